"""Two answers to one prompt, the better one first: `chosen` and `rejected`.

An answer is a text, a chat message, or a list of messages; a message may be ShareGPT's {from, value}. The prompt is
given (`prompt`, or `conversations`, or `instruction` and `input`), or it is what both answers begin with. `margin`
says by how much chosen is better, or `score_chosen` and `score_rejected` do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from twofold.data.formats import Example, Group, RowError, check_messages, field, tools_of
from twofold.data.formats.sharegpt import message as from_sharegpt

KIND = "preference"
COLUMNS = "chosen, rejected, and optionally prompt | conversations | instruction, input; system, tools, margin, scores"
USES = {
    *("chosen", "rejected", "prompt", "conversations", "instruction", "input", "system", "tools"),
    *("margin", "score_chosen", "score_rejected"),
}

Messages = list[Any]


def matches(columns: set[str]) -> bool:
    return {"chosen", "rejected"} <= columns


def convert(row: Mapping[str, Any]) -> Group:
    answers = [_answer(row, name) for name in ("chosen", "rejected")]
    if answers[0] == answers[1]:
        raise RowError("chosen and rejected are the same")
    prompt = _prompt(row)
    if all(isinstance(answer, list) and answer[0].get("role") != "assistant" for answer in answers):
        prompt = None  # both are whole conversations
    if prompt is None:
        prompt, answers = _split(*answers)
    system = field(row, "system", str, "")
    if isinstance(prompt, str) and not system and all(isinstance(answer, str) for answer in answers):
        return Group(tuple(Example(prompt=prompt, completion=str(answer)) for answer in answers), _values(row))
    start = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    start = [{"role": "system", "content": system}, *start] if system else start
    tools = tools_of(row)
    examples = []
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        messages = check_messages([*start, *turns], f"prompt + {name}", learn_from=len(start))
        examples.append(Example(messages=messages, tools=tools, learn_from=len(start)))
    return Group(tuple(examples), _values(row))


def _answer(row: Mapping[str, Any], name: str) -> str | Messages:
    """A text that is not empty, or chat messages, at least one."""
    answer = field(row, name, (str, list, dict))
    if isinstance(answer, str):
        if not answer.strip():
            raise RowError(f"column '{name}' is empty")
        return answer
    turns = [_message(turn, i) for i, turn in enumerate([answer] if isinstance(answer, dict) else answer, 1)]
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        raise RowError(f"column '{name}' should be a text or a list of messages")
    return turns


def _message(turn: Any, number: int) -> Any:
    return from_sharegpt(turn, number) if isinstance(turn, dict) and "from" in turn else turn


def _prompt(row: Mapping[str, Any]) -> str | Messages | None:
    """None where no column gives it."""
    if row.get("prompt") is not None:
        prompt = field(row, "prompt", (str, list))
        return prompt if isinstance(prompt, str) else [_message(turn, i) for i, turn in enumerate(prompt, 1)]
    if row.get("conversations") is not None:
        return [_message(turn, i) for i, turn in enumerate(field(row, "conversations", list), 1)]
    if row.get("instruction") is not None:
        parts = field(row, "instruction", str), field(row, "input", str, "")
        return [{"role": "user", "content": "\n".join(part for part in parts if part)}]
    return None


def _split(chosen: Any, rejected: Any) -> tuple[str | Messages, list[Any]]:
    """(what both begin with, the rest of each)."""
    if type(chosen) is not type(rejected):
        raise RowError("without a prompt, chosen and rejected should both be texts or both be lists of messages")
    if isinstance(chosen, list):
        shared = min(_alike(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        if not shared:
            raise RowError("chosen and rejected share no first message, and there is no column 'prompt'")
        return chosen[:shared], [chosen[shared:], rejected[shared:]]
    prompt = chosen[: _alike(chosen, rejected)]
    if prompt.endswith(" "):  # the space belongs to the word that follows, as tokenizers see it
        prompt = prompt[:-1]
    rest = [text[len(prompt) :] for text in (chosen, rejected)]
    if not prompt.strip() or not all(text.strip() for text in rest):
        raise RowError("chosen and rejected share no beginning, and there is no column 'prompt'")
    return prompt, rest


def _alike(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many characters or messages at their beginnings are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _values(row: Mapping[str, Any]) -> tuple[float, ...]:
    """A score for each, of which only the difference counts. () where the row has none."""
    if row.get("margin") is not None:
        return float(field(row, "margin", (int, float))), 0.0
    if row.get("score_chosen") is not None and row.get("score_rejected") is not None:
        return tuple(float(field(row, name, (int, float))) for name in ("score_chosen", "score_rejected"))
    return ()
