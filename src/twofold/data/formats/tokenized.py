"""Tokens made elsewhere: `input_ids`, and `labels` of the same length with -100 where nothing is learned.

Padding is taken out where an `attention_mask` tells it.
"""

from collections.abc import Mapping
from typing import Any

from twofold.data.formats import Example, RowError, field

KIND = "single"
COLUMNS = "input_ids, labels, and optionally attention_mask (lists of numbers of one length)"
USES = {"input_ids", "labels", "attention_mask"}


def matches(columns: set[str]) -> bool:
    return {"input_ids", "labels"} <= columns


def convert(row: Mapping[str, Any]) -> Example:
    ids, labels = (_numbers(row, name) for name in ("input_ids", "labels"))
    if len(ids) != len(labels):
        raise RowError(f"input_ids has {len(ids)} numbers and labels has {len(labels)}")
    if row.get("attention_mask") is not None:
        mask = _numbers(row, "attention_mask")
        if len(mask) != len(ids):
            raise RowError(f"input_ids has {len(ids)} numbers and attention_mask has {len(mask)}")
        ids, labels = ([v for v, real in zip(values, mask, strict=True) if real] for values in (ids, labels))
    return Example(input_ids=ids, labels=labels)


def _numbers(row: Mapping[str, Any], name: str) -> list[int]:
    values: Any = row.get(name)
    if hasattr(values, "tolist"):  # numpy, torch
        values = values.tolist()
    values = field({name: values}, name, (list, tuple))
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise RowError(f"column '{name}' should be a list of whole numbers")
    return list(values)
