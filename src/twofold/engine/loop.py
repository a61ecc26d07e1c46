"""The training loop: take a step's micro-batches, run the step, check, log, evaluate, save.

It knows no method and no strategy: what is learned is the task's business, how it is spread is the step's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from twofold.config.schema import TrainConfig
from twofold.engine.checkpoint import Checkpoints, Progress
from twofold.engine.evaluate import evaluate
from twofold.engine.feed import Feed
from twofold.engine.optim import schedule
from twofold.engine.step import MicroBatch, StepResult, TrainStep
from twofold.engine.sums import Sums
from twofold.mesh.mesh import Mesh
from twofold.mesh.traffic import Traffic
from twofold.monitor.callback import Callback
from twofold.monitor.memory import process_memory_mb
from twofold.parallel.whole import Whole
from twofold.task import Task

_MOST_UNCHECKED = 100
_COUNTED = 2  # steps before the one whose traffic is counted: in the second, DDP still arranges its buckets


class NotFinite(ArithmeticError):
    """A loss or a gradient became NaN or infinite."""


@dataclass
class Result:
    """What a run came to. loss: of the last logged window; best_loss: the lowest evaluation loss, if any."""

    steps: int
    seconds: float
    loss: float | None = None
    eval_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    run_folder: Path | None = None
    export: Path | None = None


@dataclass
class Loop:
    """Everything a run needs, put together by the Trainer; `run` goes from progress.step to max_steps."""

    task: Task
    train: Feed
    evaluation: Feed | None
    step: TrainStep
    mesh: Mesh
    config: TrainConfig
    max_steps: int
    checkpoints: Checkpoints
    progress: Progress
    facts: dict[str, Any]
    callbacks: Sequence[Callback]
    autocast: Callable[[], AbstractContextManager[Any]]
    samples: Callable[[nn.Module, int], list[dict[str, Any]]] | None = None
    parts: Whole | None = None
    window: Sums = field(default_factory=Sums)
    units: int = 0
    since: float = 0.0
    last_row: dict[str, float] = field(default_factory=dict)
    last_eval: tuple[int, float] | None = None
    saved_step: int | None = None
    memory_mb: float = 0.0
    memory_due: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    unchecked: list[tuple[int, StepResult]] = field(default_factory=list)
    each_step: list[Callable[[int], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lr_at = schedule(self.config, self.max_steps)
        self.counted_step = self.progress.step + _COUNTED if self.mesh.world_size > 1 else None
        if self.progress.window is not None:  # resumed in the middle of one
            self.window, self.units = Sums.restored(self.progress.window), self.progress.window_units
        self.each_step = [c.on_step for c in self._listeners() if type(c).on_step is not Callback.on_step]

    def whole(self) -> nn.Module | None:
        """The model in one piece, on rank 0. Every rank must call it."""
        if self.parts is not None:
            return self.parts.of(self.task.model, self.mesh)
        return self.task.model if self.mesh.is_zero else None

    def _listeners(self) -> list[Callback]:
        return [c for c in self.callbacks if self.mesh.is_zero or not c.rank_zero_only]

    def tell(self, event: str, *args: Any) -> None:
        """Calls an event on every callback that wants it on this rank."""
        for callback in self._listeners():
            getattr(callback, event)(*args)

    def run(self) -> Result:
        began = self.since = time.perf_counter()
        self.task.model.train()
        for k, micro_batches in enumerate(self.train.steps(self.progress.step, self.max_steps), self.progress.step):
            logs = (k + 1) % self.config.logging_steps == 0 or k + 1 == self.max_steps
            lr = self._set_lr(k)
            result = self._run_step(k, micro_batches, logs)
            self.progress.step = k + 1
            self.unchecked.append((k, result))
            if logs or len(self.unchecked) == _MOST_UNCHECKED:
                self._check()
            self.units += self.train.units(k)
            for told in self.each_step:
                told(k + 1)
            if logs:
                self._log(k + 1, lr, result)
            self._after(k + 1)
        return self._finish(time.perf_counter() - began)

    def _run_step(self, k: int, micro_batches: Sequence[MicroBatch], want_norm: bool) -> StepResult:
        """One step. In one of a run's first it is counted what this rank sends to others."""
        if k != self.counted_step:
            return self.step(micro_batches, want_norm=want_norm)
        with Traffic(self.mesh) as traffic:
            result = self.step(micro_batches, want_norm=want_norm)
        self.sent = traffic.bytes
        return result

    def _set_lr(self, k: int) -> float:
        lr = self.lr_at(k)
        for group in self.step.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _after(self, step: int) -> None:
        """Evaluates and saves where this step says so. A best checkpoint is saved when it is found."""
        evaluates = self.evaluation is not None and self.config.eval_steps and step % self.config.eval_steps == 0
        saves = self.config.save_steps and step % self.config.save_steps == 0
        if evaluates or saves:
            self._check()
            best = bool(evaluates and self.evaluate())
            if best or saves:
                self.save(best)

    def _check(self) -> None:
        """Adds the last steps to the window, or stops at the first whose loss is not finite.

        Reading numbers waits for the device, so it is done where something is logged, evaluated or saved; nothing is
        saved unchecked.
        """
        skips = self.step.scaler is not None  # it has not used such a gradient
        for step, past in self.unchecked:
            past.sums.settle(self.mesh)
            finite_loss = all(math.isfinite(past.sums.total(name)) for name in past.sums.terms)
            if not finite_loss or not (past.grad_norm is None or skips or math.isfinite(past.grad_norm)):
                raise NotFinite(self._blame(step, past, finite_loss))
            self.window.merge(past.sums)
        self.unchecked.clear()

    def _blame(self, k: int, result: StepResult, finite_loss: bool) -> str:
        """Names the step, the samples and the last good checkpoint."""
        plan = self.train.plan(k)
        totals: Sequence[Any] = result.local or [0.0] * len(plan)  # in a pipeline only the last stage has them
        mine = [s for part, total in zip(plan, totals, strict=True) if not math.isfinite(float(total)) for s in part]
        found = self.mesh.gather_objects(mine)
        samples = sorted({s for part in found for s in part} or self.train.order.step(k))
        shown = ", ".join(str(s + 1) for s in samples[:32]) + (" …" if len(samples) > 32 else "")
        latest = self.checkpoints.folder / "latest"
        kept = f"last good checkpoint: {latest.resolve()}" if latest.exists() else "there is no checkpoint yet"
        what = "gradient norm" if finite_loss else "loss"
        return (
            f"the {what} is not finite at step {k + 1}; training samples (counted from 1): {shown}; {kept}. "
            f"Look at these samples, lower train.lr, or set train.max_grad_norm."
        )

    def _log(self, step: int, lr: float, result: StepResult) -> None:
        now = time.perf_counter()
        row: dict[str, Any] = {"step": step, "split": "train", **self.window.read(), "lr": lr}
        if result.grad_norm is not None:
            row["grad_norm"] = float(result.grad_norm)
        unit = "samples" if self.train.lengths is None else "tokens"
        self.progress.units += self.units
        row[unit] = self.progress.units
        row[f"{unit}_per_second"] = self.units / max(1e-9, now - self.since)
        if now >= self.memory_due:  # asking the system takes longer than a step of a small model
            self.memory_mb, self.memory_due = process_memory_mb().peak, now + 1.0
        row["memory_mb"] = self.memory_mb
        row["epoch"] = step / self.train.order.steps_per_epoch
        row |= {f"comm_mb_{axis}": size / 2**20 for axis, size in self.sent.items()}
        self.sent = {}
        self.window, self.units, self.since, self.last_row = Sums(), 0, now, row
        self.tell("on_log", row)

    def evaluate(self) -> bool:
        """Evaluates, tells it, and returns whether this is the best loss so far."""
        assert self.evaluation is not None
        step, paused = self.progress.step, time.perf_counter()
        placed = self.step.placed
        row = evaluate(self.task, placed, self.evaluation, self.mesh, self.autocast, self.step.to_device)
        best = self.progress.best_loss is None or row["loss"] < self.progress.best_loss
        if best:
            self.progress.best_loss, self.progress.best_step = row["loss"], step
        self.last_eval = (step, row["loss"])
        self.tell("on_eval", {"step": step, "split": "eval", **row, "best": best})
        if self.samples is not None and self.config.eval_samples:
            model = self.whole()
            if model is not None:
                self.tell("on_samples", step, self.samples(model, self.config.eval_samples))
        self.since += time.perf_counter() - paused
        return best

    def save(self, best: bool = False) -> None:
        began = time.perf_counter()
        self.progress.window, self.progress.window_units = self.window.state(), self.units
        path = self.checkpoints.save(self.step, self.progress, self.facts, best)
        seconds = time.perf_counter() - began
        self.saved_step = self.progress.step
        size = sum(f.stat().st_size for f in path.iterdir()) if self.mesh.is_zero else 0
        self.tell("on_checkpoint", self.progress.step, str(path), seconds, size)
        self.since += seconds

    def _finish(self, seconds: float) -> Result:
        done = self.last_eval is not None and self.last_eval[0] == self.progress.step
        best = bool(self.evaluation is not None and not done and self.evaluate())
        if best or self.saved_step != self.progress.step:
            self.save(best)
        return Result(
            steps=self.progress.step,
            seconds=seconds,
            loss=self.last_row.get("loss"),
            eval_loss=self.last_eval[1] if self.last_eval else None,
            best_loss=self.progress.best_loss,
            best_step=self.progress.best_step,
        )
