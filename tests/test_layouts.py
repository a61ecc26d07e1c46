"""Layouts through the Trainer: modules of one's own, resume, adapters, fp16, exports, what a rank holds."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import reference
import torch
from ranks import RankFailed, run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from twofold import Callback, Loss, Task, Trainer
from twofold.data.order import Order
from twofold.engine.checkpoint import Checkpoints, Progress, load_weights
from twofold.engine.optim import decay_groups
from twofold.engine.scaler import LossScale
from twofold.engine.step import MicroBatch, TrainStep
from twofold.mesh.mesh import Mesh
from twofold.methods.sft import SFT
from twofold.models.causal_lm import CausalLM, examine
from twofold.ops.logps import linear_logps
from twofold.parallel import DATA_AXES, parse
from twofold.parallel.place import place
from twofold.parallel.whole import Whole


class Net(nn.Module):
    """Three blocks; the plans are all that the tensor and pipeline axes need."""

    tensor_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    pipeline_plan: ClassVar = ["blocks", "out"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Weighted(Task):
    def __init__(self) -> None:
        self.model = Net()

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"x": batch["x"]}

    def loss(self, output: Any, batch: Any) -> Loss:
        error = F.mse_loss(output[:, 0].float(), batch["y"], reduction="none")
        return Loss.of((batch["weight"] * error).sum(), batch["weight"].sum())


class TwoTerms(Weighted):
    """A second term with another weight, which only a forward pass can tell."""

    def loss(self, output: Any, batch: Any) -> Loss:
        [(total, weight)] = super().loss(output, batch).terms.values()
        return Loss({"mse": (total, weight), "size": (output.abs().sum(), len(output), 0.3)})


class Weighed(TwoTerms):
    """Which says them beforehand, as a pipeline needs."""

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"mse": batch["weight"].sum(), "size": len(batch["x"])}


def rows(n: int = 23) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 6)).astype(np.float32)
    y = (x @ rng.normal(size=6) + 0.5).astype(np.float32)
    w = rng.integers(1, 5, n).astype(np.float32)
    return [{"x": x[i], "y": y[i], "weight": w[i]} for i in range(n)]


class Losses(Callback):
    rank_zero_only = False

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, row: dict[str, Any]) -> None:
        self.found.append(row["loss"])


def plain_losses(steps: int, optimizer: str, two_terms: bool = False) -> list[float]:
    """The same run in plain PyTorch: means over the whole batch, clipping at 1, decay of matrices only."""
    data, model = rows(), Net()
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == m], "weight_decay": 0.01 * m} for m in (1, 0)
    ]
    opt = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](groups, lr=0.02)
    losses = []
    for k in range(steps):
        batch = [data[i] for i in Order(len(data), 6, seed=42).step(k)]
        x, y, w = (torch.tensor(np.array([r[key] for r in batch])) for key in ("x", "y", "weight"))
        output = model(x)
        loss = (w * (output[:, 0] - y).square()).sum() / w.sum()
        if two_terms:
            loss = loss + 0.3 * output.abs().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return losses


def fit(folder: Path, name: str, task: type[Task] = Weighted, **settings: Any) -> list[float]:
    losses = Losses()
    options = {"lr": 0.02, "global_batch_size": 6, "micro_batch_size": 2, "logging_steps": 1, "accelerator": "cpu"}
    options |= {"schedule": "constant", "progress": "off", "max_steps": 12}
    evaluated = rows(7) if settings.get("eval_steps") else None
    Trainer(folder=str(folder), name=name, callbacks=[losses], **(options | settings)).fit(task(), rows(), evaluated)
    return losses.found


@pytest.mark.parametrize(("optimizer", "two_terms"), [("adamw", True), ("sgd", False)])
def test_a_module_of_ones_own(tmp_path: Path, optimizer: str, two_terms: bool) -> None:
    """Every axis against a plain loop: 12 steps with AdamW (fused) and SGD, clipping on, decay of matrices only."""
    task = TwoTerms if two_terms else Weighted
    expected = plain_losses(12, optimizer, two_terms)
    assert min(expected) < 0.9 * expected[0]
    layouts = [("zero1", 2), ("zero2", 2), ("fsdp", 2), ("tp", 2), ("fsdp:2,tp:2", 4), ("ddp:2,tp:2", 4)]
    pipelines = [("pp,gpipe", 2), ("pp,zbv", 2), ("pp:3", 3), ("pp:2,tp:2", 4), ("pp:2,fsdp:2,interleaved", 4)]
    for strategy, ranks in layouts + pipelines:
        own = Weighed if two_terms and "pp" in strategy else task
        settings = {"optimizer": optimizer, "weight_decay": 0.01, "devices": ranks, "strategy": strategy}
        for found in run_ranks(ranks, fit, tmp_path, f"{strategy}-run", own, **settings):
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=strategy)


def test_a_loss_of_several_terms_in_a_pipeline_needs_their_weights(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"UserError: .*give TwoTerms a method weights"):
        run_ranks(2, fit, tmp_path, "run", TwoTerms, devices=2, strategy="pp,gpipe")


RESUMED = [("zero1", 32), ("zero2", 32), ("fsdp", 32), ("tp", 32), ("fsdp", 16), ("zero1", 16), ("pp,zbv", 32)]


@pytest.mark.parametrize(("strategy", "precision"), [*RESUMED, ("pp", 16)])
def test_resume_is_bit_exact(tmp_path: Path, strategy: str, precision: int) -> None:
    """With fp16 the loss scale resumes too: it has been lowered before the stop."""
    where = {"devices": 2, "strategy": strategy, "precision": precision}
    expected = run_ranks(2, fit, tmp_path, "straight", **where)
    first = run_ranks(2, fit, tmp_path, "parts", max_steps=5, **where)
    second = run_ranks(2, fit, tmp_path, "parts", resume=True, **where)
    assert [a + b for a, b in zip(first, second, strict=True)] == expected


def moe_step(strategy: str, ranks: int, folder: Path, resume: bool) -> dict[str, np.ndarray]:
    """A step of AdamW and a checkpoint, or a second step from it; the weights afterwards."""
    mesh = Mesh.join("cpu")
    layout = parse(strategy, ranks)
    mesh.arrange(layout.sizes)
    hf = reference.tiny_model("qwen3_moe")
    task = SFT(CausalLM(hf, examine(hf)))
    placed = place(task.model, mesh, layout)
    optimizer = placed.optimizer(torch.optim.AdamW, decay_groups(task.model, 0.0), lr=1e-2, fused=True)
    step = TrainStep(task, placed, optimizer, mesh, nullcontext, lambda b: b, 1.0)
    checkpoints, batch = Checkpoints(folder, mesh), MicroBatch(task.collate(reference.tiny_samples(3)))
    if resume:
        checkpoints.load(folder / "step-00000001", step, {})
        step([batch])
    else:
        step([batch])
        checkpoints.save(step, Progress(step=1), {}, best=False)
        saved = {f"saved {n}": x for n, x in weights_of(hf).items()}
        step([batch])
        return saved | weights_of(hf)
    return weights_of(hf)


def weights_of(hf: nn.Module) -> dict[str, np.ndarray]:
    named = hf.named_parameters(remove_duplicate=False)
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named}
    return {n: x.detach().clone().numpy() for n, x in full.items()}


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("tp", 2), ("fsdp:2,tp:2", 4), ("ep", 2), ("ep:2,fsdp:2", 4), ("ep:2,cp:2", 4), ("ep:2,pp:2,gpipe", 4)],
)
def test_a_checkpoint_of_fused_experts_in_slices(tmp_path: Path, strategy: str, ranks: int) -> None:
    """Gate and up are one weight, split in strides (tp) or by expert (ep): the checkpoint holds it in its true order,
    and resumes."""
    straight, resumed = (
        _merged(run_ranks(ranks, moe_step, strategy, ranks, tmp_path, again)) for again in (False, True)
    )
    model = reference.tiny_model("qwen3_moe")
    load_weights(tmp_path / "step-00000001", CausalLM(model, examine(model)))
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(p.detach().numpy(), straight[f"saved {name}"], err_msg=name)
        np.testing.assert_array_equal(resumed[name], straight[name], err_msg=name)


def _merged(every: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What the ranks of a pipeline hold together."""
    return {name: value for found in every for name, value in found.items()}


