"""The context axis: ranks that share the tokens of the same samples, each a piece of the row.

Everything but attention is computed token by token, so each rank works on its piece; attention exchanges, in one of
three ways, or a plug-in's (`config/plugins.py`), which is a function like `all_gather` below:

    all-to-all   each rank gets whole samples for its share of the heads (Ulysses, arXiv 2309.14509); where heads do
                 not divide by the ranks, all-gather
    all-gather   each rank gets all keys and values for its own queries (arXiv 2407.21783, section 3.3.2)
    ring         keys and values go round, a piece at a time, and are never together (arXiv 2310.01889)

A model on this axis has a method that takes the `Context` (`models/causal_lm.py`):

    def split_context(self, context: Context) -> None

Gradients are then sums over each rank's tokens: the data axes add them up over this axis too (`REDUCED_AXES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twofold.config import plugins
from twofold.errors import UserError
from twofold.mesh.mesh import Mesh
from twofold.ops.attention import allowed_pairs, packed_attention
from twofold.ops.blocks import block, block_gradients, merge
from twofold.parallel.strategy import EXCHANGES, Parallel


@dataclass(frozen=True)
class Context:
    """This rank's place on the axis. exchange: one of the functions below, or a plug-in's; None where there is no
    attention to compute."""

    group: Any
    rank: int
    ranks: int
    exchange: Callable[[Context, Tensor, Tensor, Tensor, tuple[int, ...], Any], Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> Context:
        return self

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's piece of what all ranks have, of which `ranks` divides the size."""
        return x.chunk(self.ranks, dim)[self.rank]

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The pieces of all ranks, in order; its gradient is summed over them."""
        return _Gather.apply(x, dim, self)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """The same where every rank goes on alike with the whole: its gradient is the part of this rank."""
        return _Join.apply(x, dim, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], **options: Any) -> Tensor:
        """`packed_attention` of a row in pieces. q: [1, heads, tokens / ranks, head_dim]; lengths: of the whole row's
        samples. Returns [1, tokens / ranks, heads, head_dim]."""
        assert self.exchange is not None
        return self.exchange(self, q, k, v, tuple(lengths), options)


def spread(model: Any, mesh: Mesh, layout: Parallel) -> None:
    """Puts a model on the context axis. Raises UserError if it cannot be."""
    if not hasattr(model, "split_context"):
        raise UserError(
            f"strategy 'cp': {type(model).__name__} has no method split_context, so its samples cannot be split over "
            "ranks: use ddp, fsdp, tp or pp."
        )
    exchange = plugins.find("exchanges", layout.exchange, EXCHANGES)
    model.split_context(Context(mesh.group("context"), mesh.coordinate("context"), layout.context, exchange))


def all_to_all(context: Context, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: Any) -> Tensor:
    ranks, heads = context.ranks, k.shape[1]
    if q.shape[1] % ranks:
        return all_gather(context, q, k, v, lengths, options)
    if heads % ranks:
        again = ranks // gcd(ranks, heads)
        k, v = (x.repeat_interleave(again, dim=1) for x in (k, v))
    q, k, v = (_Transpose.apply(x, 1, 2, context) for x in (q, k, v))
    return _Transpose.apply(packed_attention(q, k, v, lengths, **options), 1, 2, context)


def all_gather(context: Context, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: Any) -> Tensor:
    k, v = context.gather(k, 2), context.gather(v, 2)
    return packed_attention(q, k, v, lengths, start=context.rank * q.shape[2], **options)


def ring(context: Context, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: Any) -> Tensor:
    scale = options["scale"] if options["scale"] is not None else q.shape[-1] ** -0.5
    if options["dropout"]:
        raise UserError("strategy 'cp,ring' knows no attention dropout: use cp, or set it to 0 in the model.")
    rules = (lengths, options["causal"], options["window"])
    return _Ring.apply(q, k, v, rules, scale, options["softcap"], context).transpose(1, 2)


def _exchanged(x: Tensor, split: int, along: int, context: Context) -> Tensor:
    """Split into pieces along one dimension, one for each rank; theirs put together along another."""
    sent = torch.stack(x.chunk(context.ranks, split)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.group)
    return torch.cat(received.unbind(0), along)


def _gathered(x: Tensor, dim: int, context: Context) -> Tensor:
    x = x.contiguous()
    made = [torch.empty_like(x) for _ in range(context.ranks)]
    dist.all_gather(made, x, group=context.group)
    return torch.cat(made, dim)


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, along: int, context: Context) -> Tensor:
        ctx.how = (along, split, context)
        return _exchanged(x, split, along, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], *ctx.how), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, context: Context) -> Tensor:
        ctx.how = (dim, context)
        return _gathered(x, dim, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dim, context = ctx.how
        parts = [part.contiguous() for part in grads[0].chunk(context.ranks, dim)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=context.group)
        return mine, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, context: Context) -> Tensor:
        ctx.how = (dim, context)
        return _gathered(x, dim, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dim, context = ctx.how
        return context.part(grads[0], dim), None, None


def _mask(rules: tuple[Any, ...], mine: int, theirs: int, n: int, device: torch.device) -> Tensor | None:
    """Which tokens of piece `mine` look at which of piece `theirs`, None for none."""
    lengths, causal, window = rules
    if causal and theirs > mine:
        return None
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    first = next(i for i, end in enumerate(ends[1:]) if end > mine * n)  # the first sample of my piece
    if causal and ends[first] >= (theirs + 1) * n:
        return None
    return allowed_pairs(
        lengths, slice(mine * n, (mine + 1) * n), slice(theirs * n, (theirs + 1) * n), causal, window, device
    )


def _passed_on(tensors: Sequence[Tensor], context: Context) -> list[Tensor]:
    """Sends these to the next rank of the ring and returns those of the one before."""
    tensors = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in tensors]
    after, before = (context.rank + 1) % context.ranks, (context.rank - 1) % context.ranks
    group = context.group
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=after) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=before) for x in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rules: Any, scale: float, cap: float | None, context: Context
    ) -> Tensor:
        n, mine, held = q.shape[2], context.rank, [k, v]
        out = lse = q.new_empty(())
        for turn in range(context.ranks):
            mask = _mask(rules, mine, (mine - turn) % context.ranks, n, q.device)
            if mask is not None:
                found = block(q, held[0], held[1], mask, scale, cap)
                out, lse = merge(out, lse, *found) if turn else found
            if turn + 1 < context.ranks:
                held = _passed_on(held, context)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = (rules, scale, cap, context)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        rules, scale, cap, context = ctx.how
        delta = (out * grads[0]).sum(-1)
        d_q = torch.zeros_like(out)
        held = [k, v, *(torch.zeros_like(x, dtype=out.dtype) for x in (k, v))]
        for turn in range(context.ranks):
            mask = _mask(rules, context.rank, (context.rank - turn) % context.ranks, q.shape[2], q.device)
            if mask is not None:
                more = block_gradients(q, held[0], held[1], mask, scale, cap, lse, grads[0], delta)
                d_q += more[0]
                held = [held[0], held[1], held[2] + more[1], held[3] + more[2]]
            held = _passed_on(held, context)  # after the last turn they are home again
        return d_q.to(q.dtype), held[2].to(k.dtype), held[3].to(v.dtype), None, None, None, None
