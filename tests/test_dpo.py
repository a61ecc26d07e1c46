"""DPO and its family: losses and gradients against a plain loop over transformers, on one process and on layouts."""

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import templates as t
import torch
from method_runs import Run, run_method, same
from ranks import run_ranks

from twofold import DPOConfig, DPOTrainer, UserError
from twofold.config.schema import DataOptions
from twofold.data.order import Order
from twofold.data.prepare import prepare

TOKENIZER = t.byte_level(t.CHATML)
BETA, BATCH, STEPS, LR = 0.3, 4, 6, 0.005
LRS = {"sppo_hard": 5e-4, "ipo": 2e-2}  # of the others LR
KINDS = ("sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard", "nca_pair")


def rows(n: int) -> list[dict[str, Any]]:
    """Pairs of unequal length."""
    rng = np.random.default_rng(7)
    words = ["red", "blue", "one", "two", "cat", "sun"]
    texts = [[" ".join(rng.choice(words, rng.integers(1, 6))) for _ in range(3)] for _ in range(n)]
    return [
        {
            "prompt": a,
            "chosen": [{"role": "assistant", "content": b + " yes"}],
            "rejected": [{"role": "assistant", "content": c + " no"}],
        }
        for a, b, c in texts
    ]


ROWS = rows(10)


def tiny(family: str = "llama") -> Any:
    return reference.tiny_model(family, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)


def answer_logp(model: Any, sequence: dict[str, np.ndarray]) -> tuple[torch.Tensor, int]:
    """(sum of log p over the labelled tokens, their number) by transformers, from one sequence alone."""
    ids, labels = (torch.from_numpy(sequence[key])[None] for key in ("input_ids", "labels"))
    logp = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    kept = labels[:, 1:] != -100
    return logp.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0][kept].double().sum(), int(kept.sum())


