"""Ranks for tests, forked from the warm parent: 2 ranks cost about 0.1 s instead of the seconds of a launch.

    results = run_ranks(2, train, config)     # [train(config) on rank 0, … on rank 1]

A child has the variables a launcher sets and one thread; `Mesh.join("cpu")` in it makes the gloo group (60 s
timeout). Import torch and whatever is heavy in the parent. Fork is safe here: CPU autograd runs in the
calling thread, and one thread needs no OpenMP pool.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from twofold.mesh.guard import looks_like_lost_connection
from twofold.mesh.mesh import TIMEOUT_VARIABLE

_VICTIMS_WAIT_SECONDS = 5.0  # for the failure that made them victims


class RankFailed(AssertionError):
    """`rank`, its traceback as the text; the exception itself is the cause if it pickles."""

    def __init__(self, rank: int, world_size: int, text: str):
        super().__init__(f"rank {rank} of {world_size} failed:\n{text}")
        self.rank = rank


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, deadline: float = 120.0, **options: Any) -> list[Any]:
    """Runs fn(*args, **options) on `n` ranks and returns their results by rank. Results are pickled; tensors by value.

    Raises RankFailed for the first rank whose failure is not just a lost connection, and TimeoutError after
    `deadline` seconds. In any case no child is left.
    """
    context = multiprocessing.get_context("fork")
    port = _free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    children, pipes = [], []
    try:
        for rank in range(n):
            reader, writer = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(rank, n, port, writer, partial(fn, *args, **options)))
            child.start()
            writer.close()  # so that the reader sees the end when the child dies
            children.append(child)
            pipes.append(reader)
        return _collect(pipes, children, deadline)
    finally:
        for child in children:
            if child.is_alive():
                os.kill(child.pid, signal.SIGKILL)
            child.join()
        for reader in pipes:
            reader.close()


def _collect(pipes: list[Connection], children: list[Any], deadline: float) -> list[Any]:
    n, end = len(pipes), time.monotonic() + deadline
    results: dict[int, Any] = {}
    victims: list[tuple[int, str, bytes | None]] = []
    open_pipes = {reader: rank for rank, reader in enumerate(pipes)}
    while open_pipes:
        left = end - time.monotonic()
        ready = wait(list(open_pipes), max(left, 0))
        if not ready and victims:
            break
        if not ready:
            waiting = sorted(open_pipes.values())
            raise TimeoutError(f"ranks {waiting} of {n} did not finish within {deadline:.0f} s")
        for reader in ready:
            rank = open_pipes.pop(reader)
            kind, value, error = _receive(reader, children[rank])
            if kind == "result":
                results[rank] = pickle.loads(value)
            elif kind == "victim":
                victims.append((rank, value, error))
                end = min(end, time.monotonic() + _VICTIMS_WAIT_SECONDS)
            else:
                _fail(rank, n, value, error)
    if victims:
        rank, text, error = victims[0]
        _fail(rank, n, text, error)
    return [results[rank] for rank in range(n)]


def _receive(reader: Connection, child: Any) -> tuple[str, Any, bytes | None]:
    """("result", pickled value, None), or ("victim" or "error", traceback, pickled exception or None)."""
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        child.join(5)
        return "error", f"it ended without a result (exit code {child.exitcode})", None


def _fail(rank: int, n: int, text: str, error: bytes | None) -> None:
    try:
        cause = pickle.loads(error) if error else None
    except Exception:
        cause = None
    raise RankFailed(rank, n, text) from cause


def _child(rank: int, n: int, port: int, writer: Connection, fn: Callable[[], Any]) -> None:
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "TWOFOLD_"))]:
        del os.environ[name]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **{TIMEOUT_VARIABLE: "60"},
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        answer = ("result", pickle.dumps(fn()), None)
    except BaseException as error:
        kind = "victim" if looks_like_lost_connection(error) else "error"
        answer = (kind, traceback.format_exc(), _pickled(error))
    writer.send_bytes(pickle.dumps(answer))  # before teardown, which may wait for others
    writer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if answer[0] == "result" and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
