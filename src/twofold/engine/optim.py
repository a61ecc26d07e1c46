"""Optimizers and learning-rate schedules.

A schedule is a pure function of the optimizer step, so it has no state to save and runs at the same speed on
any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from twofold.config import plugins
from twofold.config.schema import OPTIMIZERS, TrainConfig
from twofold.errors import UserError, nearest
from twofold.parallel.placed import plain_optimizer


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


def optimizer_class(config: TrainConfig) -> tuple[Any, dict[str, Any]]:
    """The class that `config.optimizer` names, and the options that it is made with beside parameters.

    AdamW (arXiv 1711.05101; torch's fused kernel, on the CPU too) and SGD, or a plug-in: a subclass of
    torch.optim.Optimizer. It is given `lr`, `optimizer_options`, and of betas, eps and momentum those that it takes.
    Raises UserError for a class that is not there, or for settings that it does not take.
    """
    where = f"train.optimizer={config.optimizer}"
    kind = plugins.find("optimizers", config.optimizer, OPTIMIZERS)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(f"{where} is no torch.optim.Optimizer: name a class that derives from it.")
    taken = signature(kind).parameters
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in taken.values())
    doubled = [name for name in ("lr", "weight_decay") if name in config.optimizer_options]
    if doubled:
        raise UserError(f"train.optimizer_options.{doubled[0]}: set train.{doubled[0]} instead.")
    options = {"lr": config.lr, **config.optimizer_options}
    for name in ("betas", "eps", "momentum", "weight_decay"):
        value, usual = getattr(config, name), TrainConfig.model_fields[name].default
        takes = name in taken or open_ended
        if value != usual and not takes:
            raise UserError(f"{where} takes no {name}: remove train.{name}.")
        if takes and name != "weight_decay" and (value != usual or config.optimizer in OPTIMIZERS):
            options.setdefault(name, value)  # weight decay is in the groups
    if config.optimizer == "adamw":
        options.setdefault("fused", True)
    unknown = [name for name in options if name not in taken]
    if unknown and not open_ended:
        known = [name for name in taken if name not in ("params", "lr", "weight_decay")]
        raise UserError(f"{where} takes no '{unknown[0]}'. {nearest(unknown[0], known)}")
    return kind, options


def build_optimizer(
    model: nn.Module, config: TrainConfig, make: Callable[..., Any] = plain_optimizer
) -> torch.optim.Optimizer:
    """The optimizer of a model.

    make: builds an optimizer of a class, groups and options (`Placed.optimizer`). A class that wants other groups than
    `decay_groups` has a static method `parameter_groups(model, weight_decay)`. Raises UserError if nothing is
    trainable or the optimizer refuses the parameters or options.
    """
    kind, options = optimizer_class(config)
    groups = getattr(kind, "parameter_groups", decay_groups)(model, config.weight_decay)
    if not groups:
        raise UserError("no parameter of the model is trainable: every one has requires_grad=False.")
    try:
        return make(kind, groups, **options)
    except (ValueError, TypeError) as error:
        if config.optimizer in OPTIMIZERS and not config.optimizer_options:
            raise
        raise UserError(f"train.optimizer={config.optimizer} refuses: {error}") from error


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
