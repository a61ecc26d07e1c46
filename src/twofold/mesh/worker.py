"""What a worker does before the program.

    python -m twofold.mesh.worker LOG_DIR AGENT_PID FOLDER [-m] TARGET …

1. Ranks above 0 write stdout and stderr to LOG_DIR/rank-R.log; rank 0 keeps the terminal.
2. A watch ends the process (with its own children) when the agent is gone, even by kill -9, and when another
   rank has failed and this one cannot be stopped otherwise.
3. A guard records a failure before anything is torn down (guard.py).
4. The script or module runs as `__main__`, with its own sys.argv and sys.path[0] (FOLDER; "" for none).

Imports neither torch nor the program: all of it costs some milliseconds.
"""

import faulthandler
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from twofold.mesh.guard import LOG_DIR_VARIABLE, guard, read_records, record_failure

_POLL_SECONDS = 1.0
_STUCK_SECONDS = 5.0
_RANK_ZERO_SECONDS = 1.0


def main(argv: list[str]) -> None:
    """Runs the program of `argv` (the arguments in the module's docstring) as this rank."""
    log_dir, agent, folder = Path(argv[0]), int(argv[1]), argv[2]
    is_module = argv[3] == "-m"
    program = argv[4:] if is_module else argv[3:]
    rank = int(os.environ["RANK"])
    os.environ[LOG_DIR_VARIABLE] = str(log_dir)
    threading.Thread(target=_watch, args=(agent, rank, log_dir / "errors"), daemon=True).start()
    if rank > 0:
        _redirect(log_dir / f"rank-{rank}.log", rank)
    faulthandler.enable(all_threads=False)
    with guard():
        try:
            if folder:
                sys.path.insert(0, folder)
            sys.argv = program
            if is_module:
                runpy.run_module(program[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program[0], run_name="__main__")
        except SystemExit as end:
            if end.code in (None, 0):
                raise
            sys.exit(_exit_code(end, rank, log_dir / "errors"))


def _exit_code(end: SystemExit, rank: int, errors: Path) -> int:
    """The code of a program that ends itself in failure, once it is recorded and its words are printed.

    Ranks tend to do so together, and the agent stops all when one is gone: rank 0 goes first, to be seen.
    """
    if not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
    code: int = record_failure(end, errors)["exit_code"]
    deadline = time.monotonic() + _RANK_ZERO_SECONDS
    while rank > 0 and time.monotonic() < deadline and not (errors / "rank-0.json").exists():
        time.sleep(0.05)
    return code


def _redirect(path: Path, rank: int) -> None:
    """Sends this process's stdout and stderr to a file, below Python, so that C++ and children follow."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(log, f"--- {stamp} rank {rank} of {os.environ['WORLD_SIZE']}, pid {os.getpid()} ---\n".encode())
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, stream)


def _watch(agent: int, rank: int, errors: Path) -> None:
    """Ends this process group once the agent is gone, or a while after another rank's failure."""
    failed_since: float | None = None
    while os.getppid() == agent:
        time.sleep(_POLL_SECONDS)
        roots = [record["rank"] for record in read_records(errors) if not record["victim"]]
        if not any(root != rank for root in roots):
            failed_since = None
        elif failed_since is None:
            failed_since = time.monotonic()
        elif time.monotonic() - failed_since > _STUCK_SECONDS:
            break  # the agent's SIGTERM was caught, and the program does not come back
    if os.getpgrp() == os.getpid():  # the agent gives each worker a group of its own
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
