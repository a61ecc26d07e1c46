"""Files and folders that rows come from, what is refused about them, and the cache of what they become."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import templates as t
from pyarrow import parquet

from twofold.config.schema import DataOptions
from twofold.data.load import load_rows
from twofold.data.prepare import prepare
from twofold.data.preview import preview
from twofold.errors import UserError

TOKENIZER = t.byte_level(t.CHATML)
TEXT = {"text": "abc"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of rows in the format of its ending."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps({"data": rows}))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(row["text"] for row in rows))
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_kinds_of_files(tmp_path: Path, ending: str) -> None:
    rows = [{"prompt": f'a{i}, "q"\n', "completion": f"b{i}"} for i in range(3)]
    data = prepare(write(tmp_path / f"rows{ending}", rows), TOKENIZER, DataOptions())
    expected = prepare(rows, TOKENIZER, DataOptions())
    assert len(data) == 3
    for i in range(3):
        assert np.array_equal(data[i]["input_ids"], expected[i]["input_ids"])
        assert data[i]["labels"].dtype == np.int64


def test_text_files_folders_and_datasets(tmp_path: Path) -> None:
    import datasets

    write(tmp_path / "b.txt", [{"text": "three"}])
    write(tmp_path / "a.txt", [{"text": "one"}, {"text": "two"}])
    assert [row["text"] for row in load_rows(tmp_path)] == ["one", "two", "three"]
    rows = [CHAT] * 2
    given = prepare(datasets.Dataset.from_list(rows), TOKENIZER, DataOptions())
    assert len(given) == 2
    assert np.array_equal(given[1]["labels"], prepare(rows, TOKENIZER, DataOptions())[1]["labels"])
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(str(saved))
    assert len(prepare(saved, TOKENIZER, DataOptions())) == 2
    with pytest.raises(UserError, match="splits train: give one of them"):
        prepare(datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}), TOKENIZER, DataOptions())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", "", r"x\.jsonl has no rows"),
        ("x.jsonl", '{"text": "a"}\n{"text": \n', r"x\.jsonl:2: not valid JSON"),
        ("x.jsonl", "[1]", r"x\.jsonl:1: each line should be an object"),
        ("x.json", '{"text": "a"}\n{"text": "b"}', r"not valid JSON.*name it \.jsonl"),
        ("x.json", '{"rows": 1}', r'should be a list of objects, or \{"data"'),
        ("x.csv", "text,b\na\n", r"row 1 has another number of columns"),
        ("x.parquet", "no", r"not a readable Parquet file"),
        ("x.xlsx", "no", r"unknown kind of file '\.xlsx'\. Known: \.jsonl"),
        (
            "x.jsonl",
            '{"question": "a", "answer": "b"}',
            r"no known format has the columns answer, question\. Formats: ",
        ),
        (
            "x.jsonl",
            '{"messages": [], "conversations": []}',
            r"fit several formats \(messages: .*; sharegpt: .*data\.format=messages\|sharegpt",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name, TOKENIZER, DataOptions())


def test_missing_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [TEXT])
    with pytest.raises(UserError, match=r"there is no file .*trian\.jsonl in .*Did you mean 'train\.jsonl'"):
        prepare(tmp_path / "trian.jsonl", TOKENIZER, DataOptions())
    with pytest.raises(UserError, match=r"and no folder .*nowhere"):
        prepare(tmp_path / "nowhere" / "x.jsonl", TOKENIZER, DataOptions())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no data files"):
        prepare(tmp_path / "empty", TOKENIZER, DataOptions())
    write(tmp_path / "more.csv", [{"text": "a"}])
    with pytest.raises(UserError, match=r"mixes \.csv, \.jsonl"):
        prepare(tmp_path, TOKENIZER, DataOptions())
    with pytest.raises(UserError, match=r"unknown format 'chat'"):
        prepare([TEXT], TOKENIZER, DataOptions(format="chat"))


def test_the_cache_gives_the_same_and_notices_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.jsonl", [CHAT] * 4)
    first = prepare(file, TOKENIZER, DataOptions())

    def fails(*args: Any) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr("twofold.data.prepare.encode", fails)
    again = prepare(file, TOKENIZER, DataOptions())
    assert again.fingerprint == first.fingerprint
    assert again.report == first.report
    assert all(np.array_equal(again[i][k], first[i][k]) for i in range(4) for k in ("input_ids", "labels"))
    with pytest.raises(AssertionError):
        prepare(file, TOKENIZER, DataOptions(train_on="all"))
    with pytest.raises(AssertionError):
        prepare(file, t.byte_level(t.QWEN3), DataOptions())
    write(file, [CHAT] * 5)
    with pytest.raises(AssertionError):
        prepare(file, TOKENIZER, DataOptions())


def test_without_a_place_for_the_cache_it_works_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "file"))
    assert len(prepare([TEXT], TOKENIZER, DataOptions())) == 1


def test_a_row_of_a_folder_is_named_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl", [TEXT] * 3)
    write(tmp_path / "b.jsonl", [TEXT, {"text": ""}])
    for _ in range(2):  # made, and from the cache
        with pytest.raises(UserError, match=r"b\.jsonl, row 2: the text is empty"):
            prepare(tmp_path, TOKENIZER, DataOptions())
    preview(tmp_path, TOKENIZER, DataOptions())
    assert "bad      b.jsonl, row 2: the text is empty" in capsys.readouterr().out


def test_a_broken_cache_is_made_again_and_racing_writers_leave_one(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rows, cache = [CHAT] * 20, tmp_path / "own"
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: prepare(rows, TOKENIZER, DataOptions(), cache_dir=cache), range(4)))
    [folder] = cache.iterdir()
    assert folder.name == made[0].fingerprint
    for broken in ("tokens.npy", "report.json"):
        (folder / broken).write_bytes((folder / broken).read_bytes()[:40])
        again = prepare(rows, TOKENIZER, DataOptions(), cache_dir=cache)
        assert np.array_equal(again[19]["labels"], made[3][19]["labels"])
        assert [one.name for one in cache.iterdir()] == [folder.name]
        assert len((folder / broken).read_bytes()) > 40


def test_files_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "x.jsonl", [TEXT])

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"x\.jsonl cannot be read: permission denied\. Allow it: chmod u\+r"):
        prepare(file, TOKENIZER, DataOptions())


def test_a_missing_file_among_many_and_a_long_cell(tmp_path: Path) -> None:
    for i in range(30):
        write(tmp_path / f"part-{i:02}.jsonl", [TEXT])
    write(tmp_path / "validation.jsonl", [TEXT])
    with pytest.raises(UserError, match=r"Did you mean 'validation\.jsonl'\? It holds: part-00.* and 19 more"):
        prepare(tmp_path / "validaton.jsonl", TOKENIZER, DataOptions())
    long = write(tmp_path / "long.csv", [{"text": "x" * 200_000}])
    assert len(load_rows(long)[0]["text"]) == 200_000
