"""Rows from files, formats by their columns, refusals with the row and the remedy, cache, preview."""

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
from twofold.data.formats import formats
from twofold.data.load import load_rows
from twofold.data.prepare import prepare, prompts
from twofold.data.preview import preview, segments
from twofold.errors import UserError

TOKENIZER = t.byte_level(t.CHATML)
REAL = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


def trained_text(data: Any, i: int = 0) -> str:
    sample = data[i]
    return TOKENIZER.decode(sample["input_ids"][sample["labels"] != -100])


ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "abc"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "alpaca": {"instruction": "do", "input": "it", "output": "b"},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "tokenized": {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
}


@pytest.mark.parametrize("name", ROWS)
def test_formats_are_found_by_their_columns(name: str) -> None:
    data = prepare([ROWS[name] | {"id": 7}], TOKENIZER, DataOptions())
    assert data.report.format == name
    assert name in data.report.summary()
    if name not in ("text", "tokenized"):
        assert trained_text(data) == "b<|im_end|>"
    assert set(formats()) == set(ROWS)


def test_lists_of_messages_as_prompt_and_completion() -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    data = prepare([row], TOKENIZER, DataOptions())
    assert TOKENIZER.decode(data[0]["input_ids"]).startswith("<|im_start|>user\na<|im_end|>")
    assert trained_text(data) == "b<|im_end|>"


def test_alpaca_history_and_sharegpt_calls() -> None:
    row = {"instruction": "do", "input": "it", "output": "c", "system": "s", "history": [["a", "b"]]}
    data = prepare([row], TOKENIZER, DataOptions())
    text = TOKENIZER.decode(data[0]["input_ids"])
    assert text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>")
    assert "do\nit<|im_end|>" in text
    assert trained_text(data) == "b<|im_end|>c<|im_end|>"
    turns = [
        ("human", "a"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "r"),
        ("gpt", "b"),
    ]
    row = {"conversations": [{"from": who, "value": what} for who, what in turns], "system": "s", "tools": "[]"}
    data = prepare([row], t.byte_level(t.TOOLS), DataOptions())
    assert trained_text(data) == '<call>f {"x": 1}</call><|im_end|>b<|im_end|>'


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
    rows = [ROWS["messages"]] * 2
    given = prepare(datasets.Dataset.from_list(rows), TOKENIZER, DataOptions())
    assert trained_text(given, 1) == "b<|im_end|>"
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
    write(tmp_path / "train.jsonl", [ROWS["text"]])
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
        prepare([ROWS["text"]], TOKENIZER, DataOptions(format="chat"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": ""}, "the completion is empty"),
        ({"prompt": "a", "completion": None}, "column 'completion' is missing or null"),
        ({"prompt": "a"}, "column 'completion' is missing or null"),
        ({"prompt": 3, "completion": "b"}, "column 'prompt' should be a text or a list, and is a number"),
    ],
)
def test_bad_rows_are_refused_by_number_or_left_out_and_counted(row: dict[str, Any], reason: str) -> None:
    rows = [ROWS["prompt_completion"]] * 3 + [row] + [ROWS["prompt_completion"]] + [row]
    with pytest.raises(UserError, match=rf"row 4: {reason}\. 2 of 6 rows cannot be trained\. .*data\.on_bad_row=skip"):
        prepare(rows, TOKENIZER, DataOptions())
    data = prepare(rows, TOKENIZER, DataOptions(on_bad_row="skip"))
    assert len(data) == 4
    assert data.row_numbers == [1, 2, 3, 5]
    assert data.report.bad == [(4, reason), (6, reason)]
    with pytest.raises(UserError, match="Not one row is left"):
        prepare([row | {"completion": None}], TOKENIZER, DataOptions(on_bad_row="skip", format="prompt_completion"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "hi"}, "column 'messages' should be a list, and is a text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn to learn"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages, message 1: the assistant's turn is empty"),
        ({"messages": [{"content": "a"}]}, "message 1: should be an object with role and content"),
        ({"messages": [{"role": "assistant"}]}, "message 1 .assistant.: has no content"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "unknown speaker 'alien'"),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "should be JSON with name and arguments"),
        ({"instruction": "a", "output": " "}, "the output is empty"),
        ({"input_ids": [1, 2], "labels": [1]}, "input_ids has 2 numbers and labels has 1"),
        ({"input_ids": ["a"], "labels": [1]}, "should be a list of whole numbers"),
        ({"text": "  "}, "the text is empty"),
    ],
)
def test_rows_that_are_no_examples(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        prepare([row], TOKENIZER, DataOptions())


def test_the_cache_gives_the_same_and_notices_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.jsonl", [ROWS["messages"]] * 4)
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
    write(file, [ROWS["messages"]] * 5)
    with pytest.raises(AssertionError):
        prepare(file, TOKENIZER, DataOptions())


def test_without_a_place_for_the_cache_it_works_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "file"))
    assert len(prepare([ROWS["text"]], TOKENIZER, DataOptions())) == 1


def test_the_preview_shows_what_gets_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROWS["messages"], {"messages": [{"role": "user", "content": "x"}]}]
    preview(rows, TOKENIZER, DataOptions(), rows=1)
    shown = capsys.readouterr().out
    assert "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n" in shown
    assert "rows     2 · 1 samples · 1 cannot be trained" in shown
    assert "bad      row 2: messages: no assistant turn to learn" in shown
    assert "rows · format: messages (columns messages)" in shown.replace("source   the given list", "rows")
    data = prepare([ROWS["messages"]], TOKENIZER, DataOptions())
    marked = "".join(piece for piece, is_trained in segments(data[0], TOKENIZER) if is_trained)
    from twofold.data.collate import packed

    assert TOKENIZER.decode(packed([data[0]])["targets"]) == marked


def test_prompts_for_samples() -> None:
    found = prompts([ROWS["messages"], ROWS["messages"]], TOKENIZER, DataOptions(), 1)
    assert len(found) == 1
    expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert (TOKENIZER.decode(found[0].input_ids), found[0].reference) == (expected, "b")
    data = prepare([ROWS["messages"]], TOKENIZER, DataOptions())
    assert data[0]["input_ids"].tolist()[: len(found[0].input_ids)] == found[0].input_ids


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared data is not here")
@pytest.mark.parametrize(
    ("name", "form", "rows", "bad"),
    [
        ("alpaca_en.jsonl", "alpaca", 812, 0),
        ("alpaca_zh.jsonl", "alpaca", 795, 0),
        ("kto_en.jsonl", "messages", 232, 0),
        ("toolcall_en.jsonl", "sharegpt", 238, 0),
        ("dpo_en.jsonl", "sharegpt", 226, 146),  # rows whose only answer is in `chosen`
        ("wiki_en.txt", "text", 26, 0),
    ],
)
def test_real_files(name: str, form: str, rows: int, bad: int) -> None:
    options = DataOptions(max_length=None, on_bad_row="skip")
    data = prepare(REAL / name, t.byte_level(t.TOOLS), options)
    assert (data.report.format, data.report.rows, len(data.report.bad)) == (form, rows, bad)
    assert len(data) == rows - bad
    if form != "text":
        assert all((data[i]["labels"] == TOKENIZER.eos_token_id).any() for i in range(len(data)))
