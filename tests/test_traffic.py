"""The bytes of a step by axis against closed formulas, on two ranks (and on four for groups over several axes).

With n = 2 ranks a ring sends of S bytes: S for an all-reduce, S / 2 for an all-gather to S and a reduce-scatter of S.
What is counted is the third step: in the second, DDP arranges its buckets anew.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from twofold import Callback, Trainer
from twofold.data.order import Cut, Order
from twofold.engine.feed import Feed
from twofold.engine.optim import decay_groups
from twofold.engine.step import TrainStep
from twofold.errors import UserError
from twofold.mesh.mesh import Mesh
from twofold.mesh.traffic import Traffic
from twofold.methods.sft import SFT
from twofold.models.causal_lm import CausalLM, examine
from twofold.parallel import DATA_AXES, Parallel, expert, parse
from twofold.parallel.place import place
from twofold.parallel.tensor import split

SAMPLES = reference.tiny_samples(11, seed=3)
LENGTHS = [len(s["input_ids"]) for s in SAMPLES]
ORDER = Order(len(SAMPLES), 6, seed=5)
LAYERS, WIDTH, KEYS = 2, 32, 16  # KEYS: 2 heads of keys (or values) × 8
FP32, FP64, INT64 = 4, 8, 8
SUMS = 2 * FP64  # the total and the weight of one loss
Rows = dict[str, dict[str, tuple[int, int]]]


def third_step(strategy: str, family: str, count: bool) -> tuple[Rows, list[tuple[int, ...]], dict, list]:
    """(rows, (tokens, predicted tokens) of each micro-batch, the weights afterwards, (tokens for and from the other
    rank) of each exchange of experts)."""
    mesh = Mesh.join("cpu")
    layout = parse(strategy, mesh.world_size)
    mesh.arrange(layout.sizes)
    model = reference.tiny_model(family)
    task = SFT(CausalLM(model, examine(model)))
    placed = place(task.model, mesh, layout)
    optimizer = placed.optimizer(torch.optim.SGD, decay_groups(task.model, 0.0), lr=0.1, momentum=0.9)
    mine, ranks = mesh.coordinate(*DATA_AXES), mesh.size(*DATA_AXES)
    feed = Feed(SAMPLES, LENGTHS, task.collate, ORDER, Cut(tokens=24), mine, ranks, *layout.micro_batches)
    step = TrainStep(task, placed, optimizer, mesh, nullcontext, lambda b: b, clip=0.5)
    exchanged: list[tuple[int, int]] = []
    for k, micro_batches in enumerate(feed.steps(0, 3)):
        traffic = Traffic(mesh)
        if k == 2:
            _keep_sizes(exchanged, mesh.rank)
        with traffic if count and k == 2 else nullcontext():
            step(micro_batches, want_norm=True)
    assert not traffic.uncounted
    sizes = [(m.batch["input_ids"].numel(), len(m.batch["targets"])) for m in micro_batches]
    return traffic.rows, sizes, {n: _whole(p) for n, p in model.named_parameters()}, exchanged


def _keep_sizes(found: list[tuple[int, int]], rank: int) -> None:
    original = expert._sizes

    def sizes(*args: Any) -> tuple[list[int], list[int]]:
        sent, received = original(*args)
        found.append((sent[1 - rank], received[1 - rank]))
        return sent, received

    expert._sizes = sizes  # in a rank of its own


def _whole(p: torch.Tensor) -> np.ndarray:
    x = p.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).numpy()


def weights(family: str, part: str = "", but: str = "nothing", ranks: int = 1) -> int:
    """Numbers in a model's parameters with `part` in their names and without `but`; FSDP2 fills their first dimension
    up to a multiple of the ranks."""
    named = reference.tiny_model(family).named_parameters()
    return sum(-(-len(p) // ranks) * ranks * prod(p.shape[1:]) for name, p in named if part in name and but not in name)


BLOCKS, REST = weights("llama", ".layers.", ranks=2), weights("llama", but=".layers.", ranks=2)
COPIES = FP32 * weights("llama")  # gradients of all weights, all-reduced


def zero2(micro: list[tuple[int, ...]]) -> Rows:
    """Weights are gathered once in each micro-batch (two blocks and the rest), gradients reduced in the last."""
    n, every = len(micro), FP32 * (BLOCKS + REST)
    shard = {"all-gather": (3 * n, n * every // 2), "reduce-scatter": (3, every // 2)}
    return {"shard": shard, "all": {"all-reduce": (2, SUMS + FP64)}}  # and the norm


def zero3(micro: list[tuple[int, ...]]) -> Rows:
    """Blocks are gathered again in the backward pass, and gradients reduced in every micro-batch."""
    n = len(micro)
    gathers = (5 * n, n * FP32 * (2 * BLOCKS + REST) // 2)
    shard = {"all-gather": gathers, "reduce-scatter": (3 * n, n * FP32 * (BLOCKS + REST) // 2)}
    return {"shard": shard, "all": {"all-reduce": (2, SUMS + FP64)}}


def tensor(micro: list[tuple[int, ...]]) -> Rows:
    """All-reduces of [tokens, width]: forward, one after the embedding and two in a layer (attention, MLP); backward,
    one for each column-wise matrix (q, k, v, gate, up). The loss over a split vocabulary takes the largest logit, then
    the sum and the target's logit of every prediction; backward, the gradient of the head's input."""
    passes = 1 + 7 * LAYERS
    sent = sum(FP32 * (passes * t * WIDTH + p + 2 * p + p * WIDTH) for t, p in micro)
    calls = len(micro) * (passes + 3)
    return {"tensor": {"all-reduce": (calls, sent)}, "all": {"all-reduce": (2, SUMS + FP64)}}


def context(exchange: Callable[[int], Rows]) -> Callable[[list[tuple[int, ...]]], Rows]:
    """A rank has half of each row's tokens, rounded up. For the loss it gathers [tokens, width], joins the
    log-probabilities of half of the predictions, and reduces the first one's gradient; weights are DDP's."""

    def formula(micro: list[tuple[int, ...]]) -> Rows:
        n, half, pieces = len(micro), [-(-t // 2) for t, _ in micro], [-(-p // 2) for _, p in micro]
        found = dict(exchange(sum(half)))
        found = {kind: (calls * n * LAYERS, size * LAYERS) for kind, (calls, size) in found.items()}
        hidden = FP32 * WIDTH * sum(half)
        for kind, calls, size in (
            ("all-gather", 2 * n, hidden + FP32 * sum(pieces)),
            ("reduce-scatter", n, hidden),
            ("all-reduce", 1, COPIES),
        ):
            before = found.get(kind, (0, 0))
            found[kind] = (before[0] + calls, before[1] + size)
        return {"context": found, "all": {"all-reduce": (1, SUMS)}}

    return formula


def ulysses(tokens: int) -> dict[str, tuple[int, int]]:
    """Queries, keys, values and outputs change places, forward and backward; half of each stays."""
    return {"all-to-all": (8, 2 * FP32 * tokens * (2 * WIDTH + 2 * KEYS) // 2)}


def gathered(tokens: int) -> dict[str, tuple[int, int]]:
    """Keys and values are gathered, their gradients reduced."""
    return dict.fromkeys(("all-gather", "reduce-scatter"), (2, FP32 * tokens * 2 * KEYS))


def ring(tokens: int) -> dict[str, tuple[int, int]]:
    """Keys and values go to the next rank n - 1 times, and backward n times with their gradients."""
    return {"send": (10, FP32 * tokens * KEYS * (2 * 1 + 4 * 2))}


def pipeline(micro: list[tuple[int, ...]]) -> Rows:
    """Activations of every micro-batch (from the first rank), or their gradients (from the last)."""
    send = (len(micro), sum(FP32 * t * WIDTH for t, _ in micro))
    return {"pipeline": {"send": send}, "all": {"all-reduce": (2, FP64 + FP64)}}  # the weight, the norm


def tied_pipeline(micro: list[tuple[int, ...]]) -> Rows:
    """And the gradient of the embedding, which both stages have."""
    found = pipeline(micro)
    found["pipeline"]["all-reduce"] = (1, FP32 * reference.VOCABULARY * WIDTH)
    return found


CASES: dict[str, tuple[str, Callable[[list[tuple[int, ...]]], Rows]]] = {
    "ddp": ("llama", lambda _: {"replicate": {"all-reduce": (1, COPIES)}, "all": {"all-reduce": (1, SUMS)}}),
    "zero1": (  # every rank sends the parameters that it has updated
        "llama",
        lambda _: {
            "shard": {"all-reduce": (1, COPIES), "broadcast": (21, COPIES)},
            "all": {"all-reduce": (1, SUMS)},
        },
    ),
    "zero2": ("llama", zero2),
    "fsdp": ("llama", zero3),
    "tp": ("llama", tensor),
    "cp": ("llama", context(ulysses)),
    "cp,all-gather": ("llama", context(gathered)),
    "cp,ring": ("llama", context(ring)),
    "pp": ("llama", pipeline),
    "pp,gpipe": ("qwen2", tied_pipeline),
}


@pytest.mark.parametrize("strategy", CASES)
def test_bytes_of_a_step(strategy: str) -> None:
    """They are those of the formula, on both ranks, and the step is the same as one that is not counted."""
    family, formula = CASES[strategy]
    counted, plain = (run_ranks(2, third_step, strategy, family, count) for count in (True, False))
    for (rows, micro, ends, _), (none, _, expected, _) in zip(counted, plain, strict=True):
        assert len(micro) > 1
        assert rows == formula(micro)
        assert none == {}
        for name, value in ends.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_bytes_of_experts() -> None:
    """In each layer, with s tokens for the other rank's experts and r from it: their numbers; tokens (s) and their
    experts there, results (r) back; backward, gradients of the results (s) there, of the tokens (r) back. All weights
    but the experts' are in copies."""
    for rows, micro, _, exchanged in run_ranks(2, third_step, "ep", "qwen3_moe", True):
        assert len(exchanged) == LAYERS * len(micro)
        sent = sum(INT64 + INT64 * s + FP32 * WIDTH * 2 * (s + r) for s, r in exchanged)
        copies = FP32 * weights("qwen3_moe", but=".experts.")
        assert rows == {
            "expert": {"all-to-all": (6 * len(exchanged), sent), "all-reduce": (3, copies)},
            "all": {"all-reduce": (2, SUMS + FP64)},
        }


