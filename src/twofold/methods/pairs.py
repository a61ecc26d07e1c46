"""What the methods that learn from pairs (chosen, rejected) share. Sequences come in turn: chosen, rejected, …"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twofold.task import Loss

if TYPE_CHECKING:
    from torch import Tensor


def log_sigmoid(x: Tensor) -> Tensor:
    """log(1 / (1 + exp(-x)))"""
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def token_counts(batch: Any) -> Tensor:
    """Labelled tokens of each sequence: [sequences]."""
    return batch["sample_of"].bincount(minlength=sum(batch["counts"]))


def pair_metrics(chosen: Tensor, rejected: Tensor, logps: Tensor) -> dict[str, tuple[Any, Any]]:
    """What users of preference methods watch: rewards of each [pairs], their accuracy and margin, and log p."""
    n, chosen, rejected, logps = len(chosen), chosen.detach(), rejected.detach(), logps.detach()
    margin = chosen - rejected
    return {
        "rewards/chosen": (chosen.sum(), n),
        "rewards/rejected": (rejected.sum(), n),
        "rewards/accuracies": ((margin > 0).double().sum(), n),
        "rewards/margins": (margin.sum(), n),
        "logps/chosen": (logps[0::2].sum(), n),
        "logps/rejected": (logps[1::2].sum(), n),
    }


def pair_loss(name: str, losses: Tensor, logps: Tensor, batch: Any, sft_weight: float, metrics: Any) -> Loss:
    """The sum of `losses` [pairs] over their number; with sft_weight beside it the chosen answers' negative
    log-likelihood over their number of tokens. logps: [sequences]."""
    weights = pair_weights(name, batch, sft_weight)
    if not sft_weight:
        return Loss.of(losses.sum(), weights["loss"], **metrics)
    terms = {name: (losses.sum(), weights[name]), "sft": (-logps[0::2].sum(), weights["sft"], sft_weight)}
    return Loss(terms, metrics)


def pair_weights(name: str, batch: Any, sft_weight: float) -> dict[str, Any]:
    """The weights of `pair_loss`'s terms."""
    pairs = len(batch["counts"])
    return {name: pairs, "sft": (batch["sample_of"] % 2 == 0).sum()} if sft_weight else {"loss": pairs}
