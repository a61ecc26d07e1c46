"""The run folder: the place of everything that a run leaves.

    runs/NAME/
      config.yaml     the whole configuration         run.json       what ran where: versions, layout, machine
      status.json     where it stands (status.py)     metrics.jsonl  its numbers (metrics.py)
      logs/           rank-R.log (logs.py)            checkpoints/   step-00000040, latest, best
      export/         the result, ready for use

`RunFolder(path)` only names the places. `create` makes them, once per run, in the process that the user has
started (before its workers, so that a folder that cannot be written is said at once); workers find the
folder by `from_agent`.

Promises: a folder that holds the results of another run is refused, never mixed or overwritten. One that holds
nothing but a failed start is used again. A resumed run keeps what is there: run.json gets the earlier starts
under "earlier", and a config.yaml that differs is kept as config-1.yaml, config-2.yaml, …
"""

import os
import platform
import secrets
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from twofold.errors import UserError
from twofold.mesh.guard import LOG_DIR_VARIABLE
from twofold.monitor.atomic import read_json, write_json_atomic, write_text_atomic
from twofold.monitor.memory import total_memory_gb
from twofold.monitor.status import is_alive, write_status

_PACKAGES = ("twofold", "torch", "transformers", "peft", "datasets", "safetensors", "tokenizers", "numpy", "gguf")
_given_by_agent: set[str] = set()


class RunFolder:
    """The places of one run. Attributes are `Path`s: path, config, run, status, metrics, logs, checkpoints,
    export.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.run = self.path / "run.json"
        self.status = self.path / "status.json"
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def from_agent(cls) -> "RunFolder | None":
        """In a worker that our own agent has started: the folder that the agent has created for this run.

        Given once per process. A second run in the same program is another run: None, as without an agent.
        """
        logs = os.environ.get(LOG_DIR_VARIABLE)
        if logs is None or logs in _given_by_agent:
            return None
        _given_by_agent.add(logs)
        return cls(Path(logs).parent)

    def create(self, config: str, layout: Any = None, *, resume: bool = False) -> None:
        """Makes the folder with config.yaml (the text `config`), run.json, and a status of "starting".

        layout: anything of JSON types that says how the run is spread, such as {"strategy": "ddp", "ranks": 2}.
        resume: whether the run continues what lies here.

        Raises UserError where another run lies here or is going on here, and where nothing can be written.
        """
        self.check(resume=resume)
        try:
            for folder in (self.logs, self.checkpoints, self.export):
                folder.mkdir(parents=True, exist_ok=True)
            self._write_config(config)
            write_json_atomic(self.run, self._describe(layout))
            write_status(self.status, "starting")
        except OSError as problem:
            raise UserError(self._cannot_write(problem)) from problem

    def check(self, *, resume: bool = False) -> None:
        """Raises UserError where a run may not use this folder; changes nothing."""
        status = read_json(self.status)
        if is_alive(status):
            raise UserError(
                f"a run is going on in {self.path} (process {status['pid']} on {status['host']}). Give this one "
                f"another name with run.name=…, or wait. If that is no run any more: rm {self.status}"
            )
        if not resume and (found := self._results()):
            raise UserError(
                f"{self.path} holds another run ({found}). Give this one another name with run.name=…, "
                f"or continue that one with --resume."
            )

    def _results(self) -> str:
        """What a run has left here that must not be lost, in words; "" for nothing."""
        try:
            if self.metrics.is_file() and self.metrics.stat().st_size:
                return "metrics.jsonl"
            for folder in (self.checkpoints, self.export):
                if folder.is_dir() and any(folder.iterdir()):
                    return f"{folder.name}/"
            if self.config.exists() and not self.run.exists():  # a folder of something else
                return "config.yaml"
        except OSError as problem:
            raise UserError(self._cannot_write(problem)) from problem
        return ""

    def _write_config(self, text: str) -> None:
        if self.config.exists() and self.config.read_text(encoding="utf-8") != text:
            number = 1
            while (old := self.path / f"config-{number}.yaml").exists():
                number += 1
            self.config.rename(old)
        write_text_atomic(self.config, text)

    def _describe(self, layout: Any) -> dict[str, Any]:
        before = read_json(self.run)
        before = before if isinstance(before, dict) else {}
        earlier = before.pop("earlier", [])
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": shlex.join(sys.orig_argv),
            "folder": os.getcwd(),
            "git": git_commit(),
            "layout": layout,
            "machine": describe_machine(),
            "versions": versions(),
            "earlier": [*earlier, before] if before else [],
        }

    def _cannot_write(self, problem: OSError) -> str:
        """The error line: which folder, why, what to do."""
        place = self.path
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        reason = problem.strerror or str(problem)
        if not place.is_dir():
            reason, remedy = f"{place} is a file, not a folder", ""
        elif isinstance(problem, PermissionError) or not os.access(place, os.W_OK):
            remedy = f", or allow writing there: chmod u+rwx {shlex.quote(str(place))}"
        else:
            remedy = ""
        return f"cannot write the run folder {self.path}: {reason}. Choose another place with run.folder=…{remedy}"


def default_name(method: str) -> str:
    """A name for a run that says what and when, and that no other run has: sft-20261201-112807-9c1f."""
    return f"{method}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide what a run computes. Imports none of them."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, Any]:
    """This machine: host, system, processor, cores (that this process may use), memory_gb (GiB)."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": total_memory_gb(),
    }


def git_commit(folder: str | Path = ".") -> str | None:
    """The commit of the working folder, with "-dirty" behind it where tracked files differ; None without git."""
    try:
        # --exclude of all tags: the bare commit
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
