"""How long ranks of a pipeline wait, against the schedule's formula: `python benchmarks/bubbles.py SIDE SCHEDULE`.

The residual MLP of `layouts.py` without its first and last layers' imbalance (16 blocks, 64 rows a micro-batch, 8
micro-batches) on 2 ranks of one thread each. `measured`: 1 - (time in forward and backward of stages) / (time of the
schedule), the median over steps of the mean over ranks; a message counts as waiting. `formula`, with p ranks,
m micro-batches, v stages a rank and forward = backward for inputs = backward for weights (arXiv 2104.04473, section 2;
arXiv 2401.10241, table 1):

    gpipe, 1f1b    (p - 1) / (m + p - 1)
    interleaved    (p - 1) / (v m + p - 1)
    zero-bubble    (p - 1) / (3 v m + p - 1)
"""

from __future__ import annotations

import os
import time
from statistics import mean, median
from typing import Any

from ddp2 import _free_port
from measure import Meter, main, quick, report

RANKS, MICRO_BATCHES, ROWS, STEPS = 2, 8, 64, 3 if quick() else 20


def formula(schedule: str) -> None:
    p, m = RANKS, MICRO_BATCHES
    times = {"gpipe": m, "1f1b": m, "interleaved": 2 * m, "zero-bubble": 6 * m}[schedule]
    _print((p - 1) / (times + p - 1))


def measured(schedule: str) -> None:
    import torch.multiprocessing as mp

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(_free_port())
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.start_processes(rank, args=(schedule,), nprocs=RANKS, start_method="spawn")


def rank(number: int, schedule: str) -> None:
    import torch
    from torch import nn
    from torch.distributed.pipelining.stage import _PipelineStageBase

    from twofold.mesh.mesh import Mesh
    from twofold.parallel import parse
    from twofold.parallel.place import place

    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    busy = [0.0]
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(_PipelineStageBase, name, _timed(getattr(_PipelineStageBase, name), busy))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.relu(self.up(x)))

    model = nn.Sequential(*(Block() for _ in range(16)))
    model.pipeline_plan = [str(i) for i in range(16)]  # type: ignore[assignment]
    mesh, layout = Mesh.join("cpu"), parse(f"pp:2,{schedule}", RANKS)
    mesh.arrange(layout.sizes)
    pipeline = place(model, mesh, layout).pipeline
    assert pipeline is not None
    batches = [{"input": torch.randn(ROWS, 512)} for _ in range(MICRO_BATCHES)]
    shares = []
    for _ in range(STEPS):
        mesh.barrier()
        busy[0], begun = 0.0, time.perf_counter()
        pipeline.run(batches, lambda output, i: output.square().sum(), torch.enable_grad)
        mesh.barrier()
        shares.append(mean(mesh.gather_objects(1 - busy[0] / (time.perf_counter() - begun))))
        model.zero_grad()
    if number == 0:
        _print(median(shares[1:]))
    mesh.barrier()
    mesh.leave()


def _timed(function: Any, busy: list[float]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            busy[0] += time.perf_counter() - begun

    return run


def _print(share: float) -> None:
    meter = Meter()
    meter.losses.append(0.0)
    meter.begun, meter.ended = 0.0, share
    report(meter)


if __name__ == "__main__":
    main({"measured": measured, "formula": formula})
