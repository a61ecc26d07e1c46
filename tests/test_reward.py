"""Reward models against a plain loop over transformers' own classifiers, on one process and on layouts."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import templates as t
import torch
from method_runs import Run, run_method, same
from ranks import run_ranks
from test_dpo import ROWS as PAIRS
from test_dpo import TOKENIZER
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from twofold import RewardTrainer, UserError
from twofold.config.schema import DataOptions
from twofold.data.order import Order
from twofold.data.prepare import prepare
from twofold.models.generate import load_for_generation

BATCH, STEPS, LR, CENTERING = 4, 9, 0.02, 0.01
ROWS = [row | {"margin": 0.1 * i} for i, row in enumerate(PAIRS)]


def tiny(family: str = "llama", labels: int = 1) -> Any:
    """A tiny classifier of a family; of its causal twin all weights but the head."""
    causal = reference.tiny_model(family, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    config = type(causal.config)(**(causal.config.to_dict() | {"num_labels": labels}))
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.load_state_dict(causal.state_dict(), strict=False)
    return model


def score(model: Any, sequence: dict[str, np.ndarray]) -> torch.Tensor:
    """[labels], by transformers' own forward on one sequence alone."""
    return model(input_ids=torch.from_numpy(sequence["input_ids"])[None], use_cache=False).logits[0].double()


@lru_cache
def expected(family: str = "llama") -> tuple[list[float], dict[str, np.ndarray]]:
    data, order, model = prepare(ROWS, TOKENIZER, DataOptions(), kind="preference"), Order(10, BATCH, 42), tiny(family)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for k in range(STEPS):
        parts = []
        for i in order.step(k):
            c, r = (score(model, s)[0] for s in data[i]["sequences"])
            parts.append(-torch.log(torch.sigmoid(c - r - 0.1 * i)) + CENTERING * (c + r) ** 2)
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, reference.parameters(model)


def fit(folder: Path, name: str, model: Any = None, family: str = "llama", args: Any = None, **more: Any) -> Run:
    settings: dict[str, Any] = {"micro_batch_tokens": 150, "lr": LR} | more
    return run_method(
        RewardTrainer,
        folder,
        name,
        model=model or tiny(family),
        tokenizer=TOKENIZER,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        args={"centering": CENTERING} | (args or {}),
        global_batch_size=BATCH,
        max_steps=STEPS,
        **settings,
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


LAYOUTS = ("ddp:2", "fsdp:2", "tp:2", "tp:2,sequence", "pp:2", "pp:2,zbv", "cp:2", "cp:2,ring", "fsdp:2,tp:2")


@pytest.mark.parametrize("strategy", ["single", *LAYOUTS])
def test_law_1(strategy: str, tmp_path: Path) -> None:
    losses, weights = expected()
    assert sum(losses[6:]) < 0.93 * sum(losses[:3])  # an epoch against the first
    if strategy == "single":
        found = [fit(tmp_path, "one"), fit(tmp_path, "padded", args={"attention": "padded"})]
    else:
        ranks = 4 if strategy.count(":") > 1 else 2
        found = run_ranks(ranks, fit, tmp_path, "many", devices=ranks, strategy=strategy)
    for one in found:
        same(one, losses, weights)
    last = found[0][1][-1]
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-9)


@pytest.mark.parametrize(("family", "strategy"), [("gpt2", "tp:2"), ("gpt2", "pp:2"), ("qwen3_moe", "ep:2")])
def test_families(family: str, strategy: str, tmp_path: Path) -> None:
    losses, weights = expected(family)
    for one in run_ranks(2, fit, tmp_path, "many", family=family, devices=2, strategy=strategy):
        same(one, losses, weights)


@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_an_export_loads_to_the_same_scores(adapter: Any, tmp_path: Path) -> None:
    """From a causal model's folder: the head is new, trained, and saved with the adapter too."""
    reference.tiny_model("llama", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    args = {"adapter": adapter}
    lr = 0.2 if adapter else 0.01
    rows_, evals, weights = fit(tmp_path, "one", model=str(tmp_path / "base"), args=args, lr=lr)
    assert sum(r["loss"] for r in rows_[6:]) < sum(r["loss"] for r in rows_[:3])
    assert any("score" in name for name in weights)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1, dtype=torch.float32)
    folder = tmp_path / "one" / "export"
    if adapter:
        import peft

        model: Any = peft.PeftModel.from_pretrained(again, folder)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).chat_template == t.CHATML
    for use in (load_for_generation, lambda path: load_for_generation(str(Path(path).parent))):
        with pytest.raises(UserError, match="gives scores and no text"):
            use(str(folder))
    data = prepare(ROWS, TOKENIZER, DataOptions(), kind="preference")
    with torch.no_grad():
        chosen = [float(score(model.eval(), data[i]["sequences"][0])) for i in range(len(data))]
    assert np.mean(chosen) == pytest.approx(evals[-1]["rewards/chosen"], abs=1e-5)


def test_options(tmp_path: Path) -> None:
    """Without margins the first loss is the mean over pairs of log(1 + exp(r - c)), by hand."""
    found = fit(tmp_path, "one", args={"margin": False, "centering": 0.0})
    data, model = prepare(ROWS, TOKENIZER, DataOptions(), kind="preference"), tiny()
    with torch.no_grad():
        pairs = [[float(score(model, s)) for s in data[i]["sequences"]] for i in Order(10, BATCH, 42).step(0)]
    assert found[0][0]["loss"] == pytest.approx(np.mean([np.log1p(np.exp(r - c)) for c, r in pairs]), rel=1e-5)
    with pytest.raises(UserError, match="gives no scores"):
        fit(tmp_path, "two", model=reference.tiny_model("llama", vocab_size=len(TOKENIZER)))
