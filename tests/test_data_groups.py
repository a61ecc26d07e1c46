"""Rows of several texts: preference pairs and answers with a label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import templates as t
from twofold import UserError
from twofold.config.schema import DataOptions
from twofold.data.collate import packed, trees
from twofold.data.prepare import held_out, prepare, prompts
from twofold.data.preview import preview
from twofold.data.tokens import TokenDataset

REAL = Path(__file__).parents[2] / "shared" / "data"
TOKENIZER = t.byte_level(t.CHATML)
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "good"), ("assistant", "bad")))
EARLIER = {"role": "assistant", "content": "before"}


def made(row: dict[str, Any], kind: str = "preference", **options: Any) -> TokenDataset:
    return prepare([row], TOKENIZER, DataOptions(**options), kind=kind)


def texts(data: TokenDataset, i: int = 0) -> list[tuple[str, str]]:
    """(whole, trained) of each sequence of a sample."""
    decode = TOKENIZER.decode
    return [(decode(s["input_ids"]), decode(s["input_ids"][s["labels"] != -100])) for s in data.sequences(i)]


def share(turn: dict[str, str]) -> dict[str, str]:
    return {"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]}


CHAT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"conversations": [share(USER)], "chosen": share(GOOD), "rejected": share(BAD)},
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    ],
)
def test_a_pair_however_it_is_written(row: dict[str, Any]) -> None:
    data = made(row)
    assert data.report.format == "preference"
    found = texts(data)
    assert [trained for _, trained in found] == ["good<|im_end|>", "bad<|im_end|>"]
    assert all(whole.startswith(CHAT + trained) for whole, trained in found)
    assert data.lengths == [sum(len(s["input_ids"]) for s in data.sequences(0))]


def test_a_pair_of_plain_texts() -> None:
    given = made({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"})
    shared = made({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"})
    assert texts(given) == texts(shared) == [(f"2 + 2 = {n}<|im_end|>", f" {n}<|im_end|>") for n in (4, 5)]


def test_earlier_turns_belong_to_the_prompt() -> None:
    start = [USER, EARLIER, USER]
    found = texts(made({"chosen": [*start, GOOD], "rejected": [*start, BAD]}))
    assert [trained for _, trained in found] == ["good<|im_end|>", "bad<|im_end|>"]


def test_what_is_no_pair() -> None:
    for row, reason in (
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "'rejected' is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is missing"),
        ({"chosen": "yes", "rejected": "no"}, "share no beginning"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "share no first message"),
        ({"chosen": [USER, GOOD], "rejected": "no"}, "should both be texts"),
        ({"prompt": [USER], "chosen": [], "rejected": [BAD]}, "a text or a list of messages"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [BAD]}, "no assistant turn to learn"),
    ):
        with pytest.raises(UserError, match=reason):
            made(row)


def test_values() -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert "values" not in made(row)[0]
    assert made(row | {"margin": 0.5})[0]["values"].tolist() == [0.5, 0.0]
    assert made(row | {"score_chosen": 7, "score_rejected": 3})[0]["values"].tolist() == [7.0, 3.0]
    mixed = prepare([row | {"margin": 0.5}, row], TOKENIZER, DataOptions(), kind="preference")
    assert "values" not in mixed[0]
    assert "1 of 2 rows have no score" in mixed.report.notes[-1]


@pytest.mark.parametrize("label", [True, False, 1, 0])
def test_an_answer_with_a_label(label: Any) -> None:
    for row in (
        {"prompt": "q", "completion": [GOOD], "label": label},
        {"messages": [USER, EARLIER, USER, GOOD], "label": label},
        {"conversations": [share(USER), share(GOOD)], "kto_tag": label},
        {"instruction": "q", "output": "good", "label": label},
    ):
        data = made(row, "unpaired")
        assert [trained for _, trained in texts(data)] == ["good<|im_end|>"]
        assert data[0]["values"].tolist() == [float(label)]
    with pytest.raises(UserError, match="should be true or false, and is 2"):
        made({"messages": [USER, GOOD], "label": 2}, "unpaired")


def test_rows_of_another_kind_are_refused() -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(UserError, match="are preference rows, and this method learns from single rows"):
        prepare([pair], TOKENIZER, DataOptions())
    with pytest.raises(UserError, match="are single rows, and this method learns from preference rows: chosen"):
        made({"messages": [USER, GOOD]})
    with pytest.raises(UserError, match="'messages' holds single rows, and this method learns from preference rows"):
        made(pair, format="messages")


def test_max_length_never_loses_an_answer() -> None:
    """keep_start and keep_end keep what they say; a row without its answer is refused; skip counts."""
    row, short = (
        {"prompt": "x" * 30, "chosen": "good", "rejected": "worse"},
        {"prompt": "x", "chosen": "y", "rejected": "z"},
    )
    with pytest.raises(UserError, match="cuts all of its trained tokens away"):
        made(row, max_length=20)
    kept = texts(made(row, max_length=20, truncation="keep_end"))
    assert kept == [
        ("x" * 15 + "good<|im_end|>", "good<|im_end|>"),
        ("x" * 14 + "worse<|im_end|>", "worse<|im_end|>"),
    ]
    with pytest.raises(UserError, match=r"it has 35 tokens and data\.max_length is 20"):
        made(row, max_length=20, truncation="error")
    with pytest.raises(UserError, match=r"all 1 rows are over data\.max_length=20"):
        made(row, max_length=20, truncation="skip")
    some = prepare([row, short], TOKENIZER, DataOptions(max_length=20, truncation="skip"), kind="preference")
    assert (len(some), some.row_numbers, some.report.too_long) == (1, [2], 1)
    assert "1 over max_length left out" in some.report.summary()


def test_the_cache_gives_the_same_samples() -> None:
    rows = [{"prompt": "q", "chosen": "a" * n, "rejected": "b", "margin": n} for n in (1, 2, 3)]
    first, again = (prepare(rows, TOKENIZER, DataOptions(), kind="preference") for _ in range(2))
    assert first.fingerprint == again.fingerprint
    for i in range(3):
        assert texts(first, i) == texts(again, i)
        assert first[i]["values"].tolist() == again[i]["values"].tolist() == [i + 1, 0]


def test_preview_and_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "margin": 2}
    preview([row], TOKENIZER, DataOptions(), kind="preference")
    shown = capsys.readouterr().out
    assert "row 1 · 1 of 2 · value 2" in shown
    assert "row 1 · 2 of 2 · value 0" in shown
    assert "⟦good<|im_end|>⟧" in shown
    [prompt] = prompts([row], TOKENIZER, DataOptions(), 1, kind="preference")
    assert (TOKENIZER.decode(prompt.input_ids), prompt.reference) == (CHAT, "good")


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared data is not here")
@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [("dpo_en.jsonl", "preference", 226), ("dpo_zh.jsonl", "preference", 241), ("kto_en.jsonl", "unpaired", 232)],
)
def test_real_files(name: str, kind: str, rows: int) -> None:
    data = prepare(REAL / name, TOKENIZER, DataOptions(max_length=None, on_bad_row="skip"), kind=kind)
    assert len(data) + len(data.report.bad) == rows
    assert len(data.report.bad) <= 5
    assert all(trained.strip().endswith("<|im_end|>") for i in range(len(data)) for _, trained in texts(data, i))
    if kind == "unpaired":
        assert 0 < sum(float(data[i]["values"][0]) for i in range(rows)) < rows


def test_a_shared_prompt_comes_once() -> None:
    """Written out by hand: tokens, positions, what predicts what, and where sequences end."""

    def sequence(ids: list[int], trained: int) -> dict[str, Any]:
        return {"input_ids": ids, "labels": [-100] * (len(ids) - trained) + ids[len(ids) - trained :]}

    batch = trees(
        [
            [sequence([1, 2, 3, 7, 8], 2), sequence([1, 2, 3, 9], 1)],
            [sequence([4, 5], 2), sequence([4, 6], 1)],  # a label on the first token: nothing to share
            [sequence([1, 2, 3], 1)],
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7, 8, 9, 4, 5, 4, 6, 1, 2, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 0, 1, 0, 1, 2]]
    assert batch["sample_lengths"] == ((3, 2, 1), 2, 2, 3)
    assert batch["predict_at"].tolist() == [2, 3, 2, 6, 8, 11]
    assert batch["targets"].tolist() == [7, 8, 9, 5, 6, 3]
    assert batch["sample_of"].tolist() == [0, 0, 1, 2, 3, 4]
    assert batch["ends"].tolist() == [4, 5, 7, 9, 12]
    alone = [sequence([1, 2, 3], 1), sequence([4, 5, 6, 7], 2)]
    one, other = packed(alone), trees([[s] for s in alone])
    assert one.keys() == other.keys()
    assert all(str(one[key]) == str(other[key]) for key in one)


@pytest.mark.parametrize("kind", ["preference", "single"])
def test_a_part_is_held_out(kind: str) -> None:
    """Each sample lies on one side, whole, with its values and its row; the same ones each time."""
    rows: list[dict[str, Any]] = [{"prompt": "q" * n, "completion": "a" * (1 + n % 3)} for n in range(1, 21)]
    if kind == "preference":
        rows = [{"prompt": "q" * n, "chosen": "a" * n, "rejected": "b", "margin": n} for n in range(1, 21)]
    data = prepare(rows, TOKENIZER, DataOptions(), kind=kind)
    rest, held, source = held_out(data, rows, 0.2)
    assert (len(rest), len(held)) == (16, 4)
    assert sorted(rest.row_numbers + held.row_numbers) == list(range(1, 21))
    assert source == [rows[i - 1] for i in held.row_numbers]
    for part in (rest, held):
        for i, row in enumerate(part.row_numbers):
            assert texts(part, i) == texts(data, row - 1)
            assert part.lengths[i] == data.lengths[row - 1]
            if kind == "preference":
                assert part[i]["values"].tolist() == [row, 0]
        assert part.report.tokens == sum(part.lengths)
    assert held_out(data, rows, 0.2)[1].row_numbers == held.row_numbers
    assert len({data.fingerprint, rest.fingerprint, held.fingerprint}) == 3
    with pytest.raises(UserError, match="leaves none on one side"):
        held_out(data, rows, 0.01)
