"""The pipeline axis for Hugging Face causal models: which modules run in which order.

transformers' own plans where it has one, plans of ours for GPT-2 and OPT. Whether a model really is such a row of
modules is tried on a dozen tokens, not looked up (some scale or add something between their modules).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from twofold.errors import UserError
from twofold.models.causal_lm import bare, close, decoder, head
from twofold.parallel.stages import Unit, structure

OURS: dict[str, list[str | Unit]] = {
    "gpt2": [
        ("transformer.wte", "transformer.wpe", "transformer.drop"),
        "transformer.h",
        ("transformer.ln_f", "lm_head", "score"),
    ],
    "opt": [
        ("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"),
        "model.decoder.layers",
        ("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head", "score"),
    ],
}
ADDED = ("transformer.wpe", "model.decoder.embed_positions")
"""Modules whose output is added to the hidden states."""


class Nothing(nn.Module):
    """Adds nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def plan(model: Any) -> list[str | Unit]:
    """The modules of a `CausalLM` in the order in which they run; a tuple stays together.

    Raises UserError for a model without a plan.
    """
    hf = bare(model.hf)
    prefix = next(name for name, module in model.named_modules() if module is hf)
    names = [(entry,) if isinstance(entry, str) else entry for entry in _names(hf)]
    return [f"{prefix}.{entry[0]}" if len(entry) == 1 else tuple(f"{prefix}.{n}" for n in entry) for entry in names]


def _names(hf: Any) -> list[str | Unit]:
    if hf.config.model_type in OURS:
        present = {name for name, _ in hf.named_modules()}
        entries = (e if isinstance(e, str) else tuple(n for n in e if n in present) for e in OURS[hf.config.model_type])
        return [entry for entry in entries if entry]
    modules = dict(hf.named_modules())
    names = [name for name in hf._pp_plan or {} if name in modules]
    names += [name for name, module in modules.items() if module is head(hf) and name not in names]
    last = [name for name in names if modules[name] is head(hf)]
    lists = [name for name in names if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1 or not last:
        raise UserError(
            f"strategy 'pp': neither transformers nor Twofold has a pipeline plan for {type(hf).__name__}. Among many "
            "others Llama, Qwen2, Qwen3, Mistral, Mixtral, Gemma, Phi-3, OLMo 2, GPT-NeoX, GPT-2 and OPT have one; for "
            "this model use ddp or fsdp."
        )
    rest = [name for name in names if name not in last]
    at = rest.index(lists[0])
    return [tuple(rest[:at]), rest[at], (*rest[at + 1 :], *last)]


@torch.no_grad()
def check(model: Any, stages: Sequence[Sequence[Unit]]) -> None:
    """Runs the model (a `CausalLM`) in two stages on a few tokens. Raises UserError if that gives something else."""
    hf = bare(model.hf)
    weight = hf.get_input_embeddings().weight
    ids = torch.randint(weight.shape[0], (1, 6), generator=torch.Generator().manual_seed(0)).to(weight.device)
    if isinstance(weight, FakeTensor):
        return  # a simulation: there is nothing to compare
    was_training = model.training
    model.eval()
    inputs: dict[str, Any] = {"position_ids": torch.arange(6, device=ids.device)[None], "use_cache": False}
    if model.packed:
        inputs["sample_lengths"] = (6,)
    expected = decoder(hf)(input_ids=ids, **inputs).last_hidden_state
    rest = [unit for stage in stages[1:] for unit in stage]
    halves: list[Any] = [structure(model, part, [stages[0], rest]) for part in (stages[0], rest)]
    first, second = (decoder(bare(half.hf)) for half in halves)
    hidden = first(input_ids=ids, **inputs).last_hidden_state
    found = second(inputs_embeds=hidden, **inputs).last_hidden_state
    model.train(was_training)
    if not close(found, expected):
        raise UserError(
            f"strategy 'pp': {type(hf).__name__} does more than run its modules one after the other, so it cannot be "
            "cut into stages: use ddp, fsdp or tp."
        )
