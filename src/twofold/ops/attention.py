"""Attention over concatenated samples: each sample attends to itself alone, and no mask is ever built.

Samples of lengths n_1 … n_k lie one after the other in one row of sum(n) tokens. The CPU path runs
scaled-dot-product attention sample by sample (cost: the sum of n_i², against (sum of n_i)² with a mask); the
CUDA path is torch's variable-length flash attention. Both are aware of grouped queries: fewer key/value
heads than query heads, without repeating them.

A sample may be a tree: in the place of its length stand those of a trunk and its branches, (p, b_1, b_2 …). Each
branch attends to the trunk and itself, as if it alone came after it, and the trunk is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Length = int | tuple[int, ...]
"""Tokens of a sample; of a tree those of its trunk and of each branch."""


def tokens_of(length: Length) -> int:
    return length if isinstance(length, int) else sum(length)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[Length],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    start: int | None = None,
) -> Tensor:
    """Attention of each sample to itself.

    query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim];
    lengths: tokens of each sample (or tree), in order, as Python numbers (their sum is `tokens`);
    window: how many tokens back, itself included, a token sees; softcap: logits become cap * tanh(logits / cap);
    start: query holds a piece of the row only, from this token on.
    Returns [1, tokens, heads, head_dim].
    """
    plain = [length for length in lengths if isinstance(length, int)]
    if len(plain) == len(lengths):
        if start is not None:
            return _piece(query, key, value, plain, start, scale, dropout, causal, window, softcap)
        if query.is_cuda and softcap is None and dropout == 0.0 and query.dtype in (torch.float16, torch.bfloat16):
            return _varlen(query, key, value, plain, scale, causal, window)
    elif start is not None or not causal:
        raise NotImplementedError("trees are for causal attention to a whole row")
    parts, sizes, how = [], [tokens_of(length) for length in lengths], (scale, dropout, causal, window, softcap)
    for length, q, k, v in zip(lengths, *(x.split(sizes, dim=2) for x in (query, key, value)), strict=True):
        parts += [_one_sample(q, k, v, *how)] if isinstance(length, int) else _tree(q, k, v, length, how)
    return torch.cat(parts, dim=2).transpose(1, 2)


def _tree(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...], how: Any) -> list[Tensor]:
    """The attention of the trunk, and of each branch."""
    (q0, k0, v0), *branches = zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True)
    scale, dropout, causal, window, softcap = how
    parts = [_one_sample(q0, k0, v0, *how)]
    for q1, k1, v1 in branches:
        both = torch.cat([k0, k1], 2), torch.cat([v0, v1], 2)
        parts.append(_one_sample(q1, *both, scale, dropout, causal, window, softcap, sizes[0]))
    return parts


def _one_sample(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    dropout: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    before: int = 0,
) -> Tensor:
    """before: how many keys lie before the first query."""
    length = k.shape[2]
    mask = None
    if (window is not None and window < length) or (causal and (softcap is not None or before)):
        mask = _band(q.shape[2], length, before, window, causal, q.device)
    if softcap is not None:
        return _capped(q, k, v, mask, scale, dropout, softcap)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _piece(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], start: int, *how: Any) -> Tensor:
    """The attention of the tokens from `start` on that `query` holds."""
    parts, stop, first = [], start + query.shape[2], 0
    for length in lengths:
        here, there = max(first, start), min(first + length, stop)
        if here < there:
            k, v = (x[:, :, first : first + length] for x in (key, value))
            scale, dropout, causal, window, softcap = how
            if causal:
                k, v = (x[:, :, : there - first] for x in (k, v))
            q = query[:, :, here - start : there - start]
            parts.append(_one_sample(q, k, v, scale, dropout, causal, window, softcap, here - first))
        first += length
    return torch.cat(parts, dim=2).transpose(1, 2)


def _band(n: int, keys: int, before: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """True where a token (row) may look at a token (column): [n, keys]; `before` keys lie before the first row's."""
    back = torch.arange(before, before + n, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    band = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    return band if window is None else band & (back < window)


def allowed_pairs(
    lengths: Sequence[int], rows: slice, columns: slice, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """True where a token of a row of samples may look at another: [rows, columns]."""
    band = _band(
        rows.stop - rows.start, columns.stop - columns.start, rows.start - columns.start, window, causal, device
    )
    sample = torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(lengths)])
    return band & (sample[rows][:, None] == sample[columns][None, :])


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, dropout: float, cap: float
) -> Tensor:
    """Attention with soft-capped logits (Gemma 2, arXiv 2408.00118, section 2)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = q @ k.transpose(2, 3) * (scale if scale is not None else q.shape[-1] ** -0.5)
    logits = cap * torch.tanh(logits / cap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    exact = torch.promote_types(q.dtype, torch.float32)
    return F.dropout(logits.softmax(-1, dtype=exact).to(q.dtype), dropout) @ v


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.to(query.device, non_blocking=True)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    left = -1 if window is None else window - 1
    longest = max(lengths)
    out = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0 if causal else -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)
