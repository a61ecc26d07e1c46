"""Log-probabilities of target tokens from hidden states, without ever holding all the logits.

The output head is applied to a few hundred positions at a time. For a plain linear head the gradient with
respect to the hidden states is taken in the forward pass, while a chunk's probabilities are at hand:

    logp_i  = z_it - lse(z_i)             d logp_i / d h_i  = W_t - p_i W
    mean_i  = mean_j z_ij - lse(z_i)      d mean_i / d h_i  = mean_j W_j - p_i W

with z_i = W h_i and p_i = softmax(z_i),

so a frozen head (LoRA) costs two matrix products in all, and a trained one only computes a chunk's logits
again where its probabilities did not fit into `KEEP_BYTES`. Any other head runs chunk by chunk under
activation checkpointing.

With the head's rows spread over ranks (`Slice`), each rank computes the logits of its slice of the vocabulary, and
only sums over the vocabulary are exchanged (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 << 20
KEEP_BYTES = 192 << 20


@dataclass(frozen=True)
class Slice:
    """The part of a vocabulary that a weight holds, the other parts being on other ranks.

    start: its first row; widest: rows of the largest part; vocabulary: rows of all parts; max, sum: replace a tensor
    by its maximum or sum over the ranks, in place.
    """

    start: int
    widest: int
    vocabulary: int
    max: Callable[[Tensor], object]
    sum: Callable[[Tensor], object]


def chunk_rows(vocabulary: int, trained: bool = False) -> int:
    """How many positions make a chunk: fp32 logits of about `CHUNK_BYTES`.

    Twice as many where the head is trained: each chunk then passes over the weight and over its gradient.
    """
    return max(16, (CHUNK_BYTES << trained) // (4 * vocabulary))


def linear_logps(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    with_mean: bool = False,
    part: Slice | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities under logits = hidden @ weight.T + bias.

    hidden: [n, width]; targets: [n] token ids; weight: [vocabulary, width]; bias: [vocabulary] or None; part: which
    slice of the vocabulary weight and bias are, if they are one (hidden and targets are then alike on its ranks).
    Returns (logp, mean), fp32 [n] each: logp[i] = log p(targets[i] | hidden[i]) and, if asked for, mean[i] = the
    mean over the vocabulary of log p(j | hidden[i]), which is what label smoothing needs; else None.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _LinearLogps.apply(hidden, targets, weight, bias, with_mean, part)


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


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[m, vocabulary], at least fp32."""
    logits = F.linear(h, weight, bias)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _rows(targets: Tensor, weight: Tensor, part: Slice | None) -> tuple[Tensor, Tensor | float]:
    """(row of `weight` of each target, 1 where the target lies in this slice of the vocabulary and 0 elsewhere)."""
    if part is None:
        return targets, 1.0
    at = targets - part.start
    here = (at >= 0) & (at < weight.shape[0])
    return at.where(here, 0), here.to(weight.dtype)


