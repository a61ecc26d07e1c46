"""The words of `strategy=`: what they mean, and what is refused with which remedy."""

from typing import Any

import pytest
import torch

from twofold.errors import UserError
from twofold.mesh.mesh import Mesh
from twofold.parallel import Parallel, parse
from twofold.parallel.schedules import SCHEDULES
from twofold.parallel.strategy import AXES


@pytest.mark.parametrize(
    ("strategy", "ranks", "nodes", "expected"),
    [
        ("auto", 4, 1, Parallel(replicate=4)),
        ("ddp", 2, 1, Parallel(replicate=2)),
        ("single", 1, 1, Parallel()),
        ("zero1", 4, 1, Parallel(shard=4, zero=1)),
        ("zero2", 4, 1, Parallel(shard=4, zero=2)),
        ("zero3", 4, 1, Parallel(shard=4)),
        ("fsdp", 4, 1, Parallel(shard=4)),
        ("fsdp,offload", 4, 1, Parallel(shard=4, offload=True)),
        ("fsdp:2,tp:2", 4, 1, Parallel(shard=2, tensor=2)),
        ("fsdp,tp:2", 8, 1, Parallel(shard=4, tensor=2)),
        ("ddp:2, fsdp:2, tp:2", 8, 1, Parallel(replicate=2, shard=2, tensor=2)),
        ("hsdp:2", 8, 1, Parallel(replicate=4, shard=2)),
        ("hsdp", 8, 2, Parallel(replicate=2, shard=4)),
        ("hsdp,tp:2", 16, 2, Parallel(replicate=2, shard=4, tensor=2)),
        ("tp", 2, 1, Parallel(tensor=2)),
        ("pp", 2, 1, Parallel(pipeline=2, schedule="1f1b")),
        ("tp,sequence", 2, 1, Parallel(tensor=2, sequence=True)),
        ("cp,ring", 2, 1, Parallel(context=2, exchange="ring")),
        ("ep:2,fsdp", 8, 1, Parallel(expert=2, shard=4)),
        ("pp:2,fsdp,zbv", 8, 1, Parallel(pipeline=2, shard=4, schedule="zbv")),
        (Parallel(shard=2, zero=2), 2, 1, Parallel(shard=2, zero=2)),
    ],
)
def test_words(strategy: str | Parallel, ranks: int, nodes: int, expected: Parallel) -> None:
    assert parse(strategy, ranks, nodes) == expected


