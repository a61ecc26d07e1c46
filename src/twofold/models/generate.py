"""Greedy text from a model: for `twofold generate`, evaluation samples and the demo."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twofold.data.encode import prompt_tokens
from twofold.data.template import end_of_turn, render
from twofold.errors import UserError
from twofold.models import attention
from twofold.models.causal_lm import bare
from twofold.models.load import check_generates, load_model, load_tokenizer, quiet, resolve_model_path


def load_for_generation(path: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a run folder (its export), an adapter folder, a model folder, or a model's name."""
    folder = Path(path)
    if (folder / "run.json").is_file():
        folder = folder / "export"
        if not folder.is_dir() or not any(folder.iterdir()):
            raise UserError(f"{path} has no export yet: the run did not finish. Make one with: twofold export {path}")
        path = str(folder)
    if (folder / "adapter_config.json").is_file():
        return _with_adapter(folder)
    return load_model(path).eval(), load_tokenizer(path)


def _with_adapter(folder: Path) -> tuple[Any, Any]:
    from peft import PeftModel

    check_generates(str(folder))
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    tokenizer = folder if (folder / "tokenizer_config.json").is_file() else base
    with quiet():
        model = PeftModel.from_pretrained(load_model(resolve_model_path(base)), str(folder))
    return model.eval(), load_tokenizer(str(tokenizer))


def stop_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: eos, the model's own list, and the chat template's end of turn."""
    configured = getattr(bare(model), "generation_config", None)
    eos = configured.eos_token_id if configured is not None else None
    stops = {tokenizer.eos_token_id, end_of_turn(tokenizer), *(eos if isinstance(eos, list) else [eos])}
    return sorted(s for s in stops if s is not None)


@contextmanager
def _ready_to_generate(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        if bare(model).config._attn_implementation == attention.NAME:
            with attention.attention(bare(model), "sdpa"):
                yield
        else:
            yield
    finally:
        model.train(was_training)


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    batch_size: int = 16,
) -> list[list[int]]:
    """Greedy continuations of token lists, in order; stop tokens are cut off. Prompts are padded on the left."""
    stops = stop_tokens(model, tokenizer)
    device = next(model.parameters()).device
    outputs: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with _ready_to_generate(model):
        for start in range(0, len(by_length), batch_size):
            rows = by_length[start : start + batch_size]
            longest = max(len(prompts[i]) for i in rows)
            ids = torch.full((len(rows), longest), stops[0] if stops else 0)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(rows):
                ids[row, longest - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
                mask[row, longest - len(prompts[i]) :] = 1
            out = model.generate(  # type: ignore[operator]
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=stops or None,
                pad_token_id=stops[0] if stops else 0,
            )
            for row, i in enumerate(rows):
                outputs[i] = _until_stop(out[row, longest:].tolist(), stops)
    return outputs


def _until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0]] if ends else tokens


def generate_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, Any]]],
    max_new_tokens: int = 128,
    batch_size: int = 16,
) -> list[str]:
    """Greedy answers. A prompt is a text, continued as it is, or a list of chat messages, answered by the template."""
    encoded = [_encode_prompt(tokenizer, prompt) for prompt in prompts]
    outputs = generate_tokens(model, tokenizer, encoded, max_new_tokens, batch_size)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outputs]


def _encode_prompt(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    if isinstance(prompt, str):
        return prompt_tokens(tokenizer, prompt)
    text = render(tokenizer, prompt, generation=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
