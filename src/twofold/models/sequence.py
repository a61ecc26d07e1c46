"""Sequence parallel: between the layers that the tensor axis splits, each of its ranks keeps a piece of the tokens.

Norms, dropout and residuals are then computed, and kept for the backward pass, once and not on every rank
(arXiv 2205.05198, section 4.2). Of each decoder layer, the children that are more than one module (attention, the
MLP) get all tokens and give back this rank's piece; what lies outside of them sees pieces only, so gradients of its
weights are summed over the axis. Split layers keep their own reductions, so an all-gather comes on top of each: memory
is saved, traffic is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from twofold.models.causal_lm import head
from twofold.models.tensor_plan import SummedGradients
from twofold.parallel.context import Context
from twofold.parallel.shard import blocks


class _Piece(torch.autograd.Function):
    """This rank's piece of what all ranks have alike; its gradient is put together again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.part(x, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.context.join(grads[0], 1), None


def install(hf: Any, context: Context, devices: Any) -> None:
    """Puts a Hugging Face model, split over the tensor axis, on pieces of the row. context: the tensor axis."""
    inside: set[int] = set()
    whole = [child for block in blocks(hf) for child in block.children() if any(True for _ in child.children())]
    embedding = hf.get_input_embeddings()
    if isinstance(getattr(embedding, "weight", None), DTensor):
        whole.append(embedding)
    for module in whole:
        module.forward = _whole_inside(module.forward, context)
        inside |= {id(m) for m in module.modules()}
    last = head(hf)
    for module in hf.modules():
        if id(module) not in inside and module is not last and any(True for _ in module.parameters(recurse=False)):
            SummedGradients().install_forward(module, devices)


def _whole_inside(forward: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """A forward that is called with a piece of the row, runs on all of it, and returns a piece."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args = (_joined(args[0], context), *args[1:]) if args else args
        named = ("hidden_states",) if not args else ()
        kwargs |= {name: _joined(kwargs[name], context) for name in (*named, "position_embeddings") if name in kwargs}
        return _pieces(forward(*args, **kwargs), context)

    return run


def _joined(x: Any, context: Context) -> Any:
    if isinstance(x, tuple):  # cos and sin of rotary positions
        return tuple(_joined(y, context) for y in x)
    return context.join(x, 1) if isinstance(x, Tensor) else x


def _pieces(output: Any, context: Context) -> Any:
    """Of a tensor, or of the first member of a tuple (attention gives its weights beside)."""
    if isinstance(output, tuple):
        return (_Piece.apply(output[0], context), *output[1:])
    return _Piece.apply(output, context)
