"""Rows made into samples once: encoded, counted, and kept on disk for the other ranks and the next run.

The cache is keyed by everything that samples depend on (the rows, the tokenizer and its template, the options). It
is written into a folder of its own and renamed, so any number of processes may race for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from twofold.config.schema import DataOptions
from twofold.data.encode import IGNORE, Sample, encode
from twofold.data.formats import Example, RowError, find_format
from twofold.data.load import load_rows, name_of
from twofold.data.template import render
from twofold.errors import UserError

_VERSION = 1  # of what is cached: raise it when encoding changes


@dataclass
class DataReport:
    """What the rows became. lengths: min, median, 95th percentile, max, in tokens; bad: (row from 1, reason)."""

    source: str
    format: str
    rows: int
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line for the start table."""
        share = 100 * self.trained / max(1, self.tokens)
        text = f"{self.source} · format {self.format} · {self.samples:,} samples · {self.tokens:,} tokens"
        text += f", {share:.0f} % trained"
        text += f" · {len(self.bad)} rows left out" if self.bad else ""
        return text + (f" · {self.cut} cut to max_length" if self.cut else "")


class TokenDataset:
    """Samples by index: {"input_ids": [n], "labels": [n]} as numpy int64, labels -100 where nothing is trained.

    lengths: tokens of each sample; row_numbers: the row (from 1) each came from; fingerprint: of the content.
    """

    def __init__(self, tokens: np.ndarray, labels: np.ndarray, ends: np.ndarray, rows: np.ndarray, report: DataReport):
        self._tokens, self._labels = tokens, labels
        self._ends = ends.tolist()
        self.lengths: list[int] = np.diff(ends, prepend=0).tolist()
        self.row_numbers: list[int] = rows.tolist()
        self.report = report
        self.fingerprint = ""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        end = self._ends[i]
        part = slice(end - self.lengths[i], end)
        return {"input_ids": self._tokens[part].astype(np.int64), "labels": self._labels[part].astype(np.int64)}


def prepare(source: Any, tokenizer: Any, options: DataOptions, what: str = "train") -> TokenDataset:
    """The samples of a data source, from the cache where they have been made before.

    Raises UserError where the source or its format is wrong, and for the first row that cannot be trained (unless
    options.on_bad_row is "skip"), naming its number and how many are like it.
    """
    rows = load_rows(source, what)
    key = _fingerprint(source, rows, tokenizer, options)
    folder = _cache_folder() / key
    data = _read(folder)
    if data is None:
        data = _encode_all(rows, source, tokenizer, options, what)
        _write(data, folder)
    data.report.source = Path(source).name if isinstance(source, str | os.PathLike) else name_of(source)
    data.fingerprint = key
    _refuse_bad_rows(data.report, source, options, what)
    return data


def _refuse_bad_rows(report: DataReport, source: Any, options: DataOptions, what: str) -> None:
    if not report.bad or (options.on_bad_row == "skip" and report.samples):
        return
    row, reason = report.bad[0]
    others = f" {len(report.bad)} of {report.rows} rows cannot be trained." if len(report.bad) > 1 else ""
    remedy = "Mend it, or leave such rows out with data.on_bad_row=skip." if report.samples else "Not one row is left."
    raise UserError(f"data.{what}: {name_of(source)}, row {row}: {reason}.{others} {remedy}")


def _encode_all(rows: Sequence[Any], source: Any, tokenizer: Any, options: DataOptions, what: str) -> TokenDataset:
    columns = set(rows[0])
    name, module = find_format(columns, options.format, f"data.{what}: {name_of(source)}")
    report = DataReport(name_of(source), name, len(rows))
    tokens, labels, ends, numbers = [], [], [], []
    total = 0
    for number, row in enumerate(rows, 1):
        try:
            sample: Sample = encode(module.convert(row), tokenizer, options)
        except RowError as error:
            report.bad.append((number, str(error)))
            continue
        total += len(sample.input_ids)
        report.cut += sample.cut > 0
        if sample.note and sample.note not in report.notes:
            report.notes.append(sample.note)
        tokens.append(np.array(sample.input_ids, np.int32))
        labels.append(np.array(sample.labels, np.int32))
        ends.append(total)
        numbers.append(number)
    _count(report, tokens, labels)
    joined, kept = (np.concatenate(part) if part else np.zeros(0, np.int32) for part in (tokens, labels))
    return TokenDataset(joined, kept, np.array(ends, np.int64), np.array(numbers, np.int64), report)


