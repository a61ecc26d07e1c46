"""Supervised fine-tuning: the negative log-likelihood of the labelled tokens.

    loss = - sum over labelled tokens of log p(token | what comes before it in its sample) / their number

With label smoothing e (arXiv 1512.00567, section 7) the target is mixed with the uniform distribution:
(1 - e) * nll + e * (mean over the vocabulary of -log p). Both are sums over the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from twofold.config.schema import Group
from twofold.methods.common import LanguageConfig, LanguageTask, LanguageTrainer, commands
from twofold.task import Loss

if TYPE_CHECKING:
    from twofold.models.causal_lm import CausalLM


class Options(Group):
    """Supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of the target spread over the vocabulary.")


class SFTConfig(Options, LanguageConfig):
    """Options of `SFTTrainer`: the data options, label smoothing, and how the model is loaded and adapted."""


class SFT(LanguageTask):
    """Token samples; the weight is the number of labelled tokens."""

    def __init__(self, model: CausalLM, label_smoothing: float = 0.0, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.label_smoothing = label_smoothing

    def inputs(self, batch: Any) -> dict[str, Any]:
        return super().inputs(batch) | {"with_mean": self.label_smoothing > 0}

    def loss(self, output: Any, batch: Any) -> Loss:
        logp, mean = output
        total = nll = -logp.sum()
        if self.label_smoothing:
            total = (1 - self.label_smoothing) * nll - self.label_smoothing * mean.sum()
        return Loss.of(total, len(logp))

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"loss": len(batch["targets"])}


class SFTTrainer(LanguageTrainer):
    """`SFTTrainer(model="smollm2-135m-instruct", train_dataset="train.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; args: an `SFTConfig` or a dict of its fields.
    """

    config_class = SFTConfig

    def task(self) -> SFT:
        return SFT(self.model, self.args.label_smoothing, self.pad)


run, preview, export = commands(SFTTrainer)
