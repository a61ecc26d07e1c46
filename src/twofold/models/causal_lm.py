"""A causal language model that returns the log-probabilities of chosen tokens instead of logits.

`CausalLM` wraps any Hugging Face causal model (with a LoRA adapter in it or not) and keeps it whole: names,
hooks and `save_pretrained` stay the model's own. The output head runs at the chosen positions only, a chunk
at a time, so full-vocabulary logits of prompts and padding never exist.

What a model can do is not looked up in a table but tried on a dozen tokens (`examine`): whether concatenated
samples give the same hidden states as each alone, and whether the head is a plain linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from twofold.errors import UserError
from twofold.models import attention
from twofold.ops.logps import Slice, chunked_logps, linear_logps
from twofold.parallel.context import Context
from twofold.parallel.stages import Skip


@dataclass(frozen=True)
class Abilities:
    """What `examine` found. `why` says in words why a model cannot run without padding ("" if it can)."""

    packed: bool
    plain_head: bool
    why: str = ""


def bare(model: nn.Module) -> Any:
    """The Hugging Face model itself, below a PEFT wrapper if there is one (adapter layers stay inside it)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def decoder_name(model: Any) -> str:
    """The attribute that holds a causal model without its head ("model", "transformer", …)."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


def decoder(model: Any) -> Any:
    return getattr(model, decoder_name(model))


def head(model: Any) -> Any:
    """What follows the decoder: the output head over the vocabulary, or a classifier's scores; None without one."""
    found = model.get_output_embeddings()
    return found if found is not None else getattr(model, "score", None)


class NotCausalLM(TypeError):
    """A model that gives no next-token logits from hidden states, in words."""


