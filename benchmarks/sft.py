"""Supervised fine-tuning, Twofold against TRL: `python benchmarks/sft.py SIDE [llama|smollm2] [half|all|tickets]`.

Models: `llama`, 8 layers of 384 (6 heads, 2 key/value heads, 1,024 in the MLP), vocabulary 49,152, tied output head,
weights from a seed, all trained; `smollm2`, the real SmolLM2-135M-Instruct with LoRA r=16 on all linear layers.
Rows (rows.py): `half`, lengths 20 to 400 and 40 % of the tokens labelled; `all`, the same with every token labelled;
`tickets`, the rows of `examples/tickets` as they are.

Every side: the same rows, tokenised beforehand, in file order, 8 a step, two epochs, fp32, fused AdamW, constant
learning rate, no weight decay, clipping at 1, the loss logged at each step, nothing saved while it runs. Counted are
real tokens (padding is nobody's work) of the steps after the first.
TRL's sides differ in its settings alone: `trl_default` as its documentation starts (activation checkpointing, padded
batches), but in fp32 as everything here; `trl_no_ckpt` the same without checkpointing; `trl_packing` without
checkpointing and with `packing=True`, its rows cut to bins so that a step holds about as many tokens as 8 rows;
`trl_grouped` without checkpointing, padded, rows grouped by length (its order differs).
"""

from __future__ import annotations

import tempfile
from typing import Any

import rows as data
from measure import Meter, main, quick, report

LR = {"llama": 1e-3, "smollm2": 5e-4}
PACKED = {"max_length": 512, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
"""The quickest of the settings tried on two CPU cores (README.md)."""


def smollm2_folder() -> str:
    from twofold.models.load import resolve_model_path

    return resolve_model_path("smollm2-135m-instruct")


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder())


def llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=data.VOCABULARY,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )


def rows_of(model: str, kind: str) -> list[data.Row]:
    if kind == "tickets":
        return data.from_tickets(tokenizer())
    if model == "smollm2":
        return data.ticket_text(tokenizer())
    return data.synthetic(all_labels=kind == "all")


def folder() -> str:
    return tempfile.mkdtemp(prefix="bench-sft-")


def twofold(model: str = "llama", kind: str = "half") -> None:
    from twofold import Callback, SFTConfig, SFTTrainer

    last = data.steps()

    class Watch(Callback):
        def on_start(self, info: dict[str, Any]) -> None:
            meter.reset_memory()

        def on_step(self, step: int) -> None:
            meter.step_done(step, last)

        def on_log(self, row: dict[str, Any]) -> None:
            meter.losses.append(row["loss"])

    meter = Meter()
    rows = rows_of(model, kind)
    adapter = {"kind": "lora", "r": 16, "alpha": 32} if model == "smollm2" else None
    SFTTrainer(
        model=llama() if model == "llama" else "smollm2-135m-instruct",
        tokenizer=tokenizer(),
        train_dataset=rows,
        args=SFTConfig(max_length=1024, adapter=adapter),
        accelerator="cpu",
        devices=1,
        precision=32,
        global_batch_size=data.BATCH,
        max_steps=last,
        lr=LR[model],
        schedule="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle=False,
        logging_steps=1,
        save_steps=None,
        progress="off",
        folder=folder(),
        callbacks=[Watch()],
    ).train()
    done = [data.tokens(batch) for batch in data.batches(rows)]
    learned = [data.targets(batch) for batch in data.batches(rows)]
    report(meter, steps=last - 1, tokens=sum(done[1:]), targets=sum(learned[1:]))


def trl_default(model: str = "llama", kind: str = "half") -> None:
    trl(model, kind)


def trl_no_ckpt(model: str = "llama", kind: str = "half") -> None:
    trl(model, kind, gradient_checkpointing=False)


def trl_grouped(model: str = "llama", kind: str = "half") -> None:
    trl(model, kind, gradient_checkpointing=False, train_sampling_strategy="group_by_length")


def trl_packing(model: str = "llama", kind: str = "half", *setting: str) -> None:
    """setting, to try others: the length of a bin, bins at once, micro-batches of a step."""
    packed = dict(zip(PACKED, map(int, setting), strict=True)) if setting else PACKED
    trl(model, kind, gradient_checkpointing=False, packing=True, **packed)


def trl(model: str, kind: str, **settings: Any) -> None:
    import datasets
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.reset_memory()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.step_done(state.global_step, state.max_steps)

    datasets.disable_progress_bars()
    meter = Meter()
    options: dict[str, Any] = {
        "per_device_train_batch_size": data.BATCH,
        "max_length": 1024,
        "train_sampling_strategy": "sequential",
        "num_train_epochs": data.EPOCHS,
        "max_steps": data.steps() if quick() else -1,
        "learning_rate": LR[model],
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
        "output_dir": folder(),
        **settings,
    }
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=llama() if model == "llama" else _smollm2(),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows_of(model, kind)),
        args=SFTConfig(**options),
        peft_config=lora if model == "smollm2" else None,
        callbacks=[Watch()],
    )
    counted = Counted(trainer.data_collator)
    trainer.data_collator = counted
    trainer.train()
    done = trainer.state.global_step
    of_first = trainer.args.gradient_accumulation_steps
    if quick():  # the loader reads one batch ahead
        counted.keep(done * of_first)
    meter.losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
    report(
        meter,
        steps=done - 1,
        tokens=sum(counted.tokens[of_first:]),
        targets=sum(counted.targets[of_first:]),
    )


class Counted:
    """A collator that also counts the real tokens and the targets of each batch."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.tokens: list[int] = []
        self.targets: list[int] = []

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        self.tokens.append(data.tokens(rows))
        self.targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch

    def keep(self, batches: int) -> None:
        self.tokens, self.targets = self.tokens[:batches], self.targets[:batches]


def _smollm2() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)


SIDES = {
    "twofold": twofold,
    "trl_default": trl_default,
    "trl_no_ckpt": trl_no_ckpt,
    "trl_grouped": trl_grouped,
    "trl_packing": trl_packing,
}

if __name__ == "__main__":
    main(SIDES)
