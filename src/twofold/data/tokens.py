"""Token samples, what is known of them, and their place on the disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class DataReport:
    """What the rows became. columns: those that are read; unused: those that are not; files: (name, rows) of a
    folder's files; lengths: min, median, 95th percentile, max, in tokens; cut, too_long: rows that max_length has cut,
    or skipped; bad: (row from 1, reason)."""

    source: str
    format: str
    rows: int
    columns: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    too_long: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def stated_format(self) -> str:
        """The format that was found, and by what."""
        return f"{self.format} (columns {', '.join(self.columns)})"

    def place(self, row: int) -> str:
        """Where a row is: its number, in its file where there are several."""
        for name, count in self.files:
            if row <= count:
                return f"{name}, row {row}"
            row -= count
        return f"row {row}"

    def summary(self) -> str:
        """One line for the start table."""
        share = 100 * self.trained / max(1, self.tokens)
        text = f"{self.source} · format {self.stated_format()} · {self.samples:,} samples · {self.tokens:,} tokens"
        text += f", {share:.0f} % trained"
        text += f" · {len(self.bad)} rows left out" if self.bad else ""
        text += f" · {self.too_long} over max_length left out" if self.too_long else ""
        return text + (f" · {self.cut} cut to max_length" if self.cut else "")


class TokenDataset:
    """Samples by index: {"input_ids": [n], "labels": [n]} as numpy int64, labels -100 where nothing is trained.

    A sample of several sequences, or with values, is {"sequences": [such a dict …], name: [k] float64 …} with a number
    for each of its k sequences from every one of `columns`.

    ends: where each sequence ends in tokens and labels; rows: the row (from 1) of each sample; firsts: each sample's
    first sequence, None where a sample is a sequence without values; columns: name -> [sequences];
    lengths: tokens of each sample; fingerprint: of the content.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        labels: np.ndarray,
        ends: np.ndarray,
        rows: np.ndarray,
        report: DataReport,
        firsts: np.ndarray | None = None,
        columns: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.tokens, self.labels, self.ends, self.firsts = tokens, labels, ends, firsts
        self.columns = dict(columns or {})
        self.row_numbers: list[int] = rows.tolist()
        self.report = report
        self.fingerprint = ""
        sizes = np.diff(ends, prepend=0)
        self._starts, self._ends = (ends - sizes).tolist(), ends.tolist()
        self.lengths: list[int] = (
            (sizes if firsts is None else np.add.reduceat(sizes, firsts)).tolist() if len(ends) else []
        )
        self._groups = None if firsts is None else [*firsts.tolist(), len(ends)]

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if self._groups is None:
            return self.sequence(i)
        first, last = self._groups[i], self._groups[i + 1]
        numbers = {name: column[first:last] for name, column in self.columns.items()}
        return {"sequences": [self.sequence(s) for s in range(first, last)], **numbers}

    def sequence(self, s: int) -> dict[str, np.ndarray]:
        """One sequence of all."""
        part = slice(self._starts[s], self._ends[s])
        return {"input_ids": self.tokens[part].astype(np.int64), "labels": self.labels[part].astype(np.int64)}

    def part(self, samples: Sequence[int], name: str) -> TokenDataset:
        """Some of the samples, in this order. name: tells it from other parts of the same data."""
        groups = self._groups or range(len(self._ends) + 1)
        kept = [s for i in samples for s in range(groups[i], groups[i + 1])]
        sizes = np.array([groups[i + 1] - groups[i] for i in samples], np.int64)
        found = [self.sequence(s) for s in kept]
        tokens, labels = (np.concatenate([x[key] for x in found]).astype(np.int32) for key in ("input_ids", "labels"))
        report = replace(
            self.report,
            samples=len(samples),
            tokens=len(tokens),
            trained=int(sum((x["labels"][1:] != -100).sum() for x in found)),
        )
        made = TokenDataset(
            tokens,
            labels,
            np.cumsum([len(x["labels"]) for x in found]),
            np.array([self.row_numbers[i] for i in samples]),
            report,
            None if self.firsts is None else np.cumsum(sizes) - sizes,
            {column: values[kept] for column, values in self.columns.items()},
        )
        made.fingerprint = f"{self.fingerprint}-{name}"
        return made

    def sequences(self, i: int) -> list[dict[str, np.ndarray]]:
        """The sequences of a sample."""
        sample = self[i]
        return list(sample["sequences"]) if self._groups is not None else [sample]


def read(folder: Path) -> TokenDataset | None:
    """What `write` has kept there; None if it is not there, or unreadable."""
    try:
        report = DataReport(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
        report.bad = [(row, reason) for row, reason in report.bad]
        report.files = [(name, count) for name, count in report.files]
        # As plain arrays over the mapped memory: slices of np.memmap cost ten times as much.
        tokens, labels = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("tokens", "labels"))
        ends, rows = (np.load(folder / f"{name}.npy") for name in ("ends", "rows"))
        firsts = np.load(folder / "firsts.npy") if (folder / "firsts.npy").exists() else None
        columns = {path.stem: np.load(path) for path in (folder / "columns").glob("*.npy")}
        return TokenDataset(tokens, labels, ends, rows, report, firsts, columns)
    except (OSError, ValueError, TypeError):
        return None


def write(data: TokenDataset, folder: Path) -> None:
    """Keeps the samples; where there is no place for them, the run goes on in memory.

    They are written into a folder of their own that is renamed, so any number of processes may race for it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    except OSError:
        return
    arrays = {"tokens": data.tokens, "labels": data.labels, "ends": data.ends}
    arrays |= {"rows": np.array(data.row_numbers, np.int64)}
    arrays |= {} if data.firsts is None else {"firsts": data.firsts}
    arrays |= {f"columns/{name}": column for name, column in data.columns.items()}
    try:
        (work / "columns").mkdir()
        for name, array in arrays.items():
            np.save(work / f"{name}.npy", array)
        (work / "report.json").write_text(json.dumps(asdict(data.report)), encoding="utf-8")
        if folder.exists() and read(folder) is None:  # left broken by a full disk or a crash
            shutil.rmtree(folder)
        work.rename(folder)
    except OSError:  # no space, or another process was quicker
        pass
    finally:
        shutil.rmtree(work, ignore_errors=True)
