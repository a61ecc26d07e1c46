"""A worker's failure, written down before anything is torn down.

When one rank fails, the others fail too, a moment later, because they lost the connection to it. What names
the right one is a record made *first*: `guard` writes `LOG_DIR/errors/rank-R.json` as soon as an exception
reaches it and then ends the process without teardown, so that nothing after the failure (closing the process
group, flushing) can delay or overwrite it. An error that looks like a lost connection is marked a *victim*.
"""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from twofold.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER, UserError

# Set by our agent for its workers: the folder of logs and error records. Its presence says that the agent
# will print the root cause, so that workers need not.
LOG_DIR_VARIABLE = "TWOFOLD_LOG_DIR"
# Set in workers that Ray has started for us: exceptions that end the program reach the driver, which prints them.
DRIVER_TELLS_VARIABLE = "TWOFOLD_DRIVER_TELLS"

# How long a victim waits for the record of the rank that caused it: the agent stops everyone as soon as one
# process has ended, and the root may be slow (a `finally` that flushes) to reach its own record.
_WAIT_FOR_ROOT_SECONDS = 3.0

_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|connectfullmesh|broken pipe|socket closed|pair closure"
    r"|remote process exited|nccl|watchdog|timed out|timeout|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


@contextmanager
def guard(log_dir: str | Path | None = None) -> Iterator[None]:
    """Records an exception of a worker at once and ends its process (exit code 1, or 2 for a UserError).

    log_dir: where the records go under torchrun and srun; under our own agent its folder is used.
    Outside of a launcher, and in a run of one process, exceptions simply pass. SystemExit passes always.
    Ctrl-C ends the process with 130 and no traceback.
    """
    by_agent = os.environ.get(LOG_DIR_VARIABLE)
    folder = by_agent or log_dir
    # under other launchers (Ray) the exception is theirs to report
    by_launcher = "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ
    if not folder or not (by_agent or (by_launcher and int(os.environ.get("WORLD_SIZE", "1")) > 1)):
        yield
        return
    pid, errors = os.getpid(), Path(folder) / "errors"
    _record_path(errors).unlink(missing_ok=True)
    try:
        yield
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _end_process(EXIT_INTERRUPTED)
    except BaseException as error:
        if os.getpid() != pid:  # a forked child of the worker: not this rank's failure
            raise
        _end_process(_fail(error, errors, bool(by_agent)))


def _fail(error: BaseException, errors: Path, by_agent: bool) -> int:
    """Records the failure, says it in this rank's log, and gives the exit code."""
    try:
        record = record_failure(error, errors)
        _tell(error, record, quiet=by_agent and record["rank"] == 0)
        if record["victim"]:
            _wait_for_root(errors)
        return record["exit_code"]
    except KeyboardInterrupt:  # Ctrl-C came while native code was waiting for another rank, which it ended
        return EXIT_INTERRUPTED


def record_failure(error: BaseException, errors: Path) -> dict[str, Any]:
    """Writes `errors`/rank-R.json for this rank and returns what it holds.

    rank, world_size, pid; ns (time in nanoseconds); type, text; frames (file, line, function, code; outermost
    first); traceback (text, without our own bootstrap); user (a UserError); victim (looks like a connection
    lost through another rank's failure); exit_code (what the run should end with).
    """
    now = time.time_ns()
    kind, text = type(error).__name__, str(error)
    user = isinstance(error, UserError)
    trace = _without_bootstrap(error.__traceback__)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    code = EXIT_USER if user else EXIT_FAILURE
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILURE
    record = {
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": world_size,
        "pid": os.getpid(),
        "ns": now,
        "type": kind,
        "text": text,
        "frames": [
            {"file": f.filename, "line": f.lineno, "function": f.name, "code": f.line}
            for f in traceback.extract_tb(trace)
        ],
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "user": user,
        "victim": world_size > 1 and looks_like_lost_connection(error),
        "exit_code": code,
    }
    _write(record, errors)
    return record


def looks_like_lost_connection(error: BaseException) -> bool:
    """Whether an error looks like the consequence of another rank's failure."""
    text = f"{type(error).__name__}: {error}"
    return not isinstance(error, UserError) and bool(_LOST_CONNECTION.search(text))


def read_records(errors: Path) -> list[dict[str, Any]]:
    """All records in a folder, the likely root first: those that are no victims, then the earliest."""
    records = []
    for path in errors.glob("rank-*.json"):
        try:
            records.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return sorted(records, key=lambda record: (record["victim"], record["ns"]))


def _record_path(errors: Path) -> Path:
    return errors / f"rank-{os.environ.get('RANK', '0')}.json"


def _write(record: dict[str, Any], errors: Path) -> None:
    """Whole or not at all; a disk that cannot be written must not hide the error itself."""
    path = _record_path(errors)
    try:
        errors.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").replace(path)
    except OSError as problem:
        print(f"rank {record['rank']} cannot write {path}: {problem}\n{record['traceback']}", file=sys.stderr)


def _tell(error: BaseException, record: dict[str, Any], quiet: bool) -> None:
    """To this rank's own stderr; nothing on rank 0 of our agent, whose terminal the agent writes to."""
    if quiet:
        return
    if record["user"]:
        print(record["text"], file=sys.stderr)
    elif record["victim"]:
        print(f"rank {record['rank']} lost the others: {record['type']}: {record['text']}", file=sys.stderr)
    else:
        print(record["traceback"], file=sys.stderr, end="")
    if os.environ.get("TORCHELASTIC_ERROR_FILE") and not record["victim"]:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun's own summary shows it too


def _wait_for_root(errors: Path) -> None:
    deadline = time.monotonic() + _WAIT_FOR_ROOT_SECONDS
    while time.monotonic() < deadline and not any(not record["victim"] for record in read_records(errors)):
        time.sleep(0.05)


def _end_process(code: int) -> None:
    """Ends now: no `finally`, no atexit, no process group that waits for peers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _without_bootstrap(trace: TracebackType | None) -> TracebackType | None:
    """Drops the outermost frames that belong to the worker's bootstrap and not to the program."""
    ours = (str(Path(__file__).parent), "<frozen runpy>")
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith(ours):
        first = first.tb_next
    return first or trace
