"""Data as users hand it over, made into what a feed wants; and the small things a run starts with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from twofold.config.schema import TrainConfig
from twofold.data.order import Order
from twofold.errors import UserError
from twofold.task import Task


@dataclass
class Source:
    """Training or evaluation data as a Feed wants them."""

    data: Any
    collate: Callable[[Any], Any]
    global_batch_size: int
    shuffle: bool
    workers: int


def open_source(data: Any, task: Task, config: TrainConfig, what: str) -> Source:
    """Rows, a map-style data set, or a DataLoader taken apart. Raises UserError for what has no order."""
    source = Source(data, task.collate, config.global_batch_size, config.shuffle, 0)
    if isinstance(data, DataLoader):
        if data.batch_size is None or not isinstance(data.sampler, RandomSampler | SequentialSampler):
            raise UserError(
                f"{what}: a DataLoader with a sampler of its own cannot be shared among ranks: give its data set."
            )
        shuffle = isinstance(data.sampler, RandomSampler)
        source = Source(data.dataset, data.collate_fn, data.batch_size, shuffle, data.num_workers)
    if (
        isinstance(source.data, IterableDataset)
        or not hasattr(source.data, "__getitem__")
        or not hasattr(source.data, "__len__")
    ):
        raise UserError(
            f"{what}: a {type(source.data).__name__} has no len and no [i]: give a list of rows or a map-style data "
            f"set (streams are not in this version yet)."
        )
    if len(source.data) == 0:
        raise UserError(f"{what}: the data set is empty.")
    return source


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mover(device: torch.device) -> Callable[[Any], Any]:
    """A function that moves the tensors of a batch (dicts, lists, tuples of them) to `device`."""
    if device.type == "cpu":
        return lambda batch: batch

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, Mapping):
            return {k: move(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(move, value)) if not hasattr(value, "_fields") else type(value)(*map(move, value))
        return value

    return move


def count_steps(config: TrainConfig, order: Order) -> int:
    """Optimizer steps of the run: max_steps or max_epochs, whichever ends first; one epoch if neither is given."""
    limits = [config.max_steps] if config.max_steps else []
    if config.max_epochs or not limits:
        limits.append((config.max_epochs or 1) * order.steps_per_epoch)
    return min(limits)
