"""The Trainer on a module of one's own: laws 1, 3, 4 and 7 end to end, evaluation, data sets, refusals."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankFailed, run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from twofold import Callback, Loss, Parallel, Task, Trainer, UserError
from twofold.engine.checkpoint import committed, verify
from twofold.engine.loop import NotFinite


class Regression(Task):
    """Rows of unequal weight; dropout, so that random states matter."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, output: Any, batch: Any) -> Loss:
        error = batch["weight"] * (output[:, 0] - batch["y"]).square()
        return Loss.of(error.sum(), batch["weight"].sum())


def rows(n: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        x = rng.standard_normal(4).astype(np.float32)
        made.append({"x": x, "y": np.float32(x.sum()), "weight": np.float32(rng.integers(1, 6))})
    return made


class Record(Callback):
    """Keeps every row that the run tells."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []

    def on_log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def on_eval(self, row: dict[str, Any]) -> None:
        self.evals.append(row)

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def fit(folder: Path, name: str, task: Task | None = None, n: int = 23, evaluate: bool = False, **settings: Any) -> Any:
    """A short run; returns (losses, evaluation rows, final weights, result)."""
    record = Record()
    defaults = {"lr": 0.02, "global_batch_size": 6, "logging_steps": 1, "progress": "off", "accelerator": "cpu"}
    trainer = Trainer(folder=str(folder), name=name, callbacks=[record], **(defaults | settings))
    task = task or Regression()
    result = trainer.fit(task, rows(n), rows(7, seed=1) if evaluate else None)
    weights = {k: v.detach().numpy().copy() for k, v in task.model.state_dict().items()}
    return record.losses(), record.evals, weights, result


def reference_losses(steps: int, optimizer: str) -> list[float]:
    """The same run in plain PyTorch: weighted mean over the whole batch, linear decay, clipping at 1."""
    from twofold.data.order import Order

    data, model = rows(23), Regression().model
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    opt = made(model.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for k in range(steps):
        batch = [data[i] for i in Order(23, 6, seed=42).step(k)]
        x, y, w = (torch.tensor(np.array([r[key] for r in batch])) for key in ("x", "y", "weight"))
        opt.param_groups[0]["lr"] = 0.02 * (1 - k / steps)
        opt.zero_grad()
        loss = (w * F.mse_loss(model(x)[:, 0], y, reduction="none")).sum() / w.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_process_and_two_give_the_losses_of_a_plain_loop(tmp_path: Path, optimizer: str) -> None:
    expected = reference_losses(20, optimizer)
    assert expected[-1] < 0.8 * expected[0]
    one = fit(tmp_path, "one", optimizer=optimizer, max_steps=20)
    np.testing.assert_allclose(one[0], expected, rtol=1e-5)
    settings = {"optimizer": optimizer, "max_steps": 20, "devices": 2, "strategy": "ddp"}
    for rank in run_ranks(2, lambda: fit(tmp_path, "two", **settings)[:3]):
        np.testing.assert_allclose(rank[0], expected, rtol=1e-5)
        for name, value in one[2].items():
            np.testing.assert_allclose(rank[2][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{"micro_batch_size": 1}, {"micro_batch_size": 4}, {"max_steps": 20}])
def test_micro_batches_change_nothing(tmp_path: Path, how: dict[str, Any]) -> None:
    found = fit(tmp_path, "run", **({"max_steps": 20} | how))
    np.testing.assert_allclose(found[0], reference_losses(20, "adamw"), rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stop", [5, 9])  # inside an epoch of 4 steps, and in a later one
def test_resume_is_bit_exact(tmp_path: Path, ranks: int, stop: int) -> None:
    """Law 3, with dropout and AdamW: losses and weights after a stop are those of the run without one."""

    def whole() -> Any:
        return fit(tmp_path, "whole", Regression(0.3), max_steps=12, devices=ranks)[:3]

    def stopped() -> Any:
        settings = {"devices": ranks, "schedule": "constant"}
        return fit(tmp_path, "parts", Regression(0.3), max_steps=stop, **settings)[:3]

    def resumed() -> Any:
        settings = {"devices": ranks, "schedule": "constant", "resume": True}
        return fit(tmp_path, "parts", Regression(0.3), max_steps=12, **settings)[:3]

    def straight() -> Any:
        return fit(tmp_path, "straight", Regression(0.3), max_steps=12, devices=ranks, schedule="constant")[:3]

    run = (lambda f: [f()]) if ranks == 1 else (lambda f: run_ranks(2, f))
    expected, first, second = run(straight), run(stopped), run(resumed)
    for a, b, c in zip(expected, first, second, strict=True):
        assert b[0] + c[0] == a[0]  # to the last bit
        assert all(np.array_equal(c[2][name], a[2][name]) for name in a[2])
    logged = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if row["split"] == "train"] == list(range(1, 13))


def test_a_window_of_metrics_survives_a_stop(tmp_path: Path) -> None:
    """Rows of four steps; stopped after six: the second row is that of the run without a stop."""
    settings = {"logging_steps": 4, "schedule": "constant"}
    whole = fit(tmp_path, "whole", max_steps=12, **settings)
    fit(tmp_path, "parts", max_steps=6, save_steps=3, **settings)
    resumed = fit(tmp_path, "parts", max_steps=12, resume=str(tmp_path / "parts/checkpoints/step-00000003"), **settings)
    assert resumed[0] == whole[0]
    rows_ = [json.loads(x) for x in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["samples"]) for row in rows_] == [(4, 23), (8, 46), (12, 69)]


def test_resume_with_loader_workers_and_saved_steps(tmp_path: Path) -> None:
    """Field report, kind 9: prefetched batches do not count."""
    data = DataLoader(TensorDataset(torch.arange(22.0)), batch_size=4, shuffle=True, num_workers=2)
    seen: list[list[float]] = []

    class Watch(Regression):
        def inputs(self, batch: Any) -> dict[str, Any]:
            seen.append(sorted(batch[0].tolist()))
            return {"input": batch[0][:, None].expand(-1, 4) / 22}

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss.of(output.square().sum(), len(batch[0]))

    def run(name: str, max_steps: int, **more: Any) -> list[list[float]]:
        seen.clear()
        Trainer(folder=str(tmp_path), name=name, max_steps=max_steps, progress="off", **more).fit(Watch(), data)
        return list(seen)

    whole = run("whole", 11)
    assert run("parts", 4) + run("parts", 11, resume=True) == whole
    assert [len(batch) for batch in whole[:6]] == [4, 4, 4, 4, 4, 2]


def test_evaluation_counts_every_row_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Field report, kind 11: 7 rows on 1, 2 and 3 ranks, 3 rows to a micro-batch."""
    settings = {"max_steps": 4, "eval_steps": 2, "micro_batch_size": 3, "evaluate": True, "optimizer": "sgd"}
    one = fit(tmp_path, "one", lr=0.0, **settings)
    model, data = Regression().model.eval(), rows(7, seed=1)
    x, y, w = (torch.tensor(np.array([r[key] for r in data])) for key in ("x", "y", "weight"))
    expected = (w * (model(x)[:, 0] - y).square()).sum().item() / w.sum().item()
    assert [row["loss"] for row in one[1]] == pytest.approx([expected] * 2, rel=1e-6)
    for ranks in (2, 3):
        settings_ = settings | {"devices": ranks, "lr": 0.0}
        for found in run_ranks(ranks, lambda s=settings_, r=ranks: fit(tmp_path, f"on{r}", **s)[1]):
            assert [row["loss"] for row in found] == [row["loss"] for row in one[1]]  # identical


def test_checkpoints_keep_the_last_ones_and_the_best(tmp_path: Path) -> None:
    """Law 7 and field report, kind 12. The loss on the evaluation rows is made to be best at step 4."""

    class BestAtFour(Regression):
        def loss(self, output: Any, batch: Any) -> Loss:
            if not self.model.training:
                self.asked = getattr(self, "asked", 0) + 1
                return Loss.of(output.sum() * 0 + abs(self.asked - 2), 1)
            return super().loss(output, batch)

    settings = {"max_steps": 12, "eval_steps": 2, "save_steps": 1, "save_total_limit": 2, "evaluate": True}
    fit(tmp_path, "run", BestAtFour(), global_batch_size=23, micro_batch_size=None, **settings)
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in committed(folder)] == ["step-00000004", "step-00000011", "step-00000012"]
    assert (folder / "best").resolve().name == "step-00000004"
    assert (folder / "latest").resolve().name == "step-00000012"
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    assert verify(folder / "best")["progress"]["best_step"] == 4


