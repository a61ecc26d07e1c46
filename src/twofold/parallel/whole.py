"""A model in parts made whole again: for generating and exporting, which know nothing of meshes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


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

    def of(self, placed: nn.Module, here: bool) -> nn.Module | None:
        """A new model with the weights of `placed`, on the ranks that want it (`here`); every rank must call it."""
        whole = deepcopy(self.shape) if here else None
        named = dict(placed.named_parameters(remove_duplicate=False))
        made: dict[int, nn.Parameter | None] = {}
        for name, p in named.items():
            if id(p) not in made:
                full = p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone()
                made[id(p)] = nn.Parameter(full, requires_grad=p.requires_grad) if here else None
            if whole is not None:
                _set(whole, name, made[id(p)])
        if whole is not None:
            buffers = dict(placed.named_buffers())
            for name, buffer in whole.named_buffers():
                buffer.copy_(buffers[name])
        return whole


def _set(model: nn.Module, name: str, value: nn.Parameter | None) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._parameters[last] = value
