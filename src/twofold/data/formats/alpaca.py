"""Alpaca: instruction, input (may be empty) and output; as a chat, with `system` and `history` where given."""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, RowError, field

COLUMNS = "instruction, output, and optionally input, system, history"


def matches(columns: set[str]) -> bool:
    return {"instruction", "output"} <= columns


def convert(row: Mapping[str, Any]) -> Example:
    instruction, extra = field(row, "instruction", str), field(row, "input", str, "")
    output, system = field(row, "output", str), field(row, "system", str, "")
    if not instruction.strip() and not extra.strip():
        raise RowError("the instruction is empty")
    if not output.strip():
        raise RowError("the output is empty")
    messages = [{"role": "system", "content": system}] if system else []
    for turn in field(row, "history", list, []):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise RowError("history should be a list of [question, answer]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n".join(part for part in (instruction, extra) if part)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return Example(messages=messages)
