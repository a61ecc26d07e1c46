"""Runs of the methods' trainers, as their tests compare them with plain loops: SGD without schedule or clipping."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.tensor import DTensor

from twofold import Callback

Run = tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, np.ndarray]]
"""(rows of metrics, evaluations, weights)"""


class Rows(Callback):
    """Keeps what is logged, on every rank."""

    rank_zero_only = False

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []

    def on_log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def on_eval(self, row: dict[str, Any]) -> None:
        self.evals.append(row)


def run_method(trainer_class: Any, folder: Path, name: str, **arguments: Any) -> Run:
    """Trains, with a cache in `folder`."""
    os.environ["TWOFOLD_CACHE"] = str(folder / "cache")  # ranks come from a server that has another environment
    watch = Rows()
    settings = {
        "accelerator": "cpu",
        "optimizer": "sgd",
        "schedule": "constant",
        "max_grad_norm": None,
        "logging_steps": 1,
        "progress": "off",
    }
    trainer = trainer_class(folder=str(folder), name=name, callbacks=[watch], **(settings | arguments))
    trainer.train()
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trainer.model.hf.named_parameters()}
    return watch.rows, watch.evals, {n: p.detach().clone().numpy() for n, p in weights.items()}


def same(found: Run, losses: Sequence[float], weights: dict[str, np.ndarray]) -> None:
    """A run's losses and weights are those of a plain loop."""
    rows, _, ends = found
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-5, atol=1e-6)
    assert ends
    for name, weight in ends.items():
        np.testing.assert_allclose(weight, weights[name], atol=5e-6, err_msg=name)