def test_numbers_decide_which_checkpoint_is_oldest(tmp_path: Path) -> None:
    for step in (99999999, 100000000, 8):
        (tmp_path / f"step-{step:08d}").mkdir()
    assert [p.name for p in committed(tmp_path)] == ["step-00000008", "step-99999999", "step-100000000"]


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, "run", max_steps=4, save_steps=2)
    checkpoints = tmp_path / "run" / "checkpoints"
    with pytest.raises(UserError, match=r"trained with global_batch_size=6 and this run has 5"):
        fit(tmp_path, "run", max_steps=8, resume=True, global_batch_size=5)
    with pytest.raises(UserError, match=r"trained with seed=42 and this run has 1"):
        fit(tmp_path, "run", max_steps=8, resume=True, seed=1)
    with pytest.raises(UserError, match=r"no checkpoint folder nowhere"):
        fit(tmp_path, "run", max_steps=8, resume="nowhere")
    data = next((checkpoints / "step-00000004").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged: .*distcp.*step-00000002"):
        fit(tmp_path, "run", max_steps=8, resume=True)
    found = fit(tmp_path, "run", max_steps=8, resume=str(checkpoints / "step-00000002"))
    assert len(found[0]) == 6


def test_a_crash_while_saving_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp

    real, calls = dcp.save, []

    def dies_the_second_time(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            (kwargs["checkpoint_id"] / "half").write_text("x")
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", dies_the_second_time)
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, "run", max_steps=9, save_steps=3)
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in committed(folder)] == ["step-00000003"]
    assert (folder / "latest").resolve().name == "step-00000003"
    again = fit(tmp_path, "run", max_steps=9, resume=True)
    assert len(again[0]) == 6
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