def _count(report: DataReport, tokens: list[np.ndarray], labels: list[np.ndarray]) -> None:
    lengths = sorted(len(t) for t in tokens)
    report.samples, report.tokens = len(lengths), sum(lengths)
    report.trained = int(sum((part[1:] != IGNORE).sum() for part in labels))
    if lengths:
        report.lengths = [int(q) for q in np.percentile(lengths, [0, 50, 95, 100], method="lower")]
    if report.cut:
        report.notes.append(f"{report.cut} of {report.rows} rows are cut to data.max_length")


def _fingerprint(source: Any, rows: Sequence[Any], tokenizer: Any, options: DataOptions) -> str:
    """Of everything that samples depend on."""
    digest = hashlib.sha256(f"{_VERSION}".encode())
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    elif hasattr(rows, "_fingerprint"):
        digest.update(rows._fingerprint.encode())
    else:
        for row in rows:
            digest.update(json.dumps(row, sort_keys=True, default=_plain).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(backend.to_str().encode() if backend is not None else repr(tokenizer).encode())
    digest.update(repr((tokenizer.chat_template, tokenizer.special_tokens_map)).encode())
    relevant = options.model_dump(exclude={"num_workers", "on_bad_row", "train", "eval"})
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    return digest.hexdigest()[:20]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _cache_folder() -> Path:
    return Path(os.environ.get("TWOFOLD_CACHE") or Path.home() / ".cache" / "twofold") / "data"


def _read(folder: Path) -> TokenDataset | None:
    if not (folder / "report.json").is_file():
        return None
    try:
        report = DataReport(**json.loads((folder / "report.json").read_text()))
        report.bad = [(row, reason) for row, reason in report.bad]
        tokens, labels = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "labels"))
        return TokenDataset(tokens, labels, np.load(folder / "ends.npy"), np.load(folder / "rows.npy"), report)
    except (OSError, ValueError, TypeError):
        return None  # unreadable: encoded again


def _write(data: TokenDataset, folder: Path) -> None:
    """Keeps the samples; where there is no place for them, the run goes on in memory."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    except OSError:
        return
    try:
        np.save(work / "tokens.npy", data._tokens)
        np.save(work / "labels.npy", data._labels)
        np.save(work / "ends.npy", np.array(data._ends, np.int64))
        np.save(work / "rows.npy", np.array(data.row_numbers, np.int64))
        (work / "report.json").write_text(json.dumps(asdict(data.report)))
        work.rename(folder)
    except OSError:  # no space, or another process was quicker
        pass
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class Prompt:
    """What comes before an answer, as tokens rendered for inference, and the answer that the data gives."""

    input_ids: list[int]
    reference: str


def prompts(source: Any, tokenizer: Any, options: DataOptions, count: int, what: str = "eval") -> list[Prompt]:
    """The first `count` rows that have a prompt, for generated samples."""
    rows = load_rows(source, what)
    _, module = find_format(set(rows[0]), options.format, f"data.{what}: {name_of(source)}")
    found: list[Prompt] = []
    for row in rows:
        if len(found) == count:
            break
        try:
            prompt = _prompt(module.convert(row), tokenizer)
        except RowError:
            continue
        if prompt is not None:
            found.append(prompt)
    return found


def _prompt(example: Example, tokenizer: Any) -> Prompt | None:
    if example.messages and tokenizer.chat_template:
        last = max(i for i, m in enumerate(example.messages) if m["role"] == "assistant")
        text = render(tokenizer, example.messages[:last], example.tools, generation=True)
        reference = example.messages[last].get("content") or ""
        return Prompt(tokenizer(text, add_special_tokens=False)["input_ids"], str(reference))
    if example.prompt is not None:
        return Prompt(tokenizer(example.prompt)["input_ids"], example.completion or "")
    return None
