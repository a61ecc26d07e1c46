"""What a step should compute, in plain PyTorch and transformers: no line of it comes from the engine.

One process, one sample at a time, transformers' eager attention and full logits; the loss is the sum of the
cross-entropy over the labelled tokens of the whole batch, divided once by their number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_MOE = _LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA | {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
"""The three shapes that the first laws are tested on."""
FAMILIES: dict[str, dict[str, Any]] = SHAPES | {
    "mistral": _LLAMA | {"sliding_window": 5},
    "qwen3": _LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": _MOE | {"num_experts": 4, "decoder_sparse_step": 1},
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": _LLAMA | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": _LLAMA | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "phi3": _LLAMA,
    "olmo2": _LLAMA,
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
}


def tiny_model(family: str = "llama", layers: int = 2, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model with weights large enough for its losses to fall in 20 steps."""
    depth = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
    # No token of the data may be the padding: nn.Embedding(padding_idx) gives it no gradient.
    shape = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(family, **(shape | FAMILIES[family] | depth | changes))
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def tiny_samples(n: int, seed: int = 0, longest: int = 23) -> list[dict[str, np.ndarray]]:
    """Samples of unequal length (3 … longest) with an unlabelled start of unequal length."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(n):
        length = int(rng.integers(3, longest + 1))
        ids = rng.integers(3, VOCABULARY, length)
        labels = ids.copy()
        labels[: int(rng.integers(1, length - 1))] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def batch_loss(model: Any, samples: Sequence[dict[str, np.ndarray]], smoothing: float = 0.0) -> torch.Tensor:
    """The mean cross-entropy over all labelled tokens of the samples, each run alone."""
    total, weight = torch.zeros(()), 0
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"])[None]
        labels = torch.as_tensor(sample["labels"])[1:]
        logits = model(input_ids=ids).logits[0, :-1]
        total = total + F.cross_entropy(
            logits.float(), labels, ignore_index=-100, reduction="sum", label_smoothing=smoothing
        )
        weight += int((labels != -100).sum())
    return total / weight


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    """By name; a tied weight stands under both of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {n: p.grad.detach().clone().numpy() for n, p in named if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, np.ndarray]:
    """By name; a tied weight stands under both of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {n: p.detach().clone().numpy() for n, p in named if p.requires_grad}


def train(
    model: Any,
    batches: Sequence[Sequence[dict[str, np.ndarray]]],
    optimizer: torch.optim.Optimizer,
    lr: Callable[[int], float],
    clip: float | None,
) -> list[float]:
    """Plain training steps on given batches. Returns the losses."""
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.zero_grad()
        loss = batch_loss(model, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses
