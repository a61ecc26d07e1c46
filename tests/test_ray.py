"""Ray Train as the launcher, with real Ray and two workers; skipped only where Ray is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twofold import Trainer, UserError

SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
from test_layouts import Weighted, rows
from twofold import Callback, Trainer

class Losses(Callback):
    rank_zero_only = True
    def __init__(self):
        self.found = []
    def on_log(self, row):
        self.found.append(row["loss"])

losses = Losses()
trainer = Trainer(
    accelerator="cpu", name=sys.argv[1], callbacks=[losses], max_steps=6, global_batch_size=6, logging_steps=1, lr=0.1,
    schedule="constant", optimizer="sgd", weight_decay=0.0, progress="off", **json.loads(sys.argv[2]),
)
trainer.fit(Weighted(), rows())

if losses.found:
    with open(sys.argv[1] + ".json", "w") as out:
        json.dump([losses.found, os.environ.get("WORLD_SIZE"), "ray.train" in sys.modules], out)
"""


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "RAY_ADDRESS")}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=clean, capture_output=True, text=True, timeout=300, check=False
    )
