"""Runs the benchmarks: `.venv-bench/bin/python benchmarks/run.py [--only NAME,…] [--rounds N] [--quick]`.

A benchmark is a script with sides; each side is run as a process of its own and prints one JSON line (measure.py).
Sides take turns: ours, peer, peer, ours, peer, peer … after one round that only warms the disk and is thrown away.
A ratio is the median of the ratios of the rounds, so what slows a whole round slows both its sides.
Results are merged by name into results.json (`--only` keeps the other rows) and the tables of README.md are made
from it (table.py). `--quick` proves that every side runs, with few steps and one round, and writes nothing.

A side is added by a function in the script's `SIDES` and a `Peer` here; a benchmark by an entry of BENCHMARKS.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import table
from measure import MARK

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
LIBRARIES = ("torch", "lightning", "trl", "transformers", "peft", "twofold")
Line = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """What is read from a side's JSON line."""

    unit: str
    read: Callable[[Line], float]


SECONDS = Metric("s", lambda line: line["seconds"])
SPEED = Metric("tokens/s", lambda line: line["tokens"] / line["seconds"])
ROWS_SPEED = Metric("rows/s", lambda line: line["tokens"] / line["seconds"])
MEMORY = Metric("MB peak", lambda line: line["peak_mb"])


@dataclass(frozen=True)
class Peer:
    """A row of the results: our side against `side`. goal: what ours / peer must be, as ">= 8" or "<= 1.15"."""

    side: str
    metric: Metric
    goal: str | None = None
    ours: str | None = None  # another side of the same script in the place of ours
    name: str = ""  # what follows the benchmark's name


@dataclass(frozen=True)
class Benchmark:
    script: str
    ours: str
    peers: tuple[Peer, ...]
    words: tuple[str, ...] = ()  # what the script is given after the side
    rounds: int = 3


def sft(words: Sequence[str], rounds: int = 3, grouped: bool = False, **goals: str) -> Benchmark:
    """Twofold against TRL. goals: of the rows default, packing, no_ckpt and memory (against trl_default)."""
    settings = ("default", "packing", "no_ckpt")
    peers = [Peer(f"trl_{side}", SPEED, goals.get(side), name=f"trl_{side}") for side in settings]
    if grouped:
        peers.append(Peer("trl_grouped", SPEED, name="trl_grouped"))
    for side in settings:
        goal = goals.get("memory") if side == "default" else None
        peers.append(Peer(f"trl_{side}", MEMORY, goal, name=f"memory-trl_{side}"))
    return Benchmark("sft.py", "twofold", tuple(peers), tuple(words), rounds)


BENCHMARKS = {
    "loop": Benchmark(
        "loop.py",
        "twofold",
        (
            Peer("hand", SECONDS, "<= 1.15", name="hand"),
            Peer("lightning", SECONDS, name="lightning"),
            Peer("hf", SECONDS, name="hf"),
            Peer("hand", SECONDS, ours="lightning", name="lightning-over-hand"),
            Peer("hand", SECONDS, ours="hf", name="hf-over-hand"),
        ),
        rounds=5,
    ),
    "sft-llama": sft(("llama", "half"), grouped=True, default=">= 8", packing=">= 3.5", memory="<= 0.35"),
    "sft-llama-all": sft(("llama", "all")),
    "sft-smollm2-lora": sft(("smollm2", "half"), default=">= 5", packing=">= 1.4"),
    "sft-smollm2-tickets": sft(("smollm2", "tickets")),
    "dpo-llama": Benchmark(
        "dpo.py",
        "twofold",
        (
            Peer("trl_default", SPEED, ">= 6", name="trl_default"),
            Peer("trl_no_ckpt", SPEED, name="trl_no_ckpt"),
            Peer("trl_default", MEMORY, "<= 0.35", name="memory-trl_default"),
            Peer("trl_no_ckpt", MEMORY, name="memory-trl_no_ckpt"),
        ),
    ),
    "ablation": Benchmark(
        "ablation.py",
        "labels",
        (
            Peer("padded", SPEED, name="labels"),
            Peer("padded", SPEED, ours="unpadded", name="unpadded"),
            Peer("padded", SPEED, ours="both", name="both"),
            Peer("both", SPEED, ours="both_fused", name="fused-over-both"),
            Peer("padded", SPEED, ours="padded_fused", name="fused"),
            Peer("padded", SPEED, ours="both_fused", name="all"),
        ),
    ),
    "ddp2": Benchmark("ddp2.py", "twofold", (Peer("raw", ROWS_SPEED, ">= 0.95", name="module"),), ("module",), 5),
    "ddp2-llama": Benchmark("ddp2.py", "twofold", (Peer("raw", SPEED, ">= 0.95", name="raw"),), ("llama",), 5),
}


TWO = ("ddp:2", "zero1:2", "zero2:2", "fsdp:2", "tp:2", "pp:2,gpipe", "pp:2,1f1b", "pp:2,interleaved")
TWO += ("pp:2,zero-bubble", "pp:2,zbv", "pp:2,dualpipev")
FOUR = ("ddp:4", "fsdp:4", "tp:4", "fsdp:2,tp:2", "pp:2,fsdp:2", "pp:2,tp:2")
for strategy in TWO + FOUR:
    peers = (Peer("raw", ROWS_SPEED, ">= 0.95", name="raw"), Peer("raw", MEMORY, "<= 1.05", name="memory"))
    BENCHMARKS[f"layout-{strategy}"] = Benchmark("layouts.py", "twofold", peers, (strategy,), 3)

for strategy in ("cp:2", "ep:2"):
    peers = (Peer("raw", SPEED, ">= 0.95", name="raw"), Peer("raw", MEMORY, "<= 1.05", name="memory"))
    BENCHMARKS[f"layout-{strategy}"] = Benchmark("layouts_lm.py", "twofold", peers, (strategy,), 3)
