"""What a model says of every sample of a data set: one pass without gradients, the same on any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twofold.engine.feed import Feed
from twofold.mesh.mesh import Mesh
from twofold.parallel.placed import Placed
from twofold.task import Task

Values = Callable[[Any, Any], Sequence[Any]]
"""(the model's output, batch) -> something for each sample of the batch, on the CPU."""


@dataclass
class Predict:
    """feeds: name ("train", "eval") -> data; place: puts a second model where the first one is; say: tells the user."""

    task: Task
    placed: Placed
    mesh: Mesh
    feeds: Mapping[str, Feed]
    autocast: Callable[[], AbstractContextManager[Any]]
    to_device: Callable[[Any], Any]
    place: Callable[[nn.Module], Placed]
    say: Callable[[str], None]

    def __call__(
        self,
        name: str,
        values: Values,
        placed: Placed | None = None,
        inputs: Callable[[Any], dict[str, Any]] | None = None,
    ) -> list[Any]:
        """What `values` makes of each sample of a feed, in the data's order, on every rank; every rank must call it.

        placed: another model than the task's; inputs: others than the task's. It runs in evaluation mode: no dropout.
        """
        placed, feed = placed or self.placed, self.feeds[name]
        was_training = placed.model.training
        placed.model.eval()
        try:
            mine = self._pass(placed, feed, values, inputs or self.task.inputs)
        finally:
            placed.model.train(was_training)
        found: dict[int, Any] = {}
        for part in self.mesh.gather_objects(mine):
            found |= part
        return [found[i] for i in range(len(feed.data))]

    @torch.no_grad()
    def _pass(
        self, placed: Placed, feed: Feed, values: Values, inputs_of: Callable[[Any], dict[str, Any]]
    ) -> dict[int, Any]:
        """Sample -> value, of the samples whose outputs this rank has and counts."""
        found: dict[int, Any] = {}
        for micro in feed.once():
            batch = self.to_device(micro.batch)
            inputs = inputs_of(batch)
            with self.autocast():
                if placed.pipeline is None:
                    output = placed.model(**inputs)
                else:
                    output = placed.pipeline.evaluate(inputs, self.autocast)
                    if not placed.pipeline.ends_here:
                        continue
            if micro.real and placed.counts:
                found |= zip(micro.samples, values(output, batch), strict=True)
        return found
