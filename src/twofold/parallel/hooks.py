"""How gradients travel between copies of a model: the communication hooks of DistributedDataParallel, by name.

    bf16, fp16   half the bytes: sums in that precision, rounded at every addition
    powersgd     factors of low rank instead of matrices (arXiv 1905.13727), with error feedback

A plug-in's hook is one of two things: a function `(process_group, bucket)`, as torch's own compress hooks are, or a
class made once a run with the process group and `run.comm_hook_options`, whose objects take a bucket. Both return a
future of the bucket's *mean* over the ranks. What an object remembers is not in checkpoints: a resumed run goes on
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from twofold.config import plugins
from twofold.config.schema import COMM_HOOKS
from twofold.errors import UserError

bf16, fp16 = bf16_compress_hook, fp16_compress_hook


class powersgd:
    """options: those of torch's PowerSGDState (matrix_approximation_rank, start_powerSGD_iter: steps before it starts,
    more than 1 …)."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.state = PowerSGDState(group, **options)

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return powerSGD_hook(self.state, bucket)


Hook = Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]


def find_hook(name: str, options: Mapping[str, Any]) -> Callable[[Any], Hook]:
    """Makes the hook of this name for a process group.

    Raises UserError if there is none, or if it does not take the options."""
    found = plugins.find("comm_hooks", name, COMM_HOOKS)
    if not callable(found):
        raise UserError(f"run.comm_hook={name} is neither a function (process_group, bucket) nor a class.")
    if not isinstance(found, type):
        if options:
            raise UserError(f"run.comm_hook={name} is a function and takes no options: remove run.comm_hook_options.")
        return lambda group: partial(found, group)
    try:
        signature(found).bind(None, **options)
    except TypeError as error:
        raise UserError(f"run.comm_hook={name}: {error}. Correct run.comm_hook_options.") from error
    return lambda group: found(group, **options)


def call(hook, bucket):
    """A hook as DistributedDataParallel registers it; without annotations, since it would compare them."""
    return hook(bucket)
