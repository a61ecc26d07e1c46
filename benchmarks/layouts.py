"""A residual MLP on every layout: Twofold against the same layout written by hand with PyTorch.

`python benchmarks/layouts.py SIDE STRATEGY`, as "fsdp:2,tp:2" (its numbers multiply to the processes). The model: 256
to 512, eight blocks 512-2048-512, to 10 (17 M parameters); 64 rows a step, micro-batches of 8 rows of each rank's
share, fused AdamW, clipping at 1, the mean loss of each ten steps logged. By hand means what torch's documentation
shows: DDP with `no_sync`, ZeroRedundancyOptimizer, `fully_shard` on blocks and root, `parallelize_module`, the
schedules of `pipelining` over stages of equal blocks, and one norm over all axes where torch has none. The clock
starts after the third step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ddp2 import _free_port, _shared_folder
from measure import Meter, main, quick, report

BATCH, MICRO, STEPS, BLOCKS = 64, 8, 5 if quick() else 20, 8
WARM = 3  # steps before the clock starts: in the third, Twofold counts the bytes of each axis, once in a run


def net() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.relu(self.up(x)))

    class Net(nn.Module):
        tensor_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012
        pipeline_plan = ["first", "blocks", "last"]  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(256, 512), nn.Linear(512, 10)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    torch.manual_seed(0)
    return Net()


def rows() -> tuple[Any, Any]:
    """x [rows, 256] fp32 and the label that a fixed random linear teacher gives it, 0 to 9."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS, 256, generator=generator)
    return x, (x @ torch.randn(256, 10, generator=generator)).argmax(-1)


def sizes(strategy: str) -> dict[str, int]:
    """word -> ranks, without schedules."""
    return {word.partition(":")[0]: int(word.partition(":")[2]) for word in strategy.split(",") if ":" in word}


def world(strategy: str) -> int:
    size = 1
    for n in sizes(strategy).values():
        size *= n
    return size


