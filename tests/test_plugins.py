"""Parts that others bring (`examples/plugin`), by the names of its entry points and by dotted path."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_law_matrix import check
from test_layouts import Net, fit, rows
from torch import nn

from twofold import Trainer, UserError
from twofold.config.load import validate_kwargs
from twofold.config.schema import TrainConfig
from twofold.data.order import Order
from twofold.mesh.mesh import Mesh
from twofold.parallel import Parallel, parse
from twofold.parallel.data import replicate

PACKAGE = Path(__file__).parent.parent / "examples" / "plugin"
STEPS = 8


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves of the package: its modules, and its entry points as written in pyproject.toml."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    site = tmp_path / "site"
    info = site / "twofold_parts-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(PACKAGE)])


def lion(model: nn.Module) -> Callable[[], None]:
    """A step as algorithm 2 of arXiv 2302.06675 writes it."""
    momenta = {p: torch.zeros_like(p) for p in model.parameters()}

    @torch.no_grad()
    def step() -> None:
        for p, m in momenta.items():
            g, decay = p.grad, 0.01 if p.ndim == 2 else 0.0
            assert g is not None
            p -= 1e-2 * (torch.sign(0.9 * m + 0.1 * g) + decay * p)
            m.copy_(0.99 * m + 0.01 * g)

    return step


def muon(model: nn.Module) -> Callable[[], None]:
    """Muon by singular values, on which the polynomial of Newton-Schulz acts; torch's AdamW for vectors."""
    momenta = {p: torch.zeros_like(p) for p in model.parameters() if p.ndim == 2}
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], 1e-2, (0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step() -> None:
        vectors.step()
        for p, m in momenta.items():
            assert p.grad is not None
            m.copy_(0.95 * m + 0.05 * p.grad)
            u, s, v = torch.linalg.svd((0.05 * p.grad + 0.95 * m).double(), full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
            p.copy_(p * (1 - 1e-2 * 0.01) - 1e-2 * 0.2 * max(p.shape) ** 0.5 * (u * s @ v))

    return step


def plain(optimizer: Callable[[nn.Module], Callable[[], None]]) -> list[float]:
    """Losses of a plain loop over whole batches."""
    data, model, losses = rows(), Net(), []
    step = optimizer(model)
    for k in range(STEPS):
        batch = [data[i] for i in Order(len(data), 6, seed=42).step(k)]
        x, y, w = (torch.tensor(np.array([r[key] for r in batch])) for key in ("x", "y", "weight"))
        loss = (w * (model(x)[:, 0] - y).square()).sum() / w.sum()
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step()
        losses.append(loss.item())
    assert min(losses) < 0.95 * losses[0]
    return losses


@pytest.mark.parametrize(("name", "optimizer"), [("lion", lion), ("twofold_parts.lion.Lion", lion), ("muon", muon)])
def test_an_optimizer(tmp_path: Path, name: str, optimizer: Any) -> None:
    """On whole parameters, in ZeRO's parts, on DTensors of one and two axes, and in a pipeline."""
    expected = plain(optimizer)
    settings = {"optimizer": name, "lr": 1e-2, "weight_decay": 0.01, "max_steps": STEPS}
    layouts = [("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp", 2), ("tp", 2), ("fsdp:2,tp:2", 4), ("pp", 2)]
    for strategy, ranks in layouts:
        for found in run_ranks(ranks, fit, tmp_path, f"{strategy}-run", devices=ranks, strategy=strategy, **settings):
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_it_resumes_bit_exactly(tmp_path: Path, strategy: str) -> None:
    for name in ("lion", "muon"):
        where = {"devices": 2, "strategy": strategy, "optimizer": name, "lr": 1e-2}
        expected = run_ranks(2, fit, tmp_path, f"{name}-straight", **where)
        first = run_ranks(2, fit, tmp_path, f"{name}-parts", max_steps=5, **where)
        second = run_ranks(2, fit, tmp_path, f"{name}-parts", resume=True, **where)
        assert [a + b for a, b in zip(first, second, strict=True)] == expected, name


def test_options_go_to_the_class_and_nothing_is_dropped() -> None:
    from twofold.engine.optim import build_optimizer

    def made(**settings: Any) -> Any:
        [config] = validate_kwargs((TrainConfig,), settings)
        return build_optimizer(nn.Linear(3, 2), config)

    options = {"nesterov": True, "momentum": 0.8}
    sgd = made(optimizer="torch.optim.SGD", optimizer_options=options, lr=0.3, weight_decay=0.1)
    assert [(g["nesterov"], g["momentum"], g["lr"], g["weight_decay"]) for g in sgd.param_groups] == [
        (True, 0.8, 0.3, 0.1),
        (True, 0.8, 0.3, 0.0),
    ]
    assert made(optimizer="adamw").param_groups[0]["fused"]
    assert made(optimizer="lion", betas=(0.8, 0.9)).param_groups[0]["betas"] == (0.8, 0.9)
    for settings, message in [
        (
            {"optimizer": "lino"},
            "optimizer: unknown optimizer 'lino'. Did you mean 'lion'? Known: adamw, lion, muon, sgd",
        ),
        ({"optimizer": "no_such.Thing"}, "optimizer 'no_such.Thing': No module named 'no_such'. Install the package"),
        ({"optimizer": "torch.optim.Adamx"}, "optimizer 'torch.optim.Adamx': module torch.optim has no 'Adamx'."),
        ({"optimizer": "torch.nn.Linear"}, "train.optimizer=torch.nn.Linear is no torch.optim.Optimizer"),
        ({"optimizer": "sgd", "betas": (0.8, 0.9)}, "train.optimizer=sgd takes no betas: remove train.betas."),
        ({"optimizer": "lion", "momentum": 0.5}, "train.optimizer=lion takes no momentum"),
        ({"optimizer": "sgd", "optimizer_options": {"nestrov": 1}}, "sgd takes no 'nestrov'. Did you mean 'nesterov'?"),
        ({"optimizer": "sgd", "optimizer_options": {"lr": 1}}, "train.optimizer_options.lr: set train.lr instead."),
        ({"optimizer": "torch.optim.Muon"}, "train.optimizer=torch.optim.Muon refuses: Muon only supports 2D"),
    ]:
        with pytest.raises(UserError) as refused:
            made(**settings)
        assert message in str(refused.value)


def test_a_file_beside_the_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("beside_me.py").write_text("import torch\nclass Mine(torch.optim.SGD):\n    pass\n")
    Trainer(optimizer="beside_me.Mine", devices=1)


# ----------------------------------------------------------------------------------------------- gradients on the way


def hooked(folder: Path, hook: str | None, options: dict[str, Any] | None = None, **settings: Any) -> list[float]:
    where = {"devices": dist.get_world_size() if dist.is_initialized() else 2, "strategy": "ddp"} | settings
    return fit(folder, "run", optimizer="sgd", comm_hook=hook, comm_hook_options=options or {}, **where)


@pytest.mark.parametrize(
    ("hook", "options", "tolerance"),
    [
        ("bf16", {}, 1e-2),
        ("fp16", {}, 2e-3),
        ("powersgd", {"start_powerSGD_iter": 2, "matrix_approximation_rank": 6}, 1e-4),
        ("int8", {}, 1e-2),
        ("twofold_parts.int8.Int8", {}, 1e-2),
        ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook", {}, 1e-6),
    ],
)
def test_a_hook_carries_gradients(tmp_path: Path, hook: str, options: dict[str, Any], tolerance: float) -> None:
    """Near the run without one, to what the hook rounds; a wrong scale would be off by the ranks."""
    expected = run_ranks(2, hooked, tmp_path / "without", None)[0]
    assert min(expected) < 0.9 * expected[0]
    for found in run_ranks(2, hooked, tmp_path / "with", hook, options):
        np.testing.assert_allclose(found, expected, rtol=tolerance)
        if tolerance > 1e-6:
            assert found != expected  # it has rounded: the hook was there


class Dot(nn.Module):
    """Its gradient is its input. More than a megabyte: DDP makes buckets of one after the first step that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(300_000) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x[i] * p).sum() for i, p in enumerate(self.parts))  # type: ignore[return-value]


def int8_mean() -> tuple[np.ndarray, np.ndarray]:
    """The mean of two ranks' gradients by the hook, four times the same ones, and the true mean."""
    mesh = Mesh.join("cpu")
    from twofold_parts.int8 import Int8

    model = Dot()
    placed = replicate(model, mesh, hook=lambda group: Int8(group))
    x = torch.randn(2, 3, 300_000, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(4):
        model.zero_grad()
        placed.module(x[mesh.rank]).backward()
        found.append(np.stack([p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]))
    return np.stack(found), x.mean(0).numpy()


def test_int8_gives_back_what_it_lost() -> None:
    for found, true in run_ranks(2, int8_mean):
        rounding = 5.5 / 127 / 2  # half a step of the largest number, which is below 5.5
        for gradients in found:
            assert 1e-3 < np.abs(gradients - true).max() < 2 * rounding
        assert np.abs(found[1:].sum(0) - 3 * true).max() < 2 * rounding  # errors do not add up


def test_hooks_that_cannot_be() -> None:
    for settings, message in [
        ({"comm_hook": "int4"}, "comm_hook: unknown communication hook 'int4'. Did you mean 'int8'?"),
        (
            {"comm_hook": "int8", "comm_hook_options": {"bits": 4}},
            "run.comm_hook=int8: got an unexpected keyword argument",
        ),
        ({"comm_hook": "bf16", "comm_hook_options": {"a": 4}}, "run.comm_hook=bf16 is a function and takes no options"),
        ({"comm_hook_options": {"a": 4}}, "run.comm_hook_options are for a run.comm_hook"),
        ({"comm_hook": "bf16", "devices": 2, "strategy": "fsdp"}, "run.comm_hook works with whole copies"),
        ({"comm_hook": "math.pi"}, "run.comm_hook=math.pi is neither a function"),
    ]:
        with pytest.raises(UserError) as refused:
            Trainer(accelerator="cpu", **({"devices": 1} | settings))
        assert message in str(refused.value)


# ------------------------------------------------------------------------------------------------------------ backends


def on_backend(folder: Path, backend: str) -> tuple[list[float], str]:
    found = fit(folder, "run", devices=2, strategy="ddp", backend=backend)
    return found, dist.get_backend()


@pytest.mark.parametrize("backend", ["many-threads", "twofold_parts.many_threads.register"])
def test_a_backend_of_the_run(tmp_path: Path, backend: str) -> None:
    expected = run_ranks(2, fit, tmp_path, "usual", devices=2, strategy="ddp")
    for (found, name), usual in zip(run_ranks(2, on_backend, tmp_path / "x", backend), expected, strict=True):
        assert name == "many_threads"
        assert found == usual


def on_axis() -> tuple[str, float]:
    mesh = Mesh.join("cpu")
    layout = Parallel(shard=2, tensor=2, backends={"tensor": "many-threads"})
    mesh.arrange(layout.sizes, layout.timeouts, layout.backends)
    total = torch.tensor(float(mesh.rank))
    dist.all_reduce(total, group=mesh.group("tensor"))
    return dist.get_backend(mesh.group("tensor")), total.item()


def test_a_backend_of_an_axis() -> None:
    assert run_ranks(4, on_axis) == [("many_threads", 1.0)] * 2 + [("many_threads", 5.0)] * 2


def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"run\.backend: unknown backend 'glo'\. Did you mean 'gloo'"):
        Trainer(accelerator="cpu", devices=1, backend="glo")
    with pytest.raises(UserError, match=r"Parallel: backends\['tensor'\]: unknown backend 'glo'"):
        Trainer(accelerator="cpu", devices=2, strategy=Parallel(tensor=2, backends={"tensor": "glo"}))


# --------------------------------------------------------------------------------- a schedule, an exchange: a file each


@pytest.mark.parametrize("strategy", ["pp:2,breadth-first", "pp:2,twofold_parts.breadth_first.SCHEDULE"])
def test_a_schedule_is_one_file(strategy: str) -> None:
    """Law 1 as in the matrix: gradients of one step and the losses of 20."""
    check("qwen2", parse(strategy, 2), 2)


def test_with_another_axis_beneath() -> None:
    check("qwen2", parse("pp:2,fsdp:2,breadth-first", 4), 4)


@pytest.mark.parametrize("strategy", ["cp:2,by-head", "cp:2,twofold_parts.by_head.attend"])
def test_an_exchange_is_one_file(strategy: str) -> None:
    check("llama", parse(strategy, 2), 2)


def test_words_of_a_strategy_that_are_not_there() -> None:
    for strategy, message in [
        ("pp:2,breadth-frist", "unknown strategy 'pp:2,breadth-frist'. Did you mean 'breadth-first'?"),
        ("pp:2,no_such.SCHEDULE", "schedule 'no_such.SCHEDULE': No module named 'no_such'"),
        ("fsdp:2,breadth-first", "'breadth-first' belongs to the pipeline axis: add 'pp' to it."),
    ]:
        with pytest.raises(UserError) as refused:
            parse(strategy, 2)
        assert message in str(refused.value)
    with pytest.raises(UserError, match=r"schedule 'math\.pi' is no twofold"):
        Parallel(pipeline=2, schedule="math.pi")
