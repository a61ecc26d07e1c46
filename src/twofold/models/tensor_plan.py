"""The tensor axis for Hugging Face causal models: transformers' own plans, completed where they stop short.

- The input embedding is split over the vocabulary together with the head (tied or not), so that the loss is computed
  on slices of the vocabulary (`ops/logps.py`).
- Heads that do not divide by the ranks: projections stay split, attention itself runs on gathered heads.
- A LoRA layer is split like the layer that it adapts: the base and one of its two matrices. Fused experts that are
  adapted stay whole.
- GPT-2, which transformers declares no plan for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel, TensorParallelLayer
from transformers.pytorch_utils import Conv1D

from twofold.errors import UserError

OURS = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": "colwise_gather_output",
        "transformer.h.*.attn.c_proj": "rowwise_split_input",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
}
_GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}


def split(hf: Any, devices: DeviceMesh) -> None:
    """Splits a Hugging Face causal model over the ranks of `devices`, in place.

    Raises UserError if neither transformers nor this file has a plan for it.
    """
    styles = dict(_rules(hf, plan(hf, devices.size())))
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    modules = dict(hf.named_modules())
    for name, style in styles.items():
        if modules[name] in (embedding, head):
            continue
        _apply(modules[name], style, devices)
    if type(embedding) is nn.Embedding:
        _apply(embedding, ALL_PARALLEL_STYLES["embedding_rowwise"], devices)
    if type(head) is nn.Linear and not (tied and type(embedding) is not nn.Embedding):
        if tied:
            head.weight = embedding.weight
        _apply(head, ALL_PARALLEL_STYLES["colwise_gather_output"], devices, skip=("weight",) if tied else ())


def plan(hf: Any, ranks: int) -> dict[str, str]:
    """module, with `*` for layer numbers -> style, as this number of ranks can bear it. Raises UserError for a model
    without a plan."""
    found = OURS.get(hf.config.model_type) or dict(hf.tp_plan or {})
    if not any("layers" in name or ".h." in name for name in found):
        raise UserError(
            f"strategy 'tp': neither transformers nor Twofold has a tensor plan for {type(hf).__name__}. Among many "
            "others Llama, Qwen2, Qwen3, Mistral, Mixtral, Gemma, Phi-3, OLMo 2, GPT-NeoX and GPT-2 have one; for this "
            "model use ddp or fsdp."
        )
    config = hf.config.get_text_config()
    heads = {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads}
    if all(n % ranks == 0 for n in heads):
        return found
    gathered = {name: _GATHERED.get(how, how) for name, how in found.items() if _in_attention(name)}
    whole = {name for name, how in gathered.items() if how == "replicated_with_grad_allreduce"}  # all heads are here
    return {name: how for name, how in (found | gathered).items() if name not in whole}


def _in_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split("."))


def _rules(hf: Any, plan: dict[str, str]) -> Iterator[tuple[str, TensorParallelLayer]]:
    """(module, style) of every module that the plan splits or wraps; parameters without a module of their own too."""
    for name, module in hf.named_modules():
        how = plan.get(replace_layer_number_by_wildcard(name))
        own = {
            p: plan.get(replace_layer_number_by_wildcard(f"{name}.{p}"))
            for p, _ in module.named_parameters(recurse=False)
        }
        if hasattr(module, "base_layer") and not isinstance(module.base_layer, nn.Linear | Conv1D):
            continue  # adapted experts stay whole on every rank
        if how and hasattr(module, "base_layer"):
            yield f"{name}.base_layer", _style(how, module.base_layer)
            matrices = "lora_B" if how.startswith("colwise") else "lora_A"
            for adapter, linear in getattr(module, matrices).items():
                yield f"{name}.{matrices}.{adapter}", _style(how, linear)
        elif how or any(own.values()):
            yield name, _Composed(how, own) if any(own.values()) else _style(str(how), module)


def _style(how: str, module: nn.Module) -> TensorParallelLayer:
    if how == "replicated_with_grad_allreduce":
        return SummedGradients()
    style = ALL_PARALLEL_STYLES[how]
    return _transposed(style) if isinstance(module, Conv1D) else style


def _apply(module: nn.Module, style: TensorParallelLayer, devices: DeviceMesh, skip: tuple[str, ...] = ()) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        if name not in skip:
            style.shard_param(module, name, devices)
    style.install_forward(module, devices)


class _Composed(TensorParallelLayer):
    """A module whose parameters have styles of their own (fused experts), and perhaps one around its forward."""

    def __init__(self, how: str | None, parameters: dict[str, str | None]) -> None:
        self.around = ALL_PARALLEL_STYLES[how] if how else None
        self.parameters = {name: ALL_PARALLEL_STYLES[style] for name, style in parameters.items() if style}

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        if param in self.parameters:
            self.parameters[param].shard_param(module, param, mesh)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return self.around.install_forward(module, mesh) if self.around else module


class _SumGradient(torch.autograd.Function):
    """The tensor itself; its gradient summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SummedGradients(TensorParallelLayer):
    """Weights that every rank applies to its own heads (q_norm, k_norm).

    transformers' own style adds up `param.grad` after each backward pass, which counts earlier micro-batches again.
    """

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        original, group = module.forward, mesh.get_group()

        def forward(*args: Any, **kwargs: Any) -> Any:
            own = dict(module._parameters)
            module._parameters.update({n: None if p is None else _SumGradient.apply(p, group) for n, p in own.items()})
            try:
                return original(*args, **kwargs)
            finally:
                module._parameters.update(own)

        module.forward = forward
        return module


def _transposed(style: Any) -> TensorParallelLayer:
    """The style for GPT-2's Conv1D, a linear layer whose weight is [in, out]."""
    kind = _ColwiseConv if isinstance(style, ColwiseParallel) else _RowwiseConv
    return kind(input_layouts=style.input_layouts, output_layouts=style.output_layouts)


class _ColwiseConv(ColwiseParallel):
    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        _distribute(module, param, mesh, Shard(module._parameters[param].ndim - 1))  # type: ignore[union-attr]

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.out_features = module.nf
        return super().install_forward(module, mesh)


class _RowwiseConv(RowwiseParallel):
    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        _distribute(module, param, mesh, Replicate() if param == "bias" else Shard(0))

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.in_features = module.nx
        return super().install_forward(module, mesh)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Any) -> None:
    old = module._parameters[name]
    assert old is not None
    new = distribute_tensor(old, mesh, [placement], src_data_rank=None)
    module._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
