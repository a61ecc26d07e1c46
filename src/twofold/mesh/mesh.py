"""The ranks of a run and what they exchange: one object, asked by name.

A `Mesh` of one process needs no process group, and everything on it is then free. `arrange` names the ranks by
axes (replicate, shard, tensor, …): torch's `DeviceMesh`, built once, here, when a run starts and never inside a step
(law 9); parallel/ asks for its parts by axis name.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from twofold.config import plugins
from twofold.errors import UserError
from twofold.mesh.cluster import TIMEOUT_VARIABLE
from twofold.mesh.devices import in_launcher_environment

T = TypeVar("T")

# How long an exchange waits for a rank. A rank that *fails* ends the run at once (launch.py); this is for one that
# hangs, or saves and loads for long.
_TIMEOUT_SECONDS = 1800


@dataclass
class Mesh:
    """rank: 0 … world_size - 1 over all nodes. local_rank: on this node. device: where this rank computes.
    sizes: axis -> ranks, outermost first; axes of one rank are left out."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    sizes: dict[str, int] = field(default_factory=dict)
    _devices: Any = field(default=None, repr=False)
    _flat: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)
    _owns_group: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not self.sizes and self.world_size > 1:
            self.sizes = {"replicate": self.world_size}

    @classmethod
    def join(cls, device_type: str = "cpu", indices: Sequence[int] = (), backend: str | None = None) -> "Mesh":
        """This process's place in the run. indices: the GPUs of this machine by local rank; () = from 0. backend: of
        exchanges, instead of the device's own (`use_backend`).

        Adopts a process group that is up; makes one (gloo; for "cuda" nccl, with gloo for tensors on the CPU)
        where a launcher has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR; else it is a run of one. Raises UserError
        for a group that is up with another backend than the one asked for.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        index = indices[local_rank] if indices else local_rank
        device = torch.device(device_type, index) if device_type == "cuda" else torch.device(device_type)
        if device_type == "cuda":
            torch.cuda.set_device(device)
        if dist.is_initialized():
            _check_adopted(backend, device_type)
            return cls(dist.get_rank(), dist.get_world_size(), local_rank, device)
        if not in_launcher_environment() or int(os.environ["WORLD_SIZE"]) == 1:
            return cls(0, 1, local_rank, device)
        usual = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(
            backend=use_backend(backend) if backend else usual,
            timeout=timedelta(seconds=_run_timeout()),
            device_id=device if device_type == "cuda" else None,
        )
        mesh = cls(dist.get_rank(), dist.get_world_size(), local_rank, device, _owns_group=True)
        atexit.register(mesh.leave)
        return mesh

    @property
    def is_zero(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def arrange(
        self,
        sizes: Mapping[str, int],
        timeouts: Mapping[str, float] | None = None,
        backends: Mapping[str, str] | None = None,
    ) -> None:
        """Names the ranks by axes, outermost first; the product of the sizes is `world_size`. Every rank calls it.

        timeouts: axis -> seconds that its exchanges wait for a rank, instead of the run's; backends: axis -> backend,
        as `init_process_group` takes it. Raises UserError for a backend that is not there.
        """
        if prod(sizes.values()) != self.world_size:
            raise ValueError(f"axes {dict(sizes)} are not for {self.world_size} ranks")
        self.sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self._devices, self._flat = None, {}
        if self.world_size > 1:
            names, shape = tuple(self.sizes), tuple(self.sizes.values())
            own = _backends(names, timeouts or {}, backends or {})
            self._devices = init_device_mesh(self.device.type, shape, mesh_dim_names=names, backend_override=own)
            for axis in names:
                _wait_at_most((timeouts or {}).get(axis), self.group(axis))

    def size(self, *axes: str) -> int:
        """Ranks along these axes together."""
        return prod(self.sizes.get(axis, 1) for axis in axes)

    def coordinate(self, *axes: str) -> int:
        """This rank's place along these axes together, row by row: 0 … size - 1."""
        rest, place = self.rank, {}
        for axis, size in reversed(self.sizes.items()):
            rest, place[axis] = divmod(rest, size)
        number = 0
        for axis, size in self.sizes.items():
            if axis in axes:
                number = number * size + place[axis]
        return number

    def sub(self, *axes: str | tuple[str, ...]) -> DeviceMesh:
        """The part of torch's mesh that spans these axes (those of one rank are left out); a tuple becomes one axis."""
        if self._devices is None:
            raise RuntimeError("Mesh.arrange comes first")
        parts = []
        for axis in axes:
            names = tuple(name for name in self.sizes if name in ((axis,) if isinstance(axis, str) else axis))
            if len(names) > 1 and names not in self._flat:
                self._flat[names] = self._devices[names]._flatten("_".join(names))
                _wait_at_most(None, self._flat[names].get_group())
            parts += [self._flat[names] if len(names) > 1 else self._devices[names[0]]] if names else []
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def group(self, axis: str) -> Any:
        """The process group of an axis."""
        return self.sub(axis).get_group()

    def axes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The axes along which these ranks lie apart, outermost first."""
        places = np.unravel_index(np.asarray(ranks), tuple(self.sizes.values()))
        return tuple(axis for axis, place in zip(self.sizes, places, strict=True) if np.unique(place).size > 1)

    def part_of(self, axis: str, coordinates: Sequence[int]) -> Any:
        """A process group of the ranks at these places of an axis, one group for every place on the other axes: the
        one of this rank, None if it has none or is alone there. Every rank calls it."""
        ranks = np.arange(self.world_size).reshape(tuple(self.sizes.values()))
        lines = np.moveaxis(ranks, list(self.sizes).index(axis), -1).reshape(-1, self.size(axis))[:, list(coordinates)]
        group, _ = dist.new_subgroups_by_enumeration(lines.tolist())
        _wait_at_most(None, group)
        return group if len(coordinates) > 1 else None

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replaces each tensor by rank 0's, in place."""
        if self.world_size > 1:
            with torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), 0)

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

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, by rank (pickled)."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

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