class CausalLM(nn.Module):
    """model: a Hugging Face causal model or a PEFT model around one; packed: samples come without padding."""

    def __init__(self, model: nn.Module, abilities: Abilities, packed: bool = True) -> None:
        super().__init__()
        self.hf = model
        self.abilities = abilities
        self.packed = packed and abilities.packed
        self.hidden_dtype = torch.float32
        self.context: Context | None = None
        self.sequence: Context | None = None
        if self.packed:
            bare(model).set_attn_implementation(attention.NAME)

    def forward(
        self, input_ids: Tensor, predict_at: Tensor, targets: Tensor, with_mean: bool = False, **inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of `targets`.

        input_ids: [rows, tokens]; predict_at: [n] flat positions (row * tokens + position) whose next token is
        a target; targets: [n] token ids; inputs: what else the decoder takes (position_ids, attention_mask,
        sample_lengths). Returns (logp, mean or None), fp32 [n] each: see `twofold.ops.logps.linear_logps`.
        """
        return self.run_stage(None, input_ids, predict_at, targets, with_mean, **inputs)

    def _logps(
        self, hidden: Tensor, predict_at: Tensor, targets: Tensor, with_mean: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden = hidden.flatten(0, 1).index_select(0, predict_at)
        model = bare(self.hf)
        last = head(model)
        if self.abilities.plain_head and type(last) is nn.Linear:
            weight, bias, part = _local(last)
            return linear_logps(hidden, targets, weight, bias, with_mean, part)
        return chunked_logps(hidden, targets, lambda h: head_logits(model, h), with_mean)

    def _shared_logps(
        self, context: Context, hidden: Tensor, predict_at: Tensor, targets: Tensor, with_mean: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same where each rank has a piece of the row: each runs the head on an equal share of the targets."""
        n = len(targets)
        predict_at, targets = (context.part(F.pad(x, (0, -n % context.ranks)), 0) for x in (predict_at, targets))
        logp, mean = self._logps(context.gather(hidden, 1), predict_at, targets, with_mean)
        return context.join(logp, 0)[:n].clone(), None if mean is None else context.join(mean, 0)[:n].clone()

    def _part_of_row(
        self, input_ids: Tensor, position_ids: Tensor, sample_lengths: Sequence[int]
    ) -> tuple[Tensor, dict[str, Any]]:
        """This rank's piece of a row of samples, which a sample of filler makes divisible."""
        filler = -input_ids.shape[1] % self._pieces
        ids, positions = (F.pad(x, (0, filler)) for x in (input_ids, position_ids))
        for axis in (self.context, self.sequence):
            if axis is not None:
                ids, positions = axis.part(ids, 1), axis.part(positions, 1)
        lengths = (*sample_lengths, filler) if filler else tuple(sample_lengths)
        inputs: dict[str, Any] = {"position_ids": positions, "sample_lengths": lengths}
        return ids, inputs | ({"context": self.context} if self.context is not None else {})

    def split_tensor(self, devices: DeviceMesh, sequence: bool = False) -> None:
        """Puts the model on the tensor axis (`parallel/tensor.py`). sequence: with sequence parallel."""
        from twofold.models import sequence as sequence_parallel
        from twofold.models import tensor_plan

        tensor_plan.split(bare(self.hf), devices)
        if sequence:
            self._check_packed("sequence")
            self.sequence = Context(devices.get_group(), devices.get_local_rank(), devices.size())
            sequence_parallel.install(bare(self.hf), self.sequence, devices)

    def _check_packed(self, word: str) -> None:
        if not self.packed:
            why = self.abilities.why or "model.attention is padded"
            raise UserError(f"strategy '{word}' needs samples without padding, and {why}.")

    def split_context(self, context: Context) -> None:
        """Puts the model on the context axis (`parallel/context.py`)."""
        self._check_packed("cp")
        self.context = context

    @property
    def _pieces(self) -> int:
        """Into how many a row is split over ranks."""
        return prod(axis.ranks for axis in (self.context, self.sequence) if axis is not None)

    # The pipeline axis (`parallel/stages.py`)

    @property
    def pipeline_plan(self) -> list[str | tuple[str, ...]]:
        from twofold.models import pipeline_plan

        return pipeline_plan.plan(self)

    def check_stages(self, stages: Sequence[Sequence[tuple[str, ...]]]) -> None:
        from twofold.models import pipeline_plan

        self.hidden_dtype = bare(self.hf).get_input_embeddings().weight.dtype
        pipeline_plan.check(self, stages)

    def stand_in(self, name: str) -> nn.Module | None:
        from twofold.models import pipeline_plan

        return pipeline_plan.Nothing() if name.endswith(pipeline_plan.ADDED) else None

    def stage_activation(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """What passes between stages: hidden states, [rows, tokens, width]."""
        width = bare(self.hf).config.get_text_config().hidden_size
        rows, tokens = input_ids.shape
        tokens = -(-tokens // self._pieces)
        return torch.empty((rows, tokens, width), dtype=self.hidden_dtype, device="meta")

    def run_stage(
        self,
        activation: Tensor | None,
        input_ids: Tensor,
        predict_at: Tensor,
        targets: Tensor,
        with_mean: bool = False,
        **inputs: Any,
    ) -> Any:
        """`forward` on one stage: takes hidden states unless it is the first, returns them unless it is the last."""
        model, context = bare(self.hf), self.context
        if self._pieces > 1:
            input_ids, inputs = self._part_of_row(input_ids, **inputs)
        given = {"input_ids": input_ids} if activation is None else {"inputs_embeds": activation}
        hidden = decoder(model)(**given, use_cache=False, **inputs).last_hidden_state
        if isinstance(head(model), Skip):
            return hidden
        if self.sequence is not None:
            hidden = self.sequence.join(hidden, 1)
        if context is not None:
            return self._shared_logps(context, hidden, predict_at, targets, with_mean)
        return self._logps(hidden, predict_at, targets, with_mean)


def _local(head: nn.Linear) -> tuple[Tensor, Tensor | None, Slice | None]:
    """A head's weight and bias on this rank, and which slice of the vocabulary they are if it is split."""
    weight = head.weight
    if not isinstance(weight, DTensor):
        return weight, head.bias, None
    bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
    ranks, group = weight.device_mesh.size(), weight.device_mesh.get_group()
    widest = -(-weight.shape[0] // ranks)
    part = Slice(
        start=min(weight.device_mesh.get_local_rank() * widest, weight.shape[0]),
        widest=widest,
        vocabulary=weight.shape[0],
        max=lambda x: dist.all_reduce(x, dist.ReduceOp.MAX, group=group),
        sum=lambda x: dist.all_reduce(x, group=group),
    )
    return weight.to_local(), bias, part


class _Output:
    """What a decoder returns, with nothing in it but the last hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _HasRun:
    """A decoder that has already run, however it is reached (`model(…)`, `model.decoder(…)`)."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def __call__(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self._hidden)

    def __getattr__(self, name: str) -> _HasRun:
        return self


class _HeadOnly:
    """A stand-in for a model whose decoder has already run: its forward is only what follows the decoder."""

    def __init__(self, model: Any, hidden: Tensor) -> None:
        self._model = model
        setattr(self, decoder_name(model), _HasRun(hidden))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's own logits for hidden states [n, width]: head, scaling, soft-capping, whatever it does."""
    output = type(model).forward(_HeadOnly(model, hidden[None]), input_ids=None, use_cache=False)
    return output.logits[0]


@torch.no_grad()
def examine(model: nn.Module) -> Abilities:
    """Tries the model on two short samples, alone and concatenated. Costs two forward passes of ten tokens.

    Raises NotCausalLM if it is no causal language model.
    """
    hf = bare(model)
    if hf.get_output_embeddings() is None or not hasattr(hf, decoder_name(hf)):
        raise NotCausalLM(f"{type(hf).__name__} has no output head over a vocabulary: it is no causal language model")
    was_training = model.training
    model.eval()
    try:
        return _examine(hf)
    finally:
        model.train(was_training)


def _examine(hf: Any) -> Abilities:
    device = hf.get_input_embeddings().weight.device
    vocabulary = hf.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (2, 6), generator=torch.Generator().manual_seed(0)).to(device)
    lengths = (6, 4)
    alone = decoder(hf)(input_ids=ids, use_cache=False).last_hidden_state
    logits = hf(input_ids=ids, use_cache=False).logits[0]
    last = head(hf)
    if not close(head_logits(hf, alone[0]), logits):
        raise NotCausalLM(
            f"{type(hf).__name__} does more between its decoder and its logits than a head can be asked for"
        )
    large = 1000 * alone[0]  # soft-capping shows only where logits are large
    plain = type(last) is nn.Linear and close(F.linear(large, last.weight, last.bias), head_logits(hf, large))
    why = why_not_packed(hf, ids, lengths, torch.cat([alone[0], alone[1, :4]]))
    return Abilities(packed=not why, plain_head=plain, why=why)


def why_not_packed(hf: Any, ids: Tensor, lengths: Sequence[int], expected: Tensor) -> str:
    """In words, why two samples one after the other give other hidden states than `expected`; "" if they do not."""
    name = type(hf).__name__
    if getattr(hf.config, "attention_chunk_size", None):
        return f"{name} attends in chunks"
    if not (getattr(hf, "_supports_attention_backend", False) or getattr(hf, "_supports_flash_attn", False)):
        return f"{name} does not let its attention be replaced"
    row = torch.cat([ids[0], ids[1, : lengths[1]]])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(ids.device)
    try:
        with attention.attention(hf, attention.NAME):
            inputs = {"position_ids": positions, "sample_lengths": tuple(lengths)}
            packed = decoder(hf)(input_ids=row, use_cache=False, **inputs).last_hidden_state[0]
    except Exception as error:  # any failure means the same: this model runs with padding
        return f"{name} fails on concatenated samples ({type(error).__name__}: {str(error).splitlines()[0][:80]})"
    return "" if close(packed, expected) else f"{name} mixes concatenated samples"


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of the dtype, relative to the largest value."""
    tolerance = 1e-4 if a.dtype == torch.float32 else 5e-2 if a.dtype in (torch.float16, torch.bfloat16) else 1e-8
    a, b = a.double(), b.double()
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


attention.register()
