"""Parts that others bring: optimizers, communication hooks, backends, pipeline schedules, context exchanges.

A name in the configuration is one of Twofold's own, or the name of a Python entry point of the group
`twofold.KIND` in any installed package, or a dotted path ("torch.optim.Muon"; "my_parts.Lion" in a file beside you).
`examples/plugin` is a package that brings one of each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from twofold.errors import UserError, nearest

KINDS = ("optimizers", "comm_hooks", "backends", "schedules", "exchanges")


def names(kind: str, own: Iterable[str]) -> set[str]:
    """The names that there are: Twofold's own and those of entry points. Imports nothing."""
    return {*own, *_entry_points(kind)}


def check(kind: str, name: str, own: Mapping[str, Any]) -> None:
    """Raises UserError if `name` can be no part of this kind: neither known nor a dotted path. Imports nothing."""
    if name not in own and not _is_path(name) and name not in names(kind, own):
        known = nearest(name, names(kind, own)).removesuffix(".")
        raise UserError(f"unknown {_one(kind)} '{name}'. {known}, or a dotted path to one of your own.")


def find(kind: str, name: str, own: Mapping[str, Any]) -> Any:
    """The part of this name. own: Twofold's own, by name; a value "module:name" is imported first.

    Raises UserError for a name that is unknown, or a module that cannot be imported.
    """
    check(kind, name, own)
    found = own.get(name) or _entry_points(kind).get(name) or ":".join(name.rsplit(".", 1))
    if isinstance(found, EntryPoint):
        found = found.value
    return _imported(found, f"{_one(kind)} '{name}'") if isinstance(found, str) else found


def _one(kind: str) -> str:
    return {"comm_hooks": "communication hook"}.get(kind, kind[:-1])


def _entry_points(kind: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"twofold.{kind}")}


def _is_path(name: str) -> bool:
    return "." in name and all(part.isidentifier() for part in name.split("."))


def _imported(path: str, what: str) -> Any:
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a file beside the configuration; last, so that it hides no package
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise UserError(f"{what}: {error}. Install the package that has it, or correct the path.") from error
    except AttributeError as error:
        raise UserError(f"{what}: module {module} has no '{name}'.") from error
