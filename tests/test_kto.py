"""KTO against a plain loop over transformers, as its paper writes it, on one process and on layouts."""

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from method_runs import Run, run_method, same
from ranks import run_ranks
from test_dpo import TOKENIZER, answer_logp, tiny

from twofold import KTOTrainer, UserError
from twofold.config.schema import DataOptions
from twofold.data.order import Order
from twofold.data.prepare import prepare
from twofold.methods.kto import with_mismatched

BATCH, STEPS, LR, BETA, GOOD, BAD = 5, 8, 0.02, 0.3, 1.0, 1.7


def rows(n: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    words = ["red", "blue", "one", "two", "cat", "sun"]
    texts = [[" ".join(rng.choice(words, rng.integers(1, 6))) for _ in range(2)] for _ in range(n)]
    return [
        {
            "prompt": [{"role": "user", "content": a}],
            "completion": f"{b} {'yes' if i % 3 else 'no'}",
            "label": i % 3 > 0,
        }
        for i, (a, b) in enumerate(texts)
    ]


ROWS = rows(11)


def mismatched(data: Any, i: int) -> dict[str, np.ndarray]:
    """Prompt of row i, answer of the row after it, written out by hand."""
    (mine,), (other,) = data[i]["sequences"], data[(i + 1) % len(data)]["sequences"]
    answer = other["labels"] != -100
    answer[np.argmax(answer) :] = True  # what follows the end of the turn belongs to it
    prompt = mine["input_ids"][: np.argmax(mine["labels"] != -100)]
    return {
        "input_ids": np.concatenate([prompt, other["input_ids"][answer]]),
        "labels": np.concatenate([np.full(len(prompt), -100), other["labels"][answer]]),
    }


@lru_cache
def expected(family: str = "llama") -> tuple[list[float], dict[str, np.ndarray], list[float]]:
    """(losses of all steps, weights after the last, KL estimates) of a plain loop."""
    data, order, model = prepare(ROWS, TOKENIZER, DataOptions(), kind="unpaired"), Order(11, BATCH, 42), tiny(family)
    frozen, optimizer, losses, kls = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=LR), [], []
    for k in range(STEPS):
        batch = order.step(k)
        with torch.no_grad():
            other = [mismatched(data, i) for i in batch]
            z = torch.stack([answer_logp(model, s)[0] - answer_logp(frozen, s)[0] for s in other]).mean().clamp(min=0)
            before = [answer_logp(frozen, data[i]["sequences"][0])[0] for i in batch]
        parts = []
        for i, old in zip(batch, before, strict=True):
            r = answer_logp(model, data[i]["sequences"][0])[0] - old
            good = ROWS[i]["label"]
            value = torch.sigmoid(BETA * (r - z)) if good else torch.sigmoid(BETA * (z - r))
            parts.append((GOOD if good else BAD) * (1 - value))
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        kls.append(z.item())
    return losses, reference.parameters(model), kls


def fit(folder: Path, name: str, family: str = "llama", args: Any = None, evaluate: bool = False, **more: Any) -> Run:
    settings: dict[str, Any] = {"lr": LR, "micro_batch_tokens": 150, "max_steps": STEPS} | more
    return run_method(
        KTOTrainer,
        folder,
        name,
        model=tiny(family),
        tokenizer=TOKENIZER,
        train_dataset=ROWS,
        eval_dataset=ROWS if evaluate else None,
        args={"beta": BETA, "desirable_weight": GOOD, "undesirable_weight": BAD} | (args or {}),
        global_batch_size=BATCH,
        **settings,
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


LAYOUTS = ("ddp:2", "fsdp:2", "tp:2", "pp:2", "pp:2,zbv", "cp:2", "fsdp:2,tp:2", "pp:2,ddp:2")


@pytest.mark.parametrize("strategy", ["single", *LAYOUTS])
def test_law_1(strategy: str, tmp_path: Path) -> None:
    losses, weights, kls = expected()
    assert losses[-1] < 0.95 * losses[0]
    assert max(kls) > 0.05  # the estimate matters
    if strategy == "single":
        cuts: list[dict[str, Any]] = [{}, {"micro_batch_tokens": None, "micro_batch_size": 1}]
        found = [fit(tmp_path, f"one{i}", evaluate=True, **cut) for i, cut in enumerate(cuts)]
        found.append(fit(tmp_path, "padded", args={"attention": "padded"}, evaluate=True))
    else:
        ranks = 4 if strategy.count(":") > 1 else 2
        found = run_ranks(ranks, fit, tmp_path, "many", devices=ranks, strategy=strategy, evaluate=True)
    for one in found:
        same(one, losses, weights)
        np.testing.assert_allclose([row["kl"] for row in one[0]], kls, rtol=1e-4, atol=1e-5)
        assert one[1][-1]["rewards/accuracies"] > 0.5 or strategy != "single"


def test_live_references_compute_the_same(tmp_path: Path) -> None:
    args: Any = {"adapter": {"r": 4, "dropout": 0.2}}
    pre, live = (fit(tmp_path, how, args=args | {"reference": how}, lr=0.5) for how in ("precompute", "live"))
    np.testing.assert_allclose([r["loss"] for r in live[0]], [r["loss"] for r in pre[0]], rtol=1e-6)


def test_metrics_by_hand(tmp_path: Path) -> None:
    """At the first step everything equals its reference: loss (weights of its rows) / 2, rewards 0."""
    found, evals, _ = fit(tmp_path, "one", evaluate=True)
    batch = Order(11, BATCH, 42).step(0)
    weights = [GOOD if ROWS[i]["label"] else BAD for i in batch]
    assert found[0]["loss"] == pytest.approx(sum(weights) / len(batch) / 2, abs=1e-5)
    assert found[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert evals[-1]["rewards/chosen"] > evals[-1]["rewards/rejected"]


def test_the_other_answer_stays_within_max_length() -> None:
    data = with_mismatched(prepare(ROWS, TOKENIZER, DataOptions(), kind="unpaired"), 60)
    for i in range(len(data)):
        mine, other = data.sequences(i)
        assert len(other["input_ids"]) <= max(60, int(np.argmax(mine["labels"] != -100)) + 1)
        assert (other["labels"] != -100).any()
    with pytest.raises(UserError, match="KTO needs two rows or more"):
        with_mismatched(prepare(ROWS[:1], TOKENIZER, DataOptions(), kind="unpaired"), None)
