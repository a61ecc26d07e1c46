"""Supervised fine-tuning end to end on tiny models: laws 1, 2, 3 and 5 through SFTTrainer and the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import reference
import templates as t
import torch
import yaml
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from twofold import Callback, SFTConfig, SFTTrainer, UserError
from twofold.config.schema import DataOptions
from twofold.data.order import Order
from twofold.data.prepare import prepare

WORDS = ["red", "blue", "green", "one", "two", "three", "four", "cat", "dog", "bird", "sun", "moon"]


def rows(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats of unequal length, some of two turns."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        turns = []
        for _ in range(1 + i % 2):
            question, answer = (" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(2))
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append({"messages": turns})
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level ChatML tokenizer whose pad is its eos, saved as a folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = t.byte_level(t.CHATML)
    reference.tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


class Losses(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def on_log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def on_eval(self, row: dict[str, Any]) -> None:
        self.evals.append(row)

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


# A large eps: where a gradient is zero but for rounding (keys' biases, idle tokens), AdamW would step by its sign.
DEFAULTS = {"global_batch_size": 4, "max_steps": 10, "lr": 5e-3, "eps": 1e-3, "logging_steps": 1, "progress": "off"}


def fit(base: Path, folder: Path, name: str, evaluate: bool = False, **more: Any) -> Any:
    """(losses, evaluation losses, trained weights, warnings) of a run."""
    seen = Losses()
    args = more.pop("args", {})
    settings = DEFAULTS | {"folder": str(folder), "name": name, "callbacks": [seen]} | more
    trainer = SFTTrainer(str(base), rows(11), rows(5, seed=9) if evaluate else None, args=args, **settings)
    trainer.train()
    held = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trainer.model.hf.named_parameters()}
    weights = {n: p.detach().clone().numpy() for n, p in held.items() if p.requires_grad}
    return [r["loss"] for r in seen.rows], [r["loss"] for r in seen.evals], weights, seen.warnings


def expected_losses(base: Path, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Full fine-tuning by the reference loop on the same samples: clip 1, linear decay, AdamW without decay."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = prepare(rows(11), tokenizer, DataOptions())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    order = Order(11, 4, seed=42)
    batches = [[data[i] for i in order.step(k)] for k in range(steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3, weight_decay=0.0)
    losses = reference.train(model, batches, optimizer, lambda k: 5e-3 * (1 - k / steps), 1.0)
    return losses, reference.parameters(model)


def test_full_fine_tuning_on_one_and_two_ranks_equals_a_plain_loop(base: Path, tmp_path: Path) -> None:
    """Laws 1 and 2 over the whole way, from rows of chat to weights."""
    expected, weights = expected_losses(base, 10)
    assert expected[-1] < 0.9 * expected[0]
    cuts: list[dict[str, Any]] = [{}, {"micro_batch_tokens": 100}, {"micro_batch_size": 1}]
    found = [fit(base, tmp_path, f"one{i}", **cut) for i, cut in enumerate(cuts)]
    found.append(fit(base, tmp_path, "padded", args={"attention": "padded"}, micro_batch_size=2))
    settings = {"devices": 2, "strategy": "ddp", "micro_batch_tokens": 100}
    found += run_ranks(2, lambda: fit(base, tmp_path, "two", **settings))
    for losses, _, trained, _ in found:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(trained[name], value, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tp", "pp", "cp"])
def test_weights_in_parts_from_rows_to_an_export(base: Path, tmp_path: Path, strategy: str) -> None:
    """Training, evaluation with samples, a checkpoint, and an export that loads to the weights of a plain loop."""
    expected, weights = expected_losses(base, 10)
    _, evals, _, _ = fit(base, tmp_path, "one", evaluate=True, eval_steps=5)
    settings = {"devices": 2, "strategy": strategy, "evaluate": True, "eval_steps": 5, "eval_samples": 1}
    for losses, evaluations, trained, _ in run_ranks(2, fit, base, tmp_path, "two", **settings):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(evaluations, evals, rtol=1e-5)
        for name, value in trained.items():  # in a pipeline each rank has some
            np.testing.assert_allclose(value, weights[name], rtol=0, atol=2e-5, err_msg=name)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "export")
    for name, value in reference.parameters(exported).items():
        np.testing.assert_allclose(value, weights[name], rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_lora_with_dropout_resumes_bit_exactly(base: Path, tmp_path: Path, ranks: int) -> None:
    """Law 3: adapter, optimizer, schedule, dropout and data position."""
    run = (lambda f: [f()]) if ranks == 1 else (lambda f: run_ranks(2, f))
    settings = {"args": {"adapter": {"r": 4, "dropout": 0.2}}, "devices": ranks, "schedule": "constant"}
    whole = run(lambda: fit(base, tmp_path, "whole", **settings))
    first = run(lambda: fit(base, tmp_path, "parts", **(settings | {"max_steps": 4})))
    second = run(lambda: fit(base, tmp_path, "parts", resume=True, **settings))
    for a, b, c in zip(whole, first, second, strict=True):
        assert b[0] + c[0] == a[0]
        assert all(np.array_equal(c[2][name], a[2][name]) for name in a[2])


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2: tied embeddings, one weight under two names
def test_a_checkpoint_of_an_adapter_holds_no_frozen_weight(family: str) -> None:
    from twofold.engine.checkpoint import _trained
    from twofold.methods.common import build_model

    tokenizer = t.byte_level(t.CHATML)
    model = reference.tiny_model(family, vocab_size=len(tokenizer))
    names = list(_trained(build_model(model, SFTConfig(adapter={"r": 4}), 0, tokenizer, "tiny")))  # type: ignore[arg-type]
    assert len(names) == 28
    assert all("lora_" in name for name in names)


def test_lora_learns_the_same_on_two_ranks(base: Path, tmp_path: Path) -> None:
    settings = {
        "args": {"adapter": {"r": 4}},
        "evaluate": True,
        "eval_steps": 10,
        "lr": 0.01,
        "eps": 1e-4,
        "max_steps": 20,
    }
    one = fit(base, tmp_path, "one", **settings)
    assert one[0][-1] < one[0][0] - 0.03  # the head of a random model is frozen: it cannot learn much
    for two in run_ranks(2, lambda: fit(base, tmp_path, "two", devices=2, **settings)):
        np.testing.assert_allclose(two[0], one[0], rtol=1e-5)
        np.testing.assert_allclose(two[1], one[1], rtol=1e-5)


def test_other_data_is_not_resumed(base: Path, tmp_path: Path) -> None:
    fit(base, tmp_path, "run", max_steps=2)
    with pytest.raises(UserError, match="was trained with data="):
        SFTTrainer(
            str(base), rows(11, seed=5), **(DEFAULTS | {"folder": str(tmp_path), "name": "run", "resume": True})
        ).train()


def test_padded_models_say_so_once(tmp_path: Path) -> None:
    from transformers import AutoConfig

    tokenizer = t.byte_level(t.CHATML)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "n_layer": 2, "n_head": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **shape))
    seen = Losses()
    settings = DEFAULTS | {"folder": str(tmp_path), "name": "run", "callbacks": [seen]}
    SFTTrainer(model, rows(11), tokenizer=tokenizer, **settings).train()
    assert seen.warnings == [
        "batches are padded: BloomForCausalLM does not let its attention be replaced. Slower, and just as correct."
    ]


def test_arguments(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown argument 'max_lenght'\. Did you mean 'max_length'"):
        SFTTrainer(str(base), rows(3), args={"max_lenght": 3})
    with pytest.raises(UserError, match=r"unknown argument 'learning_rate'.*lr"):
        SFTTrainer(str(base), rows(3), learning_rate=3)
    with pytest.raises(UserError, match="args must be a SFTConfig"):
        SFTTrainer(str(base), rows(3), args=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs tokenizer="):
        SFTTrainer(reference.tiny_model(), rows(3))
    with pytest.raises(
        UserError, match=r"261 tokens and .* 97 embeddings|tokens and LlamaForCausalLM has 97 embeddings"
    ):
        SFTTrainer(reference.tiny_model(), rows(3), tokenizer=t.byte_level(t.CHATML), folder=str(tmp_path))
    assert SFTConfig(adapter={"r": 4}).adapter.r == 4  # type: ignore[arg-type, union-attr]


# The command line, in processes of its own.


def twofold(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TWOFOLD_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "twofold", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def write_config(base: Path, folder: Path, **changes: Any) -> None:
    with (folder / "train.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(11))
    with (folder / "eval.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(5, seed=9))
    config = {
        "version": 1,
        "method": "sft",
        "model": {"path": str(base), "adapter": {"kind": "lora", "r": 4}},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 512},
        "train": {"global_batch_size": 4, "max_steps": 6, "lr": 5e-2, "eval_steps": 3, "eval_samples": 1},
        "run": {"name": "first", "accelerator": "cpu", "devices": 1},
    }
    for key, value in changes.items():
        config[key] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_from_a_file_to_an_export_on_one_process_and_on_two(base: Path, tmp_path: Path) -> None:
    """Train, generate, data, export: the whole way of a user; then the same on two processes, to the same losses."""
    write_config(base, tmp_path)
    done = twofold("train", "config.yaml", "train.logging_steps=1", cwd=tmp_path)
    assert "step 6/6" in done.stdout
    assert "sample 1 of 1" in done.stdout
    assert "runs/first/export" in done.stdout
    run = tmp_path / "runs" / "first"
    names = {p.name for p in run.iterdir()}
    assert names >= {"config.yaml", "run.json", "status.json", "metrics.jsonl", "logs", "checkpoints", "export"}
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in metrics if row["split"] == "train"]
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5, 6]
    wanted = {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "memory_mb"}
    assert wanted <= set(train[0])
    evaluations = [row for row in metrics if row["split"] == "eval"]
    assert [row["step"] for row in evaluations] == [3, 6]

    shown = twofold("data", "config.yaml", "--rows", "1", cwd=tmp_path).stdout
    assert "⟦" in shown
    assert "rows     11 · 11 samples · 0 cannot be trained" in shown

    adapter = peft.AutoPeftModelForCausalLM.from_pretrained(run / "export").eval()
    ids = torch.arange(10)[None]
    expected = adapter(input_ids=ids).logits
    plain = AutoModelForCausalLM.from_pretrained(base).eval()(input_ids=ids).logits
    assert (expected - plain).abs().max() > 1e-3
    answer = twofold("generate", "runs/first", "--prompt", "red", "--max-new-tokens", "4", cwd=tmp_path).stdout
    assert answer.endswith("\n")
    out = twofold(
        "export", "runs/first", "--merge", "--output", "merged", "--checkpoint", "latest", cwd=tmp_path
    ).stdout
    assert out.strip() == "merged"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)

    words = ["run.devices=2", "run.strategy=ddp", "run.name=second", "train.logging_steps=1"]
    twofold("train", "config.yaml", *words, cwd=tmp_path)
    second = [json.loads(x) for x in (tmp_path / "runs" / "second" / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(metrics, second, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert {p.name for p in (tmp_path / "runs" / "second" / "logs").glob("*.log")} == {"rank-0.log", "rank-1.log"}
    twofold("train", "config.yaml", *words, "train.max_steps=8", "--resume", cwd=tmp_path)
    resumed = [json.loads(x) for x in (tmp_path / "runs" / "second" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in resumed if row["split"] == "train"] == list(range(1, 9))


def test_faults_of_the_user_are_one_line_and_exit_2_before_workers_start(base: Path, tmp_path: Path) -> None:
    write_config(base, tmp_path)
    words = ("train", "config.yaml", "run.devices=2")
    for more, message in [
        (("train.lrr=1",), "'train.lrr=1': train.lrr: unknown key. Did you mean 'lr'?"),
        (("data.train=trian.jsonl",), "there is no file trian.jsonl in this folder. Did you mean 'train.jsonl'?"),
        (("data.max_length=12",), "row 1: data.max_length=12 cuts all of its trained tokens away"),
        (("run.strategy=fsdp:4",), "strategy shard 4 × zero 3 is for 4 rank(s), and devices × num_nodes is 2"),
        (("run.strategy=pp,dualpipev", "train.global_batch_size=3"), "needs 4 micro-batches a step on each of 1 data"),
        (("run.strategy=ep",), "strategy 'ep': CausalLM has no experts: use fsdp or tp"),
        (("model.path=./nowhere",), "model.path: ./nowhere is no model folder"),
        (("run.folder=train.jsonl",), "cannot write the run folder train.jsonl/first: "),
        (("run.accelerator=gpu",), "accelerator"),
    ]:
        done = twofold(*words, *more, cwd=tmp_path, code=2)
        assert done.stderr.startswith("error: "), done.stderr
        assert message.replace("./", "") in done.stderr.replace("./", ""), done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    done = twofold("export", "train.jsonl", cwd=tmp_path, code=2)
    assert "is no run folder" in done.stderr
