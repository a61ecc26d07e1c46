"""Formats by their columns, rows that are refused by number and with the remedy, preview, prompts, real files."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import templates as t
from pyarrow import parquet

from twofold.config.schema import DataOptions
from twofold.data.formats import formats_of
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
    assert set(formats_of("single")) == set(ROWS)


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


def test_the_format_is_stated_with_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    preview([ROWS["sharegpt"] | {"tools": "[]", "id": 1, "score": 2}], TOKENIZER, DataOptions())
    shown = capsys.readouterr().out
    assert "format: sharegpt (columns conversations, tools)" in shown
    assert "unused   columns id, score" in shown


def test_one_odd_row_is_named_and_does_not_hide_the_format() -> None:
    good = ROWS["prompt_completion"]
    with pytest.raises(UserError, match=r"row 1: column 'completion' is missing or null\. Mend it"):
        prepare([{"prompt": "a"}, good], TOKENIZER, DataOptions())
    with pytest.raises(UserError, match=r"row 17: column 'prompt' is missing or null"):
        prepare([good] * 16 + [ROWS["messages"]] + [good], TOKENIZER, DataOptions())
    with pytest.raises(UserError, match=r"row 2 is a str, not a dict of columns"):
        prepare([good, "text"], TOKENIZER, DataOptions())


def test_without_one_row_to_train_the_preview_still_tells_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="not one row can be trained"):
        preview([{"text": ""}] * 2, TOKENIZER, DataOptions())
    assert "bad      row 2: the text is empty" in capsys.readouterr().out


def test_a_base_model_gets_the_alpaca_texts_and_no_chats() -> None:
    base = t.sentencepiece_like(None, "mistral", "<s>", "</s>")
    introduction = "Below is an instruction that describes a task"
    request = "Write a response that appropriately completes the request.\n\n### Instruction:\ndo\n\n"
    expected = {
        "": f"{introduction}. {request}### Response:\n",
        "it": f"{introduction}, paired with an input that provides further context. {request}### Input:\nit\n\n"
        "### Response:\n",
    }
    for extra, prompt in expected.items():
        row = {"instruction": "do", "input": extra, "output": "b"}
        data = prepare([row], base, DataOptions())
        assert base.decode(data[0]["input_ids"][1:]) == f"{prompt}b</s>"
        assert base.decode(data[0]["input_ids"][data[0]["labels"] != -100]) == "b</s>"
        [found] = prompts([row], base, DataOptions(), 1)
        assert (base.decode(found.input_ids[1:]), found.reference) == (prompt, "b")
        assert found.input_ids.count(base.bos_token_id) == 1
        assert data[0]["input_ids"].tolist()[: len(found.input_ids)] == found.input_ids
    with pytest.raises(UserError, match=r"no chat template: set model\.chat_template"):
        prepare([ROWS["messages"]], base, DataOptions())


def test_the_assistants_turns_of_a_prompt_are_not_learned() -> None:
    shot = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {"prompt": shot, "completion": [{"role": "assistant", "content": "d"}]}
    assert trained_text(prepare([row], TOKENIZER, DataOptions())) == "d<|im_end|>"
    assert trained_text(prepare([row], TOKENIZER, DataOptions(train_on="assistant"))) == "b<|im_end|>d<|im_end|>"
    with pytest.raises(UserError, match="no assistant turn to learn"):
        prepare([{"prompt": shot, "completion": shot[:1]}], TOKENIZER, DataOptions())


def test_messages_as_servers_and_arrow_give_them(tmp_path: Path) -> None:
    """Arguments as JSON text, nulls in place of missing keys (Arrow), turns with weight 0: the samples are the same."""
    calls = [{"type": "function", "function": {"name": n, "arguments": {a: 1}}} for n, a in (("fx", "x"), ("gy", "y"))]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "skip me", "train": False},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    tokenizer = t.byte_level(t.TOOLS)
    expected = prepare([{"messages": turns}], tokenizer, DataOptions())
    assert trained_text(expected) == '<call>fx {"x": 1}</call><call>gy {"y": 1}</call><|im_end|>d<|im_end|>'
    served = [dict(turn) for turn in turns]
    text = [{"name": "fx", "arguments": '{"x": 1}'}, {"name": "gy", "arguments": '{"y": 1}'}]
    served[1] = {"role": "assistant", "content": None, "tool_calls": [{"function": one} for one in text]}
    served[3] = {"role": "assistant", "content": "skip me", "weight": 0}
    arrow = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([{"messages": turns}]), arrow)
    for rows in ([{"messages": served}], arrow):
        data = prepare(rows, tokenizer, DataOptions())
        assert all(np.array_equal(data[0][key], expected[0][key]) for key in ("input_ids", "labels"))


def test_padding_of_given_tokens_is_taken_out() -> None:
    row = {"input_ids": [9, 9, 1, 2], "labels": [-100, -100, -100, 2], "attention_mask": [0, 0, 1, 1]}
    data = prepare([row], TOKENIZER, DataOptions())
    assert (data[0]["input_ids"].tolist(), data[0]["labels"].tolist()) == ([1, 2], [-100, 2])


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
