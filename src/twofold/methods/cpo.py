"""Contrastive preference optimisation: DPO without a reference, and the chosen answers learned (arXiv 2401.08417).

With c and r the sums of log p over the chosen and the rejected answer, s the sigmoid and e the label smoothing (eq. 5
for e = 0 and sft_weight = 1, its likelihood over tokens):

    -(1 - e) log s(beta (c - r)) - e log s(-beta (c - r)) + sft_weight * nll

with nll the mean over the chosen answers' tokens of -log p. The weight of the first term is the number of pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from twofold.config.schema import Group
from twofold.methods.common import LanguageConfig, LanguageTask, LanguageTrainer, commands, sequence_sums
from twofold.methods.pairs import log_sigmoid, pair_loss, pair_metrics, pair_weights
from twofold.task import Loss

if TYPE_CHECKING:
    from twofold.models.causal_lm import CausalLM


class Options(Group):
    """Contrastive preference optimisation."""

    kind: Literal["cpo"] = "cpo"
    beta: float = Field(default=0.1, gt=0, description="Scale of the log-probabilities.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of pairs that are taken to be the wrong way round."
    )
    sft_weight: float = Field(default=1.0, ge=0, description="Weight of the chosen answers' negative log-likelihood.")


class CPOConfig(Options, LanguageConfig):
    """Options of `CPOTrainer`: the loss, the data options, and how the model is loaded and adapted."""


class CPO(LanguageTask):
    """Pairs (chosen, rejected); the weight is their number."""

    def __init__(self, model: CausalLM, options: Options | None = None, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.options = options or Options()

    def loss(self, output: Any, batch: Any) -> Loss:
        options, logps = self.options, sequence_sums(output[0], batch)
        rewards = options.beta * logps
        h, e = rewards[0::2] - rewards[1::2], options.label_smoothing
        losses = -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)
        metrics = pair_metrics(rewards[0::2], rewards[1::2], logps)
        return pair_loss("cpo", losses, logps, batch, options.sft_weight, metrics)

    def weights(self, batch: Any) -> dict[str, Any]:
        return pair_weights("cpo", batch, self.options.sft_weight)


class CPOTrainer(LanguageTrainer):
    """`CPOTrainer(model="smollm2-135m-instruct", train_dataset="pairs.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; rows: preference pairs; args: a `CPOConfig` or a dict of its fields.
    """

    config_class = CPOConfig
    rows = "preference"

    def task(self) -> CPO:
        return CPO(self.model, self.args, self.pad)


run, preview, export = commands(CPOTrainer)
