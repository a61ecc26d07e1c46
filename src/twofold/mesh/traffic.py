"""What this rank sends to others, counted by axis of the mesh: calls and bytes of every kind of exchange.

    with Traffic(mesh) as traffic:
        step(micro_batches)
    traffic.rows       # {"shard": {"all-gather": (5, 61440), …}, "all": {"all-reduce": (2, 24)}}

An axis is named by the ranks of the group that exchanges: those of a group over several axes are joined
("shard_context"). What the mesh itself exchanges between all ranks (sums of losses, the norm of gradients) is "all".

Bytes are those of rings: of S bytes over n ranks an all-reduce sends 2 (n-1)/n S, a reduce-scatter (n-1)/n S, an
all-gather that makes S bytes (n-1)/n S; an all-to-all sends what is for others; a broadcast and a reduce pass on S, and
a message is S. Whole bytes, rounded down for each call. What is received is another rank's to count.

Seen is every operator that reaches a process group, from whatever calls it: torch.distributed, FSDP2, DTensor,
pipelining, and DistributedDataParallel's reducer, which runs in the backward pass and so with its dispatch modes. Not
seen: kernels that send by themselves (symmetric memory), and `gather`, whose operators are in `uncounted`.

Nothing is computed differently. Cost: none outside the block; in it some microseconds for every operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from twofold.mesh.mesh import Mesh

EVERYONE = "all"
"""The name of what the mesh itself exchanges between all ranks."""


class Sent(NamedTuple):
    """calls; bytes: that this rank sends."""

    calls: int
    bytes: int


# What a rank sends of the `size` bytes that it passes in, on a ring of n ranks.
_RINGS: dict[str, Callable[[int, int], int]] = {
    "all-reduce": lambda size, n: 2 * (n - 1) * size // n,
    "reduce-scatter": lambda size, n: (n - 1) * size // n,
    "all-gather": lambda size, n: (n - 1) * size,  # it passes in its part of what is made
    "scatter": lambda size, n: (n - 1) * size // n,  # only its root passes something in
    "broadcast": lambda size, n: size,
    "reduce": lambda size, n: size,
    "send": lambda size, n: size,
    "barrier": lambda size, n: 0,
}
# Operator -> (kind, the argument with what this rank passes in).
_OPERATORS = {
    "c10d::allreduce_": ("all-reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all-reduce", "tensors"),
    "c10d::allgather_": ("all-gather", "input_tensors"),
    "c10d::_allgather_base_": ("all-gather", "input_tensor"),
    "c10d::allgather_coalesced_": ("all-gather", "input_list"),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", "inputs"),
    "c10d::reduce_scatter_": ("reduce-scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs"),
    "c10d::alltoall_": ("all-to-all", "input_tensors"),
    "c10d::alltoall_base_": ("all-to-all", "input"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::scatter_": ("scatter", "input_tensors"),
    "c10d::send": ("send", "tensors"),
    "c10d::barrier": ("barrier", "tensor"),
    "c10d::monitored_barrier_": ("barrier", "tensor"),
    "_c10d_functional::all_reduce": ("all-reduce", "input"),
    "_c10d_functional::all_reduce_": ("all-reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all-reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all-reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", "input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all-gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all-gather", "inputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce-scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all-to-all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
}
_RECEIVES = {"c10d::recv_", "c10d::recv_any_source_", "_c10d_functional::irecv"}
# What the engine calls to exchange something between all ranks.
_OF_EVERYONE = (
    "broadcast",
    "all_reduce_sum",
    "start_all_reduce_sum",
    "gather_objects",
    "broadcast_object",
    "barrier",
)


class Traffic(TorchDispatchMode):
    """Counts what runs inside its `with` block.

    rows: axis -> kind -> `Sent`. uncounted: operators that were seen and that no formula is known for.
    """

    supports_higher_order_operators = True

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.rows: dict[str, dict[str, Sent]] = {}
        self.uncounted: set[str] = set()
        self._mesh, self._of_everyone = mesh, False
        self._axes: dict[str, str] = {}
        self._before: dict[str, Any] = {}

    @property
    def bytes(self) -> dict[str, int]:
        """axis -> bytes that this rank has sent."""
        return {axis: sum(sent.bytes for sent in kinds.values()) for axis, kinds in self.rows.items()}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions stay compiled

    def __enter__(self) -> Traffic:
        # On a mesh of one axis its group is the group of all ranks: only the caller tells them apart.
        self._before = {name: vars(self._mesh)[name] for name in _OF_EVERYONE if name in vars(self._mesh)}
        for name in _OF_EVERYONE:
            setattr(self._mesh, name, partial(self._for_everyone, getattr(self._mesh, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name in _OF_EVERYONE:
            delattr(self._mesh, name)
        vars(self._mesh).update(self._before)  # those of a block around this one

    def _for_everyone(self, method: Callable[..., Any], *args: Any) -> Any:
        before, self._of_everyone = self._of_everyone, True
        try:
            return method(*args)
        finally:
            self._of_everyone = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it turns into exchanges and plain operators first, which come here then
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments]
            self._count(func._schema.name, dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, operator: str, given: Mapping[str, Any]) -> None:
        found = given.get("process_group", given.get("group_name"))
        if found is None or operator in _RECEIVES:
            return  # waits, and views of what has come
        if operator not in _OPERATORS:
            self.uncounted.add(operator)
            return
        group = _group(found)
        if group.size() == 1:
            return
        kind, argument = _OPERATORS[operator]
        if kind == "all-to-all":
            size = _for_others(given, group.rank(), group.size())
        else:
            size = _RINGS[kind](sum(map(_size, _tensors(given[argument]))), group.size())
        row = self.rows.setdefault(self._axis(group), {})
        before = row.get(kind, Sent(0, 0))
        row[kind] = Sent(before.calls + 1, before.bytes + size)

    def _axis(self, group: Any) -> str:
        if self._of_everyone:
            return EVERYONE
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = "_".join(self._mesh.axes_of(dist.get_process_group_ranks(group)))
        return self._axes[name]


def _group(found: Any) -> Any:
    """The process group that an operator was given, in one of three ways."""
    if isinstance(found, str):
        return dist.distributed_c10d._resolve_process_group(found)  # type: ignore[arg-type]
    return found if isinstance(found, dist.ProcessGroup) else dist.ProcessGroup.unbox(found)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        for one in value:
            yield from _tensors(one)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _for_others(given: Mapping[str, Any], rank: int, ranks: int) -> int:
    """Bytes of an all-to-all that are not for this rank itself."""
    if "input_tensors" in given:
        return sum(_size(x) for i, x in enumerate(given["input_tensors"]) if i != rank)
    x, splits = given["input"], given["input_split_sizes"]
    rows: Sequence[int] = splits or [len(x) // ranks] * ranks
    return (len(x) - rows[rank]) * x[:1].numel() * x.element_size()
