"""Odds-ratio preference optimisation: the chosen answers learned, with a penalty on odds (arXiv 2403.07691).

With c and r the means over tokens of log p(answer | prompt), p = exp of each, odds = p / (1 - p) and s the sigmoid
(eq. 6 and 7):

    (mean over the chosen answers' tokens of -log p) - beta * log s(log odds(chosen) - log odds(rejected))

The likelihood is that of answers; prompts are not learned. The weight of the penalty is the number of pairs.
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
    """Odds-ratio preference optimisation."""

    kind: Literal["orpo"] = "orpo"
    beta: float = Field(default=0.1, gt=0, description="Weight of the odds ratio (lambda in the paper).")
    sft_weight: float = Field(default=1.0, gt=0, description="Weight of the chosen answers' negative log-likelihood.")


class ORPOConfig(Options, LanguageConfig):
    """Options of `ORPOTrainer`: the loss, the data options, and how the model is loaded and adapted."""


class ORPO(LanguageTask):
    """Pairs (chosen, rejected); the weight is their number."""

    def __init__(self, model: CausalLM, options: Options | None = None, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.options = options or Options()

    def loss(self, output: Any, batch: Any) -> Loss:
        options, logps = self.options, sequence_sums(output[0], batch)
        means = logps / token_counts(batch)
        # log(1 - exp(x)) by log(-expm1(x)): exact where an answer is unlikely and where it is almost certain.
        log_odds = means - (-means.clamp(max=-1e-12).expm1()).log()
        ratio = log_odds[0::2] - log_odds[1::2]
        metrics = pair_metrics(options.beta * means[0::2], options.beta * means[1::2], logps)
        metrics["log_odds_ratio"] = (ratio.detach().sum(), len(ratio))
        return pair_loss("orpo", -options.beta * log_sigmoid(ratio), logps, batch, options.sft_weight, metrics)

    def weights(self, batch: Any) -> dict[str, Any]:
        return pair_weights("orpo", batch, self.options.sft_weight)


class ORPOTrainer(LanguageTrainer):
    """`ORPOTrainer(model="smollm2-135m-instruct", train_dataset="pairs.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; rows: preference pairs; args: a `ORPOConfig` or a dict of its fields.
    """

    config_class = ORPOConfig
    rows = "preference"

    def task(self) -> ORPO:
        return ORPO(self.model, self.args, self.pad)


run, preview, export = commands(ORPOTrainer)
