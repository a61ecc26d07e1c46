"""The replicate axis: each rank holds the whole model and computes its share of a step's samples.

Gradients meet in PyTorch's DistributedDataParallel, which overlaps the reduction with the backward pass.
DDP averages over ranks where the engine wants sums, so `gradient_scale` is the number of ranks. DDP's reducer is
C++ and takes no fake tensors: a simulation runs the step with the bare model and counts its gradients' all-reduce.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import signature

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from twofold.mesh.mesh import Mesh

# Buffers are the same on all ranks or, like batch statistics, of each rank's own: nothing to send in a forward pass.
_NEW_NAME = "forward_sync_buffers"  # since torch 2.13
_BUFFERS = _NEW_NAME if _NEW_NAME in signature(DistributedDataParallel).parameters else "broadcast_buffers"


class Replicated:
    """A model on the replicate axis. `module` is what is called in training; gradients of the unwrapped model
    hold sum / gradient_scale over the ranks once the last micro-batch of a step has run backward."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        if any(x.device.type != mesh.device.type for x in (*model.parameters(), *model.buffers())):
            model.to(mesh.device)
        self.module: nn.Module = model
        self.gradient_scale = float(mesh.world_size)
        self._ddp: DistributedDataParallel | None = None
        if mesh.world_size > 1:
            devices = [mesh.device.index] if mesh.device.type == "cuda" else None
            kwargs = {"gradient_as_bucket_view": True, _BUFFERS: False}
            self._ddp = DistributedDataParallel(model, device_ids=devices, **kwargs)  # type: ignore[arg-type]
            self.module = self._ddp

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: gradients are reduced over the ranks in the last one only."""
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()
