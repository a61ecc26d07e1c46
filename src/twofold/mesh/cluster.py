"""Which of several machines this is, as the cluster's environment says. Imports no torch.

    SLURM, one task on each node      srun's variables of the step (sbatch's own step and a shell have one task)
    Kubeflow Trainer                  PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    Kubeflow PyTorchJob and its kin   WORLD_SIZE, RANK, MASTER_ADDR without LOCAL_RANK: they count machines
    by hand                           num_nodes with NODE_RANK and MASTER_ADDR (and MASTER_PORT) in the environment

There, this process becomes the agent of its machine (launch.py). With several SLURM tasks on a node srun is the
launcher: each task is a rank (`join_step`). SLURM: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from twofold.errors import UserError
from twofold.mesh.command import parse
from twofold.mesh.devices import cores, in_launcher_environment, started_by_launcher

# Seconds that ranks wait for each other in an exchange (mesh.py), and machines for each other before the run.
TIMEOUT_VARIABLE = "TWOFOLD_TIMEOUT"
_START_SECONDS = 600
_PORT = 29500  # torch's own


@dataclass(frozen=True)
class Node:
    """Machine `rank` of `count`; host and port: where machine 0 can be reached; run_id: the same on all of them."""

    rank: int
    count: int
    host: str
    port: int = _PORT
    run_id: str = "twofold"


def this_node(num_nodes: int = 1) -> Node | None:
    """This machine among several; None for a run on one, and in a worker.

    num_nodes: as configured; 1 leaves it to the cluster. Raises UserError where the two do not agree, and for several
    machines where nothing says which one this is.
    """
    if in_launcher_environment():
        return None
    node = _slurm(os.environ) or _kubeflow(os.environ) or _by_hand(os.environ, num_nodes)
    if num_nodes not in (1, node.count if node else 1):
        if node is not None:
            raise UserError(f"num_nodes={num_nodes}, but the cluster has started {node.count}. Leave num_nodes away.")
        raise UserError(_how_to_start_nodes(num_nodes))
    return node


def count_nodes(num_nodes: int = 1) -> int:
    """How many machines the run has: where num_nodes is left at 1, the launcher or the cluster knows better."""
    if in_launcher_environment():
        here = started_by_launcher() or 1
        return num_nodes if num_nodes > 1 else max(1, int(os.environ["WORLD_SIZE"]) // here)
    node = this_node(num_nodes)
    return node.count if node else 1


def join_step() -> None:
    """Makes a task of a SLURM step with several tasks on a node a rank, as torchrun's workers are; else nothing.

    Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and a fair share of threads. Raises
    UserError for nodes with unequal numbers of tasks.
    """
    env = os.environ
    if in_launcher_environment() or not _in_step(env) or max(on_nodes := _tasks(env)) == 1:
        return
    if len(set(on_nodes)) > 1:
        raise UserError(
            f"SLURM has started {'+'.join(map(str, on_nodes))} tasks on {len(on_nodes)} nodes; each node needs as many "
            f"as the others. Use srun --ntasks-per-node={max(on_nodes)}, or one task a node and run.devices."
        )
    here = on_nodes[0]
    values = {"RANK": env["SLURM_PROCID"], "LOCAL_RANK": env["SLURM_LOCALID"], "WORLD_SIZE": sum(on_nodes)}
    values |= {"LOCAL_WORLD_SIZE": here, "MASTER_ADDR": _first_host(env), "MASTER_PORT": _slurm_port(env)}
    env.update({name: str(value) for name, value in values.items()})
    # srun --cpus-per-task binds a task to its CPUs; without it the tasks see all of them
    env.setdefault("OMP_NUM_THREADS", env.get("SLURM_CPUS_PER_TASK") or str(max(1, cores() // here)))


def start_timeout() -> float:
    """Seconds that machines wait for each other before the run."""
    return min(_START_SECONDS, float(os.environ.get(TIMEOUT_VARIABLE, _START_SECONDS)))


def _in_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process as one of several tasks."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1) > 1


def _slurm(env: Mapping[str, str]) -> Node | None:
    if not _in_step(env) or max(_tasks(env)) > 1:
        return None
    run_id = f"{env.get('SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}"
    return Node(int(env["SLURM_NODEID"]), len(_tasks(env)), _first_host(env), _slurm_port(env), run_id)


def _tasks(env: Mapping[str, str]) -> list[int]:
    """Tasks on each node, from "2(x3),1": [2, 2, 2, 1]."""
    words = (env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1").split(",")
    pairs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word) for word in words]
    return [int(pair[1]) for pair in pairs if pair for _ in range(int(pair[2] or 1))] or [1]


def _first_host(env: Mapping[str, str]) -> str:
    """The first host of a list such as "gpu[07-09,12],login": gpu07."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else hosts)


def _slurm_port(env: Mapping[str, str]) -> int:
    """The same on all nodes, another one for each job; MASTER_PORT of the batch script goes first."""
    return int(env.get("MASTER_PORT") or 15000 + int(env.get("SLURM_JOB_ID") or 0) % 10000)


def _kubeflow(env: Mapping[str, str]) -> Node | None:
    for count, rank, host, port in (
        ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
    ):
        if env.get(count, "").isdecimal() and int(env[count]) > 1 and rank in env and host in env:
            return Node(int(env[rank]), int(env[count]), env[host], int(env.get(port) or _PORT))
    return None


def _by_hand(env: Mapping[str, str], num_nodes: int) -> Node | None:
    if num_nodes == 1 or "NODE_RANK" not in env or "MASTER_ADDR" not in env:
        return None
    rank, port = env["NODE_RANK"], env.get("MASTER_PORT") or str(_PORT)
    if not rank.isdecimal() or int(rank) >= num_nodes or not port.isdecimal():
        raise UserError(
            f"NODE_RANK={rank}, MASTER_PORT={port}: with num_nodes={num_nodes} NODE_RANK is 0 on the machine that "
            f"MASTER_ADDR names, up to {num_nodes - 1} on the last; MASTER_PORT is a free port of the first."
        )
    return Node(int(rank), num_nodes, env["MASTER_ADDR"], int(port))


def _how_to_start_nodes(num_nodes: int) -> str:
    command = parse(sys.orig_argv)
    program = shlex.join(["python", *command.program]) if command else "python FILE.py"
    return (
        f"num_nodes={num_nodes}: nothing says which of the {num_nodes} machines this is. Run the same command on each, "
        f"N from 0 to {num_nodes - 1}: MASTER_ADDR=HOST_OF_NODE_0 NODE_RANK=N {program} (or srun --nodes={num_nodes} "
        f"--ntasks-per-node=1, or torchrun --nnodes={num_nodes} --node-rank=N)"
    )