def test_groups_over_several_axes_are_named_by_them() -> None:
    """FSDP over shard 2 × context 2: a ring of four sends 3/4 of what is gathered or reduced, 3/2 of an all-reduce."""
    blocks, rest = weights("llama", ".layers.", ranks=4), weights("llama", but=".layers.", ranks=4)
    for rows, micro, _, _ in run_ranks(4, third_step, "fsdp:2,cp:2", "llama", True):
        n = len(micro)
        assert rows.keys() == {"shard_context", "context", "all"}
        assert rows["shard_context"] == {
            "all-gather": (5 * n, n * FP32 * (2 * blocks + rest) * 3 // 4),
            "reduce-scatter": (3 * n, n * FP32 * (blocks + rest) * 3 // 4),
        }
        assert rows["all"] == {"all-reduce": (2, (SUMS + FP64) * 3 // 2)}


class Halves(nn.Module):
    tensor_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def several_kinds() -> tuple[Rows, Rows, set[str]]:
    """Exchanges of DTensor in a split module, and one of every other kind."""
    mesh = Mesh.join("cpu")
    mesh.arrange({"tensor": 2})
    model, x = Halves(), torch.ones(5, 8, requires_grad=True)
    split(model, mesh)
    with Traffic(mesh) as of_module:
        model(x).sum().backward()
    me, other, row = mesh.rank, 1 - mesh.rank, torch.ones(3, 2)
    with Traffic(mesh) as traffic:
        with Traffic(mesh) as within:
            mesh.barrier()
        assert within.rows == {"all": {"barrier": (1, 0)}}
        mesh.broadcast([row])
        dist.broadcast(row, 0)
        dist.reduce(row, 1)
        rows = [[1, 2], [0, 3]]  # of each rank, for each rank
        theirs = [mine[me] for mine in rows]
        dist.all_to_all_single(torch.empty(sum(theirs), 2), torch.ones(3, 2), theirs, rows[me])
        dist.scatter(torch.empty(4), [torch.ones(4), torch.ones(4)] if me == 0 else None, 0)
        dist.gather(torch.ones(4), [torch.empty(4), torch.empty(4)] if me == 0 else None, 0)
        dist.send(row, other) if me == 0 else dist.recv(row, other)
    mesh.barrier()
    assert "barrier" not in vars(mesh)  # the mesh is as it was
    return of_module.rows, traffic.rows, traffic.uncounted


def test_every_kind_of_exchange() -> None:
    for rank, (of_module, rows, uncounted) in enumerate(run_ranks(2, several_kinds)):
        assert of_module == {"tensor": {"all-reduce": (2, FP32 * (5 * 6 + 5 * 8))}}  # the output; the input's gradient
        assert uncounted == {"c10d::gather_"}
        assert rows["all"] == {"barrier": (1, 0), "broadcast": (1, 24)}
        one = {"broadcast": (1, 24), "reduce": (1, 24), "all-to-all": (1, 16 if rank == 0 else 0)}
        one |= {"scatter": (1, 16 if rank == 0 else 0)} | ({"send": (1, 24)} if rank == 0 else {})
        assert rows["tensor"] == one


class Logged(Callback):
    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_log(self, row: dict[str, Any]) -> None:
        self.found.append(row)


def test_a_run_logs_the_bytes_of_one_step(tmp_path: Path) -> None:
    """In the row of the third step: gradients of a linear layer of 8 × 4 and its bias, and the sums of the losses."""
    every = run_ranks(2, logged, tmp_path)
    for rows in every:
        told = [{k: v for k, v in row.items() if k.startswith("comm_mb_")} for row in rows]
        assert told == [{}, {}, {"comm_mb_replicate": FP32 * 36 / 2**20, "comm_mb_all": SUMS / 2**20}, {}, {}]


def logged(folder: Path) -> list[dict[str, Any]]:
    from twofold import Loss, Task

    class Linear(Task):
        def __init__(self) -> None:
            self.model = nn.Linear(8, 4)

        def inputs(self, batch: Any) -> dict[str, Any]:
            return {"input": batch}

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss.of(output.square().sum(), len(output))

    rows = Logged()
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "progress": "off", "global_batch_size": 4}
    Trainer(folder=str(folder), callbacks=[rows], max_steps=5, logging_steps=1, **options).fit(
        Linear(), list(torch.ones(20, 8))
    )
    return rows.found


def waits() -> tuple[float, str, float, float]:
    """Rank 1 does not come: (seconds until rank 0 gives up, its error, seconds that other groups would wait)."""
    mesh = Mesh.join("cpu")
    layout = Parallel(shard=2, tensor=2, timeouts={"tensor": 2})
    mesh.arrange(layout.sizes, layout.timeouts, layout.backends)
    other = mesh.group("shard")._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    both = mesh.sub(("shard", "tensor")).get_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    mesh.barrier()
    began, error = time.perf_counter(), ""
    if mesh.rank % 2 == 0:
        try:
            dist.all_reduce(torch.ones(2), group=mesh.group("tensor"))
        except RuntimeError as found:
            error = str(found)
    seconds = time.perf_counter() - began
    mesh.barrier()
    return seconds, error, other, both


def test_an_axis_has_a_timeout_of_its_own() -> None:
    """Two seconds on the tensor axis; every other group waits as long as the run says (60 in tests)."""
    for rank, (seconds, error, other, both) in enumerate(run_ranks(4, waits)):
        assert (other, both) == (60, 60)
        if rank % 2 == 0:
            assert "Timed out waiting 2000ms" in error
            assert 1.5 < seconds < 10


def own_groups() -> tuple[bool, bool, str]:
    mesh = Mesh.join("cpu")
    layout = Parallel(tensor=2, backends={"tensor": "gloo"})
    mesh.arrange(layout.sizes)
    shared = mesh.group("tensor") is dist.group.WORLD
    mesh.arrange(layout.sizes, layout.timeouts, layout.backends)
    again = mesh.group("tensor") is dist.group.WORLD
    with pytest.raises(UserError) as refused:
        mesh.arrange(layout.sizes, {}, {"tensor": "cpu:gloo,cuda:ncl"})
    return shared, again, str(refused.value)


def test_an_axis_has_a_backend_of_its_own() -> None:
    for shared, again, refused in run_ranks(2, own_groups):
        assert (shared, again) == (True, False)
        assert refused.startswith("Parallel: backends['tensor']: unknown backend 'ncl'. ")
