"""Sums and weights of a loss over micro-batches and ranks, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twofold.mesh.mesh import Mesh
from twofold.task import Loss

Pair = tuple[Any, Any]  # (total, weight): scalar tensors without a graph, or Python numbers


class Sums:
    """Totals and weights of the terms (with their coefficients) and metrics of any number of micro-batches.

    Pairs are only collected, and added up (in fp64) when somebody reads: a step costs no arithmetic here.
    everywhere: whether they are those of all ranks already; in a pipeline only the ranks of the last stage have some.
    """

    def __init__(self, everywhere: bool = True) -> None:
        self.everywhere = everywhere
        self.terms: dict[str, list[Pair]] = {}
        self.metrics: dict[str, list[Pair]] = {}
        self.coefficients: dict[str, float] = {}

    def add(self, loss: Loss, real: bool) -> None:
        """Adds a micro-batch; of a filler only the names."""
        for name, term in loss.terms.items():
            if len(term) > 2:
                self.coefficients[name] = term[2]
            _append(self.terms, name, term, real)
        for name, pair in loss.metrics.items():
            _append(self.metrics, name, pair, real)

    def settle(self, mesh: Mesh) -> None:
        """Reads every pair as Python numbers, over all ranks. Waits for the device; every rank must call it."""
        for pairs in (*self.terms.values(), *self.metrics.values()):
            total, weight = _sum(pairs)
            pairs[:] = [(float(total), float(weight))]
        if not self.everywhere and mesh.world_size > 1:
            states = mesh.gather_objects(self.state())
            self.terms, self.metrics = {}, {}
            for state in states:
                self.merge(Sums.restored(state))
            self.everywhere = True

    def merge(self, other: Sums) -> None:
        """Adds what another step has settled."""
        self.coefficients |= other.coefficients
        for mine, theirs in ((self.terms, other.terms), (self.metrics, other.metrics)):
            for name, [(total, weight)] in theirs.items():
                before = mine.get(name)
                mine[name] = [(before[0][0] + total, before[0][1] + weight) if before else (total, weight)]

    def state(self) -> dict[str, Any]:
        """Settled sums as JSON."""
        return {"terms": self.terms, "metrics": self.metrics, "coefficients": self.coefficients}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Sums:
        """The sums that `state` gave."""
        sums = cls()
        sums.coefficients = dict(state["coefficients"])
        for mine, kept in ((sums.terms, state["terms"]), (sums.metrics, state["metrics"])):
            mine |= {name: [(total, weight) for total, weight in pairs] for name, pairs in kept.items()}
        return sums

    def all_reduce(self, mesh: Mesh) -> Callable[[], None]:
        """Begins to sum everything over the ranks, in one exchange; call what it returns to have the sums."""
        if mesh.world_size == 1 or not self.everywhere:
            return lambda: None
        lists = [*self.terms.values(), *self.metrics.values()]
        local = [x for pairs in lists for x in _sum(pairs)]
        flat = torch.stack([torch.as_tensor(x, device=mesh.device).double() for x in local])
        wait = mesh.start_all_reduce_sum(flat)

        def finish() -> None:
            wait()
            for pairs, total, weight in zip(lists, flat[::2], flat[1::2], strict=True):
                pairs[:] = [(total, weight)]

        return finish

    def weight(self, name: str) -> Any:
        """The weight of a term: a Python number where all its weights are."""
        return _sum(self.terms[name])[1]

    def metric(self, name: str) -> Any:
        """A metric: a Python number where all of it is."""
        return ratio(*_sum(self.metrics[name]))

    def total(self, name: str) -> Any:
        return _sum(self.terms[name])[0]

    def read(self) -> dict[str, float]:
        """Everything as Python numbers: the loss, each term where there are several, and each metric."""
        terms = {name: ratio(*map(float, _sum(pairs))) for name, pairs in self.terms.items()}
        row = {"loss": sum(self.coefficients.get(name, 1.0) * value for name, value in terms.items())}
        if len(terms) > 1:
            row |= terms
        return row | {name: ratio(*map(float, _sum(pairs))) for name, pairs in self.metrics.items()}


def _append(into: dict[str, list[Pair]], name: str, pair: Sequence[Any], real: bool) -> None:
    made = (_detached(pair[0]), _detached(pair[1])) if real else (0.0, 0.0)
    if name in into:
        into[name].append(made)
    else:
        into[name] = [made]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _sum(pairs: Sequence[Pair]) -> Pair:
    """(sum of the totals, sum of the weights)."""
    if len(pairs) == 1:
        return pairs[0]
    return _add([total for total, _ in pairs]), _add([weight for _, weight in pairs])


def _add(values: Sequence[Any]) -> Any:
    tensors = [v for v in values if isinstance(v, Tensor)]
    numbers = sum(v for v in values if not isinstance(v, Tensor))
    if not tensors:
        return numbers
    if any(t.dtype != tensors[0].dtype for t in tensors):
        tensors = [t.double() for t in tensors]
    total = torch.stack(tensors).sum(dtype=torch.float64)
    return total + numbers if numbers else total


def ratio(total: Any, weight: Any) -> Any:
    """total / weight, and 0 where there is no weight."""
    if isinstance(weight, Tensor):
        return total / torch.where(weight == 0, 1.0, weight)
    return total / weight if weight else total * 0.0