@dataclass
class _Chunk:
    """e: exp(z - top) for logits z, [m, vocabulary], None if it is to be computed again; top, total: [m], the largest
    logit and the sum of e over the vocabulary. Probabilities are e / total: dividing a product with the weight costs
    less."""

    e: Tensor | None
    top: Tensor
    total: Tensor


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        with_mean: bool,
        part: Slice | None,
    ) -> tuple[Tensor, Tensor | None]:
        w = weight.to(hidden.dtype)
        b = None if bias is None else bias.to(hidden.dtype)
        want_h, want_w = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        widest, vocabulary = (part.widest, part.vocabulary) if part else (len(w), len(w))
        rows = chunk_rows(widest, want_w)
        logps, means, pulls, chunks = [], [], [], []
        room = KEEP_BYTES if want_w else 0
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            z = _logits(h, w, b)
            at, here = _rows(t, w, part)
            target = (h.to(z.dtype) * w[at]).sum(-1)
            sums = [(target if b is None else target + b[at]) * here, *([z.sum(-1)] if with_mean else [])]
            top = z.amax(-1)
            if part:
                part.max(top)
            e = z.sub_(top[:, None]).exp_()  # in place: on CPU a fresh buffer costs more than the arithmetic
            over_vocabulary = torch.stack([e.sum(-1), *sums])
            if part:
                part.sum(over_vocabulary)
            total, target, *all_logits = over_vocabulary
            logps.append(target - total.log() - top)
            means += [x / vocabulary - total.log() - top for x in all_logits]
            if not (want_h or want_w):
                continue
            if w.dtype != e.dtype:  # sums of e overflow in fp16
                e.div_(total[:, None])
                top, total = top + total.log(), torch.ones_like(total)
            pulls.append((e.to(w.dtype) @ w) / total[:, None])  # p W, [m, width], of this slice
            room -= len(h) * widest * e.element_size()
            chunks.append(_Chunk(e if room >= 0 else None, top, total))
        ctx.set_materialize_grads(False)
        if pulls:
            ctx.save_for_backward(hidden, targets, weight, bias, torch.cat(pulls))
            ctx.chunks, ctx.part, ctx.vocabulary, ctx.rows = chunks, part, vocabulary, rows
        return torch.cat(logps), torch.cat(means) if with_mean else None

    @staticmethod
    def backward(
        ctx: Any, g_logp: Tensor | None, g_mean: Tensor | None
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]:
        hidden, targets, weight, bias, pulls = ctx.saved_tensors
        if g_logp is None and g_mean is None:
            return None, None, None, None, None, None
        g_logp = torch.zeros_like(g_mean) if g_logp is None else g_logp  # type: ignore[arg-type]
        w = weight.to(hidden.dtype)
        grad_h = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            at, here = _rows(targets, w, ctx.part)
            row = w[at] if ctx.part is None else w[at] * here[:, None]  # type: ignore[index]
            grad_h = g_logp[:, None] * (row - pulls)
            if g_mean is not None:
                grad_h = grad_h + g_mean[:, None] * (w.sum(0) / ctx.vocabulary - pulls)
            if ctx.part:
                ctx.part.sum(grad_h)
            grad_h = grad_h.to(hidden.dtype)
        if ctx.needs_input_grad[2]:
            grad_w, grad_b = _head_gradient(ctx, hidden, targets, w, bias, g_logp, g_mean)
            grad_w = None if grad_w is None else grad_w.to(weight.dtype)
        return grad_h, None, grad_w, grad_b, None, None


def _head_gradient(
    ctx: Any,
    hidden: Tensor,
    targets: Tensor,
    w: Tensor,
    bias: Tensor | None,
    g_logp: Tensor,
    g_mean: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """d/dW: the sum over i of (g_i (onehot_i - p_i) + m_i (1/V - p_i)) h_iᵀ; d/db the same without h."""
    grad_w = grad_b = None
    smoothed = g_mean is not None
    g_mean = torch.zeros_like(g_logp) if g_mean is None else g_mean
    pieces = (x.split(ctx.rows) for x in (hidden, targets, g_logp, g_mean))
    for (h, t, g, m), chunk in zip(zip(*pieces, strict=True), ctx.chunks, strict=True):
        e, chunk.e = chunk.e, None  # changed in place; a second pass (zero-bubble pipelines) computes it again
        if e is None:
            e = _logits(h, w, None if bias is None else bias.to(w.dtype)).sub_(chunk.top[:, None]).exp_()
        d = e.mul_(-((g + m) / chunk.total)[:, None])
        at, here = _rows(t, w, ctx.part)
        d[torch.arange(len(t), device=t.device), at] += g * here
        if smoothed:
            d += (m / ctx.vocabulary)[:, None]
        d = d.to(w.dtype)
        grad_w = d.T @ h if grad_w is None else grad_w.addmm_(d.T, h)
        if bias is not None:
            grad_b = d.sum(0) if grad_b is None else grad_b + d.sum(0)
    return grad_w, None if grad_b is None or bias is None else grad_b.to(bias.dtype)
