"""ShareGPT: `conversations` of {from, value}, with tool calls and observations; `system` and `tools` beside them."""

import json
from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, RowError, check_messages, field, tools_of

KIND = "single"
COLUMNS = "conversations (list of {from, value}), system and tools (optional)"
USES = {"conversations", "system", "tools"}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def matches(columns: set[str]) -> bool:
    return "conversations" in columns


def convert(row: Mapping[str, Any]) -> Example:
    turns = field(row, "conversations", list)
    system = field(row, "system", str, "")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [message(turn, i) for i, turn in enumerate(turns, 1)]
    return Example(messages=check_messages(messages, "conversations"), tools=tools_of(row))


def message(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise RowError(f"conversations, turn {number}: should be an object with from and value (a text)")
    source = turn.get("from")
    if source not in ROLES:
        raise RowError(f"conversations, turn {number}: unknown speaker {source!r}; known: {', '.join(ROLES)}")
    if source == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(turn["value"], number)]}
    return {"role": ROLES[source], "content": turn["value"]}


def _call(value: str, number: int) -> dict[str, Any]:
    try:
        call = json.loads(value)
        return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
    except (ValueError, KeyError, TypeError, AttributeError):
        place = f"conversations, turn {number}"
        raise RowError(f"{place}: a function_call should be JSON with name and arguments") from None
