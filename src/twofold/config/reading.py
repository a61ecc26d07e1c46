"""From YAML text to a `Tree` of plain values with their lines.

Promises: a key given twice is a fault; numbers, true/false and null are read as YAML 1.2 does, so `1e-5` is a
number, and `on`, `off`, `yes`, `no` and dates stay text. Costs: a few milliseconds for a file of 100 lines.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from twofold.config.tree import Fault, KeyPath, Origin, Tree, show
from twofold.errors import UserError, nearest


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars instead of PyYAML's 1.1: no `on` = true, no `1:30` = 90, no dates; `1e-5` a number."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (how PyYAML is extended)


_SCALARS = (  # tag, pattern, characters it may start with
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     [*"-+.0123456789"]),
    ("merge", r"<<", ["<"]),
)  # fmt: skip
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


_CONTAINERS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def _integer(loader: Any, node: yaml.ScalarNode) -> int:
    return int(node.value, 16 if node.value.startswith("0x") else 10)


def _float(loader: Any, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def read_file(path: Path) -> Tree:
    """The tree of a YAML file. Raises UserError for a file that is missing, unreadable or no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: there is no such file. {_yaml_files_near(path)}") from None
    except IsADirectoryError:
        hint = _yaml_files_near(path / "config.yaml")
        raise UserError(f"{path}: is a folder, not a YAML file. {hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not text in UTF-8 (byte {error.start}). Is it a YAML file?") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Tree:
    """The tree of YAML text; `name` is the file's name in messages. Raises UserError for broken YAML."""
    tree = Tree({}, Origin(text=name))
    try:
        values = _parse(text, tree)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place, problem = _broken(error, text)
        raise UserError(f"{name}{place}: not valid YAML: {problem}") from None
    if values is not None and not isinstance(values, dict):
        raise UserError(f"{name}: expected keys, such as 'version: 1', got {show(values)}.")
    tree.values = values or {}
    return tree


def read_value(text: str) -> Any:
    """The value of an override. Raises UserError (naming no place) for text that is no YAML."""
    tree = Tree({}, Origin())
    try:
        value = _parse(text, tree)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"the value is not valid YAML: {_broken(error, text)[1]}") from None
    if tree.faults:
        raise UserError(tree.faults[0].text)
    return value


def _parse(text: str, tree: Tree) -> Any:
    """The value that YAML text holds; lines and repeated keys go to `tree`. Raises as PyYAML does."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _Reader(loader, tree).value(node, ())
    finally:
        loader.dispose()


class _Reader:
    """Turns YAML nodes into values, noting the line of every key and the keys given twice."""

    def __init__(self, loader: _Loader, tree: Tree) -> None:
        self.loader, self.tree = loader, tree
        self.open: list[yaml.Node] = []  # the nodes around the current one: an alias may point back at them

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if node in self.open:
            raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _CONTAINERS:
            raise yaml.MarkedYAMLError(problem=f"unknown tag {node.tag!r}", problem_mark=node.start_mark)
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, str(i))) for i, item in enumerate(node.value)]
            return self.loader.construct_object(node)
        finally:
            self.open.pop()

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self.note_repeats(node, path)
        self.loader.flatten_mapping(node)  # what `<<` brings comes first, so that the group's own keys win
        values: dict[str, Any] = {}
        for key, value in node.value:
            here = (*path, self.key(key))
            self.tree.origins[here] = self.origin(key)
            values[here[-1]] = self.value(value, here)
        return values

    def note_repeats(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first: dict[str, int] = {}
        for key, _ in node.value:
            name, origin = self.key(key), self.origin(key)
            if name in first:
                dotted = ".".join((*path, name))
                text = f"{dotted}: given twice, first in line {first[name]}. Remove one of them."
                self.tree.faults.append(Fault(origin, text))
            first.setdefault(name, origin.line)

    def key(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=node.start_mark)

    def origin(self, node: yaml.Node) -> Origin:
        line = node.start_mark.line + 1
        return Origin(line=line, text=f"{self.tree.root.text}:{line}")


def _broken(error: Exception, text: str) -> tuple[str, str]:
    """Where the YAML is broken (":line:column", or "" where that is unknown) and how, with a remedy."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if mark is None:
        return "", f"{problem}."
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    hint = ""
    if "\\t" in problem or "\t" in line[: len(line) - len(line.lstrip())]:
        hint = " Indent with spaces, not with tabs."
    elif "cannot start any token" in problem:
        hint = " Put the value in quotes."
    elif "mapping values are not allowed" in problem:
        hint = " Is it a text with ': ' in it (put it in quotes), or a line that is indented too far?"
    elif "expected <block end>" in problem or "',' or" in problem or "end of stream" in problem:
        hint = " Is a bracket or a quote left open, or a line indented otherwise than its neighbours?"
    return f":{mark.line + 1}:{mark.column + 1}", f"{problem}.{hint}"


def _yaml_files_near(path: Path) -> str:
    """What could have been meant: the YAML files in the folder of `path`."""
    folder = path.parent
    if not folder.is_dir():
        return f"Nor is there a folder {folder}."
    try:
        names = [one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml")]
    except OSError as error:
        return f"The folder {folder} cannot be read: {error.strerror}."
    if not names:
        return f"There are no YAML files in {folder.resolve()}."
    hint, _, known = nearest(path.name, names).rpartition("Known: ")
    return f"{hint}YAML files in {folder.resolve()}: {known}"
