"""The methods: each module of this folder with an `Options` model is one, named by its `kind`.

A method is one file. It defines `Options` (a pydantic model with `kind: Literal["name"] = "name"`, in the file
name.py), `run(config)`, `preview(config, rows)` and `export(config, checkpoint, output, merge)`; a `*Trainer` and a
`*Config` in it are found as `twofold.*Trainer` and `twofold.*Config`. Methods for language models share `common.py`.
Importing a method must not import torch: the command line asks all of them for their options before it knows which one
it needs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from twofold.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from twofold.config.schema import Config


def method_options() -> dict[str, type[BaseModel]]:
    """The options of every method, by kind."""
    return {module.Options.model_fields["kind"].default: module.Options for module in _modules()}


def find_class(name: str) -> Any:
    """The trainer or the configuration class of this name in any method; None if there is none."""
    return next((getattr(module, name) for module in _modules() if _defines(module, name)), None)


def _defines(module: Any, name: str) -> bool:
    return getattr(getattr(module, name, None), "__module__", None) == module.__name__


def _modules() -> list[Any]:
    every = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return [module for module in every if hasattr(module, "Options")]


def run_method(config: Config) -> Any:
    """Trains as the configuration says; returns what the method's `run` does."""
    return _module(config).run(config)


def preview_method(config: Config, rows: int) -> str | None:
    """Shows `rows` rows as the method would train them; a text that is returned is still to be printed."""
    return _module(config).preview(config, rows)


def export_run(
    run_folder: str | Path, output: str | Path | None = None, merge: bool = False, checkpoint: str | None = None
) -> Path:
    """Writes the model of a run as a folder for others to load, and returns it.

    output: default RUN/export, or RUN/export-merged where merged; checkpoint: "latest" or "best" (None: the best, or
    the latest of a run without evaluation). Raises UserError if the folder is no run or has no such checkpoint.
    """
    from twofold.config.load import load

    folder = Path(run_folder)
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder} is no run folder: it holds no run.json. Give the folder of a run, like runs/NAME.")
    checkpoints = folder / "checkpoints"
    wanted = checkpoint or ("best" if (checkpoints / "best").exists() else "latest")
    if not (checkpoints / wanted).exists():
        raise UserError(f"{folder} has no {wanted} checkpoint: look into {checkpoints}.")
    target = Path(output) if output else folder / ("export-merged" if merge else "export")
    config = load(folder / "config.yaml", [], method_options())
    _module(config).export(config, (checkpoints / wanted).resolve(), target, merge)
    return target


def _module(config: Config) -> Any:
    return import_module(f"{__name__}.{config.method.kind}")  # type: ignore[attr-defined]
