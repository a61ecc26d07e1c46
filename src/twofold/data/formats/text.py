"""Plain text: every token is trained."""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, RowError, field

KIND = "single"
COLUMNS = "text"
USES = {"text"}


def matches(columns: set[str]) -> bool:
    return "text" in columns and not columns & {"prompt", "completion", "messages", "conversations", "instruction"}


def convert(row: Mapping[str, Any]) -> Example:
    text = field(row, "text", str)
    if not text.strip():
        raise RowError("the text is empty")
    return Example(text=text)
