"""A configuration before it is checked: nested dicts of plain values that know where each was written."""

from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str, ...]


@dataclass(frozen=True, order=True)
class Origin:
    """Where something was written. Sorts as it was given: the file by lines, then the overrides in turn."""

    override: int = -1  # index of the override, -1 for the file
    line: int = 0
    text: str = field(default="", compare=False)  # "config.yaml:3" or "'train.lr=1'"
    raw: str | None = field(default=None, compare=False)  # an override's value as it was typed


@dataclass(order=True)
class Fault:
    """One thing that is wrong, and where."""

    origin: Origin
    text: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.origin.text}: {self.text}"


@dataclass
class Tree:
    """`values` are nested dicts; `origins` holds the place of every key by its path; `root` is the file."""

    values: dict[str, Any]
    root: Origin
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin:
        """Where `path` was written, or else the nearest group around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, self.root)

    def fault(self, path: KeyPath, text: str) -> None:
        """Notes that what is at `path` is wrong; `text` need not repeat the path."""
        dotted = ".".join(path)
        self.faults.append(Fault(self.origin(path), f"{dotted}: {text}" if dotted else text))


def show(value: Any) -> str:
    """A value as it is written in YAML, at most 60 characters: 'lots', true, null, [1, 2], {a: 1}."""
    if value is None or isinstance(value, bool | list | tuple | dict):
        value = list(value) if isinstance(value, tuple) else value
        try:
            text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).split("\n")[0]
        except yaml.YAMLError:
            text = repr(value)
    else:
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]} …{text[-1]}"
