"""What every side of every benchmark shares: the clock, the peak memory, the one JSON line it prints.

A side is one process. It prepares what it needs, calls `Meter.start` once its first optimizer step is done (or
before it, where there is nothing to warm up), `Meter.stop` after its last one, and `report`. So imports, loading,
tokenising and the first step (lazy allocations, kernel selection) are in nobody's time.

Memory is the process's peak resident set (VmHWM), nothing subtracted: interpreter, libraries, weights, optimizer
and activations, the number that decides whether a job fits. The kernel's high-water mark is reset when training
begins, so a peak of loading or tokenising does not hide that of training; `base_mb` is what was resident then.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

MARK = "BENCH "


class Meter:
    """Times the steps after the first and follows the peak memory of all of them."""

    def __init__(self) -> None:
        self.losses: list[float] = []  # of the logged steps, in order
        self.base_mb = self.peak_mb = 0.0
        self.first_step = 0
        self.begun = self.ended = 0.0

    def reset_memory(self) -> None:
        """Call when training begins: from here on the peak is training's."""
        self.base_mb = status_mb("VmRSS")
        with contextlib.suppress(OSError):  # not allowed here: the peak is then the process's whole life
            Path("/proc/self/clear_refs").write_text("5")

    def start(self, step: int = 1) -> None:
        """Starts the clock; `step` optimizer steps are done and not counted."""
        self.first_step, self.begun = step, time.perf_counter()

    def stop(self) -> None:
        """Call after the last optimizer step: saving what was trained is not measured."""
        self.ended = time.perf_counter()
        self.peak_mb = status_mb("VmHWM")

    def step_done(self, step: int, last: int, warm: int = 1) -> None:
        """The same from a callback that is told the number of steps done; the clock starts after `warm` of them."""
        if step == warm:
            self.start(step)
        elif step == last:
            self.stop()

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


def report(meter: Meter, **more: Any) -> None:
    """Prints the side's JSON line. more: steps, tokens (or rows), targets of the measured span."""
    losses = [round(float(loss), 5) for loss in meter.losses]
    line = {
        "seconds": meter.seconds,
        "peak_mb": meter.peak_mb,
        "base_mb": meter.base_mb,
        "life_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "losses": losses[:: max(1, len(losses) // 48)],
        **more,
    }
    sys.stdout.write("\n" + MARK + json.dumps(line) + "\n")
    sys.stdout.flush()


def status_mb(field: str) -> float:
    """A size of /proc/self/status (VmRSS: resident now, VmHWM: its peak) in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def quick() -> bool:
    """A run that only proves that the side works."""
    return os.environ.get("BENCH_QUICK") == "1"


def quiet() -> None:
    """Nothing is fetched, nothing is sent, no bars: set before the libraries are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main(sides: dict[str, Any]) -> None:
    """Runs the side that the command line names: `python benchmarks/loop.py SIDE [words…]`."""
    quiet()
    name, words = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name not in sides:
        sys.exit(f"give one of these sides: {', '.join(sides)}")
    sides[name](*words)
