"""What placing a model gives: all that the engine knows of a layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from twofold.parallel.pipeline import Pipeline


def plain_optimizer(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any) -> Any:
    """An optimizer over the parameters as they lie on this rank."""
    return kind(groups, **options)


def nothing_around(last: bool) -> AbstractContextManager[None]:
    """A micro-batch needs no more than its own passes."""
    return nullcontext()


@dataclass
class Placed:
    """A model on its mesh.

    model: as it was given, changed in place; module: what a training step calls. Once the last micro-batch of a step
    has run backward, gradients of `model` hold the sum over the data ranks / gradient_scale. accumulate(last): goes
    around a micro-batch. optimizer: makes an optimizer of a class, groups and options. counts: whether the losses of
    this rank are counted (ranks of one tensor group compute the same ones). pipeline: runs a step's micro-batches
    instead of `module`, where the model is cut into stages.
    """

    model: nn.Module
    module: nn.Module
    gradient_scale: float = 1.0
    accumulate: Callable[[bool], AbstractContextManager[None]] = nothing_around
    optimizer: Callable[..., Any] = plain_optimizer
    counts: bool = True
    pipeline: Pipeline | None = None
