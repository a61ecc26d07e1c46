"""How a model is spread over ranks: a `Parallel` names the size of each axis, each axis is one file here.

The axes in use are replicate (`data.py`). A later axis (shard, tensor, pipeline, context, expert) is one new
file with a function that takes the model and the mesh, and its name in `AXES`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from twofold.errors import UserError, nearest

STRATEGIES = ("auto", "single", "ddp")
PLANNED = ("zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Parallel:
    """Ranks along each axis. replicate: copies of the model, each on a share of a step's samples (ddp)."""

    replicate: int = 1

    @property
    def world_size(self) -> int:
        product = 1
        for axis in fields(self):
            product *= getattr(self, axis.name)
        return product

    def __str__(self) -> str:
        return (
            " × ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1)
            or "single"
        )


def parse(strategy: str | Parallel, world_size: int) -> Parallel:
    """The axes of a strategy on `world_size` ranks. Raises UserError for what is unknown or does not multiply."""
    if isinstance(strategy, Parallel):
        layout = strategy
    elif strategy in ("auto", "ddp"):
        layout = Parallel(replicate=world_size)
    elif strategy == "single":
        layout = Parallel()
    elif strategy.split(":")[0].split(",")[0] in PLANNED:
        raise UserError(f"strategy '{strategy}' is not in this version yet. Here are: {', '.join(STRATEGIES)}.")
    else:
        raise UserError(f"unknown strategy '{strategy}'. {nearest(strategy, STRATEGIES)}")
    if layout.world_size != world_size:
        raise UserError(
            f"strategy {layout} is for {layout.world_size} rank(s), and devices × num_nodes is {world_size}: "
            f"set devices={layout.world_size}, or strategy='ddp'."
        )
    return layout
