"""Gradients as they lie on this rank, and their norm over all axes of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from twofold.mesh.mesh import Mesh


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients, each laid out as its parameter is."""
    found = []
    for p in parameters:
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)
        if p.grad is not None:
            found.append(p.grad)
    return found


def local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor: changing it in place changes the tensor."""
    return x._local_tensor if isinstance(x, DTensor) else x


def _parts(x: Tensor) -> int:
    """Over how many ranks the numbers of a tensor are spread; every other rank holds a copy."""
    if not isinstance(x, DTensor):
        return 1
    split = (isinstance(p, Shard | _StridedShard) for p in x.placements)
    return prod(x.device_mesh.size(i) for i, yes in enumerate(split) if yes)


def global_norm(gradients: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """The Euclidean norm of all gradients of the model, fp64 [], alike on every rank.

    Squares are summed over all ranks, those of a gradient in n parts counted n / (ranks that have its layer) times, so
    that every number counts once whatever axes it is spread over. Nothing is sent where every rank holds everything.
    """
    ranks = mesh.world_size // mesh.size("pipeline")
    groups: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_parts(gradient), []).append(local(gradient))
    norms: dict[int, Any] = {n: torch.nn.utils.get_total_norm(group).double() for n, group in groups.items()}
    if ranks == mesh.world_size and set(norms) <= {1}:
        return norms.get(1, torch.zeros((), dtype=torch.float64))
    squares = sum((norm.square() * (n / ranks) for n, norm in norms.items()), torch.zeros((), dtype=torch.float64))
    return mesh.all_reduce_sum(squares.to(mesh.device)).sqrt()
