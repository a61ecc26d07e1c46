"""Two processes over gloo: Twofold's `ddp` against a raw loop with torch's DistributedDataParallel.

`python benchmarks/ddp2.py SIDE [module|llama]`; both sides take the samples of a step in file order, fused AdamW,
constant learning rate, clipping at 1, the loss logged at each 10th step (`llama`: each step).
  module  an MLP 256-1024-1024-1024-10 (2.4 M parameters), 128 rows a step, 200 steps: DDP's buckets and the loop;
  llama   the model, rows and steps of `sft.py`, both sides without padding and with logits only at labels: raw deals
          the 8 samples of a step out in turn, where Twofold balances them by cost.
The raw loop counts as a careful person would: DDP averages over ranks, so each rank's sum is multiplied by the number
of ranks and divided by the weight of the whole step.
"""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from typing import Any

import rows as data
from measure import Meter, main, quick, report
from sft import LR, llama, tokenizer

RANKS = 2
BATCH = 128
STEPS = 20 if quick() else 200


def mlp() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths = [256, 1024, 1024, 1024, 10]
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def module_rows() -> Any:
    """x [256] fp32 and the label that a fixed random linear teacher gives it, 0 to 9."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS, 256, generator=generator)
    return TensorDataset(x, (x @ torch.randn(256, 10, generator=generator)).argmax(-1))


def twofold(work: str = "module") -> None:
    from twofold import Callback

    last = STEPS if work == "module" else data.steps()

    class Watch(Callback):
        rank_zero_only = True

        def on_start(self, info: dict[str, Any]) -> None:
            meter.reset_memory()

        def on_step(self, step: int) -> None:
            meter.step_done(step, last)

        def on_log(self, row: dict[str, Any]) -> None:
            meter.losses.append(row["loss"])

    meter = Meter()
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "strategy": "ddp",
        "max_steps": last,
        "schedule": "constant",
        "shuffle": False,
        "save_steps": None,
        "progress": "off",
        "folder": _shared_folder(),
        "callbacks": [Watch()],
    }
    if work == "module":
        _twofold_module(options)
    else:
        _twofold_llama(options)
    if os.environ.get("RANK", "0") == "0":
        report(meter, steps=last - 1, **_counted(work))


def _twofold_module(options: dict[str, Any]) -> None:
    from torch.nn.functional import cross_entropy

    from twofold import Loss, Task, Trainer

    class Classify(Task):
        def __init__(self) -> None:
            self.model = mlp()

        def inputs(self, batch: Any) -> dict[str, Any]:
            return {"input": batch[0]}

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss.of(cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    Trainer(global_batch_size=BATCH, lr=1e-3, logging_steps=10, **options).fit(Classify(), module_rows())


def _twofold_llama(options: dict[str, Any]) -> None:
    from twofold import SFTConfig, SFTTrainer

    SFTTrainer(
        model=llama(),
        tokenizer=tokenizer(),
        train_dataset=data.synthetic(),
        args=SFTConfig(max_length=1024),
        global_batch_size=data.BATCH,
        lr=LR["llama"],
        logging_steps=1,
        **options,
    ).train()


def _shared_folder() -> str:
    """One folder for all ranks: made by the process that starts them, told to them by the environment."""
    if "BENCH_FOLDER" not in os.environ:
        os.environ["BENCH_FOLDER"] = tempfile.mkdtemp(prefix="bench-ddp-")
    return os.environ["BENCH_FOLDER"]


def raw(work: str = "module") -> None:
    """Starts two processes with torch.multiprocessing; each runs `raw_rank`."""
    import torch.multiprocessing as mp

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(_free_port())
    os.environ["OMP_NUM_THREADS"] = "1"  # each rank its share of the two cores, as Twofold's launcher gives it
    mp.start_processes(raw_rank, args=(work,), nprocs=RANKS, start_method="spawn")


def raw_rank(rank: int, work: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // RANKS))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    parts, model, summed, lr, log_every = (_raw_module if work == "module" else _raw_llama)(rank)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    meter = Meter()
    meter.reset_memory()
    for step, (part, weight) in enumerate(parts, start=1):
        total = summed(model, part)
        (total * RANKS / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % log_every == 0:
            shown = total.detach().clone()
            dist.all_reduce(shown)
            meter.losses.append(shown.item() / weight)
        meter.step_done(step, STEPS if work == "module" else data.steps())
    if rank == 0:
        report(meter, steps=step - 1, **_counted(work))
    dist.barrier()  # a rank that leaves first can take the other's gloo threads down with it
    del model
    dist.destroy_process_group()


def _raw_module(rank: int) -> tuple[Any, ...]:
    """(this rank's (part, weight of the whole step) of each step, model, summed loss, lr, log every)."""
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, Subset

    rows, share = module_rows(), BATCH // RANKS
    mine = [i for i in range(len(rows)) if i // share % RANKS == rank]
    loader = DataLoader(Subset(rows, mine), batch_size=share)

    def summed(model: Any, part: Any) -> Any:
        return cross_entropy(model(part[0]), part[1], reduction="sum")

    return ((part, BATCH) for part in loader), mlp(), summed, 1e-3, 10


def _raw_llama(rank: int) -> tuple[Any, ...]:
    from ablation import joined, prepared, summed_loss
    from torch import nn

    class Summed(nn.Module):  # DDP hooks forward, so the loss is computed inside it
        def __init__(self) -> None:
            super().__init__()
            self.net = prepared(unpadded=True)

        def forward(self, batch: list[data.Row]) -> Any:
            return summed_loss(self.net, *joined(batch), only_labels=True)

    parts = ((batch[rank::RANKS], data.targets(batch)) for batch in data.batches(data.synthetic()))
    return parts, Summed(), lambda model, part: model(part), LR["llama"], 1


def _counted(work: str) -> dict[str, int]:
    """The units of all steps after the first: rows of the module, real tokens of the llama."""
    if work == "module":
        return {"tokens": BATCH * (STEPS - 1)}
    return {"tokens": sum(data.tokens(batch) for batch in data.batches(data.synthetic())[1:])}


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    main({"twofold": twofold, "raw": raw})
