"""A prompt, the steps of an answer, and whether each step is right: `prompt`, `completions`, `labels`."""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, Group, RowError, field

KIND = "stepwise"
COLUMNS = "prompt, completions (list of texts), labels (list of true or false)"
USES = {"prompt", "completions", "labels"}


def matches(columns: set[str]) -> bool:
    return {"prompt", "completions", "labels"} <= columns


def convert(row: Mapping[str, Any]) -> Group:
    prompt, steps, labels = field(row, "prompt", str), field(row, "completions", list), field(row, "labels", list)
    if len(steps) != len(labels) or not steps:
        raise RowError(f"completions has {len(steps)} steps and labels has {len(labels)}")
    if not all(isinstance(step, str) and step.strip() for step in steps):
        raise RowError("completions should be texts, none of them empty")
    if not all(isinstance(label, bool | int) and label in (0, 1) for label in labels):
        raise RowError("labels should be true or false")
    return Group(
        (Example(prompt=prompt, steps=[(step, int(right)) for step, right in zip(steps, labels, strict=True)]),)
    )
