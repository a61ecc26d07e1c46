"""Direct preference optimisation, Twofold against TRL: `python benchmarks/dpo.py SIDE`.

The model: `llama` of sft.py (8 layers of 384, vocabulary 49,152, tied head), all of it trained. Rows: pairs of plain
texts from the words of `examples/tickets`, the prompt 10 to 200 words (log-normal, median 60), each answer 20 to 60 %
of that, so that padding has something to pad and prompts something to share.

Every side: the same rows in the same order, 8 pairs a step, two epochs, beta 0.1, fp32, fused AdamW, constant learning
rate, clipping at 1, the loss logged at each step, and the reference's log-probabilities computed before the first step
(in nobody's time). Counted are the tokens of prompt + chosen and prompt + rejected of the steps after the first, on
every side alike: that Twofold computes a prompt once is its own matter.
TRL's sides: `trl_default` as its documentation starts, but in fp32; `trl_no_ckpt` without activation checkpointing.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import numpy as np
from measure import Meter, main, quick, report
from rows import TICKETS
from sft import llama, tokenizer

ROWS, BATCH, EPOCHS, LR = 24, 8, 2, 3e-4


def steps() -> int:
    return 3 if quick() else ROWS // BATCH * EPOCHS


def rows() -> list[dict[str, str]]:
    """prompt, chosen, rejected; the prompt ends with a new line, so that no token lies across its end."""
    words = " ".join(json.loads(line)["messages"][1]["content"] for line in TICKETS.read_text().splitlines()).split()
    rng, made = np.random.default_rng(11), []
    while len(made) < ROWS:
        n = int(rng.lognormal(np.log(60), 0.8))
        if 10 <= n <= 200:
            sizes = [n, *(max(2, int(n * rng.uniform(0.2, 0.6))) for _ in range(2))]
            starts = rng.integers(0, len(words) - n, 3)
            texts = [" ".join(words[a : a + size]) for a, size in zip(starts, sizes, strict=True)]
            made.append({"prompt": texts[0] + "\n", "chosen": texts[1], "rejected": texts[2]})
    return made


def counted() -> dict[str, int]:
    """Tokens by row order: prompt and answer together, and the end of the text that both trainers add."""
    encode, done = tokenizer(), []
    for row in rows():
        done.append(sum(len(encode(row["prompt"] + row[name])["input_ids"]) + 1 for name in ("chosen", "rejected")))
    every = (done * EPOCHS)[BATCH : steps() * BATCH]
    return {"steps": steps() - 1, "tokens": sum(every)}


def twofold() -> None:
    from twofold import Callback, DPOConfig, DPOTrainer

    class Watch(Callback):
        def on_start(self, info: dict[str, Any]) -> None:
            meter.reset_memory()

        def on_step(self, step: int) -> None:
            meter.step_done(step, steps())

        def on_log(self, row: dict[str, Any]) -> None:
            meter.losses.append(row["loss"])

    meter = Meter()
    folder = tempfile.mkdtemp(prefix="bench-dpo-")
    DPOTrainer(
        model=llama(),
        tokenizer=tokenizer(),
        train_dataset=rows(),
        args=DPOConfig(beta=0.1, max_length=1024, reference_folder=f"{folder}/reference"),
        accelerator="cpu",
        devices=1,
        precision=32,
        global_batch_size=BATCH,
        max_steps=steps(),
        lr=LR,
        schedule="constant",
        shuffle=False,
        logging_steps=1,
        progress="off",
        folder=folder,
        callbacks=[Watch()],
    ).train()
    report(meter, **counted())


def trl_default() -> None:
    trl()


def trl_no_ckpt() -> None:
    trl(gradient_checkpointing=False)


def trl(**settings: Any) -> None:
    import datasets
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.reset_memory()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.step_done(state.global_step, state.max_steps)

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            from torch.utils.data import SequentialSampler

            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    datasets.disable_progress_bars()
    meter = Meter()
    options: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "max_length": 1024,
        "beta": 0.1,
        "precompute_ref_log_probs": True,
        "max_steps": steps(),
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "output_dir": tempfile.mkdtemp(prefix="bench-dpo-"),
        **settings,
    }
    trainer = InOrder(
        model=llama(),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows()),
        args=DPOConfig(**options),
        callbacks=[Watch()],
    )
    trainer.train()
    meter.losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
    report(meter, **counted())


SIDES = {"twofold": twofold, "trl_default": trl_default, "trl_no_ckpt": trl_no_ckpt}

if __name__ == "__main__":
    main(SIDES)
