"""Puts a model on the axes of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from twofold.mesh.mesh import Mesh
from twofold.parallel.hooks import Hook
from twofold.parallel.placed import Placed
from twofold.parallel.strategy import Parallel


def place(
    model: nn.Module, mesh: Mesh, layout: Parallel | None = None, hook: Callable[[Any], Hook] | None = None
) -> Placed:
    """Spreads `model` over the ranks, in place. layout: None = replicate over all ranks; hook: how gradients travel
    between copies of a whole model (`hooks.find_hook`). Every rank must call it with a model of the same shape; the
    weights of rank 0 count."""
    from twofold.parallel import context, data, expert, pipeline, shard, tensor

    if any(x.device.type != mesh.device.type for x in (*model.parameters(), *model.buffers())):
        model.to(mesh.device)
    layout = layout or Parallel(replicate=mesh.world_size)
    if layout.pipeline > 1:
        mesh.broadcast([*model.parameters(), *model.buffers()])
        return pipeline.place(model, mesh, layout)
    if layout.context > 1:
        context.spread(model, mesh, layout)
    if not layout.splits_weights:
        return data.replicate(model, mesh, layout.shard > 1, hook)
    mesh.broadcast([*model.parameters(), *model.buffers()])
    if layout.expert > 1:
        expert.split(model, mesh)
    if layout.tensor > 1:
        tensor.split(model, mesh, layout.sequence)
    return shard.shard(model, mesh, layout)
