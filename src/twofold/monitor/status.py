"""`status.json`: where a run stands, for whoever looks from outside.

    {"state": "running", "step": 120, "max_steps": 600, "eta_seconds": 84.2, "seconds": 21.0, "error": null,
     "time": 1796116414.3, "pid": 9214, "host": "node3"}

state: "starting" (written with the run folder), "running", "done", "failed" (see "error") or "stopped"
(Ctrl-C or a request to end). A process that is killed writes nothing any more: `is_alive` tells.

Promises: the file is always whole, and follows the run within a second or a step, whichever is longer.
Costs: `on_step` 0.1 µs, and at most once a second one write of 0.1 to 1 ms (ext4).
"""

import os
import platform
import time
from pathlib import Path
from typing import Any

from twofold.monitor.atomic import read_json, write_json_atomic
from twofold.monitor.callback import Callback

_SECONDS_BETWEEN_WRITES = 1.0
_SILENT_SECONDS = 3600  # a run on another machine that has written nothing for so long counts as dead
_UNFINISHED = ("starting", "running")


class Status(Callback):
    """Keeps `path` (a run folder's status.json) up to date."""

    rank_zero_only = True

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._begin = time.monotonic()
        self._next_write = 0.0
        self._start_step = self._step = 0
        self._max_steps: int | None = None

    def on_start(self, info: dict[str, Any]) -> None:
        self._begin = time.monotonic()
        self._start_step = self._step = info.get("start_step", 0)
        self._max_steps = info.get("max_steps")
        self._write("running")

    def on_step(self, step: int) -> None:
        self._step = step
        if time.monotonic() >= self._next_write:
            self._write("running")

    def on_eval(self, row: dict[str, Any]) -> None:
        self.on_step(row["step"])

    def on_checkpoint(self, step: int, path: str, seconds: float, size_bytes: int) -> None:
        self.on_step(step)

    def on_end(self, summary: dict[str, Any]) -> None:
        self._step = summary.get("steps", self._step)
        self._write("done")

    def on_error(self, error: BaseException, step: int) -> None:
        self._step = step
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        self._write("stopped" if stopped else "failed", f"{type(error).__name__}: {error}".rstrip(": "))

    def _write(self, state: str, error: str | None = None) -> None:
        now = time.monotonic()
        self._next_write = now + _SECONDS_BETWEEN_WRITES
        done = self._step - self._start_step
        eta = eta_seconds(now - self._begin, done, self._max_steps, self._step) if state == "running" else None
        write_status(
            self._path,
            state,
            step=self._step,
            max_steps=self._max_steps,
            eta_seconds=eta,
            seconds=round(now - self._begin, 3),
            error=error,
        )


def write_status(
    path: str | Path,
    state: str,
    *,
    step: int = 0,
    max_steps: int | None = None,
    eta_seconds: float | None = None,
    seconds: float = 0.0,
    error: str | None = None,
) -> None:
    """Replaces `path` by the status of a run that this process carries. Raises OSError."""
    status = {
        "state": state,
        "step": step,
        "max_steps": max_steps,
        "eta_seconds": None if eta_seconds is None else round(eta_seconds, 1),
        "seconds": seconds,
        "error": error,
        "time": round(time.time(), 3),
        "pid": os.getpid(),
        "host": platform.node(),
    }
    write_json_atomic(path, status, durable=False)


def close_status(path: str | Path, error: str, state: str = "failed") -> None:
    """For the process that has watched a run end which could not say so itself (killed): marks it ended.

    Changes nothing where the run has already said how it ended, or was never begun.
    """
    status = read_json(path)
    if isinstance(status, dict) and status.get("state") in _UNFINISHED:
        keep: dict[str, Any] = {name: status.get(name) for name in ("step", "max_steps", "seconds")}
        write_status(path, state, error=error, **keep)


def is_alive(status: Any) -> bool:
    """Whether the run of this status (the content of a status.json; None: no run) is still going on.

    Known for sure on the same machine; elsewhere a run that has been silent for an hour counts as dead.
    """
    if not isinstance(status, dict) or status.get("state") not in _UNFINISHED:
        return False
    pid = status.get("pid", 0)
    if status.get("host") != platform.node():
        return time.time() - status.get("time", 0) < _SILENT_SECONDS
    if pid == os.getpid():  # a container that starts anew gives the same numbers again
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except OSError:
        return False
    return True


def eta_seconds(elapsed: float, steps_done: int, max_steps: int | None, step: int) -> float | None:
    """Seconds that the remaining steps take at the pace so far (evaluations included); None: not known yet."""
    if not max_steps or steps_done <= 0:
        return None
    return max(0, max_steps - step) * elapsed / steps_done
