"""One optimizer step: run each micro-batch, divide by the weights of the whole step, clip, step.

Losses come as sums and weights, so micro-batches add up their gradients of *sums*; when the last one is done,
the weights are summed over micro-batches and ranks, and gradients are divided once, in the same pass over
them that clips. A loss of several terms needs the ratios of their weights beforehand: from `Task.weights`, or
from a forward pass without gradients.

No number is read back from a tensor inside a step, so that it also runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from twofold.mesh.mesh import Mesh
from twofold.parallel.data import Replicated
from twofold.task import Loss, Task


@dataclass
class MicroBatch:
    """A collated batch. A filler (real=False) keeps ranks in step and counts with weight zero."""

    batch: Any
    real: bool = True
    samples: Sequence[int] = ()


@dataclass
class Sums:
    """Sums of totals and weights by name: terms (with their coefficients), then metrics. fp64 on the device."""

    terms: dict[str, list[Tensor]] = field(default_factory=dict)
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)

    def add(self, loss: Loss, real: bool, device: torch.device) -> None:
        for name, (total, weight, *coefficient) in loss.terms.items():
            self.coefficients[name] = coefficient[0] if coefficient else 1.0
            _accumulate(self.terms, name, total, weight, real, device)
        for name, (total, weight) in loss.metrics.items():
            _accumulate(self.metrics, name, total, weight, real, device)

    def pairs(self) -> list[list[Tensor]]:
        return [*self.terms.values(), *self.metrics.values()]

    def merge(self, other: Sums) -> None:
        """Adds what another step (already summed over the ranks) has summed."""
        self.coefficients |= other.coefficients
        for mine, theirs in ((self.terms, other.terms), (self.metrics, other.metrics)):
            for name, (total, weight) in theirs.items():
                pair = mine.get(name)
                mine[name] = [total, weight] if pair is None else [pair[0] + total, pair[1] + weight]

    def all_reduce(self, mesh: Mesh) -> None:
        """Sums everything over the ranks, in one exchange."""
        pairs = self.pairs()
        if mesh.world_size == 1 or not pairs:
            return
        flat = mesh.all_reduce_sum(torch.stack([x for pair in pairs for x in pair]))
        for pair, total, weight in zip(pairs, flat[::2], flat[1::2], strict=True):
            pair[:] = total, weight

    def loss(self) -> Tensor:
        """The sum over terms of coefficient * total / weight."""
        parts = [self.coefficients[name] * _ratio(*pair) for name, pair in self.terms.items()]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def read(self) -> dict[str, float]:
        """Everything as Python numbers: loss, each term where there are several, each metric."""
        row = {"loss": float(self.loss())}
        if len(self.terms) > 1:
            row |= {name: float(_ratio(*pair)) for name, pair in self.terms.items()}
        return row | {name: float(_ratio(*pair)) for name, pair in self.metrics.items()}


def _accumulate(into: dict, name: str, total: Any, weight: Any, real: bool, device: torch.device) -> None:
    pair = [_scalar(total, device), _scalar(weight, device)]
    if not real:
        pair = [torch.zeros_like(pair[0]), torch.zeros_like(pair[1])]
    before = into.get(name)
    into[name] = pair if before is None else [before[0] + pair[0], before[1] + pair[1]]


def _scalar(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64)
    return torch.tensor(value, dtype=torch.float64, device=device)


def _ratio(total: Tensor, weight: Tensor) -> Tensor:
    """total / weight, and 0 where there is no weight."""
    return total / torch.where(weight == 0, 1.0, weight)


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
    to_device: moves a batch.
    """

    task: Task
    layout: Replicated
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    autocast: Callable[[], AbstractContextManager[Any]]
    to_device: Callable[[Any], Any]
    clip: float | None = None

    def __post_init__(self) -> None:
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def __call__(self, micro_batches: Sequence[MicroBatch], want_norm: bool = False) -> StepResult:
        sums, local = Sums(), []
        ratios: dict[str, Tensor] | None = None
        for i, micro in enumerate(micro_batches):
            batch = self.to_device(micro.batch)
            with self.layout.accumulate(last=i == len(micro_batches) - 1):
                with self.autocast():
                    loss = self.task.loss(self.layout.module(**self.task.inputs(batch)), batch)
                if ratios is None:
                    ratios = self._ratios(loss, micro_batches)
                objective = _objective(loss, ratios)
                (objective if micro.real else objective * 0.0).backward()
            sums.add(loss, micro.real, self.mesh.device)
            local.append(objective.detach())
        sums.all_reduce(self.mesh)
        grad_norm = self._normalise(sums, want_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(sums, grad_norm, local)

    def _normalise(self, sums: Sums, want_norm: bool) -> Tensor | None:
        """Divides the gradients by the first term's weight over the global batch, and clips them: one pass."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        weight = next(iter(sums.terms.values()))[1]
        scale = self.layout.gradient_scale / torch.where(weight == 0, 1.0, weight)
        norm = None
        if self.clip is not None or want_norm:
            norm = torch.nn.utils.get_total_norm(gradients).to(torch.float64) * scale
        if self.clip is not None and norm is not None:
            scale = scale * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.to(torch.float32))
        return norm

    @torch.no_grad()
    def _ratios(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """term -> weight of the first term / weight of the term, over the global batch; {} for a single term."""
        if len(loss.terms) == 1:
            return {}
        sums = Sums()
        for micro in micro_batches:
            batch = self.to_device(micro.batch)
            weights: Mapping[str, Any] | None = self.task.weights(batch)
            if weights is None:
                with self.autocast():
                    again = self.task.loss(unwrapped(self.layout.module)(**self.task.inputs(batch)), batch)
                weights = {name: term[1] for name, term in again.terms.items()}
            zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            counted = Loss({name: (zero, weights[name]) for name in loss.terms})
            sums.add(counted, micro.real, self.mesh.device)
        sums.all_reduce(self.mesh)
        totals = {name: pair[1] for name, pair in sums.terms.items()}
        first = next(iter(totals.values()))
        return {name: _ratio(first, weight) for name, weight in totals.items()}


def _objective(loss: Loss, ratios: Mapping[str, Tensor]) -> Tensor:
    """The sum over terms of coefficient * total * ratio: divided by the first term's weight, it is the loss."""
    parts: Iterable[Tensor] = (
        total * (coefficient[0] if coefficient else 1.0) * (ratios[name].to(total.dtype) if ratios else 1.0)
        for name, (total, _, *coefficient) in loss.terms.items()
    )
    return torch.stack(list(parts)).sum() if len(loss.terms) > 1 else next(iter(parts))


def unwrapped(module: nn.Module) -> nn.Module:
    """The model below DistributedDataParallel, if it is there."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
