"""What a run leaves for others to load: a PEFT folder or a Hugging Face folder, proved by loading it again.

Everything is written by `save_pretrained`. The folder is then read back as a user would read it: no missing
and no unexpected weights, and the same logits as the model in memory (wrong names would load silently with
random weights). Only then does it take its final name.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from twofold import __version__
from twofold.models import attention
from twofold.models.causal_lm import bare
from twofold.models.generate import stop_tokens
from twofold.models.load import quiet, without_reports
from twofold.models.lora import is_adapter, is_classifier


def export(model: Any, tokenizer: Any, folder: Path, merge: bool = False, facts: dict[str, Any] | None = None) -> None:
    """Writes `folder`: the adapter alone, or the whole model (adapter merged if `merge`), with its tokenizer.

    facts: shown in the model card. Raises RuntimeError if what was written does not load to the same logits.
    """
    work = folder.with_name(f".{folder.name}-new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with attention.attention(bare(model), "sdpa"), quiet():
        whole = deepcopy(model).merge_and_unload() if merge and is_adapter(model) else model
        _write(whole, tokenizer, work)
        (work / "README.md").write_text(_card(whole, folder, facts or {}), encoding="utf-8")
        _prove(whole, tokenizer, work)
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    hf = bare(model)
    if getattr(hf, "generation_config", None) is not None:
        hf.generation_config.eos_token_id = stop_tokens(model, tokenizer) or None
    if is_adapter(model):
        name = hf.name_or_path
        for config in model.peft_config.values():
            config.base_model_name_or_path = str(Path(name).resolve()) if _is_folder(name) else name
    if is_classifier(hf) and hf.config.pad_token_id is None:
        hf.config.pad_token_id = tokenizer.pad_token_id  # by which transformers finds where a padded row ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _is_folder(name: str) -> bool:
    """A model made in memory has the name "", which as a path would be the current folder."""
    return bool(name) and Path(name).is_dir()


@torch.no_grad()
def _prove(model: Any, tokenizer: Any, folder: Path) -> None:
    """Loads the folder again and compares the logits on a dozen tokens."""
    import peft
    import transformers

    kind = "SequenceClassification" if is_classifier(bare(model)) else "CausalLM"
    dtype = next(model.parameters()).dtype
    if is_adapter(model):
        if not _is_folder(model.peft_config["default"].base_model_name_or_path):
            return  # the base model has no folder (it was made in memory): there is nothing to load it onto
        labels = {"num_labels": bare(model).config.num_labels} if kind != "CausalLM" else {}
        with without_reports():
            again = getattr(peft, f"AutoPeftModelFor{kind}").from_pretrained(folder, dtype=dtype, **labels)
    else:
        report: Any
        auto = getattr(transformers, f"AutoModelFor{kind}")
        again, report = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        wrong = {
            k: v for k, v in dict(report).items() if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys")
        }
        if wrong:
            raise RuntimeError(f"export {folder} does not load as it should: {wrong}")
    size = bare(model).get_input_embeddings().weight.shape[0]
    ids = torch.randint(size, (1, 12), generator=torch.Generator().manual_seed(0))
    device = next(model.parameters()).device
    was_training = model.training
    expected = model.eval()(input_ids=ids.to(device)).logits.cpu()
    model.train(was_training)
    difference = float((again.eval()(input_ids=ids).logits - expected).abs().max() / expected.abs().max())
    if difference > (1e-4 if dtype == torch.float32 else 5e-2):
        raise RuntimeError(
            f"export {folder} gives other logits than the trained model (relative difference {difference:.1e})"
        )


def how_to_use(folder: Path, model: Any) -> list[str]:
    """Commands that use an export."""
    if is_classifier(bare(model)):
        return [f"vllm serve {folder} --runner pooling"] if not is_adapter(model) else []
    lines = [f"twofold generate {folder} --prompt 'Hello'"]
    if is_adapter(model):
        rank = model.peft_config["default"].r
        base = model.peft_config["default"].base_model_name_or_path
        lines.append(f"vllm serve {base} --enable-lora --max-lora-rank {max(rank, 8)} --lora-modules tuned={folder}")
    else:
        lines.append(f"vllm serve {folder}")
    return lines


def _card(model: Any, folder: Path, facts: dict[str, Any]) -> str:
    adapter = is_adapter(model)
    base = model.peft_config["default"].base_model_name_or_path if adapter else bare(model).name_or_path
    kind = "SequenceClassification" if is_classifier(bare(model)) else "CausalLM"
    load = f"AutoPeftModelFor{kind}" if adapter else f"AutoModelFor{kind}"
    head = {
        "base_model": base,
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation" if kind == "CausalLM" else "text-classification",
    }
    front = "\n".join(f"{k}: {json.dumps(v)}" for k, v in head.items())
    rows = "\n".join(f"| {k} | {v} |" for k, v in facts.items())
    return (
        f"---\n{front}\ntags: [twofold]\n---\n\n# {folder.parent.name}\n\nTrained with Twofold {__version__}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n```python\nfrom {'peft' if adapter else 'transformers'} import {load}\n"
        f"from transformers import AutoTokenizer\n\nmodel = {load}.from_pretrained(FOLDER)\n"
        f"tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n"
    )
