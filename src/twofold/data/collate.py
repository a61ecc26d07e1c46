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
    numbers; sample_of: [labelled], the sample each target belongs to; ends: [samples], where each one's last token is.
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
        "ends": torch.from_numpy(starts + lengths - 1),
    }


def trees(groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """As `packed` for groups of samples that begin alike: what all of a group begin with comes once, as the trunk of a
    tree (`ops/attention.py`) with the rest of each as a branch. sample_of: counted over all groups.

    Labels lie in the branches: where there is no common beginning before the first label, samples stand alone.
    """
    rows: list[np.ndarray] = []
    lengths: list[int | tuple[int, ...]] = []
    positions, at, targets, ends, begun = [], [], [], [], 0
    for group in groups:
        ids, labels = ([np.asarray(s[key], dtype=np.int64) for s in group] for key in ("input_ids", "labels"))
        p = _common(ids, labels)
        rows += [ids[0][:p], *(x[p:] for x in ids)]
        positions += [np.arange(p), *(np.arange(p, len(x)) for x in ids)]
        lengths += [(p, *(len(x) - p for x in ids))] if p else [len(x) for x in ids]
        start = begun + p
        for x, y in zip(ids, labels, strict=True):
            where = np.flatnonzero(y[1:] != IGNORE) + 1  # tokens that are predicted
            before = start + where - p - 1
            at.append(np.where(where == p, begun + p - 1, before) if p else before)
            targets.append(y[where])
            start += len(x) - p
            ends.append(start - 1)
        begun = start
    found = [torch.from_numpy(np.concatenate(x)) for x in (at, targets)]
    return {
        "input_ids": torch.from_numpy(np.concatenate(rows))[None],
        "position_ids": torch.from_numpy(np.concatenate(positions))[None],
        "sample_lengths": tuple(lengths),
        "predict_at": found[0],
        "targets": found[1],
        "sample_of": torch.from_numpy(np.repeat(np.arange(len(targets)), [len(x) for x in targets])),
        "ends": torch.tensor(ends),
    }


def _common(ids: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> int:
    """How many tokens all begin with, before any label; 0 for a sample alone, and each has a token after them."""
    if len(ids) == 1:
        return 0
    most = min(len(x) - 1 for x in ids)
    most = min(most, *(int(np.argmax(y != IGNORE)) if (y != IGNORE).any() else len(y) for y in labels))
    same = np.all([x[:most] == ids[0][:most] for x in ids], axis=0)
    return most if same.all() else int(np.argmin(same))


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
        "ends": torch.arange(len(samples)) * longest + torch.tensor(lengths) - 1,
    }


def at_ends(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch in which the last token of each sequence is looked at, instead of its labels.

    predict_at: [sequences]; targets: [sequences], all 0, since nothing is predicted; sample_of: [sequences].
    """
    at = batch["ends"]
    return batch | {"predict_at": at, "targets": torch.zeros_like(at), "sample_of": torch.arange(len(at))}


def grouped(
    samples: Sequence[Mapping[str, Any]], make: Callable[[Sequence[Any]], dict[str, Any]], as_trees: bool = False
) -> dict[str, Any]:
    """Samples of several sequences: `make` (above) of all of these, in order, or `trees`, and the columns beside.

    Returns what that returns (sample_of then names the sequence), counts: the sequences of each sample, and each
    column: [sequences] fp64.
    """
    groups = [sample["sequences"] for sample in samples]
    batch = trees(groups) if as_trees else make([sequence for group in groups for sequence in group])
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