@pytest.mark.parametrize(
    ("strategy", "ranks", "message"),
    [
        ("fsdpp", 2, r"unknown strategy 'fsdpp'\. Did you mean 'fsdp'"),
        ("fsdp:2,zbv", 2, r"'zbv' belongs to the pipeline axis: add 'pp' to it"),
        ("fsdp:2,ring", 2, r"'ring' belongs to the context axis: add 'cp' to it"),
        ("fsdp:2,sequence", 2, r"sequence needs a tensor axis: strategy='tp,sequence'"),
        ("ep:2,tp:2", 4, r"ep and tp both split experts"),
        ("pp:2,1fb1", 2, r"unknown strategy 'pp:2,1fb1'\. Did you mean '1f1b'"),
        ("pp:2,fsdp:2", 2, r"is for 4 rank\(s\), .*: set devices=4, or strategy='pp:2'"),
        ("fsdp:2,fsdp:2", 4, r"names the shard axis twice"),
        ("fsdp:x", 2, r"'fsdp:x' needs a number of ranks after the colon, as in 'fsdp:2'"),
        ("fsdp,tp", 4, r"only one word may be without a number"),
        ("fsdp:2,tp:2", 2, r"is for 4 rank\(s\), and devices × num_nodes is 2: set devices=4, or strategy='tp:2'"),
        ("fsdp:3", 4, r"set devices=3, or strategy='fsdp:4'"),
        ("hsdp", 4, r"hsdp on one node needs the number of ranks that share a copy: strategy='hsdp:2'"),
        ("zero1,tp:2", 4, r"zero1 splits the optimizer over all ranks and goes with no other word"),
        ("ddp,offload", 2, r"offload needs a shard axis: strategy='fsdp,offload'"),
    ],
)
def test_what_cannot_be(strategy: str, ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(strategy, ranks)


def test_sizes_are_numbers_of_ranks() -> None:
    with pytest.raises(UserError, match="shard must be a number of ranks from 1 on, not 0"):
        Parallel(shard=0)
    with pytest.raises(UserError, match="zero must be 1, 2 or 3, not 4"):
        Parallel(shard=2, zero=4)
    with pytest.raises(UserError, match=r"unknown schedule '1f2b'\. Did you mean '1f1b'"):
        Parallel(pipeline=2, schedule="1f2b")
    with pytest.raises(UserError, match=r"unknown exchange 'rings'\. Did you mean 'ring'"):
        Parallel(context=2, exchange="rings")


def test_order_timeouts_and_backends() -> None:
    """They are part of a layout: equal and hashable, and the sizes come in the order."""
    order = ("tensor", "pipeline", "replicate", "expert", "context", "shard")
    layout = Parallel(shard=2, tensor=2, order=list(order), timeouts={"tensor": 60}, backends={"shard": "gloo"})  # type: ignore[arg-type]
    assert tuple(layout.sizes) == layout.order == order
    assert str(layout) == "tensor 2 × shard 2 × zero 3"
    again = Parallel(shard=2, tensor=2, order=order, timeouts={"tensor": 60.0}, backends={"shard": "gloo"})
    assert layout == again
    assert hash(layout) == hash(again)
    assert layout != Parallel(shard=2, tensor=2, order=order)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": ("tensor", "shard")}, r"order must name every axis once, outermost first, as in \('pipeline', "),
        ({"order": "tensor"}, r"order must name every axis once"),
        ({"order": (*AXES[:-1], "tensr")}, r"'tensr' is none\. Did you mean 'tensor'"),
        ({"order": (*AXES, "tensor")}, r"order must name every axis once"),
        ({"timeouts": {"tensr": 60}}, r"timeouts has the unknown axis 'tensr'\. Did you mean 'tensor'"),
        ({"timeouts": {"tensor": 0}}, r"timeouts\['tensor'\] must be seconds above 0, not 0"),
        ({"timeouts": 60}, r"timeouts must give axes seconds above 0, as in \{'tensor': …\}, not 60"),
        ({"backends": {"shards": "nccl"}}, r"backends has the unknown axis 'shards'\. Did you mean 'shard'"),
        ({"backends": {"shard": None}}, r"backends\['shard'\] must be the name of a backend, not None"),
    ],
)
def test_options_of_axes_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Parallel(shard=2, **options)


def test_places_on_the_mesh() -> None:
    """Eight ranks as replicate 2 × shard 2 × tensor 2: the tensor axis is the innermost."""
    found = []
    for rank in range(8):
        mesh = Mesh(rank, 8, rank, torch.device("cpu"), sizes={"replicate": 2, "shard": 2, "tensor": 2})
        found.append((mesh.coordinate("replicate", "shard"), mesh.coordinate("tensor"), mesh.coordinate("context")))
    assert found == [(rank // 2, rank % 2, 0) for rank in range(8)]
    assert mesh.size("replicate", "shard") == 4
    assert mesh.size("context") == 1


@pytest.mark.parametrize(
    ("schedule", "ranks", "expected", "needs"),
    [
        ("gpipe", 4, [[0], [1], [2], [3]], (1, 1)),
        ("1f1b", 4, [[0], [1], [2], [3]], (4, 1)),
        ("interleaved", 2, [[0, 2], [1, 3]], (2, 2)),
        ("zbv", 3, [[0, 5], [1, 4], [2, 3]], (3, 1)),
        ("dualpipev", 2, [[0, 3], [1, 2]], (4, 1)),
    ],
)
def test_stages_of_a_schedule(schedule: str, ranks: int, expected: list[list[int]], needs: tuple[int, int]) -> None:
    kind = SCHEDULES[schedule]
    assert [kind.stages_of(rank, ranks) for rank in range(ranks)] == expected
    for rank, stages in enumerate(expected):
        assert [kind.rank_of(stage, ranks) for stage in stages] == [rank] * len(stages)
    assert Parallel(pipeline=ranks, schedule=schedule).micro_batches == needs
