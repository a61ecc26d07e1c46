"""Laws 1 and 2: the layout and the cut of a step change nothing. Gradients first, then 20 steps.

Expected numbers come from `reference.py`, which shares no code with the engine.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import reference
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

from twofold.data.order import Cut, Order
from twofold.engine.feed import Feed
from twofold.engine.step import TrainStep
from twofold.mesh.mesh import Mesh
from twofold.methods.sft import SFT
from twofold.models.causal_lm import CausalLM, examine
from twofold.parallel.place import place
from twofold.task import Loss, Task

SAMPLES = reference.tiny_samples(11, seed=3)
CUTS = {
    "whole step at once": Cut(),
    "40 tokens": Cut(tokens=40),
    "one sample": Cut(rows=1),
    "padded, 50 tokens": Cut(tokens=50, padded=True),
    "padded, 3 rows": Cut(rows=3, padded=True),
}


def sft_task(family: str, packed: bool = True, smoothing: float = 0.0, **changes: Any) -> SFT:
    model = reference.tiny_model(family, **changes)
    return SFT(CausalLM(model, examine(model), packed), smoothing)


def make_step(
    task: Task, optimizer: torch.optim.Optimizer, cut: Cut, batch: int, clip: float | None, data: Any
) -> tuple[TrainStep, Feed]:
    mesh = Mesh.join("cpu")
    lengths = [len(s["input_ids"]) for s in data] if "input_ids" in data[0] else None
    order = Order(len(data), batch, seed=5)
    feed = Feed(data, lengths, task.collate, order, cut, mesh.rank, mesh.world_size)
    return TrainStep(task, place(task.model, mesh), optimizer, mesh, nullcontext, lambda b: b, clip), feed


class KeepGradients(torch.optim.SGD):
    """SGD that keeps what the gradients were when it was asked to step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        named = self.named
        self.kept = {
            n: p.grad.clone().numpy() for n, p in named.named_parameters(remove_duplicate=False) if p.grad is not None
        }


def step_gradients(family: str, cut: Cut, packed: bool, smoothing: float = 0.0) -> tuple[dict, float]:
    """The gradients and the loss of one step over all SAMPLES, on this rank."""
    task = sft_task(family, packed, smoothing)
    optimizer = KeepGradients(task.model.parameters(), lr=0.0)
    optimizer.named = task.model.hf
    step, feed = make_step(task, optimizer, cut, batch=len(SAMPLES), clip=None, data=SAMPLES)
    result = step(next(iter(feed.steps(0, 1))))
    return optimizer.kept, result.sums.read()["loss"]


def expected_gradients(family: str, smoothing: float = 0.0) -> tuple[dict, float]:
    model = reference.tiny_model(family)
    loss = reference.batch_loss(model, SAMPLES, smoothing)
    loss.backward()
    return reference.gradients(model), loss.item()


