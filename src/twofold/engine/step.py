"""One optimizer step: run each micro-batch, divide by the weights of the whole step, clip, step.

Losses come as sums and weights, so micro-batches add up their gradients of *sums*; when the last one is done,
the weights are summed over micro-batches and ranks, and gradients are divided once, in the same pass over
them that clips. A loss of several terms needs the ratios of their weights beforehand: from `Task.weights`, or
from a forward pass without gradients.

No number is read back from a tensor inside a step, so that it also runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofold.engine.gradients import global_norm, gradients_of, local
from twofold.engine.scaler import LossScale
from twofold.mesh.mesh import Mesh
from twofold.parallel.data import local_optimizer
from twofold.parallel.placed import Placed
from twofold.task import Loss, Task


@dataclass
class MicroBatch:
    """A collated batch. A filler (real=False) keeps ranks in step and counts with weight zero."""

    batch: Any
    real: bool = True
    samples: Sequence[int] = ()


Pair = tuple[Any, Any]  # (total, weight): scalar tensors without a graph, or Python numbers


class Sums:
    """Totals and weights of the terms (with their coefficients) and metrics of any number of micro-batches.

    Pairs are only collected, and added up (in fp64) when somebody reads: a step costs no arithmetic here.
    """

    def __init__(self) -> None:
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

    def settle(self) -> None:
        """Reads every pair as Python numbers. Waits for the device."""
        for pairs in (*self.terms.values(), *self.metrics.values()):
            total, weight = _sum(pairs)
            pairs[:] = [(float(total), float(weight))]

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
        if mesh.world_size == 1:
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

    def total(self, name: str) -> Any:
        return _sum(self.terms[name])[0]

    def read(self) -> dict[str, float]:
        """Everything as Python numbers: the loss, each term where there are several, and each metric."""
        terms = {name: _ratio(*map(float, _sum(pairs))) for name, pairs in self.terms.items()}
        row = {"loss": sum(self.coefficients.get(name, 1.0) * value for name, value in terms.items())}
        if len(terms) > 1:
            row |= terms
        return row | {name: _ratio(*map(float, _sum(pairs))) for name, pairs in self.metrics.items()}


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


def _ratio(total: Any, weight: Any) -> Any:
    """total / weight, and 0 where there is no weight."""
    if isinstance(weight, Tensor):
        return total / torch.where(weight == 0, 1.0, weight)
    return total / weight if weight else total * 0.0


@dataclass
class StepResult:
    """sums: over the global batch; grad_norm: before clipping, None if not asked for; local: this rank's total
    of each micro-batch, to find out which one was not finite."""

    sums: Sums
    grad_norm: Tensor | None
    local: list[Tensor]


@dataclass
class TrainStep:
    """Calling it with a step's micro-batches of this rank runs one optimizer step.

    autocast: makes the context that forward passes run in; clip: largest global gradient norm, or None;
    to_device: moves a batch; scaler: the loss scale, where gradients need one.
    """

    task: Task
    placed: Placed
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    autocast: Callable[[], AbstractContextManager[Any]]
    to_device: Callable[[Any], Any]
    clip: float | None = None
    scaler: LossScale | None = None

    def __post_init__(self) -> None:
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._last_factor: tuple[Any, Any] = (None, None)

    def __call__(self, micro_batches: Sequence[MicroBatch], want_norm: bool = False) -> StepResult:
        sums, parts = Sums(), []
        ratios: dict[str, Any] | None = None
        alone = len(micro_batches) == 1 and self.mesh.world_size == 1 and self.scaler is None
        for i, micro in enumerate(micro_batches):
            batch = self.to_device(micro.batch)
            with self.placed.accumulate(i == len(micro_batches) - 1):
                with self.autocast():
                    loss = self.task.loss(self.placed.module(**self.task.inputs(batch)), batch)
                sums.add(loss, micro.real and self.placed.counts)
                if ratios is None:
                    ratios = self._ratios(loss, micro_batches)
                if i == len(micro_batches) - 1:
                    have_sums = sums.all_reduce(self.mesh)  # while the last backward pass runs
                objective = _objective(loss, ratios)
                # Alone, its weight is the whole step's: divide now, and save a pass over the gradients.
                factor = _ratio(1.0, next(iter(loss.terms.values()))[1]) if alone else self._factor(micro.real)
                objective.backward(self._like(factor, objective))
            parts.append(objective.detach())
        have_sums()
        grad_norm = self._update(1.0 if alone else self._scale(sums), want_norm)
        for p in self.parameters:
            p.grad = None
        return StepResult(sums, grad_norm, parts)

    def _factor(self, real: bool) -> Any:
        """What gradients of a micro-batch count: a filler's nothing."""
        return float(real) if self.scaler is None else self.scaler.scale * float(real)

    def _like(self, factor: Any, objective: Tensor) -> Tensor:
        """A factor as a gradient of the objective; the last one is kept, since it seldom changes."""
        if isinstance(factor, Tensor):
            return factor.to(objective.dtype)
        if self._last_factor[0] != factor:
            made = torch.as_tensor(factor, dtype=objective.dtype, device=objective.device)
            self._last_factor = (factor, made)
        return self._last_factor[1]

    def _scale(self, sums: Sums) -> Any:
        """What turns the gradients of sums into those of the loss: 1 / the first term's weight over the step."""
        scale = _ratio(self.placed.gradient_scale, sums.weight(next(iter(sums.terms))))
        return scale if self.scaler is None else scale / self.scaler.scale.double()

    def _update(self, scale: Any, want_norm: bool) -> Tensor | None:
        """Scales and clips the gradients in one pass, and steps. Returns the norm before clipping, if it was needed."""
        gradients, norm = gradients_of(self.parameters), None
        if self.clip is not None or want_norm or self.scaler is not None:
            norm = global_norm(gradients, self.mesh) * scale
        if self.clip is not None and norm is not None:
            scale = scale * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        if isinstance(scale, Tensor):
            mine = [local(g) for g in gradients]
            torch._foreach_mul_(mine, scale.float().to(mine[0].device) if mine else scale)
        elif scale != 1.0:
            torch._foreach_mul_([local(g) for g in gradients], scale)
        if self.scaler is not None and norm is not None:
            self.scaler.step(self.optimizer, local_optimizer(self.optimizer), norm.isfinite())
        else:
            self.optimizer.step()
        return norm

    @torch.no_grad()
    def _ratios(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> dict[str, Any]:
        """term -> weight of the first term / weight of the term, over the global batch; {} for a single term."""
        if len(loss.terms) == 1:
            return {}
        sums = Sums()
        for micro in micro_batches:
            batch = self.to_device(micro.batch)
            weights: Mapping[str, Any] | None = self.task.weights(batch)
            if weights is None:
                with self.autocast():
                    again = self.task.loss(self.placed.model(**self.task.inputs(batch)), batch)
                weights = {name: term[1] for name, term in again.terms.items()}
            sums.add(Loss({name: (0.0, weights[name]) for name in loss.terms}), micro.real and self.placed.counts)
        sums.all_reduce(self.mesh)()
        first = sums.weight(next(iter(sums.terms)))
        return {name: _ratio(first, sums.weight(name)) for name in sums.terms}


def _objective(loss: Loss, ratios: Mapping[str, Any]) -> Tensor:
    """The sum over terms of coefficient * total * ratio: divided by the first term's weight, it is the loss."""
    parts = []
    for name, (total, _, *coefficient) in loss.terms.items():
        factor = (coefficient[0] if coefficient else 1.0) * ratios.get(name, 1.0)
        part = total * factor if isinstance(factor, Tensor) or factor != 1.0 else total
        parts.append(part.to(total.dtype))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
