"""Real launches of small scripts: what the person at the terminal sees, and that nobody is left behind.

A launch costs 2 to 5 s, so that each looks at several things.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import os, sys, time
from twofold.mesh.launch import ensure_workers
print("top level", os.environ.get("RANK"))
LOGS = sys.argv[1]
ensure_workers("cpu", 2, 1, LOGS)
import torch
from twofold.errors import UserError
from twofold.mesh.guard import guard
from twofold.mesh.mesh import Mesh
mesh = Mesh.join("cpu")
"""


def start(folder: Path, code: str, *words: str, python=(), env=None, name="train.py") -> subprocess.Popen:
    """Starts folder/train.py (HEAD and `code`); its logs go to folder/logs."""
    if code:
        (folder / name).write_text(HEAD + code)
    words = words or (str(folder / name), str(folder / "logs"))
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST")}
    return subprocess.Popen(
        [sys.executable, *python, *words],
        cwd=folder, env=clean | (env or {}), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen, seconds: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def end_leftovers(pids: list[int]) -> None:
    """So that a test that fails leaves nothing either."""
    for pid in filter(is_alive, pids):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def test_two_workers_run_the_script_again(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("WORD = 'neighbour'")
    (tmp_path / "json.py").write_text("raise ImportError('a file in the working folder hid the real json')")
    code = """
import beside
assert __name__ == "__main__" and os.path.isabs(__file__) and sys.path[0] == os.path.dirname(__file__)
total = mesh.all_reduce_sum(torch.tensor([1.0, mesh.rank]))
print("said", mesh.rank, total.tolist(), beside.WORD, sys.argv[2:], "threads", torch.get_num_threads())
print("shared store off:", os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"], flush=True)
os.system("echo from a child >&2")
if mesh.is_zero: print("after fit")
"""
    words = ("scripts/train.py", "logs", "--lr=1", "two words", "$$${local_rank}")
    (tmp_path / "scripts" / "train.py").write_text(HEAD + code)
    rc, out, err = finish(start(tmp_path, "", *words, env={"PYTHONWARNINGS": "error::RuntimeWarning"}))
    assert rc == 0, err
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    arguments = "['--lr=1', 'two words', '$$${local_rank}']"
    said = f"[2.0, 1.0] neighbour {arguments} threads {share}"
    assert out.splitlines() == [
        "top level None", "top level 0", f"said 0 {said}", "shared store off: 1", "after fit",
    ]  # fmt: skip
    assert err == "from a child\n"
    log = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert re.fullmatch(r"--- .* rank 1 of 2, pid \d+ ---", log[0])
    assert log[1:] == ["top level 1", f"said 1 {said}", "shared store off: 1", "from a child"]


def test_the_rank_that_failed_first_is_named(tmp_path):
    code = """
try:
    if mesh.rank == 1:
        time.sleep(0.2)
        {"text": 1}["messages"]
    mesh.all_reduce_sum(torch.ones(2))
finally:
    torch.distributed.destroy_process_group()    # the others see this first
    time.sleep(1.5 if mesh.rank == 1 else 0)
"""
    process = start(tmp_path, code)
    rc, _, err = finish(process, 30)
    assert rc == 1
    lines = err.splitlines()
    assert lines[0] == "rank 1 of 2 failed: KeyError: 'messages'"
    assert 'train.py", line' in err
    assert '{"text": 1}["messages"]' in err
    assert "runpy" not in err
    assert "1 other rank only lost the connection to it (0)" in err
    assert len(lines) < 15
    # and when a rank is in an exchange and the failing one writes its record itself, as fit() does
    (tmp_path / "b").mkdir()
    code = """
with guard(LOGS):
    time.sleep(0.2 * mesh.rank)
    if mesh.rank == 1: raise UserError("data.train: no such file. Is it in tickets/?")
    mesh.all_reduce_sum(torch.ones(2))
"""
    rc, out, err = finish(start(tmp_path / "b", code, "-m", "train", "logs"), 30)
    assert (rc, err) == (2, "data.train: no such file. Is it in tickets/?\n")
    assert out.splitlines() == ["top level None", "top level 0"]


def test_a_killed_worker_and_a_chosen_exit_code(tmp_path):
    code = """
if mesh.rank == 1:
    print("last words", flush=True)
    os.kill(os.getpid(), 9)
mesh.all_reduce_sum(torch.ones(2))
"""
    (tmp_path / "b").mkdir()
    exits = start(
        tmp_path / "b",
        "mesh.barrier()\nprint('bye', file=sys.stderr)\nsys.exit(7)\n",
        env={"OMP_NUM_THREADS": "1"},
    )
    killed = start(tmp_path, code)
    rc, _, err = finish(killed, 30)
    assert rc == 1
    assert re.match(r"rank 1 of 2 died of SIGKILL \(pid \d+\): often the kernel's out-of-memory killer", err)
    assert "    last words" in err
    assert "Traceback" not in err
    rc, _, err = finish(exits, 30)
    assert (rc, err) == (7, "bye\n")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_nobody_is_left_behind(tmp_path):
    code = """
import signal, subprocess
if mesh.rank == 1:
    signal.signal(signal.SIGTERM, lambda *_: print("caught"))     # does not go by itself
child = subprocess.Popen(["sleep", "300"])
with open(f"{LOGS}/pids", "a") as f: f.write(f"{os.getpid()} {child.pid} ")
mesh.barrier()
open(f"{LOGS}/ready-{mesh.rank}", "w").close()
while True:
    mesh.all_reduce_sum(torch.ones(2))
    time.sleep(0.1 if mesh.rank else 0)
"""
    ends = {}
    for name in ("group-int", "alone-int", "term", "kill"):
        (tmp_path / name).mkdir()
        ends[name] = start(tmp_path / name, code, env={"OMP_NUM_THREADS": "1"})
    pids = {}
    for name in ends:
        logs = tmp_path / name / "logs"
        wait_until(lambda logs=logs: len(list(logs.glob("ready-*"))) == 2, 60, f"{name} runs")
        pids[name] = [int(word) for word in (logs / "pids").read_text().split()]
        assert all(map(is_alive, pids[name]))
    try:
        os.killpg(ends["group-int"].pid, signal.SIGINT)
        ends["alone-int"].send_signal(signal.SIGINT)
        ends["term"].send_signal(signal.SIGTERM)
        ends["kill"].send_signal(signal.SIGKILL)
        for name, expected in (("group-int", 130), ("alone-int", 130), ("term", 143), ("kill", -9)):
            ends[name].wait(20)
            workers = pids[name]
            wait_until(lambda workers=workers: not any(map(is_alive, workers)), 10, f"{name}: {workers} gone")
            rc, _, err = finish(ends[name], 10)
            assert rc == expected, err
            assert "Traceback" not in err
    finally:
        end_leftovers([pid for some in pids.values() for pid in some])


def test_torchrun_is_joined_and_guarded(tmp_path):
    code = """
total = mesh.all_reduce_sum(torch.tensor([1.0]))
os.write(1, f"joined {mesh.rank} {total.item()}\\n".encode())
with guard(LOGS):
    mesh.barrier()
    if mesh.rank == 1: raise KeyError("messages")
    mesh.all_reduce_sum(torch.ones(2))
"""
    (tmp_path / "train.py").write_text(HEAD + code)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=t", "train.py", "logs")
    rc, out, err = finish(start(tmp_path, "", *torchrun))
    assert rc == 1
    assert "joined 0 2.0\n" in out
    assert "joined 1 2.0\n" in out
    assert "top level None" not in out  # no agent of ours
    assert err.count('raise KeyError("messages")') >= 1
    assert re.search(r"exitcode\s*: 1", err)
    from twofold.mesh.guard import read_records

    root, *others = read_records(tmp_path / "logs" / "errors")
    assert (root["rank"], root["type"], root["victim"]) == (1, "KeyError", False)
    assert root["frames"][-1]["function"] == "<module>"
    assert all(other["victim"] for other in others)


def test_what_cannot_be_run_again_is_refused(tmp_path):
    code = "from twofold.mesh.launch import ensure_workers; ensure_workers('cpu', 2)"
    rc, _, err = finish(start(tmp_path, "", "-c", code))
    assert rc == 1  # the exception itself; trainer and command line turn it into exit code 2
    assert "UserError: devices=2 starts workers that run this program again, which a program given by -c" in err
    assert "torchrun --nproc-per-node=2 FILE.py" in err
