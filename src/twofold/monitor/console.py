"""What a person sees of a run: the start table, progress, evaluations, samples, where things lie at the end.

On a terminal: a panel, one live line, and permanent lines for what is worth keeping (live.py, by rich).
Anywhere else (a file, a pipe, a cluster's log): the same facts as plain lines, one for every `on_log`, each
flushed at once, without a control character. `progress` chooses: "auto", "rich", "plain", or "off", which
leaves warnings and the end.

Promises: only rank 0 prints; a model's output is shown, never obeyed (no markup, no terminal escapes); a
terminal that goes away or cannot show a character never stops a run.
Costs: a step 0.1 µs, on a terminal also a redraw (0.2 ms) at most five times a second; a plain line 10 µs.
"""

import math
import os
import sys
import time
from typing import IO, Any

from twofold.errors import UserError, nearest
from twofold.monitor.callback import Callback
from twofold.monitor.status import eta_seconds
from twofold.monitor.text import clock, duration, excerpt, learning_rate, number, rate, size, sparkline, visible

_MODES = ("auto", "rich", "plain", "off")
_REDRAW_SECONDS = 0.2
_NO_ROWS = ("max_steps", "start_step")
_RATES = {"tokens_per_second": "tok/s", "samples_per_second": "samples/s"}
_KNOWN = {"step", "split", "loss", "lr", "grad_norm", "tokens", "samples", "memory_mb", "epoch", "best", *_RATES}


