"""What a row of a data file can look like: one file per format, found by its columns.

A format is a module here with `KIND` (what its rows are for), `COLUMNS` (what it needs, in words), `USES` (every column
it reads), `matches(columns)` and `convert(row)`, which makes an `Example` or a `Group` or raises `RowError`. A new
format is one new file. Kinds:

    single       one text to learn (an `Example`)
    preference   two answers to one prompt, chosen and rejected, in this order (a `Group`)
    unpaired     one answer and whether it is good: its value is 1 or 0 (a `Group`)
    stepwise     a prompt and steps, each right or wrong (a `Group`)
    labelled     one text and its class: its value is the class's name or number (a `Group`)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
    """A row in one of five forms: chat (`messages`, with `tools`), `prompt` and `completion`, `prompt` and `steps` with
    a number for each, `text`, or tokens.

    learn_from: messages before this one are the prompt, and their assistant turns are not learned by default.
    With messages *and* prompt, the texts are for a tokenizer that has no chat template.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    learn_from: int = 0
    prompt: str | None = None
    completion: str | None = None
    steps: list[tuple[str, int]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    labels: list[int] | None = None


@dataclass(frozen=True)
class Group:
    """Examples that make one sample. values: a number for each (a label, a score), where the method needs one."""

    examples: tuple[Example, ...]
    values: tuple[float | str, ...] = ()


def formats() -> dict[str, ModuleType]:
    """Every format by name."""
    return {m.name: import_module(f"{__name__}.{m.name}") for m in iter_modules(__path__)}


def formats_of(kind: str) -> dict[str, ModuleType]:
    """The formats of one kind by name."""
    return {name: module for name, module in formats().items() if kind == module.KIND}


def find_format(columns: set[str], wanted: str, what: str, kind: str = "single") -> tuple[str, ModuleType]:
    """(name, module) of the format of rows with these columns. `wanted` is a name or "auto"; kind: what the method
    learns from.

    Raises UserError for an unknown name, for columns that fit no format of the kind or more than one.
    """
    known = formats_of(kind)
    if wanted != "auto":
        if wanted not in known:
            if wanted in formats():
                raise UserError(
                    f"data.format: '{wanted}' holds {formats()[wanted].KIND} rows, and this method learns from {kind} "
                    f"rows: {', '.join(known)}."
                )
            raise UserError(f"data.format: unknown format '{wanted}'. {nearest(wanted, known)}")
        return wanted, known[wanted]
    fitting = [name for name, module in known.items() if module.matches(columns)]
    found = ", ".join(sorted(columns)) or "none"
    others = [module.KIND for module in formats().values() if module.matches(columns)]
    if not fitting and others:
        table = "; ".join(module.COLUMNS for module in known.values())
        raise UserError(
            f"{what}: the columns {found} are {others[0]} rows, and this method learns from {kind} rows: "
            f"{table}. Choose a method for such data, or another file."
        )
    if not fitting:
        table = "; ".join(f"{name}: {module.COLUMNS}" for name, module in known.items())
        raise UserError(f"{what}: no known format has the columns {found}. Formats: {table}.")
    if len(fitting) > 1:
        several = "; ".join(f"{name}: {known[name].COLUMNS}" for name in fitting)
        raise UserError(
            f"{what}: the columns {found} fit several formats ({several}). Choose one with "
            f"data.format={'|'.join(fitting)}."
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


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools that a row offers: a list, or JSON text of one."""
    tools = field(row, "tools", (list, str), None)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise RowError("column 'tools' is a text and no JSON") from None
        if not isinstance(tools, list | None):
            raise RowError("column 'tools' should be a list of tools")
    return tools or None


def check_messages(messages: Iterable[Any], name: str, learn_from: int = 0) -> list[dict[str, Any]]:
    """Chat messages as templates want them: without null keys, the arguments of tool calls as objects, and `train`
    (from `train: false` or `weight: 0`) where an assistant turn is not to be learned.

    Raises RowError for what is no message, for an empty assistant turn, and where none is left to learn.
    """
    clean = [_message(message, f"{name}, message {i}") for i, message in enumerate(messages, 1)]
    turns = [(i, m) for i, m in enumerate(clean) if m["role"] == "assistant"]
    if not any(i >= learn_from for i, _ in turns):
        raise RowError(f"{name}: no assistant turn to learn")
    for i, message in turns:
        content = message["content"]
        empty = not (content.strip() if isinstance(content, str) else content) and not message.get("tool_calls")
        if empty and i >= learn_from and message.get("train", True):
            raise RowError(f"{name}, message {i + 1}: the assistant's turn is empty")
    return clean


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RowError(f"{place}: should be an object with role and content")
    clean = {key: value for key, value in message.items() if value is not None}
    place = f"{place} ({clean['role']})"
    calls = clean.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise RowError(f"{place}: tool_calls should be a list")
        clean["tool_calls"] = [_call(call, place) for call in calls]
    if "content" not in clean:
        if not calls:
            raise RowError(f"{place}: has no content")
        clean["content"] = ""
    if not isinstance(clean["content"], str | list):
        raise RowError(f"{place}: content should be a text")
    if clean.pop("weight", 1) == 0:
        clean["train"] = False
    return clean


def _call(call: Any, place: str) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"{place}: a tool call should be an object with a function's name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as servers send them; templates want objects
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise RowError(f"{place}: the arguments of a tool call are a text and no JSON") from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}
