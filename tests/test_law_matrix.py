"""Law 1 as a matrix, families × layouts: losses and gradients against plain transformers on one process.

Twenty SGD steps with momentum and clipping on samples of unequal length, without padding, in several micro-batches;
11 samples in steps of 6, so that every second step is short. The part marked `full` runs with `make matrix`.
"""

import json
import os
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import reference
import torch
from ranks import run_ranks
from torch.distributed.tensor import DTensor

from twofold.data.order import Cut, Order
from twofold.engine.feed import Feed
from twofold.engine.optim import decay_groups
from twofold.engine.step import StepResult, TrainStep
from twofold.mesh.mesh import Mesh
from twofold.methods.sft import SFT
from twofold.models.causal_lm import CausalLM, examine
from twofold.parallel import DATA_AXES, Parallel, parse
from twofold.parallel.place import place
from twofold.parallel.strategy import AXES

SAMPLES = reference.tiny_samples(11, seed=3)
STEPS, BATCH, CLIP = 20, 6, 0.5
LR = {"olmo2": 0.05}  # at 0.1, the others' rate, its steps amplify rounding to 1e-5 within 20 steps
ORDER = Order(len(SAMPLES), BATCH, seed=5)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
PIPELINES = tuple(f"pp:2,{schedule}" for schedule in SCHEDULES)
CONTEXTS = ("cp:2", "cp:2,all-gather", "cp:2,ring")
TWO = ("ddp:2", "zero1:2", "zero2:2", "fsdp:2", "fsdp:2,offload", "tp:2", "tp:2,sequence", *PIPELINES, *CONTEXTS)
FOUR = ("ddp:2,fsdp:2", "fsdp:2,tp:2", "ddp:2,tp:2", "fsdp:4", "tp:4", "pp:4")
FOUR += ("pp:2,ddp:2,interleaved", "pp:2,fsdp:2", "pp:2,fsdp:2,zbv", "pp:2,tp:2", "pp:2,tp:2,dualpipev")
FOUR += (
    "cp:4",
    "cp:2,fsdp:2",
    "ddp:2,cp:2,ring",
    "cp:2,tp:2,all-gather",
    "fsdp:2,tp:2,sequence",
    "pp:2,cp:2",
    "pp:2,cp:2,zbv,ring",
)
EIGHT = ("ddp:2,fsdp:2,tp:2", "pp:2,fsdp:2,tp:2")
EXPERTS = ("ep:2", "ep:4", "ep:2,fsdp:2", "ddp:2,ep:2", "ep:2,pp:2", "ep:2,pp:2,zbv", "ep:2,cp:2", "ep:2,ddp:2,fsdp:2")
EVERY_DAY = {
    *((family, layout) for family in reference.FAMILIES for layout in ("fsdp:2", "pp:2,1f1b")),
    *((family, "tp:2") for family in ("qwen3", "qwen3_moe", "gemma2", "phi3", "olmo2", "gpt_neox", "gpt2")),
    *(("llama", layout) for layout in (*TWO, "ddp:2,fsdp:2,tp:2")),
    *(("qwen2", layout) for layout in (*FOUR, "pp:2,zbv", "pp:2,fsdp:2,tp:2")),
    ("qwen3_moe", "fsdp:2,tp:2"),
    ("gpt2", "tp:4"),
    *(("qwen3_moe", layout) for layout in EXPERTS if layout != "ep:2"),
    ("mixtral", "ep:2"),
    ("gemma2", "cp:2,ring"),  # soft-capped logits and a sliding window
    ("mistral", "cp:2,all-gather"),
    ("qwen3_moe", "tp:2,sequence"),
    ("gpt2", "tp:2,sequence"),
}


def cases() -> list[Any]:
    every = [(family, layout) for family in reference.FAMILIES for layout in TWO + FOUR + EIGHT]
    every += [(family, layout) for family in ("qwen3_moe", "mixtral") for layout in EXPERTS]
    return [pytest.param(*case, marks=() if case in EVERY_DAY else pytest.mark.full) for case in every]


@lru_cache
def expected(family: str) -> tuple[list[float], dict, dict]:
    """Losses of all steps, gradients of the first, weights after the last: plain transformers."""
    batches = [[SAMPLES[i] for i in ORDER.step(k)] for k in range(STEPS)]
    model = reference.tiny_model(family)
    reference.batch_loss(model, batches[0]).backward()
    first = reference.gradients(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR.get(family, 0.1), momentum=0.9)
    losses = reference.train(model, batches, optimizer, lambda step: LR.get(family, 0.1), CLIP)
    return losses, first, reference.parameters(model)


