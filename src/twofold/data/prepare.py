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
from types import ModuleType
from typing import Any

import numpy as np

from twofold.config.schema import DataOptions
from twofold.data.encode import IGNORE, Sample, encode, prompt_tokens
from twofold.data.formats import Example, RowError, find_format, formats
from twofold.data.load import ArrowRows, load_rows, name_of
from twofold.data.template import render
from twofold.errors import UserError

_VERSION = 2  # of what is cached: raise it when encoding changes


@dataclass
class DataReport:
    """What the rows became. columns: those that are read; unused: those that are not; files: (name, rows) of a
    folder's files; lengths: min, median, 95th percentile, max, in tokens; bad: (row from 1, reason)."""

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


def prepare(
    source: Any,
    tokenizer: Any,
    options: DataOptions,
    what: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
) -> TokenDataset:
    """The samples of a data source, from the cache where they have been made before.

    what: "train" or "eval", for messages; cache_dir: where samples are kept (default: $TWOFOLD_CACHE/data, else
    ~/.cache/twofold/data). Raises UserError where the source or its format is wrong, and for the first row that
    cannot be trained (unless options.on_bad_row is "skip"), naming its number and how many are like it.
    """
    data = samples(source, tokenizer, options, what, cache_dir)
    report = data.report
    if report.bad and not (options.on_bad_row == "skip" and report.samples):
        row, reason = report.bad[0]
        place = report.place(row)
        where = f"{name_of(source)}/{place}" if report.files else f"{name_of(source)}, {place}"
        others = f" {len(report.bad)} of {report.rows} rows cannot be trained." if len(report.bad) > 1 else ""
        remedy = "Mend it, or leave such rows out with data.on_bad_row=skip."
        if not report.samples:
            remedy = "Not one row is left: mend them, or choose another data.format or data.max_length."
        raise UserError(f"data.{what}: {where}: {reason}.{others} {remedy}")
    return data


def samples(
    source: Any,
    tokenizer: Any,
    options: DataOptions,
    what: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
) -> TokenDataset:
    """As `prepare`, but rows that cannot be trained are only left out and reported, even if that is all of them."""
    rows = None
    content = _content_of_files(source)
    if content is None:
        rows = load_rows(source, what)
        content = _content_of_rows(rows)
    key = _fingerprint(content, tokenizer, options)
    folder = (Path(cache_dir) if cache_dir is not None else _cache_folder()) / key
    data = _read(folder)
    if data is None:
        data = _encode_all(load_rows(source, what) if rows is None else rows, source, tokenizer, options, what)
        _write(data, folder)
    data.report.source = Path(source).name if isinstance(source, str | os.PathLike) else name_of(source)
    data.fingerprint = key
    return data


def _find_format(rows: Sequence[Any], options: DataOptions, place: str) -> tuple[str, ModuleType, set[str]]:
    """(name, format, all columns). A first row that lacks a column does not hide what the others are."""
    every = rows.columns if isinstance(rows, ArrowRows) else set().union(*rows)
    columns = every
    if options.format == "auto" and sum(module.matches(set(rows[0])) for module in formats().values()) == 1:
        columns = set(rows[0])
    name, module = find_format(columns, options.format, place)
    return name, module, every


def _encode_all(rows: Sequence[Any], source: Any, tokenizer: Any, options: DataOptions, what: str) -> TokenDataset:
    name, module, columns = _find_format(rows, options, f"data.{what}: {name_of(source)}")
    report = DataReport(name_of(source), name, len(rows), sorted(columns & module.USES), sorted(columns - module.USES))
    report.files = getattr(rows, "files", [])
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
        report.notes += [note for note in sample.notes if note not in report.notes]
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


def _content_of_files(source: Any) -> bytes | None:
    """A digest of a file or of a folder's files; None for other sources, and for what cannot be read."""
    if not isinstance(source, str | os.PathLike):
        return None
    path, digest = Path(source).expanduser(), hashlib.sha256()
    try:
        for one in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
            with one.open("rb") as file:
                digest.update(one.name.encode() + hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return None  # loading it tells what is wrong
    return digest.digest()


def _content_of_rows(rows: Sequence[Any]) -> bytes:
    if isinstance(rows, ArrowRows):
        return rows.dataset._fingerprint.encode()
    digest = hashlib.sha256()
    for row in rows:
        try:
            digest.update(json.dumps(row, sort_keys=True, default=_plain).encode())
        except TypeError:  # keys of several types
            digest.update(repr(row).encode())
    return digest.digest()


def _fingerprint(content: bytes, tokenizer: Any, options: DataOptions) -> str:
    """Of everything that samples depend on."""
    from transformers import __version__

    digest = hashlib.sha256(f"{_VERSION} {__version__}".encode() + content)
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
    try:
        report = DataReport(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
        report.bad = [(row, reason) for row, reason in report.bad]
        report.files = [(name, count) for name, count in report.files]
        # As plain arrays over the mapped memory: slices of np.memmap cost ten times as much.
        tokens, labels = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("tokens", "labels"))
        return TokenDataset(tokens, labels, np.load(folder / "ends.npy"), np.load(folder / "rows.npy"), report)
    except (OSError, ValueError, TypeError):
        return None  # not there, or unreadable: encoded again


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
        (work / "report.json").write_text(json.dumps(asdict(data.report)), encoding="utf-8")
        if folder.exists() and _read(folder) is None:  # left broken by a full disk or a crash
            shutil.rmtree(folder)
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
    _, module, _ = _find_format(rows, options, f"data.{what}: {name_of(source)}")
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
    if example.messages is not None and tokenizer.chat_template:
        last = max(i for i, m in enumerate(example.messages) if m["role"] == "assistant")
        text = render(tokenizer, example.messages[:last], example.tools, generation=True)
        reference = example.messages[last]["content"]
        return Prompt(list(tokenizer(text, add_special_tokens=False)["input_ids"]), str(reference))
    if example.prompt is not None:
        return Prompt(prompt_tokens(tokenizer, example.prompt), example.completion or "")
    return None
