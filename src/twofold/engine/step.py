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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from twofold.engine.gradients import global_norm, gradients_of, local
from twofold.engine.observe import observe
from twofold.engine.scaler import LossScale
from twofold.engine.sums import Sums, ratio
from twofold.errors import UserError
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
        micro_batches = self._observed(micro_batches)
        run = self._one_after_another if self.placed.pipeline is None else self._through_stages
        sums, parts, scale = run(micro_batches)
        grad_norm = self._update(scale, want_norm)
        for p in self.parameters:
            p.grad = None
        return StepResult(sums, grad_norm, parts)

    def _observed(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """With the statistics of the whole step in each batch, where the task needs them."""
        if not self.task.observes:
            return micro_batches
        batches = ((self.to_device(micro.batch), micro.real) for micro in micro_batches)
        found = observe(self.task, self.placed, batches, self.mesh, self.autocast)
        return [replace(micro, batch={**micro.batch, "statistics": found}) for micro in micro_batches]

    def _one_after_another(self, micro_batches: Sequence[MicroBatch]) -> tuple[Sums, list[Tensor], Any]:
        """(sums, each micro-batch's total, what gradients are to be multiplied by)."""
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
                factor = ratio(1.0, next(iter(loss.terms.values()))[1]) if alone else self._factor(micro.real)
                objective.backward(self._like(factor, objective))
            parts.append(objective.detach())
        have_sums()
        return sums, parts, 1.0 if alone else self._scale(sums.weight(next(iter(sums.terms))))

    def _through_stages(self, micro_batches: Sequence[MicroBatch]) -> tuple[Sums, list[Tensor], Any]:
        """The same for a model in stages: only the ranks of the last one have losses."""
        assert self.placed.pipeline is not None
        batches = [self.to_device(micro.batch) for micro in micro_batches]
        sums, parts, ratios = Sums(everywhere=False), [], self._known_ratios(batches, micro_batches)

        def loss_of(output: Any, i: int) -> Tensor:
            loss = self.task.loss(output, batches[i])
            if len(loss.terms) > 1 and not ratios:
                raise UserError(
                    f"strategy 'pp': a loss of several terms needs their weights beforehand: give "
                    f"{type(self.task).__name__} a method weights(batch)."
                )
            sums.add(loss, micro_batches[i].real and self.placed.counts)
            objective = _objective(loss, ratios)
            parts.append(objective.detach())
            return objective * self._like(self._factor(micro_batches[i].real), objective)

        self.placed.pipeline.run([self.task.inputs(batch) for batch in batches], loss_of, self.autocast)
        weight = sums.weight(next(iter(sums.terms))) if sums.terms else 0.0
        total = self.mesh.all_reduce_sum(torch.as_tensor(weight, dtype=torch.float64, device=self.mesh.device).clone())
        return sums, parts, self._scale(total)

    def _known_ratios(self, batches: Sequence[Any], micro_batches: Sequence[MicroBatch]) -> dict[str, Any]:
        """The ratios of `_ratios` from `Task.weights`, where the task has it."""
        weights = [self.task.weights(batch) for batch in batches]
        sums, counts = Sums(), self.placed.counts and self.mesh.coordinate("pipeline") == 0
        for found, micro in zip(weights, micro_batches, strict=True):
            if found is None or len(found) == 1:
                return {}
            sums.add(Loss({name: (0.0, weight) for name, weight in found.items()}), micro.real and counts)
        return _ratios_of(sums, self.mesh)

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

    def _scale(self, weight: Any) -> Any:
        """What turns the gradients of sums into those of the loss: 1 / the first term's weight over the step."""
        scale = ratio(self.placed.gradient_scale, weight)
        return scale if self.scaler is None else scale / self.scaler.scale.double()

    def _update(self, scale: Any, want_norm: bool) -> Tensor | None:
        """Scales and clips the gradients in one pass, and steps. Returns the norm before clipping, if it was needed."""
        gradients, norm = gradients_of(self.parameters), None
        if self.clip is not None or want_norm or self.scaler is not None:
            norm = global_norm(self._counted(gradients), self.mesh) * scale
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

    def _counted(self, gradients: list[Tensor]) -> list[Tensor]:
        """Without those of tied weights that another stage's copy stands for."""
        again = self.placed.pipeline.counted_elsewhere() if self.placed.pipeline is not None else ()
        return gradients_of(p for p in self.parameters if id(p) not in again) if again else gradients

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
        return _ratios_of(sums, self.mesh)


def _ratios_of(sums: Sums, mesh: Mesh) -> dict[str, Any]:
    sums.all_reduce(mesh)()
    first = sums.weight(next(iter(sums.terms)))
    return {name: ratio(first, sums.weight(name)) for name in sums.terms}


def _objective(loss: Loss, ratios: Mapping[str, Any]) -> Tensor:
    """The sum over terms of coefficient * total * ratio: divided by the first term's weight, it is the loss."""
    parts = []
    for name, (total, _, *coefficient) in loss.terms.items():
        factor = (coefficient[0] if coefficient else 1.0) * ratios.get(name, 1.0)
        part = total * factor if isinstance(factor, Tensor) or factor != 1.0 else total
        parts.append(part.to(total.dtype))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
