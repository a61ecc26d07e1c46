"""Kahneman-Tversky optimisation: answers that are good or bad each by itself, with a reference (arXiv 2402.01306).

With r = log p(answer | prompt) under the model minus the same under the reference, s the sigmoid and z the KL estimate
(eq. 8, up to its constant):

    good answers   desirable_weight   * (1 - s(beta (r - z)))
    bad answers    undesirable_weight * (1 - s(beta (z - r)))

z is max(0, the mean of r over *mismatched* pairs, each prompt with the answer of another row), without gradient, over
the whole global batch: each row's mismatched answer is that of the row after it in the data set, so that z does not
depend on how a step is cut. Its pass needs no gradients. The weight of the loss is the number of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from twofold.errors import UserError
from twofold.methods.common import LanguageConfig, commands
from twofold.methods.reference import ReferenceOptions, ReferenceTask, ReferenceTrainer
from twofold.task import Loss

if TYPE_CHECKING:
    from twofold.data.tokens import TokenDataset
    from twofold.models.causal_lm import CausalLM


class Options(ReferenceOptions):
    """Kahneman-Tversky optimisation."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0, description="How closely the model stays with the reference.")
    desirable_weight: float = Field(default=1.0, ge=0, description="Weight of good answers.")
    undesirable_weight: float = Field(default=1.0, ge=0, description="Weight of bad answers.")


class KTOConfig(Options, LanguageConfig):
    """Options of `KTOTrainer`: the loss, the reference, the data options, and how the model is loaded and adapted."""


class KTO(ReferenceTask):
    """Samples of two sequences: an answer with its label (1 good, 0 bad), and its prompt with another answer."""

    observes = True

    def __init__(self, model: CausalLM, options: Options | None = None, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.options = options or Options()

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        own, mismatched = ([_only(sample, i) for sample in samples] for i in (0, 1))
        return super().collate(own) | {"mismatched": super().collate(mismatched)}

    def statistics_inputs(self, batch: Any) -> dict[str, Any]:
        return self.inputs(batch["mismatched"])

    def statistics(self, output: Any, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        policy, reference = self.sums(output, batch["mismatched"])
        return {"kl": ((policy - reference).sum(), len(policy))}

    def loss(self, output: Any, batch: Any) -> Loss:
        import torch

        options = self.options
        policy, reference = self.sums(output, batch)
        kl = torch.as_tensor(batch["statistics"]["kl"], dtype=policy.dtype, device=policy.device).clamp(min=0)
        good, ratios = batch["values"] > 0.5, policy - reference
        sign = torch.where(good, 1.0, -1.0)
        weight = torch.where(good, options.desirable_weight, options.undesirable_weight)
        losses = weight * (1 - (options.beta * sign * (ratios - kl)).sigmoid())
        return Loss.of(losses.sum(), len(losses), **self._metrics(ratios.detach(), policy.detach(), good, kl))

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"loss": len(batch["counts"])}

    def _metrics(self, ratios: Any, logps: Any, good: Any, kl: Any) -> dict[str, tuple[Any, Any]]:
        n, right = len(ratios), (ratios > kl) == good
        metrics = {"kl": (kl * n, n), "rewards/accuracies": (right.double().sum(), n)}
        for name, those in (("chosen", good), ("rejected", ~good)):
            metrics[f"rewards/{name}"] = (self.options.beta * (ratios * those).sum(), those.sum())
            metrics[f"logps/{name}"] = ((logps * those).sum(), those.sum())
        return metrics


def _only(sample: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The i-th sequence of a sample, as a sample."""
    return {key: value[i : i + 1] for key, value in sample.items()}


class KTOTrainer(ReferenceTrainer):
    """`KTOTrainer(model="smollm2-135m-instruct", train_dataset="rated.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; rows: unpaired answers; args: a `KTOConfig` or a dict of its fields.
    """

    config_class = KTOConfig
    rows = "unpaired"
    views = (lambda batch: batch, lambda batch: batch["mismatched"])

    def task(self) -> KTO:
        return KTO(self.model, self.args, self.pad)

    def arrange(self, data: TokenDataset, what: str) -> TokenDataset:
        return with_mismatched(data, self.args.max_length, what)


def with_mismatched(data: TokenDataset, max_length: int | None, what: str = "train") -> TokenDataset:
    """Beside each answer a second sequence: its prompt with the answer of the next sample (the last one's: of the
    first), whose end is cut where both together are over max_length.

    Raises UserError if there are fewer than two samples.
    """
    from twofold.data.encode import IGNORE
    from twofold.data.tokens import TokenDataset

    if len(data) < 2:
        raise UserError(f"data.{what}: KTO needs two rows or more, since each is compared with another's answer.")
    own = [data.sequence(i) for i in range(len(data))]
    starts = [int(np.argmax(sequence["labels"] != IGNORE)) for sequence in own]
    tokens, labels = [], []
    for i, sequence in enumerate(own):
        j = (i + 1) % len(own)
        answer = slice(starts[j], None if max_length is None else starts[j] + max(1, max_length - starts[i]))
        tokens += [
            sequence["input_ids"],
            np.concatenate([sequence["input_ids"][: starts[i]], own[j]["input_ids"][answer]]),
        ]
        labels += [sequence["labels"], np.concatenate([np.full(starts[i], IGNORE), own[j]["labels"][answer]])]
    made = TokenDataset(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(labels).astype(np.int32),
        np.cumsum([len(part) for part in tokens]),
        np.array(data.row_numbers),
        data.report,
        np.arange(0, 2 * len(own), 2),
        {"values": np.repeat(data.columns["values"], 2)},
    )
    made.fingerprint = f"{data.fingerprint}-mismatched"
    return made


run, preview, export = commands(KTOTrainer)
