"""Classification of whole texts: the cross-entropy of their class.

    loss = - sum over texts of log p(class | text) / their number, p the softmax of the scores at the last token

With label smoothing e (arXiv 1512.00567, section 7) the target is mixed with the uniform distribution. The model is
read at the end-of-text token, so a decoder has seen everything; `classes` names its scores in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from twofold.config.schema import Group
from twofold.errors import UserError
from twofold.methods.common import LanguageConfig, commands
from twofold.methods.scores import ScoreTask, ScoreTrainer
from twofold.task import Loss

if TYPE_CHECKING:
    from twofold.data.tokens import TokenDataset
    from twofold.models.causal_lm import CausalLM


class Options(Group):
    """Classification of texts."""

    kind: Literal["classify"] = "classify"
    classes: Annotated[list[str], Field(min_length=2)] = Field(description="Names of the classes, in order.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Share of the target spread over the classes.")


class ClassifyConfig(Options, LanguageConfig):
    """Options of `ClassifyTrainer`: the classes, the data options, and how the model is loaded and adapted."""


class Classify(ScoreTask):
    """Texts with the number of their class; the weight is the number of texts."""

    def __init__(self, model: CausalLM, label_smoothing: float = 0.0, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.label_smoothing = label_smoothing

    def loss(self, output: Any, batch: Any) -> Loss:
        from torch.nn.functional import cross_entropy

        scores, classes = output[0], batch["values"].long()
        total = cross_entropy(scores, classes, reduction="sum", label_smoothing=self.label_smoothing)
        right = (scores.detach().argmax(-1) == classes).double().sum()
        return Loss.of(total, len(classes), accuracy=(right, len(classes)))

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"loss": len(batch["counts"])}


class ClassifyTrainer(ScoreTrainer):
    """`ClassifyTrainer(model=…, train_dataset="texts.jsonl", args={"classes": ["no", "yes"]}).train()`.

    The arguments are those of `LanguageTrainer`; rows: labelled texts; args: a `ClassifyConfig` or a dict of its
    fields; a model object must be one for sequence classification with a label for each class.
    """

    config_class = ClassifyConfig
    rows = "labelled"

    def task(self) -> Classify:
        return Classify(self.model, self.args.label_smoothing, self.pad)

    @classmethod
    def labels(cls, args: Any) -> list[str]:
        return args.classes

    def arrange(self, data: TokenDataset, what: str) -> TokenDataset:
        numbers = {name: i for i, name in enumerate(self.args.classes)}
        numbers |= {str(i): i for i in range(len(numbers)) if str(i) not in numbers}
        found = data.columns["values"].astype(str)
        for row, label in zip(data.row_numbers, found, strict=True):
            if label not in numbers:
                known = ", ".join(self.args.classes)
                raise UserError(f"data.{what}: row {row}: '{label}' is none of method.classes: {known}.")
        data.columns["values"] = np.array([numbers[label] for label in found])
        return data


run, preview, export = commands(ClassifyTrainer)
