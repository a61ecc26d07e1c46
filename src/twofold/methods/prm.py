"""A process reward model: whether each step of an answer is right (arXiv 2305.20050, section 2.6).

    loss = - sum over steps of log p(label | prompt, the steps so far) / their number

with p the softmax of the model's two scores (wrong, right) at the new line that ends the step. Prompt and steps are
plain texts, each followed by a new line. A step's target stands at the token after it, as everywhere: what is learned
at a position is the label of the next.
"""

from __future__ import annotations

from typing import Any, Literal

from twofold.config.schema import Group
from twofold.methods.common import LanguageConfig, LanguageTask, commands
from twofold.methods.scores import ScoreTrainer
from twofold.task import Loss


class Options(Group):
    """A process reward model."""

    kind: Literal["prm"] = "prm"


class PRMConfig(Options, LanguageConfig):
    """Options of `PRMTrainer`: the data options, and how the model is loaded and adapted."""


class PRM(LanguageTask):
    """The model gives (scores [steps, 2], None) at the ends of steps; the weight is the number of steps."""

    def loss(self, output: Any, batch: Any) -> Loss:
        from torch.nn.functional import cross_entropy

        scores, labels = output[0], batch["targets"]
        right = (scores.detach().argmax(-1) == labels).double().sum()
        total = cross_entropy(scores, labels, reduction="sum")
        return Loss.of(total, len(labels), accuracy=(right, len(labels)))

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"loss": len(batch["targets"])}


class PRMTrainer(ScoreTrainer):
    """`PRMTrainer(model="smollm2-135m-instruct", train_dataset="steps.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; rows: step-wise; args: a `PRMConfig` or a dict of its fields; a model
    object must be one for sequence classification with two labels.
    """

    config_class = PRMConfig
    rows = "stepwise"

    def task(self) -> PRM:
        return PRM(self.model, self.pad)

    @classmethod
    def labels(cls, args: Any) -> list[str]:
        return ["wrong", "right"]


run, preview, export = commands(PRMTrainer)
