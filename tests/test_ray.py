"""Ray Train as the launcher, with real Ray and two workers; skipped only where Ray is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twofold import Trainer, UserError
from twofold.mesh import on_ray
from twofold.mesh.command import Command

TRAIN = """
import json, os, sys
from test_layouts import Weighted, rows
from twofold import Callback, Trainer, UserError

class Losses(Callback):
    rank_zero_only = True
    def __init__(self):
        self.found = []
    def on_log(self, row):
        self.found.append(row["loss"])

def train(config):
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu", callbacks=[losses], max_steps=6, global_batch_size=6, logging_steps=1, lr=0.1,
        schedule="constant", optimizer="sgd", weight_decay=0.0, progress="off", **config,
    )
    trainer.fit(Weighted(), rows())
    if losses.found:
        with open(os.path.join(trainer.folder.path, "losses.json"), "w") as out:
            json.dump([losses.found, os.environ.get("WORLD_SIZE"), "ray.train" in sys.modules], out)
"""
PROGRAM = TRAIN + "\ntrain(json.loads(sys.argv[1]))\n"
OWN_TRAINER = (
    TRAIN
    + """
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
if __name__ == "__main__":
    TorchTrainer(
        train, train_loop_config=json.loads(sys.argv[1]), scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("records")),
    ).fit()
"""
)
REFUSED = """
import os
from twofold import Trainer, UserError
Trainer(accelerator="cpu", devices=2, launcher="ray", max_steps=1, global_batch_size=2)
if os.environ["RANK"] == "1":
    raise UserError("rank one says no")
raise RuntimeError("Connection closed by peer")
"""


def start(at: Path, code: str, **config: object) -> subprocess.CompletedProcess[str]:
    (at / "program.py").write_text(code)
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "RAY_ADDRESS")}
    clean["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "program.py", json.dumps(config)],
        cwd=at, env=clean, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def losses(folder: Path, name: str) -> tuple[list[float], str | None, bool]:
    return tuple(json.loads((folder / "runs" / name / "losses.json").read_text()))


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one")
    ended = start(folder, PROGRAM, name="one", devices=1)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found, world_size, on_ray = losses(folder, "one")
    assert (world_size, on_ray) == (None, False)
    return found


def test_the_launcher_changes_no_loss(tmp_path: Path, by_one: list[float]) -> None:
    pytest.importorskip("ray")
    ended = start(tmp_path, PROGRAM, name="ray", devices=2, launcher="ray", strategy="zero1")
    assert ended.returncode == 0, ended.stderr[-2000:]
    found, world_size, on_ray = losses(tmp_path, "ray")
    assert (world_size, on_ray) == ("2", True)
    np.testing.assert_allclose(found, by_one, rtol=1e-5)
    assert found[-1] < found[0]


def test_a_trainer_in_ones_own_ray_trainer_joins_its_group(tmp_path: Path, by_one: list[float]) -> None:
    pytest.importorskip("ray")
    ended = start(tmp_path, OWN_TRAINER, devices=2, name="own", folder=str(tmp_path / "runs"))
    assert ended.returncode == 0, ended.stderr[-2000:]
    found, world_size, _ = losses(tmp_path, "own")
    assert world_size == "2"
    np.testing.assert_allclose(found, by_one, rtol=1e-5)


def test_a_workers_refusal_is_the_last_line_and_the_exit_code(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    ended = start(tmp_path, REFUSED)
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert ended.stderr.strip().splitlines()[-1] == "error: rank one says no"


@pytest.mark.parametrize(
    ("settings", "resources", "message"),
    [
        ({"devices": "auto"}, {"CPU": 4}, "needs a number of workers for each machine, and devices='auto'"),
        ({"devices": 2, "accelerator": "gpu"}, {"CPU": 4}, "Ray's cluster has no GPU"),
        ({"devices": 2, "num_nodes": 4}, {"CPU": 4}, "8 workers need 8 CPUs, and Ray's cluster has 4"),
        ({"devices": 2, "threads": 3}, {"CPU": 4}, "2 workers need 6 CPUs"),
    ],
)
def test_what_the_cluster_lacks_is_said_at_once(settings, resources, message, tmp_path, monkeypatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(on_ray, "_resources", lambda: resources)
    with pytest.raises(UserError, match=message):
        Trainer(**{"accelerator": "cpu", "launcher": "ray", "folder": str(tmp_path)} | settings)


def test_a_backend_that_ray_does_not_know_is_refused(tmp_path, monkeypatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(on_ray, "_resources", lambda: {"CPU": 4})
    with pytest.raises(UserError, match=r"own_gloo,cuda:nccl: run\.launcher=ray knows torch's own only"):
        on_ray.launch("cpu", 2, 1, None, "cpu:own_gloo,cuda:nccl", tmp_path)


def test_the_root_of_several_failures_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:9")
    assert on_ray._tell({0: lost, 1: ValueError("x is 3"), 2: lost}, 3) == 1
    assert capsys.readouterr().err == "rank 1 of 3 failed: ValueError: x is 3\n"
    assert on_ray._tell({0: lost, 1: SystemExit(3)}, 2) == 3


def test_ctrl_c_leaves_ray_and_ends_with_130(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("ray")
    left = []
    monkeypatch.setattr(on_ray, "this_command", lambda workers: Command((), False, "train.py", ()))
    monkeypatch.setattr(on_ray, "_resources", lambda: {"CPU": 4})
    monkeypatch.setattr(on_ray, "_leave", lambda: left.append(True))

    def interrupt(work: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(on_ray, "_in_thread", interrupt)
    assert on_ray.launch("cpu", 2, 1, None, None, tmp_path) == 130
    assert (left, capsys.readouterr().err) == ([True], "interrupted\n")
