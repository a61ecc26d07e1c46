"""What a run tells whoever listens: `Callback`, the base of everything that watches and reports.

A callback only watches. It is told facts, in the order in which they happen, and changes nothing about what
is computed. To be told, override the methods you need; all of them do nothing here.

    class Beep(Callback):
        rank_zero_only = True

        def on_eval(self, row):
            if row["best"]:
                print("\\a", end="")

    Trainer(..., callbacks=[Beep()])

Cost: `on_step` runs after every optimizer step, so it must stay within a few microseconds; `on_log` runs
every `logging_steps`. Numbers in rows are Python numbers, never tensors.
"""

from typing import Any


class Callback:
    """Base class. Every method runs on every rank, or on rank 0 alone where `rank_zero_only` is True.

    A callback that exchanges something between ranks must keep `rank_zero_only = False`. An exception in a
    callback stops the run, like one in the step. After `on_start` comes exactly one of `on_end` and
    `on_error`, and nothing after it.
    """

    rank_zero_only: bool = False

    def on_start(self, info: dict[str, Any]) -> None:
        """Before the first step. `info` is the start table in its order: "model", "parameters", "data",
        "batch", "plan", "layout", "run" (texts; "run" is the run folder), and two ints that are no table
        rows: "max_steps" (the step at which the run is done) and "start_step" (above 0 when resumed).
        """

    def on_step(self, step: int) -> None:
        """After optimizer step `step` (1, 2, …)."""

    def on_log(self, row: dict[str, Any]) -> None:
        """Every `logging_steps`. `row`: "step", "split" ("train"), "loss" (mean since the last row), "lr",
        "grad_norm" (before clipping), "tokens" (so far in this run), "tokens_per_second", "memory_mb" (of
        this rank, MiB), "epoch", and the metrics that the task reports. One of the first rows of a run on several
        ranks has "comm_mb_AXIS" too: what this rank sent on an axis of the mesh in one step (MiB).
        """

    def on_eval(self, row: dict[str, Any]) -> None:
        """After an evaluation. `row`: "step", "split" ("eval"), "loss" (mean over all trained tokens), other
        metrics, and "best": whether this is the lowest loss so far.
        """

    def on_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Texts generated at an evaluation, each with "prompt", "output", "reference" (str or None)."""

    def on_checkpoint(self, step: int, path: str, seconds: float, size_bytes: int) -> None:
        """After the checkpoint of `step` is complete and committed at the folder `path`."""

    def on_warning(self, text: str) -> None:
        """Something the user should know and can change; one line. Can also come before `on_start`."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """The run is done. `summary`: "steps", "seconds", "loss" (the last one), "best_loss" and "best_step"
        (None without an evaluation), "export" (a folder or None), "run" (the run folder), "next" (lines:
        commands that use the result).
        """

    def on_error(self, error: BaseException, step: int) -> None:
        """The run ends early, after `step` finished steps. `error` can be a KeyboardInterrupt."""
