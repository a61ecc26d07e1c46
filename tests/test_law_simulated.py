"""Law 9: one step runs unchanged on fake tensors, alone and as one rank of a fake world.

In a world the bare model stands for DDP, whose C++ reducer takes no fake tensors; the step's own exchange is run.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from twofold.data.collate import packed
from twofold.engine.step import MicroBatch, TrainStep
from twofold.mesh.mesh import Mesh
from twofold.methods.sft import SFT
from twofold.models.causal_lm import Abilities, CausalLM
from twofold.parallel.placed import Placed


def simulate(world_size: int, frozen_head: bool) -> list[str]:
    """Two steps of two micro-batches on fake tensors; returns what is fake in the end."""
    batches = [packed(reference.tiny_samples(3, seed=i)) for i in range(2)]
    if world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    with FakeTensorMode() as mode:
        model = reference.tiny_model("llama")
        model.lm_head.requires_grad_(not frozen_head)
        task = SFT(CausalLM(model, Abilities(packed=True, plain_head=True)), label_smoothing=0.1)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        mesh = Mesh(0, world_size, 0, torch.device("cpu"))
        layout = Placed(task.model, task.model)
        step = TrainStep(task, layout, optimizer, mesh, nullcontext, lambda b: b, 1.0)
        fake = [{k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in b.items()} for b in batches]
        for _ in range(2):
            result = step([MicroBatch(b) for b in fake], want_norm=True)
    things: dict[str, Any] = {
        "norm": result.grad_norm,
        "loss": result.sums.total("loss"),
        "weights": trained[0],
        "moments": optimizer.state[trained[0]]["exp_avg"],
    }
    return [name for name, value in things.items() if isinstance(value, FakeTensor)]


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_step_runs_on_fake_tensors(world_size: int, frozen_head: bool) -> None:
    """In a forked process, so that the fake process group stays there."""

    def alone() -> list[str]:
        import os

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        return simulate(world_size, frozen_head)

    assert run_ranks(1, alone) == [["norm", "loss", "weights", "moments"]]