def pair_loss(kind: str, c: torch.Tensor, r: torch.Tensor, e: float, counts: tuple[int, int]) -> torch.Tensor:
    """As the papers write them."""
    sigma = torch.sigmoid
    if kind == "sigmoid":
        return -(1 - e) * torch.log(sigma(BETA * (c - r))) - e * torch.log(1 - sigma(BETA * (c - r)))
    if kind == "robust":
        good, bad = -torch.log(sigma(BETA * (c - r))), -torch.log(sigma(BETA * (r - c)))
        return ((1 - e) * good - e * bad) / (1 - 2 * e)
    if kind == "hinge":
        return torch.maximum(c * 0, 1 - BETA * (c - r))
    if kind == "ipo":
        return (c / counts[0] - r / counts[1] - 1 / (2 * BETA)) ** 2
    if kind == "apo_zero":
        return 1 - sigma(BETA * c) + sigma(BETA * r)
    if kind == "apo_down":
        return sigma(BETA * c) + 1 - sigma(BETA * (c - r))
    if kind == "sppo_hard":
        return (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2
    good, bad = sigma(BETA * c), sigma(BETA * r)
    return -torch.log(good) - torch.log(1 - good) / 2 - torch.log(1 - bad) / 2


def plain_loss(
    model: Any, frozen: Any, samples: Sequence[Any], kinds: dict[str, float], e: float, sft: float
) -> torch.Tensor:
    losses, nll, tokens = [], [], 0
    for sample in samples:
        (chosen, n), (rejected, m) = (answer_logp(model, s) for s in sample["sequences"])
        with torch.no_grad():
            c0, r0 = (answer_logp(frozen, s)[0] if frozen is not None else 0.0 for s in sample["sequences"])
        losses.append(sum(w * pair_loss(k, chosen - c0, rejected - r0, e, (n, m)) for k, w in kinds.items()))
        nll.append(-chosen)
        tokens += n
    return torch.stack(losses).mean() + sft * torch.stack(nll).sum() / tokens


@lru_cache
def expected(
    kinds: tuple[tuple[str, float], ...], e: float = 0.0, sft: float = 0.0, free: bool = False, family: str = "llama"
) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses of all steps, weights after the last) of a plain loop."""
    data = prepare(ROWS, TOKENIZER, DataOptions(), kind="preference")
    order, model = Order(len(ROWS), BATCH, seed=42), tiny(family)
    frozen = None if free else copy.deepcopy(model).eval()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LRS.get(kinds[0][0], LR)), []
    for k in range(STEPS):
        loss = plain_loss(model, frozen, [data[i] for i in order.step(k)], dict(kinds), e, sft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, reference.parameters(model)


def fit(folder: Path, name: str, family: str = "llama", evaluate: bool = False, model: Any = None, **more: Any) -> Run:
    """(rows of metrics, evaluations, weights) of a run of `DPOTrainer`."""
    args = {"beta": BETA} | more.pop("args", {})
    options = {
        "global_batch_size": BATCH,
        "max_steps": STEPS,
        "lr": LR,
        "micro_batch_tokens": 150,
    } | more
    return run_method(
        DPOTrainer,
        folder,
        name,
        model=model or tiny(family),
        tokenizer=TOKENIZER,
        train_dataset=ROWS,
        eval_dataset=ROWS if evaluate else None,
        args=args,
        **options,
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_loss(kind: str, tmp_path: Path) -> None:
    e = 0.1 if kind in ("sigmoid", "robust") else 0.0
    losses, weights = expected(((kind, 1.0),), e)
    start = reference.parameters(tiny())
    assert max(np.abs(weights[n] - start[n]).max() for n in weights) > 1e-4  # gradients large enough to compare
    same(fit(tmp_path, "one", args={"loss_type": kind, "label_smoothing": e}, lr=LRS.get(kind, LR)), losses, weights)


def test_several_losses_and_the_sft_term(tmp_path: Path) -> None:
    losses, weights = expected((("sigmoid", 0.8), ("apo_zero", 0.5)), sft=0.3)
    args = {"loss_type": ["sigmoid", "apo_zero"], "loss_weights": [0.8, 0.5], "sft_weight": 0.3}
    same(fit(tmp_path, "one", args=args), losses, weights)
    for two in run_ranks(2, fit, tmp_path, "two", args=args, devices=2, strategy="pp:2"):
        same(two, losses, weights)


def test_without_a_reference(tmp_path: Path) -> None:
    same(fit(tmp_path, "one", args={"reference": "none"}), *expected((("sigmoid", 1.0),), free=True))


LAYOUTS = (
    "ddp:2",
    "zero2:2",
    "fsdp:2",
    "tp:2",
    "tp:2,sequence",
    "pp:2",
    "pp:2,zbv",
    "cp:2",
    "cp:2,ring",
    "fsdp:2,tp:2",
    "pp:2,fsdp:2",
)


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_law_1(strategy: str, tmp_path: Path) -> None:
    losses, weights = expected((("sigmoid", 1.0),))
    assert losses[-1] < 0.9 * losses[0]
    ranks = 4 if strategy.count(":") > 1 else 2
    found = run_ranks(ranks, fit, tmp_path, "many", devices=ranks, strategy=strategy, evaluate=True)
    for one in found:
        same(one, losses, weights)


def test_experts(tmp_path: Path) -> None:
    losses, weights = expected((("sigmoid", 1.0),), family="qwen3_moe")
    for one in run_ranks(2, fit, tmp_path, "many", "qwen3_moe", devices=2, strategy="ep:2"):
        same(one, losses, weights)


def test_padded_batches_compute_the_same(tmp_path: Path) -> None:
    same(fit(tmp_path, "one", args={"attention": "padded"}), *expected((("sigmoid", 1.0),)))


def test_metrics(tmp_path: Path) -> None:
    """At the first step the model is its own reference; later chosen answers win."""
    rows_, evals, _ = fit(tmp_path, "one", evaluate=True)
    assert rows_[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows_[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    last = evals[-1]
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-9)
    assert last["rewards/accuracies"] > 0.5
    data, model = prepare(ROWS, TOKENIZER, DataOptions(), kind="preference"), tiny()
    first = [float(answer_logp(model, data[i]["sequences"][0])[0].detach()) for i in Order(10, BATCH, 42).step(0)]
    assert rows_[0]["logps/chosen"] == pytest.approx(np.mean(first), rel=1e-5)


# The reference


def kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.npz"))


def test_a_reference_is_computed_once_and_fits_or_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"reference_folder": str(tmp_path / "ref")}
    how: dict[str, Any] = {"progress": "plain", "evaluate": True}
    first = fit(tmp_path, "one", args=args, **how)
    assert "log-probabilities of 10 train samples" in capsys.readouterr().out
    assert [path.name for path in kept(tmp_path / "ref")] == ["eval.npz", "train.npz"]
    again = fit(tmp_path, "two", args=args, **how)
    assert "log-probabilities" not in capsys.readouterr().out
    assert [row["loss"] for row in again[0]] == [row["loss"] for row in first[0]]
    other = tiny()
    other.lm_head.weight.data[5, 5] += 1e-3
    with pytest.raises(UserError, match="was computed with another model, template or precision"):
        fit(tmp_path, "three", args=args, model=other)
    with pytest.raises(UserError, match="for other train rows"):
        fit(tmp_path, "four", args=args | {"max_length": 4096})


def test_the_cache_knows_models_apart(tmp_path: Path) -> None:
    """Without a folder of one's own nothing is refused: each model has its values."""
    other = tiny()
    other.lm_head.weight.data[5, 5] += 1e-3
    for name, model in (("one", None), ("two", other), ("three", None)):
        fit(tmp_path, name, model=model)
    assert len(kept(tmp_path / "cache" / "reference")) == 2
    lora: Any = {"adapter": {"r": 4}, "loss_type": "ipo"}
    fit(tmp_path, "four", args=lora)  # an adapter that changes nothing yet, and another loss: the same reference
    assert len(kept(tmp_path / "cache" / "reference")) == 2