def lora_gradients(strategy: str, ranks: int, family: str) -> tuple[dict, int, int]:
    """(gradients of an adapter after one step's worth of samples, weights held here, weights of the model)."""
    from twofold.config.schema import LoraConfig
    from twofold.models.lora import add_lora

    mesh = Mesh.join("cpu")
    layout = parse(strategy, ranks)
    mesh.arrange(layout.sizes)
    hf = reference.tiny_model(family)
    abilities = examine(hf)
    torch.manual_seed(3)
    model = add_lora(hf, LoraConfig(r=4))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    every = sum(p.numel() for p in model.parameters())
    task = SFT(CausalLM(model, abilities))
    placed = place(task.model, mesh, layout)
    batch = task.collate(reference.tiny_samples(3, seed=1))
    if placed.pipeline is not None:
        placed.pipeline.run(
            [task.inputs(batch)], lambda output, _: task.loss(output, batch).terms["loss"][0], nullcontext
        )
    else:
        task.loss(placed.module(**task.inputs(batch)), batch).terms["loss"][0].backward()
    held = sum((p._local_tensor if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    pieces = placed.gradient_scale / mesh.size(*DATA_AXES)  # of each sample: the context axis
    full = {
        name: pieces * (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).numpy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return full, held, every


ADAPTED = [("fsdp", 2), ("tp", 2), ("fsdp:2,tp:2", 4), ("pp,gpipe", 2), ("fsdp:2,cp:2", 4), ("tp,sequence", 2)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3", "gpt2"])
@pytest.mark.parametrize(("strategy", "ranks"), ADAPTED)
def test_lora(family: str, strategy: str, ranks: int) -> None:
    """Every rank has the same samples here, so that the mean over data ranks is the gradient of one process."""
    expected, _, every = lora_gradients("single", 1, family)
    assert max(np.abs(g).max() for g in expected.values()) > 0.01
    every_rank = run_ranks(ranks, lora_gradients, strategy, ranks, family)
    assert {name for found, _, _ in every_rank for name in found} == expected.keys()
    for found, held, _ in every_rank:
        assert "pp" in strategy or found.keys() == expected.keys()
        assert held < {"qwen3_moe": 0.85, "gpt2": 0.8}.get(family, 0.65) * every  # adapted experts, wpe: whole
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=2e-6, err_msg=name)


PIPELINES = [("pp", 2), ("pp:2,zbv", 2), ("pp:2,fsdp:2,tp:2", 8)]


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("tp", 2), ("fsdp:2,tp:2", 4), *PIPELINES])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_made_whole_again(strategy: str, ranks: int, family: str) -> None:
    """What is gathered on rank 0 gives the logits of the model before it was placed; tied weights stay tied."""
    ids = torch.arange(3, 15)[None]
    expected = reference.tiny_model(family)(input_ids=ids).logits.detach()

    def gathered() -> Any:
        mesh = Mesh.join("cpu")
        layout = parse(strategy, ranks)
        mesh.arrange(layout.sizes)
        model = reference.tiny_model(family)
        parts = Whole(model)
        wrapped = CausalLM(model, examine(model), packed=False)
        place(wrapped, mesh, layout)
        whole = parts.of(model, mesh)
        if whole is None:
            return None
        tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight  # type: ignore[operator, union-attr]
        return whole(input_ids=ids).logits.detach(), tied

    first, *others = run_ranks(ranks, gathered)
    torch.testing.assert_close(first[0], expected)
    assert first[1]
    assert others == [None] * (ranks - 1)


@pytest.mark.parametrize("keep", [0, 1 << 30])
def test_the_head_in_slices_of_the_vocabulary(keep: int) -> None:
    """53 rows over 3 ranks (18, 18, 17), in chunks, with a mean and a bias; expected from torch's log_softmax."""
    from twofold.ops import logps

    def sliced() -> Any:
        import torch.distributed as dist

        mesh = Mesh.join("cpu")
        logps.KEEP_BYTES, logps.CHUNK_BYTES = keep, 1
        hidden, weight, bias, targets, up = case()
        start, widest = 18 * mesh.rank, 18
        part = logps.Slice(start, widest, 53, lambda x: dist.all_reduce(x, dist.ReduceOp.MAX), dist.all_reduce)
        mine = [x[start : start + widest].detach().clone().requires_grad_() for x in (weight, bias)]
        logp, mean = linear_logps(hidden, targets, mine[0], mine[1], with_mean=True, part=part)
        grads = torch.autograd.grad((logp * up[0] + mean * up[1]).sum(), [hidden, *mine])
        return [x.detach() for x in (logp, mean, *grads)]

    def case() -> Any:
        generator = torch.Generator().manual_seed(0)
        new = {"generator": generator, "dtype": torch.double}
        hidden, weight = torch.randn(70, 12, **new).requires_grad_(), torch.randn(53, 12, **new).requires_grad_()
        bias, targets = torch.randn(53, **new).requires_grad_(), torch.randint(53, (70,), generator=generator)
        return hidden, weight, bias, targets, torch.randn(2, 70, **new)

    hidden, weight, bias, targets, up = case()
    everything = F.log_softmax(F.linear(hidden, weight, bias), -1)
    logp, mean = everything.gather(1, targets[:, None])[:, 0], everything.mean(-1)
    expected = torch.autograd.grad((logp * up[0] + mean * up[1]).sum(), [hidden, weight, bias])
    found = run_ranks(3, sliced)
    for one in found:
        torch.testing.assert_close(one[:3], [logp.detach(), mean.detach(), expected[0]])
    torch.testing.assert_close(torch.cat([one[3] for one in found]), expected[1])
    torch.testing.assert_close(torch.cat([one[4] for one in found]), expected[2])


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_fp16(tmp_path: Path, strategy: str, ranks: int) -> None:
    """Close to fp32 from the same weights, and learning; the first steps may be skipped while the scale is found."""
    exact = fit(tmp_path, "exact", devices=1)
    settings = {"precision": 16, "devices": ranks, "strategy": strategy}
    run = (lambda *a, **k: [fit(*a, **k)]) if ranks == 1 else (lambda *a, **k: run_ranks(2, fit, *a, **k))
    for found in run(tmp_path, "half", **settings):
        assert found != exact
        np.testing.assert_allclose(found[0], exact[0], rtol=0.01)
        assert found[-1] < 0.2 * found[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_gradients_are_summed_in_fp32(strategy: str) -> None:
    """256 + 1 + 1 over three ranks: in bf16 each 1 would be rounded away, and 85.5 be left of 86."""

    def mean() -> float:
        mesh = Mesh.join("cpu")
        mesh.arrange(parse(strategy, 3).sizes)
        model = nn.Linear(1, 3, bias=False, dtype=torch.bfloat16)
        placed = place(model, mesh, parse(strategy, 3))
        value = 256.0 if mesh.rank == 0 else 1.0
        placed.module(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
        grad = model.weight.grad
        return float((grad.full_tensor() if isinstance(grad, DTensor) else grad)[0])  # type: ignore[index]

    assert run_ranks(3, mean) == [86.0] * 3


@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_scale_skips_and_adjusts(fused: bool) -> None:
    """Against torch's GradScaler: the same scales and the same weights over good and overflowing steps."""
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    mine = torch.optim.AdamW([ours], lr=0.1, fused=fused)
    other = torch.optim.AdamW([theirs], lr=0.1, fused=fused)
    scale = LossScale(torch.device("cpu"), initial=8.0, interval=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(9):
        gradient = torch.tensor([1.0, 2.0, float("inf") if step in (3, 4) else 3.0])
        ours.grad = gradient.clone()
        scale.step(mine, mine, gradient.isfinite().all())
        theirs.grad = gradient * scaler.scale(torch.ones(()))
        scaler.unscale_(other)
        scaler.step(other)
        scaler.update()
        assert float(scale.scale) == scaler.get_scale()
        torch.testing.assert_close(ours, theirs)
