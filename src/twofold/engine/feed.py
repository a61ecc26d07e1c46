"""Micro-batches of this rank, step by step: order and cut from `data/order.py`, loading by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, tee
from typing import Any

import torch
from torch.utils.data import DataLoader

from twofold.data.order import Cut, Order, evaluation_batches, micro_batches
from twofold.engine.step import MicroBatch


@dataclass
class Feed:
    """data: anything with len and [i]; lengths: the cost of each sample, or None where all cost the same;
    collate: samples -> batch; least, multiple: micro-batches that a step needs (`Parallel.micro_batches`);
    workers: loader processes (they only read ahead: a step's samples never change)."""

    data: Any
    lengths: Sequence[int] | None
    collate: Callable[[Sequence[Any]], Any]
    order: Order
    cut: Cut
    rank: int
    ranks: int
    least: int = 1
    multiple: int = 1
    workers: int = 0
    pin_memory: bool = False

    def plan(self, step: int) -> list[list[int]]:
        """This rank's micro-batches of a step, as sample indices; an empty one is filler."""
        samples = self.order.step(step)
        return micro_batches(samples, self.lengths, self.ranks, self.cut, self.least, self.multiple)[self.rank]

    def units(self, step: int) -> int:
        """The tokens (or samples, where all cost the same) of a step over all ranks."""
        if self.lengths is None:
            return self.order.size(step)
        return sum(self.lengths[s] for s in self.order.step(step))

    def steps(self, start: int, stop: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of steps start … stop - 1."""
        ahead, behind = tee(map(self.plan, range(start, stop)))  # the loader reads ahead of the loop
        batches = iter(self._loader(chain.from_iterable(ahead)))
        for plan in behind:
            yield [MicroBatch(next(batches), bool(samples), samples) for samples in plan]

    def once(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one pass over all samples."""
        limited = self.cut.tokens is not None or self.cut.rows is not None
        how = self.cut if limited else replace(self.cut, rows=self.order.global_batch_size)
        plan = evaluation_batches(len(self.data), self.lengths, self.ranks, how)[self.rank]
        for batch, samples in zip(self._loader(plan), plan, strict=True):
            yield MicroBatch(batch, bool(samples), samples)

    def _loader(self, plan: Iterable[Sequence[int]]) -> Iterable[Any]:
        """A batch for each list of samples; one of sample 0 for a filler."""
        filled = (samples or [0] for samples in plan)
        if not self.workers and not self.pin_memory:  # torch's loader would only add its own steps
            return (self.collate(_fetch(self.data, samples)) for samples in filled)
        return DataLoader(
            self.data,
            batch_sampler=filled,  # type: ignore[arg-type]
            collate_fn=self.collate,
            num_workers=self.workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # its own, so that starting a loader leaves dropout as it was
        )


def _fetch(data: Any, samples: Sequence[int]) -> Sequence[Any]:
    """The samples, in one call where the data set has one for that (torch's and datasets' convention)."""
    many = getattr(data, "__getitems__", None)
    return many(samples) if many is not None else [data[i] for i in samples]
