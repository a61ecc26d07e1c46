"""A prompt and its completion: two texts, joined as they are, or two lists of chat messages."""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, RowError, check_messages, field, tools_of

KIND = "single"
COLUMNS = "prompt, completion (texts, or lists of messages), tools (optional)"
USES = {"prompt", "completion", "tools"}


def matches(columns: set[str]) -> bool:
    return {"prompt", "completion"} <= columns


def convert(row: Mapping[str, Any]) -> Example:
    prompt = field(row, "prompt", (str, list))
    completion = field(row, "completion", (str, list))
    if not (completion.strip() if isinstance(completion, str) else completion):
        raise RowError("the completion is empty")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(prompt=prompt, completion=completion)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    messages = check_messages([*prompt, *completion], "prompt + completion", learn_from=len(prompt))
    return Example(messages=messages, tools=tools_of(row), learn_from=len(prompt))
