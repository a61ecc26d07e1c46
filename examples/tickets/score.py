"""How the ticket demo judges an answer: strict JSON, then field by field. Pure functions, no model.

An answer counts as valid only when, stripped of white space, it *is* one JSON object: no text around it, no code
fence, no second object, no repeated key, no NaN. That is what a program behind the model could use without repair.
A field is right when its key is there and its value equals the reference's (a missing key is not `null`), and an
answer is exact when it has all the reference's fields, all right, and no others.
"""

import json
from collections.abc import Sequence
from typing import Any

FIELDS = ("customer", "order", "product", "issue", "urgency")


def parse(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None when it is anything else."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def score(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Shares (0 to 1) over all tickets: `{"valid_json": …, "exact": …, "fields": {field: …}}`.

    Both are texts, in the same order; an output that is not valid counts as wrong everywhere. Raises ValueError when
    the lengths differ, when there is nothing to score, or when a reference is not an object with the five fields.
    """
    if len(outputs) != len(references) or not references:
        raise ValueError(f"cannot score {len(outputs)} outputs against {len(references)} references")
    answers = [parse(text) for text in outputs]
    wanted = [_reference(text) for text in references]
    pairs = list(zip(answers, wanted, strict=True))
    count = len(pairs)
    return {
        "valid_json": sum(answer is not None for answer in answers) / count,
        "exact": sum(answer == want for answer, want in pairs) / count,
        "fields": {field: sum(_right(answer, want, field) for answer, want in pairs) / count for field in FIELDS},
    }


def _right(answer: dict[str, Any] | None, want: dict[str, Any], field: str) -> bool:
    return answer is not None and field in answer and answer[field] == want[field]


def _reference(text: str) -> dict[str, Any]:
    want = parse(text)
    if want is None or tuple(want) != FIELDS:
        raise ValueError(f"a reference must be a JSON object with the fields {', '.join(FIELDS)}; got {text!r}")
    return want


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("repeated key")
    return dict(pairs)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
