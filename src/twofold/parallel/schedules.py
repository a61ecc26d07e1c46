"""Pipeline schedules by name: which of PyTorch's classes runs one, and what it needs.

    gpipe         all forward passes, then all backward passes (arXiv 1811.06965)
    1f1b          one forward, one backward in turn: fewer activations alive (arXiv 1806.03377)
    interleaved   1f1b with two stages a rank: smaller bubbles, more traffic (arXiv 2104.04473)
    zero-bubble   interleaved, gradients of weights computed where a rank would wait (arXiv 2401.10241)
    zbv           zero-bubble with two stages a rank in a V: the first and the last lie on one rank (arXiv 2405.15362)
    dualpipev     forward of one micro-batch beside backward of another, in a V (arXiv 2412.19437, section 3.2)

A new schedule is a `Schedule` in a file of its own, found by entry point or dotted path (`config/plugins.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from twofold.config import plugins
from twofold.errors import UserError

_TORCH = "torch.distributed.pipelining.schedules"


@dataclass(frozen=True)
class Schedule:
    """kind: "module:class" of a torch pipeline schedule; stages: stages on each rank; v: they lie in a V (rank r has
    stages r and 2 ranks - 1 - r) instead of a loop (r, r + ranks, …); least: micro-batches that a step needs, per
    rank of the pipeline; multiple: their number must be a multiple of the ranks."""

    kind: str
    stages: int = 1
    v: bool = False
    least: int = 0
    multiple: bool = False

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """The stages on a rank of the pipeline, in the order in which a sample passes them."""
        if self.v:
            return [rank, 2 * ranks - 1 - rank]
        return list(range(rank, ranks * self.stages, ranks))

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank of the pipeline that a stage lies on."""
        return min(stage, 2 * ranks - 1 - stage) if self.v else stage % ranks

    def micro_batches(self, ranks: int) -> tuple[int, int]:
        """(least number, divisor) of a step's micro-batches."""
        return max(1, self.least * ranks), ranks if self.multiple else 1

    def torch_class(self) -> type:
        module, _, name = self.kind.partition(":")
        return getattr(import_module(module), name)


SCHEDULES = {
    "gpipe": Schedule(f"{_TORCH}:ScheduleGPipe"),
    "1f1b": Schedule(f"{_TORCH}:Schedule1F1B", least=1),
    "interleaved": Schedule(f"{_TORCH}:ScheduleInterleaved1F1B", stages=2, least=1, multiple=True),
    "zero-bubble": Schedule(f"{_TORCH}:ScheduleInterleavedZeroBubble", stages=2, least=1, multiple=True),
    "zbv": Schedule(f"{_TORCH}:ScheduleZBVZeroBubble", stages=2, v=True, least=1),
    "dualpipev": Schedule(f"{_TORCH}:ScheduleDualPipeV", stages=2, v=True, least=2),
}


def find_schedule(name: str) -> Schedule:
    """Raises UserError if there is none of this name."""
    found = plugins.find("schedules", name, SCHEDULES)
    if not isinstance(found, Schedule):
        raise UserError(f"schedule '{name}' is no twofold.parallel.schedules.Schedule.")
    return found
