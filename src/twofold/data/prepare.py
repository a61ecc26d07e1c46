"""Rows made into samples once: encoded, counted, and kept on disk for the other ranks and the next run.

The cache is keyed by everything that samples depend on (the rows, the tokenizer and its template, the options).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from twofold.config.schema import DataOptions
from twofold.data.encode import IGNORE, Sample, TooLong, encode, prompt_tokens
from twofold.data.formats import Example, Group, RowError, find_format, formats_of
from twofold.data.load import ArrowRows, load_rows, name_of
from twofold.data.template import render
from twofold.data.tokens import DataReport, TokenDataset, read, write
from twofold.errors import UserError

_VERSION = 3  # of what is cached: raise it when encoding changes


def prepare(
    source: Any,
    tokenizer: Any,
    options: DataOptions,
    what: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
    kind: str = "single",
) -> TokenDataset:
    """The samples of a data source, from the cache where they have been made before.

    what: "train" or "eval", for messages; kind: of the rows (`twofold.data.formats`); cache_dir: where samples are
    kept (default: $TWOFOLD_CACHE/data, else ~/.cache/twofold/data). Raises UserError where the source or its format is
    wrong, and for the first row that cannot be trained (unless options.on_bad_row is "skip"), naming its number and how
    many are like it.
    """
    data = samples(source, tokenizer, options, what, cache_dir, kind)
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
    if not report.samples:
        raise UserError(
            f"data.{what}: {name_of(source)}: all {report.rows} rows are over data.max_length={options.max_length} and "
            "skipped: raise it, or choose data.truncation=keep_start."
        )
    return data


def held_out(data: TokenDataset, source: Any, share: float) -> tuple[TokenDataset, TokenDataset, list[Any]]:
    """(the rest, a share of the samples to evaluate on, their rows). Which they are depends on their number alone.

    Raises UserError if one of both would be empty.
    """
    count = round(share * len(data))
    if not 0 < count < len(data):
        raise UserError(f"data.eval_split={share} of {len(data)} samples leaves none on one side: change it.")
    drawn = np.random.default_rng(0).permutation(len(data))
    held, rest = sorted(drawn[:count].tolist()), sorted(drawn[count:].tolist())
    rows = load_rows(source)
    return (
        data.part(rest, f"{share}-rest"),
        data.part(held, f"{share}-held"),
        [rows[data.row_numbers[i] - 1] for i in held],
    )


def samples(
    source: Any,
    tokenizer: Any,
    options: DataOptions,
    what: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
    kind: str = "single",
) -> TokenDataset:
    """As `prepare`, but rows that cannot be trained are only left out and reported, even if that is all of them."""
    rows = None
    content = _content_of_files(source)
    if content is None:
        rows = load_rows(source, what)
        content = _content_of_rows(rows)
    key = _fingerprint(content, tokenizer, options, kind)
    folder = (Path(cache_dir) if cache_dir is not None else cache_folder() / "data") / key
    data = read(folder)
    if data is None:
        rows = load_rows(source, what) if rows is None else rows
        data = _encode_all(rows, source, tokenizer, options, what, kind)
        write(data, folder)
    data.report.source = Path(source).name if isinstance(source, str | os.PathLike) else name_of(source)
    data.fingerprint = key
    return data


def _find_format(rows: Sequence[Any], options: DataOptions, place: str, kind: str) -> tuple[str, ModuleType, set[str]]:
    """(name, format, all columns). A first row that lacks a column does not hide what the others are."""
    every = rows.columns if isinstance(rows, ArrowRows) else set().union(*rows)
    columns = every
    if options.format == "auto" and sum(module.matches(set(rows[0])) for module in formats_of(kind).values()) == 1:
        columns = set(rows[0])
    name, module = find_format(columns, options.format, place, kind)
    return name, module, every


def _encode_all(
    rows: Sequence[Any], source: Any, tokenizer: Any, options: DataOptions, what: str, kind: str
) -> TokenDataset:
    name, module, columns = _find_format(rows, options, f"data.{what}: {name_of(source)}", kind)
    report = DataReport(name_of(source), name, len(rows), sorted(columns & module.USES), sorted(columns - module.USES))
    report.files = getattr(rows, "files", [])
    tokens: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    firsts, numbers, values = [], [], []
    for number, row in enumerate(rows, 1):
        try:
            made = module.convert(row)
            group = Group((made,)) if isinstance(made, Example) else made
            found: list[Sample] = [encode(example, tokenizer, options) for example in group.examples]
        except TooLong:
            report.too_long += 1
            continue
        except RowError as error:
            report.bad.append((number, str(error)))
            continue
        report.cut += any(sample.cut for sample in found)
        report.notes += [note for sample in found for note in sample.notes if note not in report.notes]
        firsts.append(len(tokens))
        tokens += [np.array(sample.input_ids, np.int32) for sample in found]
        labels += [np.array(sample.labels, np.int32) for sample in found]
        numbers.append(number)
        values.append(group.values)
    _count(report, tokens, labels, firsts)
    joined, kept = (np.concatenate(part) if part else np.zeros(0, np.int32) for part in (tokens, labels))
    ends = np.cumsum([len(part) for part in tokens], dtype=np.int64)
    groups = None if kind == "single" else np.array(firsts, np.int64)
    return TokenDataset(joined, kept, ends, np.array(numbers, np.int64), report, groups, _values(values, report))


def _values(values: Sequence[Sequence[float | str]], report: DataReport) -> dict[str, np.ndarray]:
    """The column `values`, if the rows have some."""
    without = sum(not row for row in values)
    if without == len(values):
        return {}
    if without:
        report.notes.append(f"{without} of {report.rows} rows have no score or margin, so none is used")
        return {}
    return {"values": np.array([value for row in values for value in row])}


def _count(report: DataReport, tokens: list[np.ndarray], labels: list[np.ndarray], firsts: Sequence[int]) -> None:
    sizes = np.array([len(part) for part in tokens])
    report.samples, report.tokens = len(firsts), int(sizes.sum())
    report.trained = int(sum((part[1:] != IGNORE).sum() for part in labels))
    if len(sizes):
        lengths = np.add.reduceat(sizes, firsts)
        report.lengths = [int(q) for q in np.percentile(lengths, [0, 50, 95, 100], method="lower")]
    if report.cut:
        report.notes.append(f"{report.cut} of {report.rows} rows are cut to data.max_length")
    if report.too_long:
        report.notes.append(f"{report.too_long} of {report.rows} rows are over data.max_length and left out")


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


def _fingerprint(content: bytes, tokenizer: Any, options: DataOptions, kind: str) -> str:
    """Of everything that samples depend on."""
    from transformers import __version__

    digest = hashlib.sha256(f"{_VERSION} {__version__} {kind}".encode() + content)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(backend.to_str().encode() if backend is not None else repr(tokenizer).encode())
    digest.update(repr((tokenizer.chat_template, tokenizer.special_tokens_map)).encode())
    relevant = options.model_dump(exclude={"num_workers", "on_bad_row", "eval_split", "train", "eval"})
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    return digest.hexdigest()[:20]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def cache_folder() -> Path:
    """Where what is computed once is kept."""
    return Path(os.environ.get("TWOFOLD_CACHE") or Path.home() / ".cache" / "twofold")


@dataclass(frozen=True)
class Prompt:
    """What comes before an answer, as tokens rendered for inference, and the answer that the data gives."""

    input_ids: list[int]
    reference: str


def prompts(
    source: Any, tokenizer: Any, options: DataOptions, count: int, what: str = "eval", kind: str = "single"
) -> list[Prompt]:
    """The first `count` rows that have a prompt, for generated samples."""
    rows = load_rows(source, what)
    _, module, _ = _find_format(rows, options, f"data.{what}: {name_of(source)}", kind)
    found: list[Prompt] = []
    for row in rows:
        if len(found) == count:
            break
        try:
            made = module.convert(row)
            prompt = _prompt(made.examples[0] if isinstance(made, Group) else made, tokenizer)
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
