"""Process reward models: where steps end by hand, and a plain loop over transformers on one process and on layouts."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from method_runs import Run, run_method, same
from ranks import run_ranks
from test_dpo import TOKENIZER
from test_reward import tiny
from torch.nn import functional as F

from twofold import PRMTrainer, UserError
from twofold.config.schema import DataOptions
from twofold.data.order import Order
from twofold.data.prepare import prepare

BATCH, STEPS, LR = 3, 8, 0.02
ROWS = [
    {
        "prompt": f"{i} + {2 * i}",
        "completions": [f"step {j}" * (1 + j % 2) for j in range(1 + i % 3)],
        "labels": [(i + j) % 2 == 0 for j in range(1 + i % 3)],
    }
    for i in range(7)
]


def by_hand(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(tokens, positions of the new lines that end steps), byte by byte: the tokenizer has a token for each."""
    text = row["prompt"] + "\n" + "".join(step + "\n" for step in row["completions"])
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    return [*ids, TOKENIZER.eos_token_id], [i for i, c in enumerate(text) if c == "\n"][1:]


@lru_cache
def expected() -> tuple[list[float], dict[str, np.ndarray]]:
    order, model = Order(7, BATCH, 42), tiny(labels=2)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for k in range(STEPS):
        scores, labels = [], []
        for i in order.step(k):
            ids, ends = by_hand(ROWS[i])
            hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            scores.append(model.score(hidden[ends]))
            labels += [int(x) for x in ROWS[i]["labels"]]
        loss = F.cross_entropy(torch.cat(scores), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, reference.parameters(model)


def fit(folder: Path, name: str, **more: Any) -> Run:
    return run_method(
        PRMTrainer,
        folder,
        name,
        model=tiny(labels=2),
        tokenizer=TOKENIZER,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        global_batch_size=BATCH,
        micro_batch_tokens=60,
        max_steps=STEPS,
        lr=LR,
        **more,
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


def test_labels_stand_after_the_ends_of_steps() -> None:
    data = prepare(ROWS, TOKENIZER, DataOptions(), kind="stepwise")
    for i, row in enumerate(ROWS):
        [sequence] = data.sequences(i)
        ids, ends = by_hand(row)
        assert sequence["input_ids"].tolist() == ids
        found = np.flatnonzero(sequence["labels"] != -100)
        assert found.tolist() == [end + 1 for end in ends]
        assert sequence["labels"][found].tolist() == [int(x) for x in row["labels"]]


@pytest.mark.parametrize("strategy", ["single", "ddp:2", "fsdp:2", "tp:2", "pp:2", "cp:2"])
def test_law_1(strategy: str, tmp_path: Path) -> None:
    losses, weights = expected()
    assert abs(losses[-1] - losses[0]) > 0.005
    found = [fit(tmp_path, "one")]
    if strategy != "single":
        found = run_ranks(2, fit, tmp_path, "many", devices=2, strategy=strategy)
    for one in found:
        same(one, losses, weights)
    assert 0 <= found[0][1][-1]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": [True, False]}, "completions has 1 steps and labels has 2"),
        ({"completions": [" "]}, "none of them empty"),
        ({"labels": [3]}, "labels should be true or false"),
    ],
)
def test_bad_rows(change: dict[str, Any], reason: str) -> None:
    row = {"prompt": "a", "completions": ["b"], "labels": [True]} | change
    with pytest.raises(UserError, match=reason):
        prepare([row], TOKENIZER, DataOptions(), kind="stepwise")
