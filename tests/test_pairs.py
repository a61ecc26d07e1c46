"""SimPO, CPO and ORPO against a plain loop over transformers, as their papers write them."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from method_runs import Run, run_method, same
from ranks import run_ranks
from test_dpo import BATCH, ROWS, STEPS, TOKENIZER, answer_logp, tiny

import twofold
from twofold.config.schema import DataOptions
from twofold.data.order import Order
from twofold.data.prepare import prepare

LR = 0.02


def simpo(c: Any, r: Any, n: int, m: int) -> Any:
    return -torch.log(torch.sigmoid(2.5 * (c / n - r / m) - 0.5))


def cpo(c: Any, r: Any, n: int, m: int) -> Any:
    good = torch.sigmoid(0.2 * (c - r))
    return -0.9 * torch.log(good) - 0.1 * torch.log(1 - good)


def orpo(c: Any, r: Any, n: int, m: int) -> Any:
    p, q = torch.exp(c / n), torch.exp(r / m)
    return -0.7 * torch.log(torch.sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q))))


PAPERS: dict[str, tuple[Callable[..., Any], float, dict[str, Any]]] = {
    "SimPO": (simpo, 0.0, {"beta": 2.5, "gamma": 0.5}),
    "CPO": (cpo, 0.4, {"beta": 0.2, "label_smoothing": 0.1, "sft_weight": 0.4}),
    "ORPO": (orpo, 1.0, {"beta": 0.7}),
}


@lru_cache
def expected(name: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses of all steps, weights after the last) of a plain loop."""
    paper, sft, _ = PAPERS[name]
    data, order, model = prepare(ROWS, TOKENIZER, DataOptions(), kind="preference"), Order(10, BATCH, 42), tiny()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for k in range(STEPS):
        pairs = [[answer_logp(model, s) for s in data[i]["sequences"]] for i in order.step(k)]
        loss = torch.stack([paper(c, r, n, m) for (c, n), (r, m) in pairs]).mean()
        loss = loss - sft * sum(c for (c, _), _ in pairs) / sum(n for (_, n), _ in pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, reference.parameters(model)


def fit(folder: Path, name: str, **more: Any) -> Run:
    return run_method(
        getattr(twofold, f"{name}Trainer"),
        folder,
        name,
        model=tiny(),
        tokenizer=TOKENIZER,
        train_dataset=ROWS,
        args=PAPERS[name][2],
        global_batch_size=BATCH,
        max_steps=STEPS,
        lr=LR,
        micro_batch_tokens=150,
        **more,
    )


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("strategy", ["single", "ddp:2", "fsdp:2", "tp:2", "pp:2", "cp:2"])
def test_losses_and_weights(name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))
    losses, weights = expected(name)
    start = reference.parameters(tiny())
    assert max(np.abs(weights[n] - start[n]).max() for n in weights) > 1e-3
    if strategy == "single":
        found = [fit(tmp_path, name)]
    else:
        found = run_ranks(2, fit, tmp_path, name, devices=2, strategy=strategy)
    for one in found:
        same(one, losses, weights)
    assert {"rewards/chosen", "rewards/accuracies", "logps/rejected"} <= found[0][0][-1].keys()