def whole(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone().numpy()


def on_layout(family: str, strategy: str | Parallel) -> tuple[list[float], dict, dict]:
    """The same from this rank of a layout."""
    mesh = Mesh.join("cpu")
    layout = parse(strategy, mesh.world_size)
    mesh.arrange(layout.sizes, layout.timeouts, layout.backends)
    model = reference.tiny_model(family)
    task = SFT(CausalLM(model, examine(model)))
    placed = place(task.model, mesh, layout)
    groups, lr = decay_groups(task.model, 0.0), LR.get(family, 0.1)
    optimizer = placed.optimizer(torch.optim.SGD, groups, lr=lr, momentum=0.9)
    lengths = [len(s["input_ids"]) for s in SAMPLES]
    mine, ranks = mesh.coordinate(*DATA_AXES), mesh.size(*DATA_AXES)
    feed = Feed(SAMPLES, lengths, task.collate, ORDER, Cut(tokens=40), mine, ranks, *layout.micro_batches)
    step = TrainStep(task, placed, optimizer, mesh, nullcontext, lambda b: b, CLIP)
    losses, first = [], {}
    for k, micro_batches in enumerate(feed.steps(0, STEPS)):
        if k == 0:
            first = _first_gradients(step, micro_batches, losses)
        else:
            losses.append(_loss(step(micro_batches), mesh))
    return losses, first, {n: whole(p) for n, p in model.named_parameters(remove_duplicate=False)}


def _loss(result: StepResult, mesh: Mesh) -> float:
    result.sums.settle(mesh)
    return result.sums.read()["loss"]


def _first_gradients(step: TrainStep, micro_batches: Any, losses: list[float]) -> dict[str, np.ndarray]:
    """Runs a step, and keeps what its gradients were before they were clipped."""
    kept: dict[str, np.ndarray] = {}
    update = step.optimizer.step

    def keep_and_update(*args: Any, **kwargs: Any) -> None:
        named = dict(step.placed.model.hf.named_parameters(remove_duplicate=False))  # type: ignore[union-attr, operator]
        kept.update({n: whole(p.grad) for n, p in named.items() if p.grad is not None})
        update(*args, **kwargs)

    step.optimizer.step = keep_and_update  # type: ignore[method-assign]
    result = step(micro_batches, want_norm=True)
    step.optimizer.step = update  # type: ignore[method-assign]
    losses.append(_loss(result, step.mesh))
    norm = float(result.grad_norm)  # type: ignore[arg-type]
    return {n: g * max(1.0, (norm + 1e-6) / CLIP) for n, g in kept.items()}


@pytest.mark.parametrize(("family", "strategy"), cases())
def test_losses_and_gradients(family: str, strategy: str) -> None:
    check(family, strategy, parse_size(strategy))


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"shard": 2, "tensor": 2}, "tensor shard"),
        pytest.param({"replicate": 2, "shard": 2}, "shard replicate", marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "shard": 2}, "shard pipeline", marks=pytest.mark.full),
        pytest.param({"shard": 2, "context": 2}, "context shard", marks=pytest.mark.full),
        pytest.param({"expert": 2, "shard": 2}, "expert shard", marks=pytest.mark.full),
        pytest.param({"replicate": 2, "shard": 2, "tensor": 2}, "tensor shard replicate", marks=pytest.mark.full),
    ],
)
def test_another_order_of_axes(sizes: dict[str, int], order: str) -> None:
    """Where ranks lie on the machine changes nothing."""
    axes = order.split()
    layout = Parallel(**sizes, order=(*(axis for axis in AXES if axis not in axes), *axes))
    check("qwen3_moe" if "expert" in sizes else "llama", layout, layout.world_size)


def check(family: str, strategy: str | Parallel, ranks: int) -> None:
    losses, first, weights = expected(family)
    assert min(losses[-2:]) < 0.85 * losses[0]
    assert max(np.abs(g).max() for g in first.values()) > 0.01
    every = run_ranks(ranks, on_layout, family, strategy)
    assert {name for _, gradients, _ in every for name in gradients} == first.keys()  # stages hold some each
    worst = {
        "loss": max(np.abs(np.divide(found, losses) - 1).max() for found, _, _ in every),
        "gradient": max(np.abs(g - first[name]).max() for _, gradients, _ in every for name, g in gradients.items()),
        "weight": max(np.abs(w - weights[name]).max() for _, _, ends in every for name, w in ends.items()),
    }
    if isinstance(strategy, str):
        record(family, strategy, worst)
    assert worst["gradient"] <= 1e-6
    assert worst["loss"] <= 1e-5
    assert worst["weight"] <= 2e-5


def record(family: str, strategy: str, worst: dict[str, Any]) -> None:
    """A line for the table of the documentation (`make matrix`, docs/matrix.py)."""
    path = os.environ.get("TWOFOLD_MATRIX")
    if path:
        line = {"family": family, "strategy": strategy, **{name: float(value) for name, value in worst.items()}}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def parse_size(strategy: str) -> int:
    sizes = [int(word.partition(":")[2]) for word in strategy.split(",") if ":" in word]
    return int(np.prod(sizes))
