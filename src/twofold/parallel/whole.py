"""A model in parts made whole again: for generating and exporting, which know nothing of meshes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from twofold.mesh.mesh import Mesh


class Whole:
    """Made before a model is placed; afterwards `of` gives the model with all its weights in one place.

    It keeps the model's modules and small buffers, and of its parameters only shapes: memory is taken when they are
    gathered, on the rank that gets them.
    """

    def __init__(self, model: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        self.shape = deepcopy(model, memo)

    def of(self, placed: nn.Module, mesh: Mesh) -> nn.Module | None:
        """A new model with the weights of `placed`, on rank 0; every rank must call it."""
        whole = deepcopy(self.shape) if mesh.is_zero else None
        parameters, buffers = (dict(x(remove_duplicate=False)) for x in (placed.named_parameters, placed.named_buffers))
        held = [*parameters, *buffers]
        holders = mesh.gather_objects(held) if mesh.size("pipeline") > 1 else [held]
        source = {name: rank for rank, names in reversed([*enumerate(holders)]) for name in names}
        made: dict[int, nn.Parameter | None] = {}
        for name, shape in self.shape.named_parameters(remove_duplicate=False):
            if id(shape) not in made:
                full = _full(parameters.get(name), shape, mesh, source[name])
                made[id(shape)] = None if full is None else nn.Parameter(full, requires_grad=shape.requires_grad)
            if whole is not None:
                _set(whole, name, made[id(shape)])
        for name, buffer in self.shape.named_buffers(remove_duplicate=False):
            full = _full(buffers.get(name), buffer, mesh, source[name])
            if whole is not None and full is not None:
                whole.get_buffer(name).copy_(full)
        return whole


@torch.no_grad()
def _full(mine: torch.Tensor | None, shape: torch.Tensor, mesh: Mesh, source: int) -> torch.Tensor | None:
    """A tensor of the model on rank 0, from rank `source`."""
    x = mine.full_tensor() if isinstance(mine, DTensor) else mine
    if mesh.is_zero:
        if source == 0:
            assert x is not None
            return x.clone()
        made = torch.empty(shape.shape, dtype=shape.dtype, device=mesh.device)
        dist.recv(made, source)
        return made
    if mesh.rank == source:
        dist.send(x.contiguous(), 0)  # type: ignore[union-attr]
    return None


def _set(model: nn.Module, name: str, value: nn.Parameter | None) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._parameters[last] = value
