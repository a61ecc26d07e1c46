"""The expert axis: ranks with samples of their own that hold some of the experts each (arXiv 2006.16668).

Tokens travel to the ranks of their experts and back, by an all-to-all of uneven sizes; everything else in the model is
as on the data axes. A module of experts is one with the attribute `num_experts`, parameters whose first dimension it
is, and

    def forward(self, hidden, index, weights)     # [tokens, width], [tokens, k] experts, [tokens, k] -> [tokens, width]

as Hugging Face's models have them; its own forward runs on the experts that are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard

from twofold.errors import UserError
from twofold.mesh.mesh import Mesh


def experts(model: nn.Module) -> dict[str, Any]:
    """The modules of experts in a model, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "num_experts", None), int) and _stacked(module)
    }


def _stacked(module: Any) -> dict[str, nn.Parameter]:
    """The parameters of a module that hold a slice for every expert (all of them, one at least with matrices)."""
    own = dict(module.named_parameters(recurse=False))
    here = {name: p for name, p in own.items() if p.ndim > 1}
    return here if any(p.ndim == 3 for p in here.values()) else {}


def check(model: nn.Module, ranks: int) -> None:
    """Raises UserError if the model has no experts, or some that do not divide by the ranks."""
    found, name = experts(model), type(model).__name__
    if not found:
        raise UserError(f"strategy 'ep': {name} has no experts: use fsdp or tp.")
    for path, module in found.items():
        if path.endswith(".base_layer"):
            raise UserError(
                "strategy 'ep': experts with an adapter cannot be split: let model.adapter.target name attention only."
            )
        if module.num_experts % ranks:
            fitting = max(n for n in range(1, ranks + 1) if module.num_experts % n == 0)
            raise UserError(
                f"strategy 'ep': {module.num_experts} experts do not divide by {ranks} ranks: use ep:{fitting}."
            )


def split(model: nn.Module, mesh: Mesh) -> None:
    """Splits the experts over the axis, in place. Raises UserError as `check` does."""
    check(model, mesh.size("expert"))
    for module in experts(model).values():
        _split(module, mesh)


def _split(module: Any, mesh: Mesh) -> None:
    devices, ranks, every = mesh.sub("expert"), mesh.size("expert"), module.num_experts
    for name, p in _stacked(module).items():
        mine = p.detach().chunk(ranks, 0)[mesh.coordinate("expert")].clone()
        placed = DTensor.from_local(mine, devices, [Shard(0)], run_check=False)
        module._parameters[name] = nn.Parameter(placed, requires_grad=p.requires_grad)
    module.num_experts = every // ranks
    module.forward = _dispatched(module, module.forward, devices.get_group(), ranks, every)


def _dispatched(
    module: Any, original: Callable[..., Tensor], group: Any, ranks: int, every: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The module's forward with the tokens sent to where their experts are."""

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        flat, k = index.reshape(-1), index.shape[-1]
        order = flat.argsort(stable=True)  # by expert, and so by rank
        per_rank = flat.new_zeros(ranks).scatter_add(0, flat // (every // ranks), torch.ones_like(flat))
        sent, received = _sizes(per_rank, len(flat), group)
        tokens = _Exchange.apply(hidden[order // k], sent, received, group)
        which = _exchanged((flat % (every // ranks))[order], sent, received, group)
        own = dict(module._parameters)
        # An expert here meets the tokens of all ranks of the axis, every other weight those of one: gradients of all
        # are averaged over the ranks alike (`Placed.gradient_scale`), so an expert's must be divided once more.
        module._parameters.update({n: _Divided.apply(p.to_local(), ranks) for n, p in own.items() if p is not None})
        try:
            if len(tokens):
                done = original(tokens, which[:, None], torch.ones_like(tokens[:, :1], dtype=weights.dtype))
            else:  # every rank must take part in the backward pass
                done = tokens + 0.0 * sum(p.sum() for p in module._parameters.values() if p is not None)
        finally:
            module._parameters.update(own)
        back = _Exchange.apply(done, received, sent, group)
        restored = torch.zeros_like(back).index_copy(0, order, back).view(*index.shape, -1)
        return (restored * weights[..., None]).sum(1).to(hidden.dtype)

    return forward


def _sizes(per_rank: Tensor, total: int, group: Any) -> tuple[list[int], list[int]]:
    """(tokens for each rank, tokens from each rank). A simulation takes them to be alike."""
    if isinstance(per_rank, FakeTensor):
        ranks = len(per_rank)
        even = [(total * (i + 1)) // ranks - (total * i) // ranks for i in range(ranks)]
        return even, even
    theirs = torch.empty_like(per_rank)
    dist.all_to_all_single(theirs, per_rank, group=group)
    return per_rank.tolist(), theirs.tolist()


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    made = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(made, x.contiguous(), received, sent, group=group)
    return made


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = (received, sent, group)
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], *ctx.back), None, None, None


class _Divided(torch.autograd.Function):
    """The tensor itself; its gradient divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.by, None
