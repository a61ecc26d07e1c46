"""Evaluation: sums and weights over every sample exactly once, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from twofold.engine.feed import Feed
from twofold.engine.observe import observe
from twofold.engine.sums import Sums
from twofold.mesh.mesh import Mesh
from twofold.parallel.placed import Placed
from twofold.task import Task


@torch.no_grad()
def evaluate(
    task: Task,
    placed: Placed,
    feed: Feed,
    mesh: Mesh,
    autocast: Callable[[], AbstractContextManager[Any]],
    to_device: Callable[[Any], Any],
) -> dict[str, float]:
    """The loss (divided by its weight over the whole set) and the metrics of `task`, in evaluation mode."""
    was_training = task.model.training
    task.model.eval()
    pipeline = placed.pipeline
    sums = Sums(everywhere=pipeline is None)
    more: dict[str, Any] = {}
    if task.observes:
        passing = ((to_device(micro.batch), micro.real) for micro in feed.once())
        more = {"statistics": observe(task, placed, passing, mesh, autocast)}
    try:
        for micro in feed.once():
            batch = to_device(micro.batch)
            batch = {**batch, **more} if more else batch
            inputs = task.inputs(batch)
            with autocast():
                output = placed.model(**inputs) if pipeline is None else pipeline.evaluate(inputs, autocast)
                if pipeline is not None and not pipeline.ends_here:
                    continue
                sums.add(task.loss(output, batch), micro.real and placed.counts)
    finally:
        task.model.train(was_training)
    sums.all_reduce(mesh)()
    sums.settle(mesh)
    return sums.read()
