"""Classification against a plain loop over transformers' own classifiers, on one process and on layouts."""

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
from test_reward import score, tiny
from torch.nn import functional as F
from transformers import AutoConfig

from twofold import ClassifyTrainer, UserError
from twofold.config.schema import DataOptions
from twofold.data.order import Order
from twofold.data.prepare import prepare

BATCH, STEPS, LR, SMOOTHING = 4, 9, 0.02, 0.1
CLASSES = ["fruit", "animal", "colour"]
TEXTS = ["apple pie", "a dog", "red and blue", "the cat sat", "pear", "green", "a very long text on a horse", "plum"]
LABELS: list[Any] = ["fruit", "animal", "colour", 1, "fruit", "2", "animal", 0]
NUMBERS = [0, 1, 2, 1, 0, 2, 1, 0]
ROWS = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]


@lru_cache
def expected() -> tuple[list[float], dict[str, np.ndarray]]:
    data, order, model = prepare(ROWS, TOKENIZER, DataOptions(), kind="labelled"), Order(8, BATCH, 42), tiny(labels=3)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for k in range(STEPS):
        batch = order.step(k)
        scores = torch.stack([score(model, data[i]["sequences"][0]) for i in batch])
        loss = F.cross_entropy(scores, torch.tensor([NUMBERS[i] for i in batch]), label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, reference.parameters(model)


def fit(folder: Path, name: str, rows: Any = None, model: Any = None, **more: Any) -> Run:
    return run_method(
        ClassifyTrainer,
        folder,
        name,
        model=model or tiny(labels=3),
        tokenizer=TOKENIZER,
        train_dataset=rows or ROWS,
        eval_dataset=ROWS,
        args={"classes": CLASSES, "label_smoothing": SMOOTHING},
        global_batch_size=BATCH,
        micro_batch_tokens=60,
        max_steps=STEPS,
        lr=LR,
        **more,
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("strategy", ["single", "ddp:2", "fsdp:2", "tp:2", "pp:2", "cp:2"])
def test_law_1(strategy: str, tmp_path: Path) -> None:
    losses, weights = expected()
    assert losses[-1] < 0.9 * losses[0]
    found = [fit(tmp_path, "one")]
    if strategy != "single":
        found = run_ranks(2, fit, tmp_path, "many", devices=2, strategy=strategy)
    for one in found:
        same(one, losses, weights)
    assert found[0][1][-1]["accuracy"] in {i / 8 for i in range(9)}


def test_an_export_knows_its_classes(tmp_path: Path) -> None:
    reference.tiny_model("llama", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    fit(tmp_path, "one", model=str(tmp_path / "base"))
    assert AutoConfig.from_pretrained(tmp_path / "one" / "export").id2label == dict(enumerate(CLASSES))


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1: 'metal' is none of method\.classes: fruit, animal, colour"):
        fit(tmp_path, "none", rows=[{"text": "iron", "label": "metal"}])
    with pytest.raises(UserError, match="classes"):
        ClassifyTrainer(model=tiny(), tokenizer=TOKENIZER, train_dataset=ROWS, args={})
