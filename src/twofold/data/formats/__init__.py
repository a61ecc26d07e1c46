"""What a row of a data file can look like: one file per format, found by its columns.

A format is a module here with `COLUMNS` (what it needs, in words), `matches(columns)` and `convert(row)`, which
makes an `Example` or raises `RowError`. A new format is one new file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from twofold.errors import UserError, nearest


class RowError(Exception):
    """A row that cannot be trained. The text says why, in a few words."""


@dataclass(frozen=True)
class Example:
    """A row in one of four forms: chat (`messages`, with `tools`), `prompt` and `completion`, `text`, or tokens."""

    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    labels: list[int] | None = None


def formats() -> dict[str, ModuleType]:
    """Every format by name."""
    return {m.name: import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__)}


def find_format(columns: set[str], wanted: str, what: str) -> tuple[str, ModuleType]:
    """(name, module) of the format of rows with these columns. `wanted` is a name or "auto".

    Raises UserError for an unknown name, for columns that fit no format or more than one.
    """
    known = formats()
    if wanted != "auto":
        if wanted not in known:
            raise UserError(f"data.format: unknown format '{wanted}'. {nearest(wanted, known)}")
        return wanted, known[wanted]
    fitting = [name for name, module in known.items() if module.matches(columns)]
    found = ", ".join(sorted(columns)) or "none"
    if not fitting:
        table = "; ".join(f"{name}: {module.COLUMNS}" for name, module in known.items())
        raise UserError(f"{what}: no known format has the columns {found}. Formats: {table}.")
    if len(fitting) > 1:
        raise UserError(
            f"{what}: the columns {found} fit several formats ({', '.join(fitting)}). Choose one with data.format=…"
        )
    return fitting[0], known[fitting[0]]


def field(row: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = ...) -> Any:
    """A column's value of the right type. Raises RowError where it is missing (and has no default) or wrong."""
    value = row.get(name)
    if value is None:
        if default is not ...:
            return default
        raise RowError(f"column '{name}' is missing or null")
    if not isinstance(value, kinds):
        wanted = " or ".join(_NAMES.get(k, k.__name__) for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise RowError(f"column '{name}' should be {wanted}, and is {_NAMES.get(type(value), type(value).__name__)}")
    return value


_NAMES = {str: "a text", list: "a list", dict: "an object", int: "a number", float: "a number", bool: "true/false"}


def check_messages(messages: list[Any], name: str) -> list[dict[str, Any]]:
    """Chat messages as templates want them. Raises RowError for what is no message, and without an assistant turn."""
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"{name}, message {i}: should be an object with role and content")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RowError(f"{name}, message {i} ({message['role']}): has no content")
        if content is not None and not isinstance(content, str | list):
            raise RowError(f"{name}, message {i} ({message['role']}): content should be a text")
    turns = [m for m in messages if m["role"] == "assistant"]
    if not turns:
        raise RowError(f"{name}: no assistant turn to learn")
    if not any(m.get("tool_calls") or (m.get("content") or "") for m in turns):
        raise RowError(f"{name}: the assistant's turns are empty")
    return messages
