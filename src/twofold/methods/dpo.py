"""Direct preference optimisation: a chosen answer against a rejected one, with a reference model (arXiv 2305.18290).

For a pair let c and r be the log-ratios of the chosen and the rejected answer, log p(answer | prompt) under the model
minus the same under the reference, d = c - r, s the sigmoid and e the label smoothing. `loss_type` is one of

    sigmoid     -(1 - e) log s(beta d) - e log s(-beta d)                  arXiv 2305.18290, eq. 7; e: its appendix
    robust      (-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e)    arXiv 2403.00409, eq. 12
    hinge       max(0, 1 - beta d)                                         arXiv 2305.10425, eq. 10
    ipo         (d' - 1 / (2 beta))^2, d' of means over tokens             arXiv 2310.12036, eq. 17
    apo_zero    (1 - s(beta c)) + s(beta r)                                arXiv 2408.06266, eq. 6
    apo_down    s(beta c) + (1 - s(beta d))                                arXiv 2408.06266, eq. 7
    sppo_hard   (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2                arXiv 2405.00675, eq. 4.7 with labels 1 and 0
    nca_pair    -log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2     arXiv 2402.05369, eq. 12

or several of them with weights. `sft_weight` adds the mean over the chosen answers' tokens of -log p (arXiv 2404.19733,
eq. 2). The weight of the loss is the number of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from twofold.methods.common import LanguageConfig, commands
from twofold.methods.pairs import log_sigmoid, pair_loss, pair_metrics, pair_weights, token_counts
from twofold.methods.reference import ReferenceOptions, ReferenceTask, ReferenceTrainer
from twofold.task import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.models.causal_lm import CausalLM

Kind = Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard", "nca_pair"]


class Options(ReferenceOptions):
    """Direct preference optimisation."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0, description="How closely the model stays with the reference.")
    loss_type: Kind | Annotated[list[Kind], Field(min_length=1)] = Field(
        default="sigmoid", description="The loss of a pair, or a list of several that are added."
    )
    loss_weights: list[float] | None = Field(
        default=None, description="A weight for each of several losses. null = 1 each."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs that are taken to be the wrong way round (sigmoid, robust).",
    )
    sft_weight: float = Field(default=0.0, ge=0, description="Weight of the chosen answers' negative log-likelihood.")

    @model_validator(mode="after")
    def _weights_fit(self) -> Options:
        kinds = 1 if isinstance(self.loss_type, str) else len(self.loss_type)
        if self.loss_weights is not None and len(self.loss_weights) != kinds:
            raise ValueError(f"loss_weights has {len(self.loss_weights)} numbers and loss_type names {kinds}.")
        return self

    def losses(self) -> list[tuple[Kind, float]]:
        """Each loss_type and its weight."""
        kinds = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        return list(zip(kinds, self.loss_weights or [1.0] * len(kinds), strict=True))


class DPOConfig(Options, LanguageConfig):
    """Options of `DPOTrainer`: the loss, the reference, the data options, and how the model is loaded and adapted."""


class DPO(ReferenceTask):
    """Pairs (chosen, rejected); batch["reference"]: their log-probabilities under the reference, if precomputed."""

    def __init__(self, model: CausalLM, options: Options | None = None, pad: int = 0) -> None:
        super().__init__(model, pad)
        self.options = options or Options()

    def loss(self, output: Any, batch: Any) -> Loss:
        options = self.options
        policy, reference = self.sums(output, batch)
        c, r = (policy - reference)[0::2], (policy - reference)[1::2]
        losses = [weight * self._losses(kind, c, r, batch) for kind, weight in options.losses()]
        metrics = pair_metrics(options.beta * c, options.beta * r, policy)
        return pair_loss("dpo", sum(losses[1:], losses[0]), policy, batch, options.sft_weight, metrics)

    def weights(self, batch: Any) -> dict[str, Any]:
        return pair_weights("dpo", batch, self.options.sft_weight)

    def _losses(self, kind: Kind, c: Tensor, r: Tensor, batch: Any) -> Tensor:
        """[pairs]."""
        if kind == "ipo":
            tokens = token_counts(batch)
            c, r = c / tokens[0::2], r / tokens[1::2]
        return LOSSES[kind](c, r, self.options.beta, self.options.label_smoothing)


def _sigmoid(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    h = beta * (c - r)
    return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)


def _robust(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    h = beta * (c - r)
    return (-(1 - e) * log_sigmoid(h) + e * log_sigmoid(-h)) / (1 - 2 * e)


def _nca_pair(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    return -log_sigmoid(beta * c) - 0.5 * (log_sigmoid(-beta * c) + log_sigmoid(-beta * r))


LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": lambda c, r, beta, e: (1 - beta * (c - r)).clamp(min=0),
    "ipo": lambda c, r, beta, e: (c - r - 1 / (2 * beta)) ** 2,
    "apo_zero": lambda c, r, beta, e: (1 - (beta * c).sigmoid()) + (beta * r).sigmoid(),
    "apo_down": lambda c, r, beta, e: (beta * c).sigmoid() + (1 - (beta * (c - r)).sigmoid()),
    "sppo_hard": lambda c, r, beta, e: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
    "nca_pair": _nca_pair,
}
"""(c, r, beta, label smoothing) -> the loss of each pair."""


class DPOTrainer(ReferenceTrainer):
    """`DPOTrainer(model="smollm2-135m-instruct", train_dataset="pairs.jsonl", eval_steps=20).train()`.

    The arguments are those of `LanguageTrainer`; rows: preference pairs; args: a `DPOConfig` or a dict of its fields.
    """

    config_class = DPOConfig
    rows = "preference"

    def task(self) -> DPO:
        return DPO(self.model, self.args, self.pad)


run, preview, export = commands(DPOTrainer)
