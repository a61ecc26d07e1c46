"""Simple preference optimisation: answers' mean log-probabilities, a margin, and no reference (arXiv 2405.14734).

With c and r the means over tokens of log p(answer | prompt) of the chosen and the rejected answer, s the sigmoid and e
the label smoothing (eq. 6 for e = 0):

    -(1 - e) log s(beta (c - r) - gamma) - e log s(-(beta (c - r) - gamma))

`sft_weight` adds the mean over the chosen answers' tokens of -log p. The weight of the loss is the number of pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from twofold.config.schema import Group
from twofold.methods.common import LanguageConfig, LanguageTask, LanguageTrainer, commands, sequence_sums
from twofold.methods.pairs import log_sigmoid, pair_loss, pair_metrics, pair_weights, token_counts
from twofold.task import Loss

if TYPE_CHECKING:
    from twofold.models.causal_lm import CausalLM


class Options(Group):
    """Simple preference optimisation."""

    kind: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0, description="Scale of the mean log-probabilities.")
    gamma: float = Field(default=1.0, ge=0, description="Margin by which the chosen answer's reward should be larger.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of pairs that are taken to be the wrong way round."
    )
    sft_weight: float = Field(default=0.0, ge=0, description="Weight of the chosen answers' negative log-likelihood.")


class SimPOConfig(Options, LanguageConfig):
    """Options of `SimPOTrainer`: the loss, the data options, and how the model is loaded and adapted."""


class SimPO(LanguageTask):
    """Pairs (chosen, rejected); the weight is their number."""

    def __init__(self, model: CausalLM, options: Options | None = None, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.options = options or Options()

    def loss(self, output: Any, batch: Any) -> Loss:
        options, logps = self.options, sequence_sums(output[0], batch)
        rewards = options.beta * logps / token_counts(batch)
        h, e = rewards[0::2] - rewards[1::2] - options.gamma, options.label_smoothing
        losses = -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)
        metrics = pair_metrics(rewards[0::2], rewards[1::2], logps)
        return pair_loss("simpo", losses, logps, batch, options.sft_weight, metrics)

    def weights(self, batch: Any) -> dict[str, Any]:
        return pair_weights("simpo", batch, self.options.sft_weight)


class SimPOTrainer(LanguageTrainer):
    """`SimPOTrainer(model="smollm2-135m-instruct", train_dataset="pairs.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; rows: preference pairs; args: a `SimPOConfig` or a dict of its fields.
    """

    config_class = SimPOConfig
    rows = "preference"

    def task(self) -> SimPO:
        return SimPO(self.model, self.args, self.pad)


run, preview, export = commands(SimPOTrainer)
