"""A reward model: the chosen answer should score higher than the rejected one (Bradley and Terry, Biometrika 1952).

With c and r the scores of the two, at their last tokens, s the sigmoid and m the row's margin, where it has one
(arXiv 2203.02155, eq. 1; the margin: arXiv 2307.09288, eq. 2):

    -log s(c - r - m) + centering * (c + r)^2

The second term keeps rewards around zero (arXiv 2312.09244, eq. 2). The weight of the loss is the number of pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from twofold.config.schema import Group
from twofold.methods.common import LanguageConfig, commands
from twofold.methods.pairs import log_sigmoid
from twofold.methods.scores import ScoreTask, ScoreTrainer
from twofold.task import Loss

if TYPE_CHECKING:
    from twofold.models.causal_lm import CausalLM


class Options(Group):
    """A reward model from preferences."""

    kind: Literal["reward"] = "reward"
    margin: bool = Field(default=True, description="Use the rows' margins (or differences of scores), if they have.")
    centering: float = Field(default=0.0, ge=0, description="Weight of the squared sum of a pair's rewards.")


class RewardConfig(Options, LanguageConfig):
    """Options of `RewardTrainer`: the loss, the data options, and how the model is loaded and adapted."""


class Reward(ScoreTask):
    """Pairs (chosen, rejected); the model gives one score for each sequence."""

    def __init__(self, model: CausalLM, options: Options | None = None, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.options = options or Options()

    def loss(self, output: Any, batch: Any) -> Loss:
        scores = output[0][:, 0].double()
        c, r, pairs = scores[0::2], scores[1::2], len(scores) // 2
        h = c - r
        if self.options.margin and "values" in batch:
            h = h - (batch["values"][0::2] - batch["values"][1::2])
        losses = -log_sigmoid(h) + self.options.centering * (c + r) ** 2
        metrics = {"rewards/chosen": c, "rewards/rejected": r, "rewards/margins": c - r, "rewards/accuracies": c > r}
        sums = {name: (x.detach().double().sum(), pairs) for name, x in metrics.items()}
        return Loss.of(losses.sum(), pairs, **sums)

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"loss": len(batch["counts"])}


class RewardTrainer(ScoreTrainer):
    """`RewardTrainer(model="smollm2-135m-instruct", train_dataset="pairs.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; rows: preference pairs; args: a `RewardConfig` or a dict of its
    fields; a model object must be one for sequence classification with one label.
    """

    config_class = RewardConfig
    rows = "preference"

    def task(self) -> Reward:
        return Reward(self.model, self.args, self.pad)


run, preview, export = commands(RewardTrainer)