def twofold(strategy: str) -> None:
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset

    from twofold import Callback, Loss, Task, Trainer

    class Classify(Task):
        def __init__(self) -> None:
            self.model = net()

        def inputs(self, batch: Any) -> dict[str, Any]:
            return {"x": batch[0]}

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss.of(cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    class Watch(Callback):
        def on_start(self, info: dict[str, Any]) -> None:
            meter.reset_memory()

        def on_step(self, step: int) -> None:
            meter.step_done(step, STEPS, WARM)

        def on_log(self, row: dict[str, Any]) -> None:
            meter.losses.append(row["loss"])

    meter = Meter()
    trainer = Trainer(
        accelerator="cpu",
        devices=world(strategy),
        strategy=strategy,
        max_steps=STEPS,
        schedule="constant",
        shuffle=False,
        progress="off",
        folder=_shared_folder(),
        callbacks=[Watch()],
        global_batch_size=BATCH,
        micro_batch_size=MICRO,
        lr=1e-3,
    )
    trainer.fit(Classify(), TensorDataset(*rows()))
    if os.environ.get("RANK", "0") == "0":
        report(meter, steps=STEPS - WARM, tokens=BATCH * (STEPS - WARM))


def raw(strategy: str) -> None:
    """Starts the processes with torch.multiprocessing; each runs `raw_rank`."""
    import torch.multiprocessing as mp

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(_free_port())
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.start_processes(raw_rank, args=(strategy,), nprocs=world(strategy), start_method="spawn")


def raw_rank(rank: int, strategy: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // world(strategy)))
    dist.init_process_group("gloo", rank=rank, world_size=world(strategy))
    named = sizes(strategy)
    order = [word for word in ("pp", "ddp", "zero1", "zero2", "fsdp", "tp") if word in named]
    mesh = init_device_mesh("cpu", tuple(named[word] for word in order), mesh_dim_names=tuple(order))
    data = [word for word in order if word not in ("pp", "tp")]
    replicas, place = (mesh[data[0]].size(), mesh[data[0]].get_local_rank()) if data else (1, 0)
    model, backward, optimizer = (_stages if "pp" in named else _whole)(mesh, named, data, strategy)
    x, y = (part.view(STEPS, replicas, -1, *part.shape[1:])[:, place] for part in rows())
    meter = Meter()
    meter.reset_memory()
    window = torch.zeros(())
    for step in range(1, STEPS + 1):
        total = backward(x[step - 1], y[step - 1], replicas / BATCH)
        _clip(model, mesh, "pp" in named)
        optimizer.step()
        optimizer.zero_grad()
        window += 0.0 if total is None else total
        if step % 10 == 0 or step == STEPS:
            dist.all_reduce(window)
            meter.losses.append(window.item() / BATCH / named.get("tp", 1) / ((step - 1) % 10 + 1))
            window.zero_()
        meter.step_done(step, STEPS, WARM)
    if rank == 0:
        report(meter, steps=STEPS - WARM, tokens=BATCH * (STEPS - WARM))
    dist.barrier()
    dist.destroy_process_group()


def _summed(output: Any, target: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(output, target, reduction="sum")


def _sharded(model: Any, mesh: Any, data: list[str], reshard: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh[data[0]], reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh[data[0]])


def _split(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)


def _adamw(model: Any) -> Any:
    """One group for each mesh that parameters lie on, as fused kernels need it."""
    import torch

    groups: dict[Any, list[Any]] = {}
    for p in model.parameters():
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return torch.optim.AdamW([{"params": g} for g in groups.values()], lr=1e-3, weight_decay=0.0, fused=True)


def _whole(mesh: Any, named: dict[str, int], data: list[str], strategy: str) -> tuple[Any, Callable[..., Any], Any]:
    """(model, backward pass of a rank's rows, optimizer) where every rank runs the whole model."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = net()
    if "tp" in named:
        _split(model, mesh)
    module = model
    if "ddp" in named or "zero1" in named:
        module = DistributedDataParallel(model)
    elif data:
        module = _sharded(model, mesh, data, reshard="fsdp" in named)
    if "zero1" in named:
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.0, fused=True
        )
    else:
        optimizer = _adamw(model)

    def backward(x: Any, y: Any, scale: float) -> Any:
        total, parts = 0.0, list(zip(x.split(MICRO), y.split(MICRO), strict=True))
        for i, (a, b) in enumerate(parts):
            last = i == len(parts) - 1
            if "zero2" in named:
                module.set_requires_gradient_sync(last)
            with module.no_sync() if hasattr(module, "no_sync") and not last else nullcontext():
                loss = _summed(module(a), b)
                (loss * scale).backward()
            total = total + loss.detach()
        return total

    return model, backward, optimizer


def _stages(mesh: Any, named: dict[str, int], data: list[str], strategy: str) -> tuple[Any, Callable[..., Any], Any]:
    """The same where each rank has stages of a pipeline."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    ranks, here = named["pp"], mesh["pp"].get_local_rank()
    kinds = {
        "gpipe": ("GPipe", [here]),
        "interleaved": ("Interleaved1F1B", [here, here + ranks]),
        "zero-bubble": ("InterleavedZeroBubble", [here, here + ranks]),
        "zbv": ("ZBVZeroBubble", [here, 2 * ranks - 1 - here]),
        "dualpipev": ("DualPipeV", [here, 2 * ranks - 1 - here]),
    }
    name, ids = kinds.get(strategy.split(",")[-1], ("1F1B", [here]))
    count = ranks * len(ids)
    modules = []
    for i in ids:
        model = net()
        model.blocks = nn.ModuleList(model.blocks[i * BLOCKS // count : (i + 1) * BLOCKS // count])
        model.first = model.first if i == 0 else nn.Identity()
        model.last = model.last if i == count - 1 else nn.Identity()
        if "tp" in named:
            _split(model, mesh)
        modules.append(_sharded(model, mesh, data, reshard=False) if data else model)
    group = mesh["pp"].get_group()
    made = [PipelineStage(m, i, count, torch.device("cpu"), group=group) for m, i in zip(modules, ids, strict=True)]
    n = BATCH // named.get("fsdp", 1) // MICRO
    kind, scale_of = get_schedule_class(name), {"now": 1.0}

    def loss_fn(output: Any, target: Any) -> Any:
        return _summed(output, target) * scale_of["now"]

    schedule = kind(made if len(made) > 1 else made[0], n_microbatches=n, loss_fn=loss_fn, scale_grads=False)

    def backward(x: Any, y: Any, scale: float) -> Any:
        losses: list[Any] = []
        scale_of["now"] = scale
        target = y if count - 1 in ids else None
        schedule.step(*([x] if 0 in ids else []), target=target, losses=losses, return_outputs=False)
        return sum(losses).detach() / scale if losses else None

    held = nn.ModuleList(modules)
    return held, backward, _adamw(held)


def _clip(model: Any, mesh: Any, pipeline: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    groups: dict[Any, list[Any]] = {}
    for p in model.parameters():
        if p.grad is not None:
            groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    if len(groups) == 1 and not pipeline:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    square = torch.zeros(())
    for group in groups.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in group])
        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    if pipeline:
        dist.all_reduce(square, group=mesh["pp"].get_group())
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, square.sqrt())


if __name__ == "__main__":
    main({"twofold": twofold, "raw": raw})
