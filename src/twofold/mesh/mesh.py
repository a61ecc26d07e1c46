"""The ranks of a run and what they exchange: one object, asked by name.

A `Mesh` of one process needs no process group, and everything on it is then free. This file holds the flat
map (one line of ranks). Later axes (replicate, shard, tensor, …) are sub-meshes of torch's `DeviceMesh`,
built once, here, when a run starts and never inside a step (law 9); parallel/ asks for them by axis name.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from twofold.mesh.devices import in_launcher_environment

T = TypeVar("T")

# How long an exchange waits for a rank, in seconds. A rank that *fails* ends the run at once (launch.py);
# this is for one that hangs, or saves and loads for long.
TIMEOUT_VARIABLE = "TWOFOLD_TIMEOUT"
_TIMEOUT_SECONDS = 1800


@dataclass
class Mesh:
    """rank: 0 … world_size - 1 over all nodes. local_rank: on this node. device: where this rank computes."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    _owns_group: bool = field(default=False, repr=False)

    @classmethod
    def join(cls, device_type: str = "cpu") -> "Mesh":
        """This process's place in the run.

        Adopts a process group that is up; makes one (gloo; for "cuda" nccl, with gloo for tensors on the CPU)
        where a launcher has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR; else it is a run of one.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
        if device_type == "cuda":
            torch.cuda.set_device(device)
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), local_rank, device)
        if not in_launcher_environment() or int(os.environ["WORLD_SIZE"]) == 1:
            return cls(0, 1, local_rank, device)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            timeout=timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, _TIMEOUT_SECONDS))),
            device_id=device if device_type == "cuda" else None,
        )
        mesh = cls(dist.get_rank(), dist.get_world_size(), local_rank, device, _owns_group=True)
        atexit.register(mesh.leave)
        return mesh

    @property
    def is_zero(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces `tensor` by its sum over all ranks, in place, and returns it. Every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """The same, begun: the sum is there when the function that is returned has been called."""
        if self.world_size == 1:
            return lambda: None
        work = dist.all_reduce(tensor, async_op=True)
        return lambda: work.wait() if work is not None else None

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, on every rank (pickled; the other ranks' argument is ignored)."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Rank 0 runs the block alone; the others when it has finished (and left its cache on disk)."""
        if not self.is_zero:
            self.barrier()
        yield
        if self.is_zero:
            self.barrier()

    def leave(self) -> None:
        """Gives up the process group if this mesh has made it. Also called at exit; waits for no rank."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
