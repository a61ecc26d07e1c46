"""The shard axis: each rank holds a part of every weight, gradient and optimizer state (ZeRO, arXiv 1910.02054).

PyTorch's FSDP2 does the work: a block's weights are gathered when it runs and dropped afterwards (stage 3), or kept
until its backward pass is over (stage 2). With a replicate axis beside it, groups of ranks hold copies (HSDP). With a
tensor axis below it, the parts of a rank are split once more; a replicate axis alone is then FSDP2's `replicate`,
since DistributedDataParallel knows no split weights.
Stage 3 reduces gradients in every micro-batch, so that no rank ever holds them whole; stage 2 in the last one only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from twofold.mesh.mesh import Mesh
from twofold.parallel.expert import experts
from twofold.parallel.placed import Placed
from twofold.parallel.strategy import REDUCED_AXES, Parallel


def shard(model: nn.Module, mesh: Mesh, layout: Parallel) -> Placed:
    """The model in parts over the shard axis; over the replicate axis in copies."""
    counts = mesh.coordinate("context", "tensor") == 0
    if mesh.size(*REDUCED_AXES) == 1:
        return Placed(model, model, counts=counts)
    spread(model, mesh, layout, reshard=layout.zero == 3)
    root: Any = model
    each_time = layout.shard > 1 and layout.zero == 3

    @contextmanager
    def accumulate(last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(last or each_time)
        yield

    return Placed(model, model, float(mesh.size(*REDUCED_AXES)), accumulate, counts=counts)


def spread(model: nn.Module, mesh: Mesh, layout: Parallel, reshard: bool) -> None:
    """Puts a model, in place, on the data axes, if there are any. reshard: drop a block's weights after its forward
    pass, and gather them again for its backward pass."""
    if mesh.size(*REDUCED_AXES) == 1:
        return
    low = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters() if p.requires_grad)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32) if low else MixedPrecisionPolicy(),
        "offload_policy": _offload() if layout.offload else OffloadPolicy(),
    }
    alone: set[nn.Parameter] = set()
    if layout.expert > 1:  # experts are in parts over their axis already
        for module in experts(model).values():
            if mesh.size("replicate", "shard", "context") > 1:
                _wrap(module, mesh, layout, ("context",), reshard, options)
            else:
                alone |= set(module.parameters())
    for module in (*blocks(model), model):
        again = reshard if module is not model else None
        _wrap(module, mesh, layout, ("expert", "context"), again, options | {"ignored_params": alone})


def _wrap(
    module: nn.Module,
    mesh: Mesh,
    layout: Parallel,
    more: tuple[str, ...],
    reshard: bool | None,
    options: dict[str, Any],
) -> None:
    """The work of FSDP2. more: axes whose ranks hold parts, or copies, beside those of the data axes."""
    if layout.shard > 1:
        devices = mesh.sub("replicate", ("shard", *more))
        fully_shard(module, mesh=devices, reshard_after_forward=reshard, **options)
    else:
        replicate(module, mesh=mesh.sub(("replicate", *more)), **options)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the members of its outermost ModuleLists that have parameters."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks(child)
    return found


def _offload() -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())  # pinning needs a GPU
