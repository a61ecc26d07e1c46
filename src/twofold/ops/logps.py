"""Log-probabilities of target tokens from hidden states, without ever holding all the logits.

The output head is applied to a few hundred positions at a time. For a plain linear head the gradient with
respect to the hidden states is taken in the forward pass, while a chunk's probabilities are at hand:

    logp_i  = z_it - lse(z_i)             d logp_i / d h_i  = W_t - p_i W
    mean_i  = mean_j z_ij - lse(z_i)      d mean_i / d h_i  = mean_j W_j - p_i W

with z_i = W h_i and p_i = softmax(z_i),

so a frozen head (LoRA) costs two matrix products in all, and a trained one only computes a chunk's logits
again where its probabilities did not fit into `KEEP_BYTES`. Any other head runs chunk by chunk under
activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 << 20
KEEP_BYTES = 192 << 20


def chunk_rows(vocabulary: int, trained: bool = False) -> int:
    """How many positions make a chunk: fp32 logits of about `CHUNK_BYTES`.

    Twice as many where the head is trained: each chunk then passes over the weight and over its gradient.
    """
    return max(16, (CHUNK_BYTES << trained) // (4 * vocabulary))


def linear_logps(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None = None, with_mean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities under logits = hidden @ weight.T + bias.

    hidden: [n, width]; targets: [n] token ids; weight: [vocabulary, width]; bias: [vocabulary] or None.
    Returns (logp, mean), fp32 [n] each: logp[i] = log p(targets[i] | hidden[i]) and, if asked for, mean[i] = the
    mean over the vocabulary of log p(j | hidden[i]), which is what label smoothing needs; else None.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _LinearLogps.apply(hidden, targets, weight, bias, with_mean)


def chunked_logps(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], with_mean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same for any head, a function from hidden states [m, width] to logits [m, vocabulary]."""

    def one(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        logp = F.log_softmax(head(h).float(), dim=-1)
        return logp.gather(1, t[:, None])[:, 0], logp.mean(-1) if with_mean else None

    rows = 256  # the vocabulary of an unknown head is not known before it has run
    parts = [
        checkpoint(one, h, t, use_reentrant=False) for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if with_mean else None


def _exponentials(h: Tensor, weight: Tensor, bias: Tensor | None, with_mean: bool) -> tuple[Tensor, ...]:
    """exp(z - max z), its sum, log-sum-exp of z and (if asked for) mean of z, for logits z: [m, vocabulary], then [m].

    All at least fp32. Probabilities are the first over the second, a division that is cheaper after a product with
    the weight.
    """
    logits = F.linear(h, weight, bias)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    mean = (logits.mean(-1),) if with_mean else ()
    top = logits.amax(-1)
    e = logits.sub_(top[:, None]).exp_()  # in place: on CPU a fresh buffer costs more than the arithmetic
    total = e.sum(-1)
    return e, total, total.log().add_(top), *mean


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, with_mean: bool
    ) -> tuple[Tensor, Tensor | None]:
        w = weight.to(hidden.dtype)
        b = None if bias is None else bias.to(hidden.dtype)
        want_h, want_w = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        rows = chunk_rows(weight.shape[0], want_w)
        logps, means, pulls, kept = [], [], [], []
        room = KEEP_BYTES if want_w else 0
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            e, total, lse, *mean = _exponentials(h, w, b, with_mean)
            target = (h.to(lse.dtype) * w[t]).sum(-1)
            logps.append((target if b is None else target + b[t]) - lse)
            means += [m - lse for m in mean]
            if not (want_h or want_w):
                continue
            pulls.append((e.to(w.dtype) @ w) / total[:, None])  # p W, [m, width]
            room -= e.numel() * e.element_size()
            kept.append((e, total) if room >= 0 else None)
        ctx.set_materialize_grads(False)
        if pulls:
            ctx.save_for_backward(hidden, targets, weight, bias, torch.cat(pulls))
            ctx.kept = kept
        return torch.cat(logps), torch.cat(means) if with_mean else None

    @staticmethod
    def backward(
        ctx: Any, g_logp: Tensor | None, g_mean: Tensor | None
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        hidden, targets, weight, bias, pulls = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        if g_logp is None and g_mean is None:
            return None, None, None, None, None
        g_logp = torch.zeros_like(g_mean) if g_logp is None else g_logp  # type: ignore[arg-type]
        w = weight.to(hidden.dtype)
        grad_h = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_h = g_logp[:, None] * (w[targets] - pulls)
            if g_mean is not None:
                grad_h = grad_h + g_mean[:, None] * (w.mean(0) - pulls)
            grad_h = grad_h.to(hidden.dtype)
        if ctx.needs_input_grad[2]:
            grad_w, grad_b = _head_gradient(hidden, targets, w, bias, g_logp, g_mean, kept)
            grad_w = None if grad_w is None else grad_w.to(weight.dtype)
        return grad_h, None, grad_w, grad_b, None


def _head_gradient(
    hidden: Tensor,
    targets: Tensor,
    w: Tensor,
    bias: Tensor | None,
    g_logp: Tensor,
    g_mean: Tensor | None,
    kept: list[tuple[Tensor, Tensor] | None],
) -> tuple[Tensor | None, Tensor | None]:
    """d/dW: the sum over i of (g_i (onehot_i - p_i) + m_i (1/V - p_i)) h_iᵀ; d/db the same without h."""
    rows = chunk_rows(w.shape[0], trained=True)
    grad_w = grad_b = None
    smoothed = g_mean is not None
    g_mean = torch.zeros_like(g_logp) if g_mean is None else g_mean
    pieces = (x.split(rows) for x in (hidden, targets, g_logp, g_mean))
    for (h, t, g, m), chunk in zip(zip(*pieces, strict=True), kept, strict=True):
        e, total = chunk or _exponentials(h, w, None if bias is None else bias.to(w.dtype), with_mean=False)[:2]
        d = e.mul_(-((g + m) / total)[:, None])
        d[torch.arange(len(t), device=t.device), t] += g
        if smoothed:
            d += (m / w.shape[0])[:, None]
        d = d.to(w.dtype)
        grad_w = d.T @ h if grad_w is None else grad_w.addmm_(d.T, h)
        if bias is not None:
            grad_b = d.sum(0) if grad_b is None else grad_b + d.sum(0)
    return grad_w, None if grad_b is None or bias is None else grad_b.to(bias.dtype)
