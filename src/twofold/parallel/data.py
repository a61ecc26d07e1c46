"""The replicate axis: each rank holds the whole model and computes its share of a step's samples.

Gradients meet in PyTorch's DistributedDataParallel, which overlaps the reduction with the backward pass.
DDP averages over ranks where the engine wants sums, so `gradient_scale` is the number of ranks. DDP's reducer is
C++ and takes no fake tensors: a simulation runs the step with the bare model and counts its gradients' all-reduce.
With the optimizer in parts (ZeRO stage 1, arXiv 1910.02054) each rank updates some of the parameters and sends them
to the others, by PyTorch's ZeroRedundancyOptimizer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from twofold.mesh.mesh import Mesh
from twofold.parallel.hooks import Hook, call
from twofold.parallel.placed import Placed

# Buffers are the same on all ranks or, like batch statistics, of each rank's own: nothing to send in a forward pass.
_NEW_NAME = "forward_sync_buffers"  # since torch 2.13
_BUFFERS = _NEW_NAME if _NEW_NAME in signature(DistributedDataParallel).parameters else "broadcast_buffers"


def replicate(
    model: nn.Module, mesh: Mesh, shard_optimizer: bool = False, hook: Callable[[Any], Hook] | None = None
) -> Placed:
    """The whole model on each rank. hook: makes what reduces gradients, for a process group (`hooks.find_hook`)."""
    if mesh.world_size == 1:
        return Placed(model, model)
    devices = [mesh.device.index] if mesh.device.type == "cuda" else None
    kwargs = {"gradient_as_bucket_view": True, _BUFFERS: False}
    ddp = DistributedDataParallel(model, device_ids=devices, **kwargs)  # type: ignore[arg-type]
    if hook is not None:
        ddp.register_comm_hook(hook(ddp.process_group), call)
    elif any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters() if p.requires_grad):
        ddp.register_comm_hook(mesh.world_size, _mean_in_fp32)

    def accumulate(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else ddp.no_sync()

    placed = Placed(model, ddp, float(mesh.world_size), accumulate, counts=mesh.coordinate("context") == 0)
    if shard_optimizer:
        placed.optimizer = _in_parts
    return placed


def _mean_in_fp32(ranks: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients of low precision are summed in fp32: rounding at each rank's addition would lose small ones.

    DDP checks the annotations of this function, so they must not be strings here.
    """
    gradients = bucket.buffer()
    work = dist.all_reduce(gradients.float(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0] / ranks))


def _in_parts(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any) -> Any:
    return ZeroRedundancyOptimizer(groups, kind, **options)


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of the parameters that this rank updates."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
