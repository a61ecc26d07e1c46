"""The words of `strategy=` and what they mean: a size for each axis of the mesh.

    ddp          replicate: copies of the model
    zero1        copies of the model, the optimizer's state in parts
    zero2        gradients and the optimizer's state in parts
    zero3, fsdp  weights too
    hsdp         parts within groups of ranks, copies of the groups
    tp           tensor: each weight matrix split, all ranks work on the same samples; with the word "sequence" each
                 keeps a piece of the tokens between split layers, as in "tp:2,sequence"
    pp           pipeline: each rank holds some of the layers, and micro-batches pass through; its schedule is one
                 word more: gpipe, 1f1b (the default), interleaved, zero-bubble, zbv or dualpipev, as in "pp:2,zbv"
    cp           context: ranks share the tokens of the same samples; how attention exchanges is one word more:
                 all-to-all (the default), all-gather or ring, as in "cp:2,ring"
    ep           expert: ranks with samples of their own hold some of a mixture's experts each

Words are joined by commas and may carry a number of ranks: "fsdp:2,tp:2". At most one word without a number takes the
ranks that are left. The word "offload" keeps parts on the CPU between uses (with zero2, zero3, fsdp, hsdp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from twofold.config import plugins
from twofold.errors import UserError, nearest
from twofold.parallel.schedules import SCHEDULES, Schedule, find_schedule

# word -> (axis, zero stage)
WORDS = {
    "ddp": ("replicate", 0),
    "zero1": ("shard", 1),
    "zero2": ("shard", 2),
    "zero3": ("shard", 3),
    "fsdp": ("shard", 3),
    "hsdp": ("shard", 3),
    "tp": ("tensor", 0),
    "pp": ("pipeline", 0),
    "cp": ("context", 0),
    "ep": ("expert", 0),
}
STRATEGIES = ("auto", "single", *WORDS)
AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""Outermost first: ranks of the last axis are neighbours, inside a node."""
DATA_AXES = ("replicate", "shard", "expert")
"""Axes whose ranks work on different samples."""
REDUCED_AXES = (*DATA_AXES, "context")
"""Axes over which gradients are summed: their ranks work on different tokens."""
EXCHANGES = {
    "all-to-all": "twofold.parallel.context:all_to_all",
    "all-gather": "twofold.parallel.context:all_gather",
    "ring": "twofold.parallel.context:ring",
}
"""How attention on the context axis gets at other ranks' tokens. A plug-in's is a function like these."""