WAITING = Metric("share of waiting", lambda line: line["seconds"])
for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
    BENCHMARKS[f"bubble-{schedule}"] = Benchmark(
        "bubbles.py", "measured", (Peer("formula", WAITING, name="formula"),), (schedule,), 3
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Twofold and its peers, in turn.")
    parser.add_argument("--only", default="*", help=f"names or patterns, with commas: {', '.join(BENCHMARKS)}")
    parser.add_argument("--rounds", type=int, help="rounds that count, in the place of each benchmark's own number")
    parser.add_argument("--quick", action="store_true", help="few steps, one round, nothing written")
    options = parser.parse_args()
    chosen = [n for n in BENCHMARKS if any(fnmatch.fnmatch(n, p) for p in options.only.split(","))]
    if not chosen:
        parser.error(f"no benchmark is called {options.only}; there are: {', '.join(BENCHMARKS)}")
    if os.getloadavg()[0] > 0.5:
        print(f"warning: the load average is {os.getloadavg()[0]:.1f}; measure on a quiet machine", file=sys.stderr)
    failed = False
    for name in chosen:
        try:
            rounds = 1 if options.quick else options.rounds or BENCHMARKS[name].rounds
            results = rows(name, BENCHMARKS[name], measure(name, BENCHMARKS[name], rounds, options.quick))
        except SideFailed as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        for row in results:
            print(table.line(row), flush=True)
        if not options.quick:
            merge(results)
            table.write(RESULTS, HERE / "README.md")
    sys.exit(1 if failed else 0)


def sides(benchmark: Benchmark) -> list[str]:
    """Ours first, then the peers in order, each once."""
    names = [benchmark.ours, *(side for peer in benchmark.peers for side in (peer.ours, peer.side) if side)]
    return list(dict.fromkeys(names))


def measure(name: str, benchmark: Benchmark, rounds: int, quick: bool) -> dict[str, list[Line]]:
    """side -> its JSON lines, one per round. The round before the first that counts runs quick and is thrown away."""
    lines: dict[str, list[Line]] = {side: [] for side in sides(benchmark)}
    for turn in range(rounds if quick else rounds + 1):
        warm_up = not quick and turn == 0
        for side in lines:
            line = run_side(benchmark, side, quick or warm_up)
            word = "warm-up" if warm_up else f"round {turn if not quick else 1} of {rounds}"
            print(
                f"{name}  {word}  {side}: {line['seconds']:.2f} s, {line['peak_mb']:.0f} MB, "
                f"loss {line['first_loss']:.4f} to {line['final_loss']:.4f}",
                flush=True,
            )
            if not warm_up:
                lines[side].append(line)
    return lines


class SideFailed(RuntimeError):
    """A side that ended without its JSON line."""


def run_side(benchmark: Benchmark, side: str, quick: bool) -> Line:
    """Runs one side as a process, in a folder of its own that is removed afterwards."""
    folder = tempfile.mkdtemp(prefix="twofold-bench-")
    environment = {**os.environ, "TMPDIR": folder, "BENCH_QUICK": "1" if quick else "0"}
    command = [sys.executable, str(HERE / benchmark.script), side, *benchmark.words]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = [text[len(MARK) :] for text in done.stdout.splitlines() if text.startswith(MARK)]
    if done.returncode or len(found) != 1:
        tail = "\n".join((done.stdout + "\n" + done.stderr).strip().splitlines()[-25:])
        raise SideFailed(f"{benchmark.script} {side} {' '.join(benchmark.words)} ended with {done.returncode}:\n{tail}")
    line: Line = json.loads(found[0])
    return line


def rows(name: str, benchmark: Benchmark, lines: dict[str, list[Line]]) -> list[dict[str, Any]]:
    """The rows of results.json."""
    out = []
    for peer in benchmark.peers:
        side = peer.ours or benchmark.ours
        ours = [peer.metric.read(line) for line in lines[side]]
        theirs = [peer.metric.read(line) for line in lines[peer.side]]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratio = median(ratios)
        out.append(
            {
                "name": f"{name}-{peer.name}",
                "ours": round(median(ours), 3),
                "peer": round(median(theirs), 3),
                "unit": peer.metric.unit,
                "ratio": round(ratio, 3),
                "goal": peer.goal,
                "holds": None if peer.goal is None else holds(ratio, peer.goal),
                "machine": machine(),
                "versions": versions(),
                "date": datetime.date.today().isoformat(),
                "detail": {
                    "sides": [side, peer.side],
                    "ratios": [round(one, 3) for one in ratios],
                    "ours": shown(lines[side]),
                    "peer": shown(lines[peer.side]),
                },
            }
        )
    return out


def shown(lines: list[Line]) -> Line:
    """What a reader needs to see that both sides did the same work: of the median round."""
    line = sorted(lines, key=lambda one: float(one["seconds"]))[len(lines) // 2]
    keys = ("seconds", "peak_mb", "base_mb", "steps", "tokens", "targets", "first_loss", "final_loss")
    return {key: round(line[key], 4) for key in keys if key in line}


def holds(ratio: float, goal: str) -> bool:
    sign, number = goal.split()
    return ratio >= float(number) if sign == ">=" else ratio <= float(number)


def merge(new: list[dict[str, Any]]) -> None:
    """Puts rows into results.json: one with the same name is replaced where it stands, others go to the end."""
    old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    by_name = {row["name"]: row for row in [*old, *new]}
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(list(by_name.values()), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(RESULTS)


def machine() -> str:
    """Processor, cores and memory."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = "source"
    return found


if __name__ == "__main__":
    main()
