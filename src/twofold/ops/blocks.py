"""Attention computed a block of keys at a time (arXiv 2205.14135): what a ring of ranks needs, in plain PyTorch.

With z = q kᵀ * scale over the keys of a block, capped to cap * tanh(z / cap) where there is a cap:

    lse = log sum exp z        out = exp(z - lse) v

Results of several blocks are merged by their lse; the backward pass of a block needs the lse over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """q: [1, heads, n, d]; k, v: [1, kv_heads, m, d]; allowed: [n, m]. Returns (out [1, heads, n, d], lse
    [1, heads, n]), at least fp32; a query without a key has out 0 and lse -inf."""
    z, _ = _logits(_grouped(q, k), k, allowed, scale, cap)
    lse = z.logsumexp(-1)
    p = (z - lse.clamp(min=torch.finfo(z.dtype).min)[..., None]).exp()
    return _joined(p @ v[:, :, None].to(z.dtype)), _joined(lse)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both; the first has a key for every query."""
    total = torch.logaddexp(lse, more_lse)
    return out * (lse - total).exp()[..., None] + more * (more_lse - total).exp()[..., None], total


def block_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    cap: float | None,
    lse: Tensor,
    d_out: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k, v of a block. lse: over all blocks; delta: the sum of out * d_out, like lse."""
    queries, d = _grouped(q, k), _grouped(d_out, k)
    z, slope = _logits(queries, k, allowed, scale, cap)
    keys, values = k[:, :, None].to(z.dtype), v[:, :, None].to(z.dtype)
    p = (z - _grouped(lse, k)[..., None]).exp()
    d_v = (p.transpose(-1, -2) @ d.to(z.dtype)).sum(2)
    d_z = p * (d.to(z.dtype) @ values.transpose(-1, -2) - _grouped(delta, k)[..., None]) * scale
    if slope is not None:
        d_z = d_z * slope
    d_q = d_z @ keys
    d_k = (d_z.transpose(-1, -2) @ queries.to(z.dtype)).sum(2)
    return _joined(d_q), d_k, d_v


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[1, heads, …] -> [1, kv_heads, queries of each, …]"""
    return x.unflatten(1, (k.shape[1], -1))


def _joined(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _logits(q: Tensor, k: Tensor, allowed: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """(masked logits [1, kv_heads, group, n, m], their derivative by the uncapped ones where there is a cap)."""
    exact = torch.promote_types(q.dtype, torch.float32)
    z = q.to(exact) @ k[:, :, None].to(exact).transpose(-1, -2) * scale
    slope = None
    if cap is not None:
        bent = torch.tanh(z / cap)
        z, slope = cap * bent, 1 - bent.square()
    return z.masked_fill(~allowed, float("-inf")), slope