@dataclass(frozen=True)
class Parallel:
    """Ranks along each axis of the mesh.

    replicate: copies of the model, each on a share of a step's samples; shard: ranks that hold a copy in parts, each
    on a share of the samples too; tensor: ranks that split every weight matrix and work on the same samples,
    and sequence: whether each keeps only a piece of the tokens between those matrices;
    pipeline: ranks that hold some of the layers each, and schedule: in which order they run a step's micro-batches;
    context: ranks that share the tokens of the same samples, and exchange: how their attention meets;
    expert: ranks that hold some experts of a mixture each, and each work on a share of the samples.
    zero: what the shard axis splits: 1 the optimizer's state, 2 gradients too, 3 weights too. offload: parts of
    weights, gradients and the optimizer's state stay on the CPU.
    order: all axes, outermost first: ranks of the last one are neighbours, inside a node. timeouts: axis -> seconds
    that its exchanges wait for a rank (the run's otherwise); backends: axis -> its backend, as in "nccl", "gloo" or
    "cpu:gloo,cuda:nccl". Groups over several axes, and of all ranks, have the run's.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    context: int = 1
    exchange: str = "all-to-all"
    expert: int = 1
    zero: int = 3
    offload: bool = False
    order: tuple[str, ...] = AXES
    timeouts: Mapping[str, float] = field(default_factory=dict, hash=False)
    backends: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", _checked_order(self.order))
        _check_axes("timeouts", self.timeouts, "seconds above 0", _is_seconds)
        _check_axes("backends", self.backends, "the name of a backend", lambda x: isinstance(x, str) and bool(x))
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"Parallel: {axis} must be a number of ranks from 1 on, not {size!r}.")
        if self.zero not in (1, 2, 3):
            raise UserError(f"Parallel: zero must be 1, 2 or 3, not {self.zero!r}.")
        find_schedule(self.schedule)
        plugins.check("exchanges", self.exchange, EXCHANGES)
        if self.shard > 1 and self.zero == 1 and (self.world_size > self.shard or self.offload):
            raise UserError("zero1 splits the optimizer over all ranks and goes with no other word: use zero2 or fsdp.")
        if self.expert > 1 and self.tensor > 1:
            raise UserError("ep and tp both split experts: use ep with fsdp, ddp, pp or cp.")
        if self.sequence and self.tensor == 1:
            raise UserError("sequence needs a tensor axis: strategy='tp,sequence'.")
        if self.offload and self.shard == 1:
            raise UserError("offload needs a shard axis: strategy='fsdp,offload'.")

    @property
    def sizes(self) -> dict[str, int]:
        """axis -> ranks, outermost first."""
        return {axis: getattr(self, axis) for axis in self.order}

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def splits_weights(self) -> bool:
        """Whether a rank holds parts of weights only."""
        return self.tensor > 1 or self.pipeline > 1 or self.expert > 1 or (self.shard > 1 and self.zero > 1)

    @property
    def micro_batches(self) -> tuple[int, int]:
        """(least number, divisor) of the micro-batches that a step of each rank must have."""
        return find_schedule(self.schedule).micro_batches(self.pipeline) if self.pipeline > 1 else (1, 1)

    def __str__(self) -> str:
        parts = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        if self.shard > 1:
            parts.append(f"zero {self.zero}")
        if self.pipeline > 1:
            parts.append(self.schedule)
        if self.context > 1:
            parts.append(self.exchange)
        if self.sequence:
            parts.append("sequence")
        return " × ".join(parts + ["offload"] * self.offload) or "single"


def _checked_order(order: Any) -> tuple[str, ...]:
    names = [str(axis) for axis in order] if isinstance(order, tuple | list) else []
    if sorted(names) != sorted(AXES):
        unknown = [name for name in names if name not in AXES]
        hint = f" '{unknown[0]}' is none. {nearest(unknown[0], AXES)}" if unknown else ""
        raise UserError(f"Parallel: order must name every axis once, outermost first, as in {AXES}.{hint}")
    return tuple(names)


def _check_axes(name: str, values: Any, what: str, fits: Callable[[Any], bool]) -> None:
    """Raises UserError unless `values` gives axes something that fits."""
    if not isinstance(values, Mapping):
        raise UserError(f"Parallel: {name} must give axes {what}, as in {{'tensor': …}}, not {values!r}.")
    for axis, value in values.items():
        if axis not in AXES:
            raise UserError(f"Parallel: {name} has the unknown axis '{axis}'. {nearest(str(axis), AXES)}")
        if not fits(value):
            raise UserError(f"Parallel: {name}['{axis}'] must be {what}, not {value!r}.")


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def parse(strategy: str | Parallel, world_size: int, num_nodes: int = 1) -> Parallel:
    """The axes of a strategy on `world_size` ranks. Raises UserError for what is unknown or does not multiply."""
    layout = strategy if isinstance(strategy, Parallel) else _read(strategy, world_size, num_nodes)
    if layout.world_size != world_size:
        raise UserError(
            f"strategy {layout} is for {layout.world_size} rank(s), and devices × num_nodes is {world_size}: "
            f"set devices={_devices(layout, num_nodes)}{_fitting(layout, world_size)}."
        )
    return layout


def _read(strategy: str, world_size: int, num_nodes: int) -> Parallel:
    if strategy == "auto":
        return Parallel(replicate=world_size)
    if strategy == "single":
        return Parallel()
    sizes: dict[str, int | None] = {}
    more: dict[str, Any] = {"zero": 3, "offload": False}
    words = [word.strip() for word in strategy.split(",")]
    for word in words:
        name, _, number = word.partition(":")
        if word in ("offload", "sequence"):
            more[word] = True
            continue
        if name not in WORDS and (option := _option(word)):
            more[option] = word
            continue
        axis, stage = _axis(name, strategy)
        if axis in sizes:
            raise UserError(f"strategy '{strategy}' names the {axis} axis twice.")
        sizes[axis] = _number(number, word, strategy)
        more["zero"] = stage or more["zero"]
    if "hsdp" in (word.partition(":")[0] for word in words):
        sizes = _hybrid(sizes, world_size, num_nodes)
    found: dict[str, Any] = dict(_filled(sizes, strategy, world_size))
    for option, axis, name in (("schedule", "pipeline", "pp"), ("exchange", "context", "cp")):
        if option in more and axis not in found:
            raise UserError(f"strategy '{strategy}': '{more[option]}' belongs to the {axis} axis: add '{name}' to it.")
    return Parallel(**found, **more)


def _option(word: str) -> str | None:
    """What a word says that names no axis: "schedule", "exchange" or nothing known. A dotted path tells when it is
    imported."""
    if word in plugins.names("schedules", SCHEDULES):
        return "schedule"
    if word in plugins.names("exchanges", EXCHANGES):
        return "exchange"
    if "." in word:
        return "schedule" if isinstance(plugins.find("schedules", word, SCHEDULES), Schedule) else "exchange"
    return None


def _axis(name: str, strategy: str) -> tuple[str, int]:
    if name not in WORDS:
        words = plugins.names("schedules", SCHEDULES) | plugins.names("exchanges", EXCHANGES)
        raise UserError(f"unknown strategy '{strategy}'. {nearest(name, (*STRATEGIES, *words))}")
    return WORDS[name]


def _number(text: str, word: str, strategy: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"strategy '{strategy}': '{word}' needs a number of ranks after the colon, as in 'fsdp:2'.")
    return int(text)


def _hybrid(sizes: dict[str, int | None], world_size: int, num_nodes: int) -> dict[str, int | None]:
    """hsdp: parts within a node unless a number says otherwise, copies over the rest."""
    if sizes["shard"] is None:
        if num_nodes == 1:
            raise UserError("hsdp on one node needs the number of ranks that share a copy: strategy='hsdp:2'.")
        sizes["shard"] = world_size // num_nodes // (sizes.get("tensor") or 1)
    return {"replicate": None} | sizes


def _filled(sizes: dict[str, int | None], strategy: str, world_size: int) -> dict[str, int]:
    """The one size that is not given is what is left."""
    open_axes = [axis for axis, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        raise UserError(f"strategy '{strategy}': only one word may be without a number of ranks, as in 'fsdp,tp:2'.")
    given = {axis: size for axis, size in sizes.items() if size is not None}
    if open_axes:
        given[open_axes[0]] = max(1, world_size // prod(given.values()))
    return given


def _devices(layout: Parallel, num_nodes: int) -> str:
    whole = layout.world_size % num_nodes == 0
    return str(layout.world_size // num_nodes) if whole else f"{layout.world_size} and num_nodes=1"


def _fitting(layout: Parallel, world_size: int) -> str:
    """The nearest layout that these ranks make, in words."""
    rest, words = world_size, []
    for word, size in (("tp", layout.tensor), ("pp", layout.pipeline), ("cp", layout.context), ("ep", layout.expert)):
        if size > 1 and rest % size == 0:
            rest //= size
            words.append(f"{word}:{size}")
    data = "fsdp" if layout.shard > 1 else "ddp"
    words = [f"{data}:{rest}"] * (rest > 1) + words
    return f", or strategy='{','.join(words) or 'single'}'"
