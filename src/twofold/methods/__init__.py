"""The methods: each module of this folder with an `Options` model is one, named by its `kind`.

A method is one file. It defines `Options` (a pydantic model with `kind: Literal["name"] = "name"`, in the file
name.py), `run(config)` and `preview(config, rows)`. Importing it must not import torch: the command line asks
all methods for their options before it knows which one it needs.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from twofold.config.schema import Config


def method_options() -> dict[str, type[BaseModel]]:
    """The options of every method, by kind."""
    found: dict[str, type[BaseModel]] = {}
    for module in iter_modules(__path__):
        options = getattr(import_module(f"{__name__}.{module.name}"), "Options", None)
        if options is not None:
            found[options.model_fields["kind"].default] = options
    return found


def run_method(config: Config) -> Any:
    """Trains as the configuration says; returns what the method's `run` does."""
    return _module(config).run(config)


def preview_method(config: Config, rows: int) -> str | None:
    """Shows `rows` rows as the method would train them; a text that is returned is still to be printed."""
    return _module(config).preview(config, rows)


def _module(config: Config) -> Any:
    return import_module(f"{__name__}.{config.method.kind}")  # type: ignore[attr-defined]
