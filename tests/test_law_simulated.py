"""Law 9: one step runs unchanged on fake tensors, alone and as one rank of a fake world, on every layout.

Of `ddp` the bare model stands for DDP, whose C++ reducer takes no fake tensors; the step's own exchange is run. Meshes
are made before the step; FSDP2 makes more of them when it wraps a model on the tensor axis, outside of the fake mode.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from twofold.data.collate import packed
from twofold.engine.gradients import local
from twofold.engine.optim import decay_groups
from twofold.engine.step import MicroBatch, TrainStep
from twofold.mesh.mesh import Mesh
from twofold.methods.sft import SFT
from twofold.models.causal_lm import Abilities, CausalLM
from twofold.parallel import parse
from twofold.parallel.place import place
from twofold.parallel.placed import Placed
from twofold.parallel.strategy import EXCHANGES


def simulate(strategy: str, world_size: int, frozen_head: bool) -> list[str]:
    """Two steps of two micro-batches on fake tensors; returns what is fake in the end."""
    batches = [packed(reference.tiny_samples(3, seed=i)) for i in range(2)]
    mesh, layout = fake_world(strategy, world_size)
    with FakeTensorMode() as mode:
        # torch's fake grouped matrix product, for experts, knows no other type than bf16
        family, dtype = ("qwen3_moe", torch.bfloat16) if "ep" in strategy else ("llama", torch.float32)
        model = reference.tiny_model(family, tie_word_embeddings=False, dtype=dtype)
        model.lm_head.requires_grad_(not frozen_head)
        task = SFT(CausalLM(model, Abilities(packed=True, plain_head=True)), label_smoothing=0.1)
        bare = strategy in ("ddp", "single")
        placed = Placed(task.model, task.model) if bare else place(task.model, mesh, layout)
        optimizer = placed.optimizer(torch.optim.AdamW, decay_groups(task.model, 0.0), lr=1e-3, fused=True)
        step = TrainStep(task, placed, optimizer, mesh, nullcontext, lambda b: b, 1.0)
        fake = [{k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in b.items()} for b in batches]
        for _ in range(2):
            result = step([MicroBatch(b) for b in fake], want_norm=True)
        weight = step.parameters[0]
        things: dict[str, Any] = {
            "norm": result.grad_norm,
            "loss": result.sums.total("loss"),
            "weights": local(weight.detach()),
            "moments": local(optimizer.state[weight]["exp_avg"]),
        }
        return [name for name, value in things.items() if isinstance(value, FakeTensor)]


def fake_world(strategy: str, world_size: int) -> tuple[Mesh, Any]:
    """Rank 0 of a world that exists in name only, and its layout. Meshes are always made of real tensors."""
    import torch.distributed._tools.fake_collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    if world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    for name in ("__init__", "_concatenate", "_flatten", "__getitem__"):
        found = _outside(getattr(DeviceMesh, name))
        setattr(DeviceMesh, name, staticmethod(found) if isinstance(DeviceMesh.__dict__[name], staticmethod) else found)
    mesh, layout = Mesh(0, world_size, 0, torch.device("cpu")), parse(strategy, world_size)
    mesh.arrange(layout.sizes)
    return mesh, layout


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return method(*args, **kwargs)

    return run


LAYOUTS = [("single", 1), ("ddp", 4), ("zero2", 4), ("fsdp", 4), ("hsdp:2", 4), ("tp", 2), ("fsdp:2,tp:2", 4)]
LAYOUTS += [
    ("ddp:2,fsdp:2,tp:2", 8),
    ("pp:2,zbv", 2),
    ("pp:2,fsdp:2,tp:2,zbv", 8),
    ("ep:2", 2),
    ("ep:2,fsdp:2", 4),
    ("tp:2,sequence", 2),
]
LAYOUTS += [(f"fsdp:2,cp:2,{exchange}", 4) for exchange in EXCHANGES] + [("tp:2,sequence", 2)]


@pytest.mark.parametrize(("strategy", "ranks"), LAYOUTS)
@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_step_runs_on_fake_tensors(strategy: str, ranks: int, frozen_head: bool) -> None:
    """In a forked process, so that the fake process group stays there."""
    found = run_ranks(1, simulate, strategy, ranks, frozen_head)
    assert found == [["norm", "loss", "weights", "moments"]]
