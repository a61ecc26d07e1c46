"""A chat: `messages` with role and content, as chat templates take them; `tools` beside them."""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, check_messages, field, tools_of

KIND = "single"
COLUMNS = "messages (list of {role, content}), tools (optional)"
USES = {"messages", "tools"}


def matches(columns: set[str]) -> bool:
    return "messages" in columns


def convert(row: Mapping[str, Any]) -> Example:
    return Example(messages=check_messages(field(row, "messages", list), "messages"), tools=tools_of(row))
