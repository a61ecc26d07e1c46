"""Which samples make a step, and who computes them.

The samples of step k are a pure function of (number of samples, seed, k): position k * G in the permutations
of the epochs, one after the other; the last batch of an epoch is as short as it is. How a step is shared
among ranks and cut into micro-batches is decided afterwards, by cost alone, and is the same on every rank
without a word between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil


@lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch."""
    import torch

    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(n, generator=generator).tolist()


@dataclass(frozen=True)
class Order:
    """samples: rows in the data set; global_batch_size: samples of a step, over all ranks and micro-batches."""

    samples: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return ceil(self.samples / self.global_batch_size)

    def size(self, k: int) -> int:
        """How many samples step k has."""
        return min(self.global_batch_size, self.samples - k % self.steps_per_epoch * self.global_batch_size)

    def step(self, k: int) -> list[int]:
        """Indices of the samples of step k (from 0), in any order of the layout's choosing."""
        epoch, batch = divmod(k, self.steps_per_epoch)
        window = slice(batch * self.global_batch_size, (batch + 1) * self.global_batch_size)
        order: Sequence[int] = permutation(self.samples, self.seed, epoch) if self.shuffle else range(self.samples)
        return list(order[window])


@dataclass(frozen=True)
class Cut:
    """How large a micro-batch may be. tokens: at most so many (a longer sample stands alone); rows: at most so
    many samples; neither: a rank's whole share at once. padded: a micro-batch costs rows * its longest sample."""

    tokens: int | None = None
    rows: int | None = None
    padded: bool = False


def share(samples: Sequence[int], costs: Sequence[int] | None, ranks: int) -> list[list[int]]:
    """The samples of a step dealt to the ranks, dearest first, each to the rank with the least to do so far."""
    if costs is None:
        return [list(samples[rank::ranks]) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for sample in sorted(samples, key=lambda s: (-costs[s], s)):
        rank = load.index(min(load))
        shares[rank].append(sample)
        load[rank] += costs[sample]
    return shares


def cut(samples: Sequence[int], costs: Sequence[int] | None, how: Cut) -> list[list[int]]:
    """Micro-batches of like-sized samples, longest first, each within the limits of `how`."""
    if costs is None or (how.tokens is None and how.rows is None):
        if how.rows is None:
            return [list(samples)] if samples else []
        rows = how.rows
        return [list(samples[i : i + rows]) for i in range(0, len(samples), rows)]
    batches: list[list[int]] = []
    used: list[int] = []
    for sample in sorted(samples, key=lambda s: (-costs[s], s)):
        place = _first_fit(batches, used, costs, costs[sample], how)
        if place is None:
            batches.append([sample])
            used.append(costs[sample])
        else:
            batches[place].append(sample)
            used[place] += costs[batches[place][0]] if how.padded else costs[sample]
    return batches


def _first_fit(batches: list[list[int]], used: list[int], costs: Sequence[int], cost: int, how: Cut) -> int | None:
    for i, batch in enumerate(batches):
        more = costs[batch[0]] if how.padded else cost
        if (how.rows is None or len(batch) < how.rows) and (how.tokens is None or used[i] + more <= how.tokens):
            return i
    return None


def micro_batches(
    samples: Sequence[int], costs: Sequence[int] | None, ranks: int, how: Cut, least: int = 1, multiple: int = 1
) -> list[list[list[int]]]:
    """[rank][micro-batch] -> samples. Every rank gets the same number of micro-batches, at least `least` and a
    multiple of `multiple` (what a pipeline's schedule needs): the costliest are halved where there are too few. An
    empty one is filler: the rank computes something and counts it with weight zero, so that no rank waits for another
    for ever."""
    shares = share(samples, costs, ranks) if ranks > 1 else [samples]
    plan = [cut(part, costs, how) for part in shares]
    most = max(least, *(len(batches) for batches in plan))
    most = ceil(most / multiple) * multiple
    plan = [_halved(batches, costs, most) if least > 1 else batches for batches in plan]
    return [batches + [[]] * (most - len(batches)) for batches in plan]


def _halved(batches: list[list[int]], costs: Sequence[int] | None, wanted: int) -> list[list[int]]:
    """More micro-batches, by halving the costliest that has more than one sample."""
    batches = list(batches)
    while len(batches) < wanted and any(len(batch) > 1 for batch in batches):
        costly = max((b for b in batches if len(b) > 1), key=lambda b: sum(costs[s] for s in b) if costs else len(b))
        batches.remove(costly)
        batches += share(costly, costs, 2)
    return batches


def evaluation_batches(samples: int, costs: Sequence[int] | None, ranks: int, how: Cut) -> list[list[list[int]]]:
    """The same for an evaluation over all samples once: cut first, then dealt, so that a micro-batch holds the
    same samples on any number of ranks and its sums are the same to the last bit."""
    batches = cut(range(samples), costs, how)
    most = ceil(len(batches) / ranks)
    shares = [batches[rank::ranks] for rank in range(ranks)]
    return [part + [[]] * (most - len(part)) for part in shares]
