"""A text and its class: `label` is one of the method's classes, or its number from 0."""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, Group, RowError, field

KIND = "labelled"
COLUMNS = "text, label (a class, or its number)"
USES = {"text", "label"}


def matches(columns: set[str]) -> bool:
    return {"text", "label"} <= columns


def convert(row: Mapping[str, Any]) -> Group:
    text, label = field(row, "text", str), field(row, "label", (str, int))
    if not text.strip():
        raise RowError("the text is empty")
    return Group((Example(text=text),), (label,))
