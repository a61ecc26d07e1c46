"""Optimizers and learning-rate schedules.

A schedule is a pure function of the optimizer step, so it has no state to save and runs at the same speed on
any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from twofold.config.schema import TrainConfig
from twofold.errors import UserError, nearest
from twofold.parallel.placed import plain_optimizer

OPTIMIZERS = ("adamw", "sgd")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices and embeddings decay, vectors (biases, norms) do not. Frozen ones are left out.

    As few groups as can be, since a fused optimizer runs once for each; but one for each mesh that parameters lie on,
    since its kernels do not take both.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for p in model.parameters():
        if p.requires_grad:
            decay = weight_decay if p.ndim >= 2 else 0.0
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            groups.setdefault((mesh, decay), {"params": [], "weight_decay": decay})["params"].append(p)
    return list(groups.values())


def build_optimizer(
    model: nn.Module, config: TrainConfig, make: Callable[..., Any] = plain_optimizer
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101; torch's fused kernel, on the CPU too) or SGD with momentum.

    make: builds an optimizer of a class, groups and options (`Placed.optimizer`). Raises UserError if nothing is
    trainable or the optimizer is unknown.
    """
    groups = decay_groups(model, config.weight_decay)
    if not groups:
        raise UserError("no parameter of the model is trainable: every one has requires_grad=False.")
    if config.optimizer == "adamw":
        return make(torch.optim.AdamW, groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if config.optimizer == "sgd":
        return make(torch.optim.SGD, groups, lr=config.lr, momentum=config.momentum)
    raise UserError(f"train.optimizer: unknown optimizer '{config.optimizer}'. {nearest(config.optimizer, OPTIMIZERS)}")


def schedule(config: TrainConfig, max_steps: int) -> Callable[[int], float]:
    """The learning rate of optimizer step k (from 0).

    Warm-up rises linearly from 0 to `lr`; then constant, linear to 0 at `max_steps`, or half a cosine to 0 there (the
    same values as transformers' get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup).
    """
    lr, kind = config.lr, config.schedule
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * max_steps)
    rest = max(1, max_steps - warmup)

    def at(k: int) -> float:
        if k < warmup:
            return lr * k / warmup
        if kind == "constant":
            return lr
        left = max(0.0, 1.0 - (k - warmup) / rest)
        return lr * (left if kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * left)))

    return at