def assert_same(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    assert max(np.abs(g).max() for g in expected.values()) > 0.01  # or the comparison would say nothing
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("family", reference.SHAPES)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_do_not_depend_on_the_cut(family: str, cut: str) -> None:
    expected, loss = expected_gradients(family)
    found, found_loss = step_gradients(family, CUTS[cut], packed=not CUTS[cut].padded)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_same(found, expected, 1e-6)


def test_a_smoothed_loss_does_not_depend_on_the_cut() -> None:
    """Field report, kind 2: label smoothing that ignored the global count."""
    expected, loss = expected_gradients("llama", smoothing=0.2)
    for cut in (Cut(), Cut(rows=1), Cut(tokens=40)):
        found, found_loss = step_gradients("llama", cut, packed=True, smoothing=0.2)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_same(found, expected, 1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cut", ["whole step at once", "40 tokens", "padded, 3 rows"])
def test_gradients_do_not_depend_on_the_ranks(ranks: int, cut: str) -> None:
    """Field report, kinds 1 and 4: unequal lengths, unequal numbers of micro-batches, any number of ranks."""
    expected, loss = expected_gradients("llama")
    for found, found_loss in run_ranks(ranks, step_gradients, "llama", CUTS[cut], not CUTS[cut].padded):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_same(found, expected, 1e-6)


def test_more_ranks_than_samples() -> None:
    """A rank without a sample of the step computes filler, and counts nothing."""

    def two_samples_on_three_ranks() -> Any:
        task = sft_task("llama")
        optimizer = KeepGradients(task.model.parameters(), lr=0.0)
        optimizer.named = task.model.hf
        step, feed = make_step(task, optimizer, Cut(), batch=2, clip=None, data=SAMPLES[:2])
        result = step(next(iter(feed.steps(0, 1))))
        return optimizer.kept, result.sums.read()["loss"]

    model = reference.tiny_model("llama")
    loss = reference.batch_loss(model, SAMPLES[:2])
    loss.backward()
    for found, found_loss in run_ranks(3, two_samples_on_three_ranks):
        assert found_loss == pytest.approx(loss.item(), rel=1e-6)
        assert_same(found, reference.gradients(model), 1e-6)


# Twenty steps. The learning rates make the losses fall by a third and more: a wrong scale would show.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}
LR = {"sgd": 0.1, "adamw": 1e-2}


def twenty_steps(family: str, optimizer: str, cut: Cut, clip: float | None) -> tuple[list[float], list, dict]:
    task = sft_task(family)
    made = OPTIMIZERS[optimizer](task.model.parameters())
    step, feed = make_step(task, made, cut, batch=6, clip=clip, data=SAMPLES)
    losses, norms = [], []
    for micro_batches in feed.steps(0, 20):
        result = step(micro_batches, want_norm=True)
        losses.append(result.sums.read()["loss"])
        norms.append(float(result.grad_norm))
    return losses, norms, reference.parameters(task.model.hf)


@pytest.mark.parametrize("family", reference.SHAPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_twenty_steps_on_one_and_two_ranks(family: str, optimizer: str, clip: float | None) -> None:
    """11 samples in steps of 6: every second step is short, and counts for what it is."""
    order = Order(len(SAMPLES), 6, seed=5)
    batches = [[SAMPLES[i] for i in order.step(k)] for k in range(20)]
    model = reference.tiny_model(family)
    made = OPTIMIZERS[optimizer](model.parameters())
    expected = reference.train(model, batches, made, lambda step: LR[optimizer], clip)
    assert min(expected[-2:]) < 0.8 * expected[0]
    start = reference.parameters(reference.tiny_model(family))
    end = reference.parameters(model)
    one = twenty_steps(family, optimizer, Cut(tokens=60), clip)
    for losses, norms, weights in [one, *run_ranks(2, twenty_steps, family, optimizer, Cut(tokens=40), clip)]:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(norms, one[1], rtol=1e-4)
        for name, value in end.items():
            moved = np.abs(value - start[name]).max()
            if name.endswith("c_attn.bias"):  # keys: their true gradient is zero, and AdamW makes steps of rounding
                weights[name], value = weights[name][64:], value[64:]
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=max(1e-5, 1e-4 * moved), err_msg=name)


class TwoTerms(Task):
    """Two terms with different weights: squared errors per element, and an L1 term per row with a coefficient."""

    def __init__(self, declares_weights: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.declares_weights = declares_weights

    def collate(self, samples: Any) -> dict[str, torch.Tensor]:
        return {key: torch.cat([s[key] for s in samples]) for key in ("x", "y")} | {"rows": len(samples)}

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}

    def loss(self, output: Any, batch: Any) -> Loss:
        squares = (output - batch["y"]).square().sum()
        return Loss(
            {"mse": (squares, output.numel()), "l1": (output.abs().sum(), batch["rows"], 0.3)},
            metrics={"mean_output": (output.sum(), output.numel())},
        )

    def weights(self, batch: Any) -> dict[str, Any] | None:
        return {"mse": 2 * len(batch["x"]), "l1": batch["rows"]} if self.declares_weights else None


def two_terms(declares_weights: bool, cut: Cut) -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, 2, 3, 1, 4, 2]
    data = [{"x": torch.randn(n, 3, generator=generator), "y": torch.randn(n, 2, generator=generator)} for n in lengths]
    task = TwoTerms(declares_weights)
    optimizer = KeepGradients(task.model.parameters(), lr=0.0)
    optimizer.named = task.model
    step, feed = make_step(task, optimizer, cut, batch=7, clip=None, data=data)
    result = step(next(iter(feed.steps(0, 1))))
    task.model.zero_grad()
    x, y = (torch.cat([d[key] for d in data]) for key in ("x", "y"))
    output = task.model(x)
    (F.mse_loss(output, y) + 0.3 * output.abs().sum() / 7).backward()
    expected = reference.gradients(task.model)
    row = {"mse": F.mse_loss(output, y).item(), "l1": (output.abs().sum() / 7).item(), "mean": output.mean().item()}
    found = result.sums.read()
    assert found["loss"] == pytest.approx(row["mse"] + 0.3 * row["l1"], rel=1e-6)
    assert (found["mse"], found["l1"], found["mean_output"]) == pytest.approx(tuple(row.values()), rel=1e-5)
    return optimizer.kept, expected


@pytest.mark.parametrize("declares_weights", [True, False])
@pytest.mark.parametrize("rows", [None, 1, 2])
def test_terms_are_divided_each_by_its_own_global_weight(declares_weights: bool, rows: int | None) -> None:
    assert_same(*two_terms(declares_weights, Cut(rows=rows)), 1e-6)
    for found, expected in run_ranks(2, two_terms, declares_weights, Cut(rows=rows)):
        assert_same(found, expected, 1e-6)
