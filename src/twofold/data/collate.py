"""Batches of token samples: concatenated without padding, or padded on the right.

Both forms say the same thing: the tokens, their positions within their sample, and the pairs (where a token
is predicted, which token). A label belongs to the position before it; the first token of a sample is never a
target. Labels are masked by position (-100), never by value: eos is trained though it may also be the pad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

IGNORE = -100


def packed(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples ({"input_ids": [n], "labels": [n]}) one after the other, in one row of `tokens` = sum of n.

    Returns input_ids, position_ids: [1, tokens]; predict_at, targets: [labelled]; sample_lengths: Python
    numbers; sample_of: [labelled], the sample each target belongs to.
    """
    lengths = [len(s["input_ids"]) for s in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    at, targets, sample_of = _labelled(samples, starts)
    return {
        "input_ids": torch.from_numpy(_joined(samples, "input_ids"))[None],
        "position_ids": torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None],
        "sample_lengths": tuple(lengths),
        "predict_at": at,
        "targets": targets,
        "sample_of": sample_of,
    }


def padded(samples: Sequence[Mapping[str, Any]], pad: int = 0) -> dict[str, Any]:
    """The same with one row per sample, padded on the right.

    Returns input_ids, position_ids, attention_mask: [rows, longest]; the rest as from `packed`.
    """
    lengths = [len(s["input_ids"]) for s in samples]
    longest = max(lengths)
    ids = np.full((len(samples), longest), pad, dtype=np.int64)
    mask = np.zeros((len(samples), longest), dtype=np.int64)
    for row, (sample, n) in enumerate(zip(samples, lengths, strict=True)):
        ids[row, :n] = sample["input_ids"]
        mask[row, :n] = 1
    at, targets, sample_of = _labelled(samples, np.arange(len(samples)) * longest)
    return {
        "input_ids": torch.from_numpy(ids),
        "position_ids": torch.arange(longest).expand(len(samples), -1),
        "attention_mask": torch.from_numpy(mask),
        "predict_at": at,
        "targets": targets,
        "sample_of": sample_of,
    }


def ends_of(samples: Sequence[Mapping[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of `packed` or `padded` where the last token of each sequence is looked at, instead of its labels.

    predict_at: [sequences]; targets: [sequences], all 0, since nothing is predicted; sample_of: [sequences].
    """
    lengths = np.array([len(s["input_ids"]) for s in samples])
    padded_to = batch["input_ids"].shape[1] if "attention_mask" in batch else None
    ends = np.cumsum(lengths) if padded_to is None else np.arange(len(lengths)) * padded_to + lengths
    at = torch.from_numpy(ends - 1)
    return batch | {"predict_at": at, "targets": torch.zeros_like(at), "sample_of": torch.arange(len(at))}


def grouped(samples: Sequence[Mapping[str, Any]], make: Callable[[Sequence[Any]], dict[str, Any]]) -> dict[str, Any]:
    """Samples of several sequences: `make` (above) of all their sequences, in order, and the columns beside them.

    Returns what `make` returns (sample_of then names the sequence), counts: the sequences of each sample, and each
    column: [sequences] fp64.
    """
    batch = make([sequence for sample in samples for sequence in sample["sequences"]])
    columns = [name for name in samples[0] if name != "sequences"]
    numbers = {name: np.concatenate([sample[name] for sample in samples]) for name in columns}
    batch["counts"] = tuple(len(sample["sequences"]) for sample in samples)
    return batch | {name: torch.from_numpy(x.astype(np.float64)) for name, x in numbers.items()}


def _joined(samples: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    return np.concatenate([np.asarray(s[key], dtype=np.int64) for s in samples])


def _labelled(
    samples: Sequence[Mapping[str, Any]], starts: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(predict_at, targets, sample_of) of samples whose first tokens lie at the flat positions `starts`."""
    at, targets, sample_of = [], [], []
    for i, sample in enumerate(samples):
        labels = np.asarray(sample["labels"], dtype=np.int64)[1:]
        where = np.flatnonzero(labels != IGNORE)
        at.append(where + starts[i])
        targets.append(labels[where])
        sample_of.append(np.full(len(where), i))
    joined = (np.concatenate(part).astype(np.int64) for part in (at, targets, sample_of))
    at_, targets_, sample_of_ = (torch.from_numpy(x) for x in joined)
    return at_, targets_, sample_of_
