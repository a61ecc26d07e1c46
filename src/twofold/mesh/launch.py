"""Starting the workers of a run, and ending with them.

The process that a person starts becomes the *agent*: torch's elastic agent, in this process, which runs this
very command again once per device (command.py, worker.py) and ends with their exit code. So the code after
`fit()` runs in the workers, and what rank 0 prints is seen. On several machines each has its agent (cluster.py,
nodes.py). Under a launcher (torchrun) nothing is started: the process joins.

Promises: no process is left behind, whatever ends the run (an error, Ctrl-C, SIGTERM, kill -9 of the agent or
of a worker); one root cause is printed; the exit code is 0, 1 (failure), 2 (UserError), a program's own
sys.exit code, or 128 + the signal. Costs: on 2 cores, 2 processes have ended their first all_reduce 2.5 to
4.5 s after the start, nearly all of it `import torch`, once in the agent and once in the workers.
"""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofold.errors import UserError
from twofold.mesh.affinity import bind
from twofold.mesh.cluster import Node, start_timeout, this_node
from twofold.mesh.command import Command, parse, this_command
from twofold.mesh.devices import cores, in_launcher_environment
from twofold.mesh.guard import LOG_DIR_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from twofold.mesh.nodes import Meeting

_SHUTDOWN_SECONDS = 5  # between SIGTERM or SIGINT to the workers and SIGKILL
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def is_worker() -> bool:
    """Whether this process is one rank of a run: a launcher has started it, or a process group is up."""
    if in_launcher_environment():
        return True
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def ensure_workers(
    device_type: str,
    devices: int,
    num_nodes: int = 1,
    log_dir: str | Path = "logs",
    threads: int | None = None,
    affinity: str = "none",
    gpus: Sequence[int] = (),
) -> None:
    """Returns in a worker and for a single process; else runs `devices` workers and exits with their code.

    Call it as early as possible: everything before it runs in the agent and again in each worker.
    device_type, devices: as `resolve` gives them. threads: per worker; None shares out the cores. affinity,
    gpus: see affinity.py.

    Raises UserError where the launcher's world does not fit `devices` and `num_nodes`, where machines do not find
    each other, and for a program that cannot be run again (a notebook).
    """
    node = this_node(num_nodes)
    if is_worker():
        if in_launcher_environment():
            _check_world(devices, num_nodes)
    elif node is not None or devices > 1:
        sys.exit(launch_workers(devices, log_dir=log_dir, threads=threads, node=node))
    bind(affinity, device_type, gpus)
    if threads:
        import torch

        torch.set_num_threads(threads)


def launch_workers(
    devices: int,
    *,
    log_dir: str | Path,
    command: Sequence[str] | None = None,
    threads: int | None = None,
    node: Node | None = None,
) -> int:
    """Runs `command` in `devices` workers on this machine, prints the root cause of a failure; the exit code.

    command: what would follow `python` (["train.py", "--lr=1"] or ["-m", "name"]); None is this very program.
    node: this machine, if there are several; log_dir is that of the first one then.
    Sets variables in this process's environment, which the workers inherit.
    """
    program = parse([sys.executable, *command]) if command else this_command(devices)
    if program is None:
        raise UserError(f"{shlex.join(command or [])}: only a script or -m MODULE can be started as workers.")
    _set_environment(devices, threads)
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        if node is None:
            return _run_agent(devices, _prepare_log_dir(Path(log_dir)), program)
        from twofold.mesh.nodes import meet

        meeting = meet(node, devices, Path(log_dir), start_timeout())
        return _run_agent(devices, _prepare_log_dir(meeting.log_dir), program, meeting)
    except KeyboardInterrupt:  # before the agent handles signals itself
        return 128 + signal.SIGINT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _run_agent(devices: int, log_dir: Path, program: Command, meeting: "Meeting | None" = None) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from twofold.mesh.report import Death, explain

    _silence_elastic()
    config = _launch_config(devices, meeting.node if meeting else None)
    try:
        elastic_launch(config, sys.executable)(*_worker_arguments(program, log_dir))
    except ChildFailedError as failed:
        deaths = [Death(rank, f.pid, f.exitcode, f.timestamp) for rank, f in failed.failures.items()]
        if meeting is not None:
            deaths = meeting.tell_failure(deaths, log_dir)
        hosts = meeting.hosts if meeting else [""]
        text, code = explain(deaths, log_dir, devices * len(hosts), hosts)
        if meeting is not None and meeting.node.rank > 0:  # node 0 says the rest
            text = text.partition("\n")[0]
        if text:
            print(text, file=sys.stderr, flush=True)
        return code
    except SignalException as received:
        print(f"Stopped by {received.sigval.name}.", file=sys.stderr, flush=True)
        return 128 + received.sigval
    return 0


def _launch_config(devices: int, node: Node | None) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=f"twofold-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # 0: a free port
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the workers write their own
    )
    if node is None:
        return config
    return replace(  # static: ranks in the order of the nodes, and one port for agents and workers
        config,
        min_nodes=node.count,
        max_nodes=node.count,
        run_id=node.run_id,
        rdzv_backend="static",
        rdzv_endpoint=f"{node.host}:{node.port}",
        rdzv_configs={"rank": node.rank, "timeout": int(start_timeout())},
        local_addr=None,
    )


def _worker_arguments(program: Command, log_dir: Path) -> list[str]:
    """The arguments of the interpreter that make it a worker (see worker.py)."""
    options = [*program.options, "-u", "-P"]  # -P: a file in this folder must not hide a module of ours
    bootstrap = ["-m", "twofold.mesh.worker", str(log_dir), str(os.getpid()), program.import_folder()]
    # torch fills in templates in the arguments ("$$" and "${local_rank}"): ours are meant literally
    return [word.replace("$", "$$") for word in [*options, *bootstrap, *program.program]]


def _prepare_log_dir(log_dir: Path) -> Path:
    """Makes the folder and removes the records of an earlier attempt."""
    try:
        (log_dir / "errors").mkdir(parents=True, exist_ok=True)
        for record in (log_dir / "errors").glob("rank-*.json"):
            record.unlink()
    except OSError as problem:
        raise UserError(
            f"cannot write logs to {log_dir}: {problem.strerror}. Give a folder that can be written (run.folder)."
        ) from None
    return log_dir.resolve()


def _set_environment(devices: int, threads: int | None) -> None:
    # Without it gloo workers of a second attempt meet the stale addresses of the first and fail.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.pop(LOG_DIR_VARIABLE, None)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // devices)))


def _silence_elastic() -> None:
    """torch's agent reports each failure in dozens of lines; ours names the root in a few."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


def _check_world(devices: int, num_nodes: int) -> None:
    """Whether what the launcher has started is what the configuration asks for."""
    world_size = int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size // max(num_nodes, 1))
    nodes = world_size // max(here, 1)
    if here != devices:
        raise UserError(
            f"devices={devices}, but the launcher has started {here} worker{'s' if here > 1 else ''} on this "
            f"node (WORLD_SIZE={world_size}). Use devices='auto' or devices={here}, or torchrun "
            f"--nproc-per-node={devices}."
        )
    if num_nodes not in (1, nodes):  # 1 is the default: the launcher knows better
        raise UserError(
            f"num_nodes={num_nodes}, but the launcher has started {nodes} node{'s' if nodes > 1 else ''} "
            f"(WORLD_SIZE={world_size}, {here} on each). Use num_nodes={nodes}, or "
            f"torchrun --nnodes={num_nodes}."
        )
