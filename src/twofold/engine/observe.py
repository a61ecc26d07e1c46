"""What a loss must know of its whole global batch before it can be computed (`Task.statistics`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from twofold.engine.sums import Sums
from twofold.mesh.mesh import Mesh
from twofold.parallel.placed import Placed
from twofold.task import Loss, Task


@torch.no_grad()
def observe(
    task: Task,
    placed: Placed,
    batches: Iterable[tuple[Any, bool]],
    mesh: Mesh,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Any]:
    """The task's statistics over all batches of all ranks; every rank must call it.

    batches: (batch, whether it counts). One forward pass of each in evaluation mode: dropout would make it depend on
    how a step is cut.
    """
    was_training, sums = task.model.training, Sums(everywhere=placed.pipeline is None)
    task.model.eval()
    try:
        for batch, counts in batches:
            inputs = task.statistics_inputs(batch)
            with autocast():
                if placed.pipeline is None:
                    output = placed.model(**inputs)
                else:
                    output = placed.pipeline.evaluate(inputs, autocast)
                    if not placed.pipeline.ends_here:
                        continue
                sums.add(Loss({}, task.statistics(output, batch)), counts and placed.counts)
    finally:
        task.model.train(was_training)
    sums.all_reduce(mesh)()
    if not sums.everywhere:
        sums.settle(mesh)
    return {name: sums.metric(name) for name in sums.metrics}