class Console(Callback):
    """Prints to `stream` (standard output by default). progress: "auto", "rich", "plain" or "off".

    Raises UserError for another `progress`.
    """

    rank_zero_only = True

    def __init__(self, progress: str = "auto", stream: IO[str] | None = None):
        if progress not in _MODES:
            raise UserError(f"run.progress: unknown value '{progress}'. {nearest(progress, _MODES)}")
        self._quiet = progress == "off"
        self._stream: IO[str] | None = stream or sys.stdout
        self._terminal = _open_terminal(self._stream, progress)
        self._begin = time.monotonic()
        self._next_draw = math.inf
        self._step = self._start_step = self._max_steps = 0
        self._row: dict[str, Any] = {}
        self._losses: list[float] = []
        self._warned: set[str] = set()
        self._run = self._checkpoint = ""

    # --- what the run tells ---

    def on_start(self, info: dict[str, Any]) -> None:
        self._begin = time.monotonic()
        self._max_steps = info.get("max_steps") or 0
        self._step = self._start_step = info.get("start_step") or 0
        self._run = str(info.get("run", ""))
        rows = [(name, visible(str(value))) for name, value in info.items() if name not in _NO_ROWS]
        if self._start_step:
            rows.append(("resume", f"after step {self._start_step}"))
        if self._quiet:
            return
        if self._terminal:
            self._terminal.panel("twofold", rows)
            self._draw()
        else:
            self._table(rows)

    def on_step(self, step: int) -> None:
        self._step = step
        if time.monotonic() >= self._next_draw:
            self._draw()

    def on_log(self, row: dict[str, Any]) -> None:
        self._step, self._row = row["step"], row
        if self._quiet:
            return
        if self._terminal:
            self._losses.append(row.get("loss", math.nan))
        else:
            width = len(str(self._max_steps))
            self._say(f"step {row['step']:>{width}}/{self._max_steps}  {'  '.join(self._facts(row))}")

    def on_eval(self, row: dict[str, Any]) -> None:
        if not self._quiet:
            best = " (best)" if row.get("best") else ""
            facts = [f"loss {number(row['loss'])}{best}"] if "loss" in row else []
            self._say("  ".join([f"eval  step {row['step']}", *facts, *_extras(row)]), "bold")
            self._draw()

    def on_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        if self._quiet:
            return
        for index, sample in enumerate(samples, start=1):
            self._say(f"sample {index} of {len(samples)}, step {step}", "bold")
            for name, key in (("prompt", "prompt"), ("output", "output"), ("expected", "reference")):
                if sample.get(key) is not None:
                    lines = excerpt(str(sample[key]))
                    self._say("\n".join(f"  {'' if i else name:9} {line}" for i, line in enumerate(lines)))

    def on_checkpoint(self, step: int, path: str, seconds: float, size_bytes: int) -> None:
        self._checkpoint = str(path)
        if not self._quiet:
            self._say(f"saved {path}  ({size(size_bytes)}, {duration(seconds)})")
            self._draw()

    def on_warning(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(f"warning: {visible(text)}", "yellow")

    def on_end(self, summary: dict[str, Any]) -> None:
        self._stop()
        head = [f"done: {summary['steps']} steps in {duration(summary['seconds'])}"]
        if summary.get("loss") is not None:
            head.append(f"loss {number(summary['loss'])}")
        if summary.get("best_loss") is not None:
            head.append(f"best eval loss {number(summary['best_loss'])} at step {summary['best_step']}")
        self._say(", ".join(head), "bold green")
        rows = [("run", summary.get("run")), ("export", summary.get("export"))]
        rows += [("" if i else "next", line) for i, line in enumerate(summary.get("next") or [])]
        self._table([(name, str(value)) for name, value in rows if value])

    def on_error(self, error: BaseException, step: int) -> None:
        """Says how far the run came and what is left; the error itself is told by who ends the program."""
        self._stop()
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        word = "stopped" if stopped else "failed"
        after = duration(time.monotonic() - self._begin)
        self._say(f"{word} after step {step} of {self._max_steps} ({after})", "bold yellow" if stopped else "bold red")
        rows = [("run", self._run), ("last checkpoint", self._checkpoint and f"{self._checkpoint} (--resume)")]
        self._table([row for row in rows if row[1]])

    # --- how it is said ---

    def _facts(self, row: dict[str, Any]) -> list[str]:
        """The numbers of a training row, in words."""
        facts = [f"loss {number(row['loss'])}"] if "loss" in row else []
        if row.get("lr") is not None:
            facts.append(f"lr {learning_rate(row['lr'])}")
        if row.get("grad_norm") is not None:
            facts.append(f"grad {number(row['grad_norm'])}")
        facts += _extras(row)
        return [*facts, *_speed(row), f"ETA {clock(self._eta())}"]

    def _eta(self) -> float | None:
        elapsed = time.monotonic() - self._begin
        return eta_seconds(elapsed, self._step - self._start_step, self._max_steps, self._step)

    def _draw(self) -> None:
        if self._terminal is None or self._quiet:
            return
        row, parts = self._row, [f"{self._step}/{self._max_steps}"]
        if "loss" in row:
            parts.append(f"loss {number(row['loss'])}")
        if self._terminal.width >= 80 and (course := sparkline(self._losses)):
            parts.append(course)
        parts += [*_speed(row), f"ETA {clock(self._eta())}"]
        try:
            self._terminal.draw(self._step / max(1, self._max_steps), " ".join(parts))
        except OSError:
            self._give_up()
        self._next_draw = time.monotonic() + _REDRAW_SECONDS

    def _stop(self) -> None:
        self._next_draw = math.inf
        if self._terminal:
            try:
                self._terminal.stop()
            except OSError:
                self._give_up()

    def _table(self, rows: list[tuple[str, str]]) -> None:
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._say(f"{name:{width}}  {value}")

    def _say(self, text: str, style: str = "") -> None:
        """A permanent line, seen at once."""
        if self._stream is None:
            return
        try:
            if self._terminal:
                self._terminal.line(text, style)
            else:
                encoding = getattr(self._stream, "encoding", None) or "utf-8"
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # a pipe that nobody reads any more, a closed stream
            self._give_up()

    def _give_up(self) -> None:
        """The run goes on without a console; its numbers are in the run folder."""
        self._stream = self._terminal = None
        self._next_draw = math.inf


def _speed(row: dict[str, Any]) -> list[str]:
    return [f"{rate(row[name])} {unit}" for name, unit in _RATES.items() if row.get(name)]


def _extras(row: dict[str, Any]) -> list[str]:
    """The metrics of a row beside the usual ones: "accuracy 0.9100"."""
    return [
        f"{name} {number(value)}"
        for name, value in row.items()
        if name not in _KNOWN and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _open_terminal(stream: IO[str] | None, progress: str) -> Any:
    """The live console where it is wanted and can be shown, else None."""
    if stream is None or progress in ("plain", "off"):
        return None
    if progress == "auto":
        utf8 = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
        if not stream.isatty() or not utf8 or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
            return None
    from twofold.monitor.live import Terminal

    return Terminal(stream)
