"""Alpaca: instruction, input (may be empty) and output; as a chat, with `system` and `history` where given.

For a tokenizer without a chat template: the texts of github.com/tatsu-lab/stanford_alpaca, with the new line after
"Response:" that most later models have.
"""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, RowError, field

KIND = "single"
COLUMNS = "instruction, output, and optionally input, system, history"
USES = {"instruction", "input", "output", "system", "history"}

_INTRODUCTION = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_WITH_INPUT = ", paired with an input that provides further context"


def matches(columns: set[str]) -> bool:
    return {"instruction", "output"} <= columns


def convert(row: Mapping[str, Any]) -> Example:
    instruction, extra = field(row, "instruction", str), field(row, "input", str, "")
    output, system = field(row, "output", str), field(row, "system", str, "")
    if not instruction.strip() and not extra.strip():
        raise RowError("the instruction is empty")
    if not output.strip():
        raise RowError("the output is empty")
    history = [_turn(turn) for turn in field(row, "history", (list, tuple), [])]
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = "\n".join(part for part in (instruction, extra) if part)
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return Example(messages=messages, prompt=_prompt(instruction, extra, system, history), completion=output)


def _turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(part, str) for part in turn):
        raise RowError("history should be a list of [question, answer]")
    if not turn[1].strip():
        raise RowError("history holds an empty answer")
    return turn[0], turn[1]


def _prompt(instruction: str, extra: str, system: str, history: list[tuple[str, str]]) -> str:
    start = f"{system}\n\n" if system else _INTRODUCTION.format(_WITH_INPUT if extra else "")
    past = "".join(f"### Instruction:\n{question}\n\n### Response:\n{answer}\n\n" for question, answer in history)
    given = f"### Input:\n{extra}\n\n" if extra else ""
    return f"{start}{past}### Instruction:\n{instruction}\n\n{given}### Response:\n"
