"""Loop overhead: an MLP of 64-128-10, batch 32, 2,000 steps, the loss logged every 10.

The work of a step is so small that what is measured is the trainer. Every side: the same rows, torch's DataLoader
with shuffling and default collation, fused AdamW, constant learning rate, no clipping, no checkpoints, no bar, one
epoch, its own way of logging to its own place. Logged are: hand and Lightning, the step's loss; Twofold and HF, the
mean since the last time (Twofold also the gradient norm, the tokens a second and the memory).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from measure import Meter, main, quick, report

BATCH = 32
STEPS = 200 if quick() else 2000
LOG_EVERY = 10
LR = 1e-3


def data() -> Any:
    """Rows of a fixed random linear teacher: x [64] fp32, label 0 to 9."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS, 64, generator=generator)
    return TensorDataset(x, (x @ torch.randn(64, 10, generator=generator)).argmax(-1))


def mlp() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)


def folder() -> str:
    return tempfile.mkdtemp(prefix="bench-loop-")


def hand() -> None:
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    model = mlp()
    optimizer = adamw(model)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    meter = Meter()
    meter.reset_memory()
    with open(Path(folder()) / "metrics.jsonl", "w", encoding="utf-8") as log:
        for step, (x, y) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0:
                meter.losses.append(loss.item())
                log.write(json.dumps({"step": step, "loss": meter.losses[-1]}) + "\n")
            meter.step_done(step, STEPS)
    report(meter, steps=STEPS - 1)


def twofold() -> None:
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    from twofold import Callback, Loss, Task, Trainer

    class Classify(Task):
        def __init__(self) -> None:
            self.model = mlp()

        def inputs(self, batch: Any) -> dict[str, Any]:
            return {"input": batch[0]}

        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss.of(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    class Watch(Callback):
        def on_start(self, info: dict[str, Any]) -> None:
            meter.reset_memory()

        def on_step(self, step: int) -> None:
            meter.step_done(step, STEPS)

        def on_log(self, row: dict[str, Any]) -> None:
            meter.losses.append(row["loss"])

    meter = Meter()
    Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        lr=LR,
        schedule="constant",
        max_grad_norm=None,
        logging_steps=LOG_EVERY,
        save_steps=None,
        progress="off",
        folder=folder(),
        callbacks=[Watch()],
    ).fit(Classify(), DataLoader(data(), batch_size=BATCH, shuffle=True))
    report(meter, steps=STEPS - 1)


def lightning() -> None:
    import lightning as L
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    class Classify(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            meter.reset_memory()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % LOG_EVERY == 0:
                meter.losses.append(outputs["loss"].item())
            meter.step_done(index + 1, STEPS)

    meter = Meter()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        log_every_n_steps=LOG_EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder(),
        callbacks=[Watch()],
    )
    trainer.fit(Classify(), DataLoader(data(), batch_size=BATCH, shuffle=True))
    report(meter, steps=STEPS - 1)


def hf() -> None:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Classify(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.reset_memory()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.step_done(state.global_step, STEPS)

    def collate(rows: list[Any]) -> dict[str, Any]:
        x, y = default_collate(rows)
        return {"x": x, "labels": y}

    meter = Meter()
    arguments = TrainingArguments(
        output_dir=folder(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = Trainer(Classify(), arguments, train_dataset=data(), data_collator=collate, callbacks=[Watch()])
    trainer.train()
    meter.losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
    report(meter, steps=STEPS - 1)


if __name__ == "__main__":
    main({"hand": hand, "twofold": twofold, "lightning": lightning, "hf": hf})
