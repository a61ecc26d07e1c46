"""Reads a configuration: one YAML file and the overrides of the command line become one checked `Config`.

Promises: everything that is wrong is said at once, one line each, with the file's line or the override; then
nothing has been started yet. Costs: about 0.2 s, nearly all of it `import pydantic`.

`load` is told the kinds of methods (`twofold.methods.method_options()`), since they live on a higher floor.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from twofold.config import overrides as _overrides
from twofold.config.checking import Checker
from twofold.config.dump import dump, json_schema
from twofold.config.explain import explain
from twofold.config.names import hint_for_argument
from twofold.config.reading import read_file
from twofold.config.schema import Config, Methods, kinds
from twofold.config.tree import KeyPath, Tree
from twofold.errors import UserError

__all__ = ["dump", "json_schema", "load", "load_with_origins", "validate_kwargs"]


def load(path: str | PathLike[str], overrides: Sequence[str], methods: Methods) -> Config:
    """The configuration in the file at `path`, changed by `overrides` such as "train.lr=1e-4".

    A relative `data.train`, `data.eval`, `model.path` or `model.chat_template` is looked for in the current
    folder first, then beside the configuration file; found in neither, it stays as it is written.
    Raises UserError with one line for each thing that is wrong, in the order in which it was given.
    """
    return load_with_origins(path, overrides, methods)[0]


def load_with_origins(
    path: str | PathLike[str], overrides: Sequence[str], methods: Methods
) -> tuple[Config, dict[str, str]]:
    """As `load`, and where each value was given, by dotted path: {"train.lr": "config.yaml:4", …}."""
    tree = read_file(Path(path))
    _overrides.apply(tree, list(overrides), _kind_groups(methods))
    config = Checker(tree, methods).config()
    if config is not None:
        _check_together(config, tree)
    if config is None or tree.faults:
        raise UserError("\n".join(str(fault) for fault in sorted(tree.faults)))
    _find_files(config, Path(path).parent)
    return config, {".".join(key): origin.text for key, origin in tree.origins.items()}


def validate_kwargs(
    models: Sequence[type[BaseModel]], kwargs: Mapping[str, Any], also: Iterable[str] = ()
) -> list[Any]:
    """Keyword arguments of the Python API as one instance of each of `models`, in order.

    also: names of arguments that the caller takes itself; they only serve as suggestions.
    Raises UserError with a line for each argument that is unknown or has a wrong value.
    """
    known = {name for model in models for name in model.model_fields}
    faults = [
        f"unknown argument '{name}'. {hint_for_argument(name, sorted({*known, *also}))}".strip()
        for name in kwargs
        if name not in known
    ]
    built = []
    for model in models:
        given = {name: value for name, value in kwargs.items() if name in model.model_fields}
        try:
            built.append(model(**given))
        except ValidationError as error:
            wrong = explain(model, error, given)
            faults += [f"{name}: {text}" if name else text for name, text in wrong.items()]
    if faults:
        raise UserError("\n".join(dict.fromkeys(faults)))
    return built


def _kind_groups(methods: Methods, model: type[BaseModel] = Config, path: KeyPath = ()) -> set[KeyPath]:
    """The groups that are chosen by `kind`: method, model.adapter."""
    found: set[KeyPath] = set()
    for name, field in model.model_fields.items():
        for kind, arm in kinds(name if not path else "", field, methods).items():
            found |= {(*path, name)} if kind else set()
            found |= _kind_groups(methods, arm, (*path, name))
    return found


def _check_together(config: Config, tree: Tree) -> None:
    """What only shows when several groups are seen together."""
    if config.data.eval is None:
        for name in ("eval_steps", "eval_samples"):
            if ("train", name) in tree.origins and getattr(config.train, name):
                tree.fault(("train", name), "nothing to evaluate on. Set data.eval, or remove this key.")


def _find_files(config: Config, folder: Path) -> None:
    """Turns a relative path that exists only beside the configuration file into a path that exists here."""
    for group, name in ((config.data, "train"), (config.data, "eval"), (config.model, "path"),
                        (config.model, "chat_template")):  # fmt: skip
        text = getattr(group, name)
        if not text or "\n" in text or "{" in text or Path(text).is_absolute():
            continue
        if not _exists(Path(text)) and _exists(folder / text):
            setattr(group, name, str(folder / text))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long to be a file's
        return False
