"""A module of one's own on any layout: scikit-learn's handwritten digits.

python examples/digits.py            # one process
python examples/digits.py 2          # two processes, same losses
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from twofold import Loss, Task, Trainer


class Digits(Task):
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def inputs(self, batch):
        return {"input": batch["image"]}

    def loss(self, output, batch):
        right = (output.argmax(-1) == batch["label"]).sum()
        n = len(batch["label"])
        return Loss.of(F.cross_entropy(output, batch["label"], reduction="sum"), n, accuracy=(right, n))


if __name__ == "__main__":
    devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    trainer = Trainer(accelerator="cpu", devices=devices, precision=32, max_epochs=3, global_batch_size=32, lr=3e-3)
    images, labels = load_digits(return_X_y=True)
    rows = [{"image": np.float32(x / 16), "label": y} for x, y in zip(images, labels, strict=True)]
    result = trainer.fit(Digits(), rows[:1500], rows[1500:])
    print(f"evaluation loss {result.eval_loss:.6f}")