def test_a_broken_file_of_the_cache_is_made_again(tmp_path: Path) -> None:
    first = fit(tmp_path, "one")
    [path] = kept(tmp_path / "cache" / "reference")
    path.write_bytes(path.read_bytes()[:100])
    assert [r["loss"] for r in fit(tmp_path, "two")[0]] == [r["loss"] for r in first[0]]


@pytest.fixture
def second(tmp_path: Path) -> str:
    """Another model than the trained one, in a folder."""
    torch.manual_seed(1)
    model = reference.tiny_model("llama", vocab_size=len(TOKENIZER), num_hidden_layers=1)
    model.save_pretrained(tmp_path / "second")
    TOKENIZER.save_pretrained(tmp_path / "second")
    return str(tmp_path / "second")


def with_second(path: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """A plain loop against that model."""
    from transformers import AutoModelForCausalLM

    frozen = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    data, order, model = prepare(ROWS, TOKENIZER, DataOptions(), kind="preference"), Order(10, BATCH, 42), tiny()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = plain_loss(model, frozen, [data[i] for i in order.step(k)], {"sigmoid": 1.0}, 0.0, 0.0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, reference.parameters(model)


def test_a_second_model_as_reference(second: str, tmp_path: Path) -> None:
    losses, weights = with_second(second)
    assert abs(losses[0] - np.log(2)) > 1e-3
    for how in ("precompute", "live"):
        args = {"reference": how, "reference_model": second}
        same(fit(tmp_path, how, args=args), losses, weights)
    for i, strategy in enumerate(("ddp:2", "fsdp:2", "tp:2", "cp:2")):
        for one in run_ranks(2, fit, tmp_path, f"live{i}", args=args, devices=2, strategy=strategy):
            same(one, losses, weights)
    pre = {"reference_model": second}
    for i, strategy in enumerate(("pp:2", "fsdp:2")):
        (tmp_path / "cache").rename(tmp_path / f"used{i}")
        for one in run_ranks(2, fit, tmp_path, f"pre{i}", args=pre, devices=2, strategy=strategy):
            same(one, losses, weights)


@pytest.mark.parametrize("strategy", ["ddp:2", "fsdp:2", "tp:2", "cp:2"])
def test_an_adapter_switched_off_is_the_reference(strategy: str, tmp_path: Path) -> None:
    """With dropout on the adapter, which must not touch the reference; live and precomputed are the same run."""
    args: Any = {"adapter": {"r": 4, "dropout": 0.3}}
    pre, live = (fit(tmp_path, how, args=args | {"reference": how}, lr=0.5) for how in ("precompute", "live"))
    assert pre[0][-1]["loss"] < 0.69
    np.testing.assert_allclose([r["loss"] for r in live[0]], [r["loss"] for r in pre[0]], rtol=1e-6)
    clean: Any = {"adapter": {"r": 4}, "reference": "live"}
    one = fit(tmp_path, "clean", args=clean, lr=0.5)
    for two in run_ranks(2, fit, tmp_path, "two", args=clean, lr=0.5, devices=2, strategy=strategy):
        np.testing.assert_allclose([r["loss"] for r in two[0]], [r["loss"] for r in one[0]], rtol=1e-5)


def test_resume_keeps_the_reference_of_the_start(tmp_path: Path) -> None:
    whole = fit(tmp_path, "whole")
    fit(tmp_path, "cut", max_steps=3)
    (tmp_path / "cache").rename(tmp_path / "lost")  # it must be computed again, and not from the checkpoint
    rest = fit(tmp_path, "cut", resume=True)
    np.testing.assert_allclose([r["loss"] for r in rest[0]], [r["loss"] for r in whole[0]][3:], rtol=1e-6)


def test_what_cannot_be(tmp_path: Path) -> None:
    for args, more, reason in (
        ({"reference": "live"}, {}, "needs method.reference_model or an adapter"),
        ({"reference": "none", "reference_model": "x"}, {}, "has no reference"),
        ({"reference": "live", "adapter": {"r": 4}}, {"devices": 2, "strategy": "pp"}, r"runs on no pipeline \(pp\)"),
        ({"beta": 0}, {}, "beta"),
        ({"label_smoothing": 0.5}, {}, "label_smoothing"),
        (
            {"loss_type": ["sigmoid"], "loss_weights": [1.0, 2.0]},
            {},
            "loss_weights has 2 numbers and loss_type names 1",
        ),
        ({"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0]}, {}, "has 1 numbers and loss_type names 2"),
        ({"reference_model": "nowhere/at/all"}, {}, r"method\.reference_model: nowhere/at/all is no model folder"),
        ({"loss_type": "best"}, {}, "loss_type"),
    ):
        with pytest.raises(UserError, match=reason):
            fit(tmp_path, "none", args=args, **more)
    with pytest.raises(UserError, match="this method learns from preference rows"):
        DPOTrainer(model=tiny(), tokenizer=TOKENIZER, train_dataset=[{"text": "a b c"}], accelerator="cpu")
    assert DPOConfig().losses() == [("sigmoid", 1.0)]


def test_evaluation_on_rows_that_are_held_out(tmp_path: Path) -> None:
    """Two of ten rows; without training steps on them the training losses are those of the other eight."""
    found, evals, _ = fit(tmp_path, "one", args={"eval_split": 0.2}, max_epochs=1, max_steps=None)
    assert len(found) == 2  # eight rows in steps of four
    assert evals[-1]["loss"] != found[-1]["loss"]


def test_a_second_model_is_in_no_checkpoint(second: str, tmp_path: Path) -> None:
    """A run with a live one goes on as if it had not been cut, and with a precomputed one too: names are the same."""
    args = {"reference": "live", "reference_model": second}
    whole = fit(tmp_path, "whole", args=args)
    for name, then in (("live", args), ("other", {"reference_model": second})):
        fit(tmp_path, name, args=args, max_steps=3)
        rest = fit(tmp_path, name, args=then, resume=True)
        np.testing.assert_allclose([r["loss"] for r in rest[0]], [r["loss"] for r in whole[0]][3:], rtol=1e-6)