def _run_timeout() -> float:
    return float(os.environ.get(TIMEOUT_VARIABLE, _TIMEOUT_SECONDS))


def use_backend(backend: str, where: str = "run.backend") -> str:
    """A backend as torch takes it ("gloo", "cpu:gloo,cuda:nccl"), after those of plug-ins have been registered.

    A plug-in's is a function without arguments that registers one (`torch.distributed.Backend.register_backend`) and
    returns its name. where: the setting that names it. Raises UserError for a name that is not there.
    """
    made = []
    for part in backend.split(","):
        device, colon, name = part.strip().rpartition(":")
        made.append(f"{device}{colon}{_registered(name, where)}")
    return ",".join(made)


def _registered(name: str, where: str) -> str:
    if dist.is_backend_available(name):
        return name
    here = {b: b for b in dist.Backend.backend_list if dist.is_backend_available(b) and b != "undefined"}
    try:
        made = plugins.find("backends", name, here)()
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not isinstance(made, str) or not dist.is_backend_available(made):
        raise UserError(f"{where}: '{name}' returns {made!r}, and not the name of a backend that it has registered.")
    return made


def _check_adopted(backend: str | None, device_type: str) -> None:
    there = _of_device(dist.get_backend_config(), device_type)
    if backend and _of_device(use_backend(backend), device_type) != there:
        raise UserError(
            f"run.backend={backend}: a process group with {there} is up already. Make it with that backend, or leave "
            "run.backend out."
        )


def _of_device(backend: str, device_type: str) -> str:
    """The backend of one device's tensors in "gloo" or "cpu:gloo,cuda:nccl"; "" if there is none."""
    parts = [part.strip().rpartition(":") for part in backend.split(",")]
    return next((name for device, _, name in parts if device in ("", device_type)), "")


def _backends(axes: Sequence[str], timeouts: Mapping[str, float], backends: Mapping[str, str]) -> Any:
    """What init_device_mesh is told of the axes that need a group of their own: a single axis would share that of all
    ranks otherwise. None if there are none."""
    made = {axis: use_backend(name, f"Parallel: backends['{axis}']") for axis, name in backends.items() if axis in axes}
    own = [axis for axis in axes if axis in timeouts or axis in backends]
    return {axis: (made.get(axis, dist.get_backend_config()), None) for axis in own} or None


def _wait_at_most(seconds: float | None, group: Any) -> None:
    """Sets how long exchanges in a group wait for a rank. None: as long as the run's (torch gives a new group its own
    default)."""
    if seconds is None:
        known = ("gloo", "nccl")
        if group is None or group is dist.group.WORLD or not any(n in dist.get_backend_config(group) for n in known):
            return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_run_timeout() if seconds is None else seconds), group)
