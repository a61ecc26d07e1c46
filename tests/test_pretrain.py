"""Pre-training in blocks: cut by hand, and against a plain loop over transformers on the pieces alone."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from method_runs import Run, run_method, same
from ranks import run_ranks
from test_dpo import TOKENIZER, tiny

from twofold import PretrainTrainer, UserError
from twofold.data.order import Order

LENGTH, BATCH, STEPS, LR = 16, 3, 6, 0.1
TEXTS = [
    "a cat",
    "the sun is red and the moon is blue",
    "one two three",
    "x" * 40,
    "y",
    "blue red blue red blue",
    "dog",
]


def pieces_by_hand() -> list[list[list[int]]]:
    """Blocks, each a list of pieces of documents, cut token by token."""
    blocks: list[list[list[int]]] = [[]]
    for text in TEXTS:
        blocks[-1].append([])
        for token in [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]:
            if sum(map(len, blocks[-1])) == LENGTH:
                blocks.append([[]])
            blocks[-1][-1].append(token)
    return [[piece for piece in block if piece] for block in blocks]


def sample(piece: list[int]) -> dict[str, np.ndarray]:
    return {"input_ids": np.array(piece), "labels": np.array(piece)}


@lru_cache
def expected() -> tuple[list[float], dict[str, np.ndarray]]:
    blocks, model = pieces_by_hand(), tiny()
    order = Order(len(blocks), BATCH, 42)
    steps = [[sample(p) for i in order.step(k) for p in blocks[i] if len(p) > 1] for k in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = reference.train(model, steps, optimizer, lambda k: LR, None)
    return losses, reference.parameters(model)


def fit(folder: Path, name: str, args: Any = None, **more: Any) -> Run:
    settings: dict[str, Any] = {"micro_batch_tokens": 2 * LENGTH, "max_steps": STEPS} | more
    return run_method(
        PretrainTrainer,
        folder,
        name,
        model=tiny(),
        tokenizer=TOKENIZER,
        train_dataset=[{"text": text} for text in TEXTS],
        args={"max_length": LENGTH} | (args or {}),
        global_batch_size=BATCH,
        lr=LR,
        **settings,
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


def test_blocks(tmp_path: Path) -> None:
    trainer = PretrainTrainer(
        model=tiny(),
        tokenizer=TOKENIZER,
        train_dataset=[{"text": text} for text in TEXTS],
        args={"max_length": LENGTH},
        accelerator="cpu",
        folder=str(tmp_path),
    )
    data, blocks = trainer.train_dataset, pieces_by_hand()
    assert [[s["input_ids"].tolist() for s in data.sequences(i)] for i in range(len(data))] == blocks
    assert set(data.lengths[:-1]) == {LENGTH}
    assert 0 < data.lengths[-1] <= LENGTH
    assert data.row_numbers[:2] == [1, 2]
    assert f"7 documents in {len(blocks)} blocks of 16 tokens" in data.report.notes[-1]


@pytest.mark.parametrize("strategy", ["single", "ddp:2", "fsdp:2", "tp:2", "pp:2", "cp:2", "cp:2,ring"])
def test_law_1(strategy: str, tmp_path: Path) -> None:
    losses, weights = expected()
    assert losses[-1] < 0.95 * losses[0]
    if strategy == "single":
        found = [fit(tmp_path, "one"), fit(tmp_path, "padded", {"attention": "padded"})]
    else:
        found = run_ranks(2, fit, tmp_path, "many", devices=2, strategy=strategy)
    for one in found:
        same(one, losses, weights)


def test_a_block_has_a_length(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the length of a block"):
        fit(tmp_path, "none", {"max_length": None})