class BreaksAt(Regression):
    """The loss of the row with the largest y becomes NaN at a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.calls = step, 0

    def loss(self, output: Any, batch: Any) -> Loss:
        self.calls += 1
        loss = super().loss(output, batch)
        worst = max(r["y"] for r in rows(23))
        poison = torch.where(batch["y"] == worst, math.nan, 1.0).prod() if self.calls >= self.step else 1.0
        total, weight = loss.terms["loss"]
        return Loss.of(total * poison, weight)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nan_stops_the_run_and_names_step_sample_and_checkpoint(tmp_path: Path, ranks: int) -> None:
    culprit = int(np.argmax([r["y"] for r in rows(23)])) + 1
    settings = {"max_steps": 40, "save_steps": 4, "micro_batch_size": 1, "devices": ranks, "task": BreaksAt(30)}
    run = (lambda f: f()) if ranks == 1 else (lambda f: run_ranks(2, f))
    with pytest.raises((NotFinite, RankFailed)) as caught:
        run(lambda: fit(tmp_path, "run", **settings))
    text = str(caught.value)
    saved = committed(tmp_path / "run" / "checkpoints")[-1]
    assert f"training samples (counted from 1): {culprit};" in text
    assert f"last good checkpoint: {saved}" in text
    step = int(text.split("not finite at step ")[1].split(";")[0])
    assert int(saved.name[5:]) == (step - 1) // 4 * 4
    if ranks == 1:  # with more, the harness may end rank 0 before it has written
        assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_schedules_count_optimizer_steps(tmp_path: Path) -> None:
    """Expected values from transformers; the same on one rank and on two, whatever the micro-batches."""
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for schedule, make in (("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.02)
        theirs = make(optimizer, 3, 10)
        expected = []
        for _ in range(10):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        settings = {"schedule": schedule, "warmup_steps": 3, "max_steps": 10, "micro_batch_size": 2}

        def rates(name: str, settings: dict[str, Any] = settings, **more: Any) -> list[float]:
            record = Record()
            fit_settings = settings | more | {"lr": 0.02, "logging_steps": 1, "progress": "off"}
            Trainer(folder=str(tmp_path), name=name, callbacks=[record], **fit_settings).fit(Regression(), rows(23))
            return [row["lr"] for row in record.rows]

        assert rates(schedule) == pytest.approx(expected)
        two = run_ranks(2, lambda n=f"{schedule}2", rates=rates: rates(n, devices=2))
        assert two[0] == two[1] == pytest.approx(expected)


def test_weight_decay_spares_vectors(tmp_path: Path) -> None:
    task = Regression()
    before = {k: v.clone() for k, v in task.model.state_dict().items()}
    Trainer(folder=str(tmp_path), max_steps=1, lr=1e-3, weight_decay=10.0, progress="off").fit(task, rows(6))
    for name, value in task.model.state_dict().items():
        moved = (value - before[name]).abs()
        decayed = (before[name] * (1 - 1e-2) - before[name]).abs()
        if value.ndim < 2:
            assert moved.max() <= 1.001e-3
        else:
            torch.testing.assert_close(value, before[name] * 0.99, rtol=0, atol=1.001e-3)
            assert decayed.max() > 1.1e-3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "train: the data set is empty"),
        (iter(range(3)), "has no len and no"),
        (DataLoader(type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(())})()), "train: "),
        (DataLoader(rows(4), sampler=torch.utils.data.SubsetRandomSampler([1, 2])), "sampler of its own"),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(folder=str(tmp_path), max_steps=1, progress="off").fit(Regression(), data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lrr": 1}, r"unknown argument 'lrr'\. Did you mean 'lr'"),
        ({"strategy": "dddp"}, r"unknown strategy 'dddp'\. Did you mean 'ddp'"),
        ({"strategy": "fsdp:2"}, r"is for 2 rank\(s\), and devices × num_nodes is 1: set devices=2"),
        ({"strategy": Parallel(replicate=4)}, r"is for 4 rank\(s\)"),
        ({"precision": "fp8"}, r"precision"),
        ({"accelerator": "gpu"}, r"cpu"),
        ({"max_steps": 0}, r"max_steps"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    if arguments.get("accelerator") == "gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=message):
        Trainer(folder=str(tmp_path), **arguments)


def test_a_task_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no Task"):
        Trainer(folder=str(tmp_path), max_steps=1).fit(nn.Linear(1, 1), rows(3))  # type: ignore[arg-type]
    frozen = Regression()
    frozen.model.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the model is trainable"):
        Trainer(folder=str(tmp_path), max_steps=1).fit(frozen, rows(3))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_bf16(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    task, record = Bf16Regression(), Record()
    settings = {"lr": 0.02, "global_batch_size": 23, "logging_steps": 1, "max_steps": 8, "progress": "off"}
    Trainer(folder=str(tmp_path), precision=precision, callbacks=[record], **settings).fit(task, rows(23))
    assert record.losses()[-1] < record.losses()[0]
    assert {p.dtype for p in task.model.parameters()} == {dtype}
    exact = fit(tmp_path, "exact", global_batch_size=23, max_steps=8)[0]
    assert exact != record.losses()
    np.testing.assert_allclose(record.losses(), exact, rtol=0.05)


class Bf16Regression(Regression):
    """Inputs follow the model's dtype, as a language model's embeddings do."""

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"].to(next(self.model.parameters()).dtype)}


def test_what_would_be_ignored_is_refused_or_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.resume=true needs run\.name"):
        Trainer(folder=str(tmp_path), resume=True)
    with pytest.raises(UserError, match=r"micro_batch_tokens needs samples of tokens"):
        fit(tmp_path, "run", micro_batch_tokens=100, max_steps=1)

    class Told(Callback):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def on_warning(self, text: str) -> None:
            self.texts.append(text)

    class WithBatchNorm(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    told = Told()
    settings = {"folder": str(tmp_path), "name": "new", "max_steps": 1, "progress": "off", "resume": True}
    Trainer(callbacks=[told], **settings).fit(WithBatchNorm(), rows(9))
    assert len(told.texts) == 2
    assert "no checkpoint to resume" in told.texts[0]
    assert "batch normalisation takes its statistics from each micro-batch" in told.texts[1]


def test_a_script_shows_a_fault_of_the_user_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from twofold import Trainer\nTrainer(lrr=1)\n")
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown argument 'lrr'. Did you mean 'lr'?")
    assert done.stderr.count("\n") == 1
