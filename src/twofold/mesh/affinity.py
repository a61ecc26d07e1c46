"""Which CPUs a worker may run on: cores of its own, or those of one NUMA node.

A GPU's worker is bound by torch's own rules (torch.numa), which know the GPU's node. Without GPUs the CPUs that this
process may use are dealt out by local rank, neighbours together. Memory is then taken from the node that a thread runs
on, as Linux does by itself.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from twofold.errors import UserError

_SYSTEM = Path("/sys/devices/system")


def bind(affinity: str, device_type: str, gpus: Sequence[int] = ()) -> None:
    """Binds this worker, by LOCAL_RANK of LOCAL_WORLD_SIZE. affinity: none, cores or numa; gpus: by local rank, if not
    from 0.

    Raises UserError where the system does not bind processes.
    """
    if affinity == "none":
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(f"run.affinity={affinity} needs Linux. Use run.affinity=none.")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to

        options = NumaOptions(AffinityMode.EXCLUSIVE if affinity == "cores" else AffinityMode.NODE)
        cpus = _get_logical_cpus_to_bind_to(gpu_index=gpus[rank] if gpus else rank, numa_options=options)
    else:
        workers = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
        cpus = share(affinity, rank, workers, cpus_by_node())
    os.sched_setaffinity(0, cpus)


def share(affinity: str, rank: int, workers: int, nodes: Sequence[Sequence[int]]) -> set[int]:
    """The CPUs of worker `rank` of `workers`, given those of each NUMA node.

    cores: an equal part of all, without the remainder; with more workers than CPUs, some share one. numa: a whole
    node, the same number of workers (up to one) on each.
    """
    if affinity == "numa":
        return set(nodes[rank * len(nodes) // workers])
    cpus = [cpu for node in nodes for cpu in node]
    each = len(cpus) // workers
    return set(cpus[rank * each : (rank + 1) * each]) if each else {cpus[rank % len(cpus)]}


def cpus_by_node() -> list[list[int]]:
    """The CPUs that this process may use, by NUMA node; threads of one core stand side by side."""
    allowed = os.sched_getaffinity(0)
    nodes = []
    for folder in sorted(_SYSTEM.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        cpus = [int(path.name[3:]) for path in folder.glob("cpu[0-9]*") if int(path.name[3:]) in allowed]
        nodes.append(sorted(cpus, key=lambda cpu: (_core(cpu), cpu)))
    return [node for node in nodes if node] or [sorted(allowed, key=lambda cpu: (_core(cpu), cpu))]


def _core(cpu: int) -> tuple[int, int]:
    """(package, core) of a CPU; (0, the CPU itself) where the system does not tell."""
    folder = _SYSTEM / f"cpu/cpu{cpu}/topology"
    try:
        return tuple(int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))  # type: ignore
    except (OSError, ValueError):
        return 0, cpu
