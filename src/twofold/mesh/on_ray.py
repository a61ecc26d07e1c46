"""Ray Train as the launcher: `run.launcher=ray`, an extra (pip install 'twofold[ray]').

The process that a person starts becomes the *driver*: it asks Ray for `devices` x `num_nodes` workers, each of which
runs this very command again, as those of our own agent do, and joins the process group that Ray Train has made. It
connects to the cluster that RAY_ADDRESS names, or that the program has connected to, and else starts one on this
machine. On several machines the program and run.folder lie on a disk that they share.

A `Trainer` inside a train function of one's own (`ray.train.torch.TorchTrainer(train).fit()`) joins in the same way.
Metrics and checkpoints are in the run folder: none go through `ray.train.report`, which takes a second or more each
time. Costs on 2 cores: some 20 s until the first step.
"""

import os
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from twofold.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER, UserError
from twofold.mesh.cluster import TIMEOUT_VARIABLE
from twofold.mesh.command import Command, this_command
from twofold.mesh.guard import DRIVER_TELLS_VARIABLE, looks_like_lost_connection

_TORCH_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def resolve(accelerator: str, devices: int | str | Sequence[int]) -> tuple[str, int]:
    """The device type and the number of workers on each machine, for a driver, whose own machine says nothing.

    Raises UserError where Ray is missing, where it has no GPU for "gpu", and for devices that are no number.
    """
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"run.launcher=ray needs a number of workers for each machine, and devices={devices!r}.")
    has_gpus = _resources().get("GPU", 0) > 0
    if accelerator in ("gpu", "cuda") and not has_gpus:
        raise UserError(f"accelerator {accelerator!r}: Ray's cluster has no GPU. Use accelerator='cpu' or 'auto'.")
    return ("cuda" if has_gpus and accelerator != "cpu" else "cpu"), devices


def launch(
    device_type: str, devices: int, num_nodes: int, threads: int | None, backend: str | None, folder: Path
) -> int:
    """Runs this program in workers of Ray Train and prints the root cause of a failure; the exit code.

    threads: CPUs that Ray sets aside for each worker (None: 1). folder: of the runs; Ray's own records go to
    folder/.ray. Raises UserError where the cluster has too little for the workers.
    """
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    workers = devices * num_nodes
    each = {"CPU": threads or 1} | ({"GPU": 1} if device_type == "cuda" else {})
    _check_backend(backend)
    _check_resources(each, workers)
    command = this_command(workers)
    trainer = TorchTrainer(
        _work,
        train_loop_config={"command": command, "folder": os.getcwd(), "imports": command.import_folder()},
        torch_config=TorchConfig(
            backend=backend or ("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"),
            timeout_s=int(float(os.environ.get(TIMEOUT_VARIABLE, "1800"))),
        ),
        scaling_config=train.ScalingConfig(
            num_workers=workers,
            use_gpu=device_type == "cuda",
            resources_per_worker=each,
            placement_strategy="SPREAD" if num_nodes > 1 else "PACK",
        ),
        run_config=train.RunConfig(storage_path=str(folder.absolute() / ".ray")),
    )
    try:
        _in_thread(trainer.fit)
    except train.TrainingFailedError as failed:
        _leave()
        return _tell(getattr(failed, "worker_failures", None) or {0: failed}, workers)
    except KeyboardInterrupt:
        _leave()
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _in_thread(work: Callable[[], Any]) -> None:
    """Runs it where Ray Train does not take over Ctrl-C: its handler ends this process with 1, or 0."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result()


def _leave() -> None:
    """Leaves Ray, which ends the workers of this program and has then printed all that it held back of them."""
    import ray

    ray.shutdown()


def _check_backend(backend: str | None) -> None:
    """Ray Train makes the process group before the workers know of any plug-in."""
    for name in (part.strip().rpartition(":")[2] for part in (backend or "").split(",")):
        if name and name not in _TORCH_BACKENDS:
            raise UserError(
                f"run.backend={backend}: run.launcher=ray knows torch's own only: {', '.join(_TORCH_BACKENDS)}. Use "
                "one of them, or another launcher."
            )


def _resources() -> dict[str, float]:
    """What the cluster has, once connected."""
    try:
        import ray
        import ray.train
    except ImportError as missing:
        raise UserError(f"run.launcher=ray: {missing}. pip install 'twofold[ray]'") from None
    if not ray.is_initialized():
        ray.init()
    return ray.cluster_resources()


def _check_resources(each: Mapping[str, int], workers: int) -> None:
    """Ray would wait for them for ever."""
    there = _resources()
    for kind, count in each.items():
        if there.get(kind, 0) < count * workers:
            raise UserError(
                f"run.launcher=ray: {workers} workers need {count * workers} {kind}s, and Ray's cluster has "
                f"{there.get(kind, 0):.0f}. Use fewer devices, add machines, or start it with more: ray start "
                f"--head --num-{kind.lower()}s=N, then RAY_ADDRESS=auto."
            )


def _work(config: dict[str, Any]) -> None:
    """In a worker: runs the program. Its exceptions are Ray's to carry to the driver."""
    command: Command = config["command"]
    if os.path.isdir(config["folder"]):  # where the program was started: its paths may be relative
        os.chdir(config["folder"])
    if not command.is_module and not os.path.exists(command.target):
        raise UserError(f"{command.target} is not on {os.uname().nodename}: put it on a disk that the machines share.")
    os.environ[DRIVER_TELLS_VARIABLE] = "1"
    if config["imports"]:
        sys.path.insert(0, config["imports"])
    sys.argv = [command.target, *command.arguments]
    try:
        if command.is_module:
            runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command.target, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _tell(failures: Mapping[int, BaseException], workers: int) -> int:
    """Prints the root of the workers' failures (Ray has shown their tracebacks) and gives the exit code."""
    rank = min(failures, key=lambda r: (looks_like_lost_connection(failures[r]), r))
    root = failures[rank]
    if isinstance(root, UserError):
        print(f"error: {root}", file=sys.stderr)
        return EXIT_USER
    if isinstance(root, SystemExit) and isinstance(root.code, int):
        return root.code
    print(f"rank {rank} of {workers} failed: {type(root).__name__}: {root}", file=sys.stderr)
    return EXIT_FAILURE
