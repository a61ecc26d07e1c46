"""Naming the one root cause of a failed run, from the workers' records and how their processes ended.

What is believed, in this order: a record that is no victim, the earliest first; a process that died of a
signal that the agent did not send; one that ended without a record; the earliest victim. The text is one root
cause, its traceback, what became of the other ranks, and a hint where the kind of failure is known.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofold.errors import EXIT_FAILURE
from twofold.mesh.guard import read_records

_TAIL_LINES = 15
# A process still alive so long after the first death was killed by the agent; its SIGKILL is no cause.
_SAME_MOMENT_SECONDS = 10

_HINTS = (
    (r"out of memory|can't allocate memory|MemoryError",
     "lower train.micro_batch_tokens (or micro_batch_size); the result of a step does not depend on it."),
    (r"address already in use|EADDRINUSE",
     "another program took the port in the moment between choosing and using it: start again."),
    (r"finished reduction in the prior iteration|unused parameters|did not receive grad",
     "with strategy 'ddp' each trainable parameter must take part in every loss: freeze the ones named "
     "(requires_grad=False) or use them in the loss."),
    (r"timed out|timeout",
     "a rank did not reach an exchange that the others waited in: a rank took another branch, or hangs."),
    (r"no space left on device", "the disk is full: free some space, or set run.folder to another disk."),
    (r"re-initialize CUDA in forked", "CUDA was used before processes were forked: set data.num_workers=0."),
    (r"too many open files", "raise the limit (ulimit -n 65536) or lower data.num_workers."),
    (r"connectfullmesh|connection refused",
     "the ranks cannot reach each other: set GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) to their network."),
)  # fmt: skip

_SIGNALS = {
    "SIGKILL": "often the kernel's out-of-memory killer: see `dmesg`, and lower train.micro_batch_tokens",
    "SIGBUS": "often a full /dev/shm: enlarge it, or set data.num_workers=0",
    "SIGSEGV": "a crash in native code; the end of its output shows where",
    "SIGABRT": "native code gave up; the end of its output says why",
}


@dataclass(frozen=True)
class Death:
    """How a worker's process ended: exit code (negative: the signal) and when (seconds since the epoch)."""

    rank: int
    pid: int
    exit_code: int
    seconds: int


def explain(deaths: Sequence[Death], log_dir: Path, world_size: int, hosts: Sequence[str] = ()) -> tuple[str, int]:
    """The text to print ("" where the program has said it itself) and the exit code of the run.

    deaths: the workers that did not end well, in the order in which that was seen. hosts: the machines, in order of
    their ranks; one is not named.
    """

    def who(rank: int) -> str:
        return f"rank {rank} of {world_size}" + (f" on {hosts[rank * len(hosts) // world_size]}" if hosts[1:] else "")

    records = read_records(log_dir / "errors")
    if records and not records[0]["victim"]:
        return _explain_record(who(records[0]["rank"]), records[0], records[1:], log_dir, world_size)
    death = _own_death(deaths, {record["rank"] for record in records})
    if death is None and records:
        return _explain_record(who(records[0]["rank"]), records[0], records[1:], log_dir, world_size)
    if death is None:
        return f"the workers failed without a trace. Logs: {log_dir}", EXIT_FAILURE
    return _explain_death(who(death.rank), death, log_dir), EXIT_FAILURE


def _own_death(deaths: Sequence[Death], recorded: set[int]) -> Death | None:
    """The death that was not the agent's doing: by a signal, else without a record."""
    if not deaths:
        return None
    first = deaths[0].seconds
    by_signal = [d for d in deaths if d.exit_code < 0 and d.exit_code != -signal.SIGTERM]
    for death in by_signal:
        if death.seconds - first < _SAME_MOMENT_SECONDS:
            return death
    unrecorded = [d for d in deaths if d.rank not in recorded]
    for death in unrecorded:
        if death.exit_code > 0:
            return death
    # SIGTERM: the agent's own way to stop the others, unless nobody else failed before
    return deaths[0] if deaths[0] in unrecorded else None


def _explain_record(
    who: str, root: dict[str, Any], others: Sequence[dict[str, Any]], log_dir: Path, world_size: int
) -> tuple[str, int]:
    rank, text = root["rank"], root["text"]
    if root["user"]:
        return text, root["exit_code"]
    if root["type"] == "SystemExit":
        ended = {r["rank"] for r in (root, *others) if r["type"] == "SystemExit"}
        if 0 in ended:  # it has the terminal, so that whatever it had to say was seen
            return "", root["exit_code"]
        lines = [f"{who} ended the program with exit code {root['exit_code']}"]
        return "\n".join([*lines, *_tail(log_dir, rank)]), root["exit_code"]
    return "\n".join(
        [
            f"{who} failed: {root['type']}{': ' if text else ''}{text}",
            *("    " + line for line in root["traceback"].rstrip().splitlines()),
            *_about_others(root, others, world_size),
            f"  Full logs: {log_dir}",
            *_hint(f"{root['type']}: {text}"),
        ]
    ), EXIT_FAILURE


def _about_others(root: dict[str, Any], others: Sequence[dict[str, Any]], world_size: int) -> list[str]:
    """What became of the other ranks: a line for each kind of end that occurred."""
    lost = {r["rank"] for r in others if r["victim"]}
    failed = {r["rank"]: r for r in others if not r["victim"]}
    same = {rank for rank, r in failed.items() if (r["type"], r["text"]) == (root["type"], root["text"])}
    own = {rank: r for rank, r in failed.items() if rank not in same}
    stopped = set(range(world_size)) - {root["rank"]} - same - set(own) - lost
    lines = [
        f"  rank {rank} failed too, later: {record['type']}: {record['text']}" for rank, record in sorted(own.items())
    ]
    for ranks, what in (
        (same, "failed with the same error"),
        (lost, "only lost the connection to it"),
        (stopped, "had no error and were stopped" if len(stopped) > 1 else "had no error and was stopped"),
    ):
        if ranks:
            noun = "other ranks" if len(ranks) > 1 else "other rank"
            lines.append(f"  {len(ranks)} {noun} {what} ({', '.join(map(str, sorted(ranks)))})")
    return lines


def _explain_death(who: str, death: Death, log_dir: Path) -> str:
    tail = _tail(log_dir, death.rank)
    if death.exit_code >= 0:
        head = f"{who} ended with exit code {death.exit_code} and no Python error (pid {death.pid})"
    else:
        name = _signal_name(-death.exit_code)
        head = f"{who} died of {name} (pid {death.pid})"
        head += f": {_SIGNALS[name]}." if name in _SIGNALS else ""
    return "\n".join([head, *tail, f"  Full logs: {log_dir}", *_hint("\n".join(tail))])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log_dir: Path, rank: int) -> list[str]:
    """The end of what this attempt of a rank has written; rank 0 has written to the terminal."""
    try:
        lines = (log_dir / f"rank-{rank}.log").read_text(errors="replace").splitlines()
    except OSError:
        return []
    header = re.compile(rf"--- .* rank {rank} of \d+, pid \d+ ---")
    starts = [number for number, line in enumerate(lines) if header.fullmatch(line)]
    said = lines[starts[-1] + 1 :] if starts else lines
    if not said:
        return [f"  It had written nothing to rank-{rank}.log."]
    return [f"  The end of rank-{rank}.log:", *("    " + line for line in said[-_TAIL_LINES:])]


def _hint(text: str) -> list[str]:
    for pattern, hint in _HINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return [f"  Hint: {hint}"]
    return []
