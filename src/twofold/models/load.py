"""Models and tokenizers by folder or name.

A model is a folder in Hugging Face's layout, a .gguf file, the name of a packaged model (`gguf.PACKAGED`), or
a name that transformers can fetch from the hub or its cache.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twofold.errors import UserError
from twofold.models import gguf


def resolve_model_path(path: str) -> str:
    """What `from_pretrained` is to be given for a model path or name. Raises UserError if it leads nowhere."""
    if path in gguf.PACKAGED:
        return str(gguf.converted(gguf.packaged_file(path)))
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        return str(gguf.converted(local))
    if local.is_dir():
        if not any((local / name).exists() for name in ("config.json", "adapter_config.json")):
            raise UserError(f"model.path: {path} holds no config.json: give the folder of a Hugging Face model.")
        return str(local)
    if local.exists() or local.is_absolute() or path.startswith(".") or path.count("/") > 1:
        raise UserError(f"model.path: {path} is no model folder and no .gguf file{_nearby(local)}.")
    return path


def _nearby(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" (there is no folder {parent})"
    names = sorted(os.listdir(parent))[:8]
    return f"; {parent} holds: {', '.join(names) or 'nothing'}"


@contextmanager
def quiet() -> Iterator[None]:
    """Hides what one library deprecates and another still uses: the user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
        yield


@contextmanager
def _from_hub(path: str) -> Any:
    """Turns the many ways of not finding a model into one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        known = ", ".join(gguf.PACKAGED)
        raise UserError(
            f"model.path: '{path}' could not be loaded: {first} "
            f"(Give a folder, a .gguf file, a hub name that can be reached, or a packaged model: {known}.)"
        ) from error


def load_tokenizer(path: str, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model path or name; `chat_template` (a file or the template itself) replaces its own."""
    from transformers import AutoTokenizer

    with _from_hub(path):
        tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(path), trust_remote_code=trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    return tokenizer


def _template_text(template: str) -> str:
    if "{" in template or "\n" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise UserError(f"model.chat_template: there is no file {template}{_nearby(file)}.")
    return file.read_text(encoding="utf-8")


def load_model(path: str, dtype: Any = None, trust_remote_code: bool = False) -> Any:
    """The causal model of a path or name, on the CPU, in `dtype` (default: fp32)."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_generates(resolve_model_path(path))
    with _from_hub(path):
        return AutoModelForCausalLM.from_pretrained(
            resolve_model_path(path), dtype=dtype or torch.float32, trust_remote_code=trust_remote_code
        )


def check_generates(path: str) -> None:
    """Raises UserError for the folder of a classifier or a reward model: transformers would give it a new output head,
    or its embeddings for one, without a word."""
    for name, key in (("config.json", "architectures"), ("adapter_config.json", "task_type")):
        file = Path(path) / name
        found = json.loads(file.read_text(encoding="utf-8")).get(key) if file.is_file() else None
        if any(word in str(found) for word in ("ForSequenceClassification", "SEQ_CLS")):
            raise UserError(f"model.path: {path} gives scores and no text (a reward model or a classifier).")


def load_classifier(path: str, labels: Sequence[str], dtype: Any = None, trust_remote_code: bool = False) -> Any:
    """The model of a path or name with a score for each label, on the CPU; a head that it does not have is new."""
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    with _from_hub(path), without_reports():
        return AutoModelForSequenceClassification.from_pretrained(
            resolve_model_path(path),
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
            dtype=dtype or torch.float32,
            trust_remote_code=trust_remote_code,
        )


@contextmanager
def without_reports() -> Iterator[None]:
    """transformers' tables of weights that a checkpoint does not have: a new head is what was asked for."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_shape(path: str, trust_remote_code: bool = False) -> Any:
    """The causal model of a path or name without its weights: every tensor is on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with _from_hub(path):
        config = AutoConfig.from_pretrained(resolve_model_path(path), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
