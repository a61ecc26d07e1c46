"""The seam: what is learned (`Task`, `Loss`), apart from how it runs (the engine).

A task owns a model, turns a batch into the model's inputs and the model's output into a loss. It knows
nothing of devices, ranks, micro-batches or optimizers. A loss is a *sum* and a *weight*, never a mean: the
engine divides each term by its weight over the whole global batch (all micro-batches, all ranks), so how a
step is cut can never change a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass
class Loss:
    """Sums and weights of one micro-batch.

    terms: name -> (total, weight) or (total, weight, coefficient). `total` is the sum of the term over its
        units (tokens, pairs, rows), a scalar tensor with a graph; `weight` is the number of units, a number
        or a scalar tensor without a graph. What is minimised over the global batch B is
        sum over terms of coefficient * sum_B(total) / sum_B(weight).
    metrics: name -> (total, weight), reported as sum / sum over the global batch and not learned from.
    """

    terms: Mapping[str, tuple[Any, ...]]
    metrics: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, total: Tensor, weight: Tensor | float, **metrics: tuple[Any, Any]) -> Loss:
        """A loss of one term: the sum over the units and the number of units."""
        return cls({"loss": (total, weight)}, metrics)


class Task:
    """What is learned. A subclass sets `model` and defines `inputs` and `loss`; the rest has defaults."""

    model: nn.Module
    observes: bool = False
    """Whether `loss` needs `statistics`."""

    def inputs(self, batch: Any) -> dict[str, Any]:
        """The keyword arguments of `model.forward` for a batch."""
        raise NotImplementedError(f"{type(self).__name__} must define inputs(batch)")

    def loss(self, output: Any, batch: Any) -> Loss:
        """The loss of a batch, as sums and weights, from the model's output."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(output, batch)")

    def collate(self, samples: Sequence[Any]) -> Any:
        """Makes one batch of samples. The default stacks what is alike (torch's `default_collate`)."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def weights(self, batch: Any) -> dict[str, Any] | None:
        """The weight of each term of `loss`, where it follows from the batch alone.

        Only a loss of several terms needs it, and only to be quick: where it is not given, the engine
        learns the weights from one more forward pass without gradients.
        """
        return None

    def statistics_inputs(self, batch: Any) -> dict[str, Any]:
        """The keyword arguments of the forward pass without gradients that gives `statistics`."""
        return self.inputs(batch)

    def statistics(self, output: Any, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """What the loss needs to know of the whole global batch, as name -> (total, weight) of one micro-batch.

        Where `observes` is true, the engine runs this before each step, in evaluation mode, and `loss` then finds
        the totals divided by the weights in batch["statistics"], name -> scalar. (Batches must be dicts.)
        """
        raise NotImplementedError(f"{type(self).__name__} must define statistics(output, batch), since it observes")
