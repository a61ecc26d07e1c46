"""Overrides from the command line: `a.b=c` and `--a.b=c` set one key of the tree; `-` counts as `_`.

The value is read as YAML. In a group that is chosen by `kind`, another kind replaces the group that the file
gives and the same kind joins it; a word alone (`method=sft`) is the kind. A group (`model.adapter={r: 8}`)
joins the group of the file.
"""

from typing import Any

from twofold.config.reading import read_value
from twofold.config.tree import Fault, KeyPath, Origin, Tree, show
from twofold.errors import UserError


def apply(tree: Tree, overrides: list[str], kind_groups: set[KeyPath]) -> None:
    """Sets the overrides in turn. What is wrong with one goes to `tree.faults`."""
    for index, text in enumerate(overrides):
        key, equals, raw = text.partition("=")
        origin = Origin(override=index, text=f"'{text}'", raw=raw.strip())
        path = tuple(key.strip().removeprefix("--").replace("-", "_").split("."))
        if not equals or not all(path):
            tree.faults.append(Fault(origin, "expected KEY=VALUE, for example train.lr=1e-4."))
            continue
        try:
            value = read_value(raw)
        except UserError as error:
            tree.faults.append(Fault(origin, str(error)))
            continue
        _set(tree, path, value, origin, kind_groups)


def _set(tree: Tree, path: KeyPath, value: Any, origin: Origin, kind_groups: set[KeyPath]) -> None:
    """Sets one key, making the groups on its way; `kind` is set through its group, which it may replace."""
    if path[-1] == "kind" and path[:-1] in kind_groups:
        path, value = path[:-1], {"kind": value}
    around = tree.values
    for depth in range(1, len(path)):
        here = path[:depth]
        old = around.get(here[-1])
        is_kind = isinstance(old, str) and here in kind_groups
        if old is not None and not isinstance(old, dict) and not is_kind:
            text = f"{'.'.join(here)} is {show(old)}, not a group of keys."
            tree.faults.append(Fault(origin, text))
            return
        if not isinstance(old, dict):
            around[here[-1]] = _as_group(old, here, kind_groups)
            tree.origins.setdefault(here, origin)
        around = around[here[-1]]
    _put(tree, around, path, value, origin, kind_groups)


def _put(
    tree: Tree, around: dict[str, Any], path: KeyPath, value: Any, origin: Origin, kind_groups: set[KeyPath]
) -> None:
    name, of_kinds = path[-1], path in kind_groups
    if of_kinds and isinstance(value, str):
        value = _as_group(value, path, kind_groups) or None
    if isinstance(value, dict):
        group = _as_group(around.get(name), path, kind_groups)
        if of_kinds and "kind" in group and value.get("kind", group["kind"]) != group["kind"]:
            group = {key: one for key, one in group.items() if tree.origin((*path, key)).override >= 0}
        if group is not around.get(name):
            tree.origins[path] = origin
        around[name] = group
        for key, one in value.items():
            _put(tree, group, (*path, str(key)), one, origin, kind_groups)
    else:
        around[name] = value
        tree.origins[path] = origin


def _as_group(value: Any, path: KeyPath, kind_groups: set[KeyPath]) -> dict[str, Any]:
    """The group that `value` stands for: itself, a kind given by its name alone, or an empty one (`none`)."""
    if isinstance(value, str) and path in kind_groups and value.lower() != "none":
        return {"kind": value}
    return value if isinstance(value, dict) else {}
