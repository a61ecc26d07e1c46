"""Evaluation: sums and weights over every sample exactly once, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from twofold.engine.feed import Feed
from twofold.engine.step import Sums
from twofold.mesh.mesh import Mesh
from twofold.task import Task


@torch.no_grad()
def evaluate(
    task: Task,
    feed: Feed,
    mesh: Mesh,
    autocast: Callable[[], AbstractContextManager[Any]],
    to_device: Callable[[Any], Any],
    counts: bool = True,
) -> dict[str, float]:
    """The loss (divided by its weight over the whole set) and the metrics of `task`, in evaluation mode.

    counts: whether this rank's sums are counted (`Placed.counts`).
    """
    was_training = task.model.training
    task.model.eval()
    sums = Sums()
    try:
        for micro in feed.once():
            batch = to_device(micro.batch)
            with autocast():
                loss = task.loss(task.model(**task.inputs(batch)), batch)
            sums.add(loss, micro.real and counts)
    finally:
        task.model.train(was_training)
    sums.all_reduce(mesh)()
    return sums.read()
