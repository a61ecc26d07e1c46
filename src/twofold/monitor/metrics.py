"""`metrics.jsonl`: one JSON object per line for every logged step and every evaluation.

    {"step": 20, "split": "train", "loss": 1.23456789, "lr": 0.0005, …, "time": 1796116414.31}

The row is the one that the run tells its callbacks, without change but for these points:
- "time" is added: seconds since the epoch when the row was written.
- A float has 9 significant digits (any float32 survives that exactly), never a fixed number of decimals.
- NaN and infinity, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity"; `read_metrics` and
  JavaScript's Number() turn them into numbers again.

Promises: append-only; a row is on the disk when it is written, or for a run that logs more than five rows a second,
within a fifth of a second: a reader can follow the file (whole lines only), and a killed run has lost no more. When a
run resumes at step k, rows of later steps (of the run that went further than its last checkpoint) and a torn last
line are taken away before it goes on: the file stays what one uninterrupted run would have written. Only then is it
replaced, so a reader that sees it shrink starts over.

Costs: about 15 µs a row of ten numbers; nothing at a step.
"""

import json
import math
import time
from pathlib import Path
from typing import IO, Any

from twofold.monitor.atomic import write_text_atomic
from twofold.monitor.callback import Callback

_SECONDS_BETWEEN_FLUSHES = 0.2

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile(Callback):
    """Writes the rows of `on_log` and `on_eval` to `path` (a run folder's metrics.jsonl)."""

    rank_zero_only = True

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._file: IO[str] | None = None
        self._flush_due = 0.0

    def on_start(self, info: dict[str, Any]) -> None:
        """Opens the file: empty for a run from step 0, else cut back to the step at which the run resumes."""
        start = info.get("start_step", 0)
        if start > 0 and self._path.exists():
            cut_back(self._path, start)
        self._file = self._path.open("a" if start > 0 else "w", encoding="utf-8")

    def on_log(self, row: dict[str, Any]) -> None:
        self._write(row)

    def on_eval(self, row: dict[str, Any]) -> None:
        self._flush_due = 0.0  # what comes next may take long
        self._write(row)

    def on_end(self, summary: dict[str, Any]) -> None:
        self._close()

    def on_error(self, error: BaseException, step: int) -> None:
        self._close()

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        now = time.time()
        self._file.write(encode_row({**row, "time": now}) + "\n")
        if now >= self._flush_due:
            self._file.flush()
            self._flush_due = now + _SECONDS_BETWEEN_FLUSHES

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def encode_row(row: dict[str, Any]) -> str:
    """One line of the file, without its newline."""
    plain = {name: _plain(value) for name, value in row.items()}
    if "time" in row:
        plain["time"] = round(row["time"], 2)  # nine digits would be seconds
    return json.dumps(plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return float(f"{value:.9g}")
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):  # a number of numpy or torch
        return _plain(value.item())
    return str(value)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order, NaN and infinity as floats. A line still being written is left out.

    Raises OSError where the file cannot be read, ValueError where a whole line is no JSON object.
    """
    rows = []
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: nothing, or a torn line
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: no JSON: {line[:80]!r}") from error
        rows.append({name: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in row.items()})
    return rows


def cut_back(path: str | Path, step: int) -> int:
    """Takes away the rows after `step`, and lines that cannot be read; the number of lines taken away.

    What is kept is kept byte for byte.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    kept = [line for line in lines[:-1] if _step_of(line) <= step]
    taken = len(lines) - 1 - len(kept) + bool(lines[-1])
    if taken:
        write_text_atomic(path, "".join(line + "\n" for line in kept))
    return taken


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
