"""One answer and whether it is good: `label` beside a prompt and its completion, or beside a chat's last answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twofold.data.formats import Group, RowError, alpaca, field, messages, prompt_completion, sharegpt

KIND = "unpaired"
COLUMNS = "label (true or false) with prompt, completion | messages | conversations | instruction, output"
FORMS = (prompt_completion, messages, sharegpt, alpaca)
USES = {"label", "kto_tag"}.union(*(form.USES for form in FORMS))


def matches(columns: set[str]) -> bool:
    return bool({"label", "kto_tag"} & columns) and any(form.matches(columns) for form in FORMS)


def convert(row: Mapping[str, Any]) -> Group:
    name = "label" if row.get("label") is not None else "kto_tag"
    label = field(row, name, (bool, int, float))
    if label not in (0, 1):
        raise RowError(f"column '{name}' should be true or false, and is {label}")
    form = next(
        (form for form in FORMS if form.matches({key for key, value in row.items() if value is not None})), None
    )
    if form is None:
        raise RowError("it has no prompt and completion, and no messages")
    example = form.convert(row)
    if example.messages is not None:
        last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
        example = replace(example, learn_from=last)
    return Group((example,), (float(label),))
