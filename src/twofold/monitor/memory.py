"""How much memory this process uses, asked from the system; needs no dependency and imports no torch."""

import os
import resource
import sys
from typing import NamedTuple

_MIB = 1024 * 1024


class Memory(NamedTuple):
    """In MiB. current: now. peak: the most since the process began. where: "cuda" (this process's tensors on
    the current GPU) or "cpu" (resident pages of the process, libraries included).
    """

    current: float
    peak: float
    where: str


def process_memory_mb() -> Memory:
    """Memory of this process: of its GPU where it has used CUDA, of the machine otherwise.

    Costs about 15 µs: for every logged row, not for every step.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        current, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return Memory(current / _MIB, peak / _MIB, "cuda")
    return host_memory_mb()


def host_memory_mb() -> Memory:
    """Resident memory of this process on the machine, whatever it has on a GPU."""
    try:
        # VmHWM, not getrusage: a child's ru_maxrss starts at what its parent had when it was started.
        with open("/proc/self/status", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file if line.startswith((b"VmRSS", b"VmHWM")))
        current, peak = (int(fields[name].split()[0]) / 1024 for name in (b"VmRSS", b"VmHWM"))
    except (OSError, KeyError, ValueError):  # no Linux
        unit = 1 if sys.platform == "darwin" else 1024
        current = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB
    return Memory(current, peak, "cpu")


def total_memory_gb() -> float:
    """Memory of the machine in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1)
