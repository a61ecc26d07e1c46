"""Rows from wherever users keep them: a file, a folder of files, a list, a `datasets` object."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from twofold.errors import UserError

ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def load_rows(source: Any, what: str = "train") -> Sequence[dict[str, Any]]:
    """The rows of a data source: a path (file or folder), a list of rows, or a `datasets.Dataset`.

    what: "train" or "eval", for messages. Raises UserError for what is missing, unreadable, broken or empty.
    """
    if isinstance(source, str | os.PathLike):
        rows = _from_path(Path(source).expanduser(), what)
    elif hasattr(source, "column_names") and hasattr(source, "__getitem__"):
        rows = _from_datasets(source, what)
    elif isinstance(source, Sequence):
        rows = source
        for i, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise UserError(f"data.{what}: row {i} is a {type(row).__name__}, not a dict of columns.")
    else:
        raise UserError(f"data.{what}: give a path, a list of rows or a datasets.Dataset, not {type(source).__name__}.")
    if len(rows) == 0:
        raise UserError(f"data.{what}: {name_of(source)} has no rows.")
    return rows


def name_of(source: Any) -> str:
    """What to call a source in messages."""
    return str(source) if isinstance(source, str | os.PathLike) else f"the given {type(source).__name__}"


class FolderRows(list[dict[str, Any]]):
    """The rows of a folder's files, one after the other. files: (name, number of rows)."""

    def __init__(self, parts: dict[str, Sequence[dict[str, Any]]]) -> None:
        super().__init__(row for rows in parts.values() for row in rows)
        self.files = [(name, len(rows)) for name, rows in parts.items()]


class ArrowRows(Sequence[dict[str, Any]]):
    """The rows of a `datasets.Dataset`, read as they are asked for, without the nulls that Arrow puts into objects."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format(None)
        self.columns = set(dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> Any:
        return _row_without_nulls(self.dataset[i])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_row_without_nulls, self.dataset)


def _row_without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object of a column the keys of all of them: null where they were not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(v) for v in value]
    return value


def _from_datasets(source: Any, what: str) -> ArrowRows:
    if isinstance(source.column_names, dict):
        splits = ", ".join(source.column_names)
        raise UserError(f"data.{what}: this is a DatasetDict with the splits {splits}: give one of them.")
    return ArrowRows(source)


def _from_path(path: Path, what: str) -> Sequence[dict[str, Any]]:
    try:
        if path.is_dir():
            return _from_folder(path, what)
        if not path.exists():
            raise UserError(f"data.{what}: there is no file {path}{_nearby(path)}")
        kind = path.suffix.lower()
        if kind not in ENDINGS:
            raise UserError(f"data.{what}: {path}: unknown kind of file '{path.suffix}'. Known: {', '.join(ENDINGS)}.")
        return _READERS[kind](path)
    except PermissionError as error:
        place = error.filename or path
        raise UserError(
            f"data.{what}: {place} cannot be read: permission denied. Allow it: chmod u+r {place}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"data.{what}: {path} is not UTF-8 text (byte {error.start}). Convert it first.") from None
    except OSError as error:
        raise UserError(f"data.{what}: {path} cannot be read: {error.strerror or error}.") from None


def _nearby(path: Path) -> str:
    """What there is instead of a missing file: the name nearest to it, and some of the others."""
    parent = path.parent
    if not parent.is_dir():
        return f" (and no folder {parent}). Paths are relative to {Path.cwd()}."
    names = sorted(p.name for p in parent.iterdir() if p.suffix.lower() in ENDINGS or p.is_dir())
    here = "this folder" if parent == Path() else str(parent)
    if not names:
        return f"; {here} holds no data files."
    close = get_close_matches(path.name, names, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f" in {here}. {hint}It holds: {', '.join(names[:12])}{more}."


def _from_folder(path: Path, what: str) -> Sequence[dict[str, Any]]:
    if (path / "dataset_info.json").exists():
        from datasets import load_from_disk

        return _from_datasets(load_from_disk(str(path)), what)
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
    if not files:
        raise UserError(f"data.{what}: the folder {path} holds no data files. Known: {', '.join(ENDINGS)}.")
    kinds = sorted({p.suffix.lower() for p in files})
    if len(kinds) > 1:
        raise UserError(f"data.{what}: the folder {path} mixes {', '.join(kinds)}: keep one kind, or name one file.")
    return FolderRows({file.name: _from_path(file, what) for file in files})


def _jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error.msg} (column {error.colno}).") from None
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}:{number}: each line should be an object {{…}}, this one is a {type(row).__name__}."
                )
            rows.append(row)
    return rows


def _json(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        hint = " It looks like JSON lines: name it .jsonl." if error.msg == "Extra data" else ""
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno}).{hint}") from None
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise UserError(f'{path}: should be a list of objects, or {{"data": [...]}}.')
    return content


def _csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long document
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except csv.Error as error:
        raise UserError(f"{path}: not readable as CSV: {error}.") from None
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise UserError(
                f"{path}: row {number} has another number of columns than the header ({reader.fieldnames})."
            )
    return rows


def _parquet(path: Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        return [_row_without_nulls(row) for row in parquet.read_table(path).to_pylist()]
    except ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _txt(path: Path) -> list[dict[str, Any]]:
    """A row per line that is not blank, as `datasets` reads text."""
    with path.open(encoding="utf-8-sig") as file:
        return [{"text": line.rstrip("\n")} for line in file if line.strip()]


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet, ".txt": _txt}
