"""A module of one's own on the tensor and pipeline axes: two plans, a few lines.

python examples/own_plans.py "tp:2"          # or "pp:2", "pp:2,zbv", "fsdp:2", "pp:2,tp:2" (4 processes) …
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from twofold import Loss, Task, Trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    # Which linear layers are split: "colwise" by their outputs, "rowwise", which follow these, by their inputs.
    tensor_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    # Which parts run one after the other: each takes what the one before returns, the first the model's inputs.
    pipeline_plan = ["embed", "blocks", "head"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Regression(Task):
    def __init__(self) -> None:
        self.model = Net()

    def inputs(self, batch: dict) -> dict:
        return {"x": batch["x"]}

    def loss(self, output: torch.Tensor, batch: dict) -> Loss:
        return Loss.of(F.mse_loss(output[:, 0], batch["y"], reduction="sum"), len(batch["y"]))


def rows(n: int = 256) -> list[dict]:
    x = np.random.default_rng(0).normal(size=(n, 8)).astype(np.float32)
    return [{"x": a, "y": np.float32(np.sin(a.sum()))} for a in x]


def ranks(strategy: str) -> int:
    return int(np.prod([int(word.split(":")[1]) for word in strategy.split(",") if ":" in word]))


def train(strategy: str, folder: str = "runs") -> float:
    """The loss in the end: the same on every layout."""
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks(strategy),
        strategy=strategy,
        global_batch_size=16,
        micro_batch_size=4,
        max_steps=60,
        lr=3e-3,
        folder=folder,
    )
    return trainer.fit(Regression(), rows()).loss


if __name__ == "__main__":
    print(f"loss {train(sys.argv[1] if len(sys.argv) > 1 else 'tp:2'):.6f}")
