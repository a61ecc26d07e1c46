"""Which kind of device, and how many workers on this machine: `accelerator` and `devices` made definite.

Imports torch only when it has to ask about GPUs; never initialises CUDA, so forking stays possible.
"""

import glob
import os
from collections.abc import Sequence
from contextlib import suppress

from twofold.errors import UserError, nearest

_ACCELERATORS = ("auto", "cpu", "cuda", "gpu")


def resolve(accelerator: str = "auto", devices: int | str | Sequence[int] = "auto") -> tuple[str, int]:
    """The device type ("cpu" or "cuda") and the number of workers on this node.

    accelerator: "auto" (a GPU where torch sees one), "cpu", "gpu" or "cuda".
    devices: a number; "auto" (every GPU; 1 on CPU; under a launcher what it has started); -1 (every GPU); or which
    GPUs, as [0, 2].

    Raises UserError for a value that means nothing, a GPU that is not there, and more GPUs than there are.
    """
    if accelerator not in _ACCELERATORS:
        raise UserError(f"accelerator {accelerator!r} is unknown. {nearest(str(accelerator), _ACCELERATORS)}")
    chosen = indices(devices)
    wanted = len(chosen) or _number(devices)
    gpus = 0 if accelerator == "cpu" else _count_gpus()
    if accelerator in ("gpu", "cuda") and not gpus:
        raise UserError(
            f"accelerator {accelerator!r}: no GPU is visible to torch {_torch_version()} here; this machine "
            f"has {_what_is_here()}. Use accelerator='cpu' or 'auto'{_why_no_gpu()}."
        )
    if not gpus:
        if wanted == -1 or chosen:
            what = f"{list(chosen)} are GPUs" if chosen else "-1 means every GPU"
            raise UserError(f"devices={what}, and this run is on cpu: give the number of workers.")
        return "cpu", wanted or started_by_launcher() or 1
    if wanted is not None and wanted > gpus:
        raise UserError(
            f"devices={wanted}: this machine has {gpus} visible GPU{'s' if gpus > 1 else ''}. "
            f"Use devices={gpus} or fewer, devices='auto', or accelerator='cpu'."
        )
    if chosen and max(chosen) >= gpus:
        raise UserError(f"devices={list(chosen)}: the visible GPUs of this machine are 0 to {gpus - 1}.")
    return "cuda", gpus if wanted == -1 else wanted or started_by_launcher() or gpus


def indices(devices: object) -> tuple[int, ...]:
    """Which GPUs `devices` names, by local rank; () where it gives no list. Raises UserError for a list of others."""
    if not isinstance(devices, (list, tuple)):
        return ()
    if not devices or len(set(devices)) < len(devices) or not all(type(i) is int and i >= 0 for i in devices):
        raise UserError(f"devices={devices!r}: a list names GPUs by number, each once, as [0, 2].")
    return tuple(devices)


def cores() -> int:
    """How many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Makes glibc keep large blocks that are freed, instead of giving them back to the system at once.

    A training step allocates and frees the same large tensors over and over, and the system hands memory out page by
    page, zeroed: on a CPU about a tenth of a step. Changes nothing where the C library is another one.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        trim_threshold, mmap_max = -1, -4  # of malloc.h
        library.mallopt(trim_threshold, 2**31 - 1)
        library.mallopt(mmap_max, 0)


def in_launcher_environment() -> bool:
    """Whether a launcher (torchrun, our agent, Ray) has started this process as one rank of several.

    LOCAL_RANK must be there too: some cluster images set RANK and WORLD_SIZE to node numbers.
    """
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))


def started_by_launcher() -> int | None:
    """How many workers a launcher (torchrun, our agent) has started on this node; None without one."""
    if not in_launcher_environment():
        return None
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])


def _number(devices: object) -> int | None:
    """`devices` as a number, -1 for "every GPU", None for "auto"."""
    if devices == "auto":
        return None
    text = str(devices)
    number = int(text) if text.removeprefix("-").isdecimal() and not isinstance(devices, bool) else 0
    if number < -1 or number == 0:
        raise UserError(f"devices={devices!r}: give 'auto', a number of workers from 1, or -1 for every GPU.")
    return number


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _torch_version() -> str:
    import torch

    return torch.__version__


def _what_is_here() -> str:
    count = cores()
    return f"cpu ({count} core{'s' if count > 1 else ''})"


def _why_no_gpu() -> str:
    """The likely reason where the machine has a GPU that torch cannot use; empty otherwise."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f", or unset CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}, which hides GPUs"
    if glob.glob("/dev/nvidia[0-9]*"):
        if torch.version.cuda is None:
            return ", or install a CUDA build of torch: there is an NVIDIA device, and this build is for CPU"
        return ", or check the NVIDIA driver: there is a device, and torch cannot use it"
    return ""
