"""Padding-free attention for Hugging Face models, by transformers' attention interface.

`register()` adds one attention function under the name `NAME`. A model that runs with it gets rows of
concatenated samples and the keyword `sample_lengths`; since no mask function is registered under that name,
transformers builds no mask at all (and reads no data to find out whether it must).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from twofold.ops.attention import Length, packed_attention
from twofold.parallel.context import Context

NAME = "twofold_packed"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sample_lengths: Sequence[Length] | None = None,
    context: Context | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature around `packed_attention`; shapes as there. context: where tokens are split
    over ranks, this rank's place."""
    if sample_lengths is None or attention_mask is not None:
        raise RuntimeError("padding-free attention was called without sample_lengths, or with a mask")
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise NotImplementedError("padding-free attention knows neither attention sinks nor position biases")
    attend: Any = packed_attention if context is None else context.attend
    out = attend(
        query,
        key,
        value,
        sample_lengths,
        scale=scaling,
        dropout=dropout,
        causal=kwargs.get("is_causal") is not False and getattr(module, "is_causal", True),
        window=sliding_window,
        softcap=softcap,
    )
    return out.contiguous(), None


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


@contextmanager
def attention(model: nn.Module, name: str) -> Iterator[None]:
    """Runs a Hugging Face model with another attention function, and puts the old one back."""
    before = model.config._attn_implementation  # type: ignore[union-attr]
    if name == before:
        yield
        return
    model.set_attn_implementation(name)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
