"""The run folder and the files in it: who may use it, what is written, what survives."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from twofold.errors import UserError
from twofold.monitor import atomic, run_folder, status
from twofold.monitor.metrics import MetricsFile, cut_back, encode_row, read_metrics
from twofold.monitor.run_folder import RunFolder, default_name
from twofold.monitor.status import Status, close_status, is_alive

INFO = {"model": "m", "run": "runs/x", "max_steps": 6, "start_step": 0}


def row(step, **more):
    return {"step": step, "split": "train", "loss": 1 / step, **more}


def train(folder, steps, start=0, end=True):
    """A run as the loop tells it."""
    callbacks = [MetricsFile(folder.metrics), Status(folder.status)]
    for callback in callbacks:
        callback.on_start({**INFO, "start_step": start})
    for step in range(start + 1, steps + 1):
        for callback in callbacks:
            callback.on_step(step)
            callback.on_log(row(step))
    for callback in callbacks if end else []:
        callback.on_end({"steps": steps})


# --- the folder ---


def test_create_leaves_what_the_design_page_names(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "first")
    folder.create("version: 1\n", layout={"strategy": "ddp", "ranks": 2})
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints", "config.yaml", "export", "logs", "run.json", "status.json",
    ]  # fmt: skip
    assert folder.config.read_text() == "version: 1\n"
    told = json.loads(folder.run.read_text())
    assert told["layout"] == {"strategy": "ddp", "ranks": 2}
    assert told["versions"]["python"] == platform.python_version()
    assert told["versions"]["torch"].startswith("2.")
    assert told["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert told["command"] == shlex.join(sys.orig_argv)
    assert json.loads(folder.status.read_text())["state"] == "starting"


def test_git_commit(tmp_path):
    def git(*arguments):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert run_folder.git_commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "a")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert run_folder.git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert run_folder.git_commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step-00000002/x", "export/model.safetensors"])
def test_a_folder_with_another_run_is_refused(tmp_path, left):
    folder = RunFolder(tmp_path / "x")
    folder.create("a")
    (folder.path / left).parent.mkdir(exist_ok=True)
    (folder.path / left).write_text("something")
    with pytest.raises(UserError, match=r"holds another run .*run\.name=.*--resume") as caught:
        RunFolder(folder.path).create("b")
    assert str(folder.path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert folder.config.read_text() == "a"
    folder.create("a", resume=True)
    assert (folder.path / left).read_text() == "something"


def test_a_failed_start_and_an_empty_folder_are_used_again(tmp_path):
    (tmp_path / "x").mkdir()
    RunFolder(tmp_path / "x").create("a")
    RunFolder(tmp_path / "x").create("b")
    assert RunFolder(tmp_path / "x").config.read_text() == "b"


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("my own")
    with pytest.raises(UserError, match="holds another run"):
        RunFolder(tmp_path).create("a")
    assert (tmp_path / "config.yaml").read_text() == "my own"


def test_a_folder_in_use_is_refused_even_for_resuming(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create("a")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        told = json.loads(folder.status.read_text())
        folder.status.write_text(json.dumps({**told, "pid": other.pid}))
        with pytest.raises(UserError, match=rf"a run is going on .*process {other.pid}.*run\.name="):
            folder.create("a", resume=True)
        other.communicate(b"\n")
    folder.create("a", resume=True)  # the process has ended


def test_resume_keeps_the_earlier_start_and_another_config(tmp_path):
    folder = RunFolder(tmp_path)
    for number, text in enumerate(["a", "a", "b", "c"]):
        folder.create(text, layout={"ranks": number}, resume=number > 0)
    told = json.loads(folder.run.read_text())
    assert told["layout"] == {"ranks": 3}
    assert [one["layout"]["ranks"] for one in told["earlier"]] == [0, 1, 2]
    assert all("earlier" not in one for one in told["earlier"])
    texts = {path.name: path.read_text() for path in tmp_path.glob("config*")}
    assert texts == {"config.yaml": "c", "config-1.yaml": "a", "config-2.yaml": "b"}


def test_default_names_say_what_and_are_unique():
    names = {default_name("sft") for _ in range(20)}
    assert len(names) > 1
    assert all(name.startswith("sft-20") for name in names)


def test_workers_find_the_agents_folder_once(tmp_path, monkeypatch):
    monkeypatch.delenv("TWOFOLD_LOG_DIR", raising=False)
    assert RunFolder.from_agent() is None
    monkeypatch.setenv("TWOFOLD_LOG_DIR", str(tmp_path / "x" / "logs"))
    assert RunFolder.from_agent().path == tmp_path / "x"
    assert RunFolder.from_agent() is None  # a second run in the same program


# --- no permission ---


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError) as caught:
        RunFolder(tmp_path / "runs" / "x").create("a")
    text = str(caught.value)
    assert f"cannot write the run folder {tmp_path}/runs/x: {tmp_path}/runs is a file, not a folder" in text
    assert "run.folder=" in text


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody can write")
def test_a_read_only_file_system():
    with pytest.raises(UserError, match=r"cannot write the run folder /proc/twofold/x: .*run\.folder="):
        RunFolder("/proc/twofold/x").create("a")


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_write_permission(exists):
    with tempfile.TemporaryDirectory() as base:  # not tmp_path, which only its owner may enter
        os.chmod(base, 0o755)
        locked = Path(base) / "locked"
        target = locked / "x"
        (target if exists else locked).mkdir(parents=True)
        for path in (locked, target) if exists else (locked,):
            path.chmod(0o555)
        me = os.geteuid()
        if me == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            with pytest.raises(UserError) as caught:
                RunFolder(target).create("a")
        finally:
            if me == 0:
                os.seteuid(0)
            locked.chmod(0o755)
    text, shut = str(caught.value), target if exists else locked
    assert text.startswith(f"cannot write the run folder {target}: Permission denied. ")
    assert text.endswith(f"run.folder=…, or allow writing there: chmod u+rwx {shut}")


# --- atomic files and status ---


def test_a_reader_never_sees_a_part(tmp_path):
    path, stop, seen = tmp_path / "status.json", threading.Event(), []
    atomic.write_json_atomic(path, [0])

    def read():
        while not stop.is_set():
            seen.append(json.loads(path.read_text()))

    reader = threading.Thread(target=read)
    reader.start()
    for length in range(1, 60):
        atomic.write_json_atomic(path, list(range(length * 150)), durable=False)
    stop.set()
    reader.join()
    assert len(seen) > 1
    assert all(value == list(range(len(value))) for value in seen)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    atomic.write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        atomic.write_json_atomic(path, {"a": math.nan})
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        atomic.write_json_atomic(path, {"a": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert atomic.read_json(path) == {"a": 1}


def test_status_follows_the_run(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(status.time, "monotonic", lambda: clock[0])
    path = tmp_path / "status.json"
    watch = Status(path)
    watch.on_start({**INFO, "max_steps": 1000, "start_step": 100})
    assert atomic.read_json(path)["state"] == "running"
    for step in range(101, 201):
        clock[0] += 0.25
        watch.on_step(step)
    told = atomic.read_json(path)
    # 100 steps in 25 s leave 800 steps: 200 s
    assert (told["step"], told["max_steps"], told["eta_seconds"], told["seconds"]) == (200, 1000, 200.0, 25.0)
    assert told["error"] is None
    assert (told["pid"], told["host"]) == (os.getpid(), platform.node())


def test_status_is_written_once_a_second_at_most(tmp_path, monkeypatch):
    clock, written = [0.0], []
    monkeypatch.setattr(status.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(status, "write_status", lambda path, state, **more: written.append(more["step"]))
    watch = Status(tmp_path / "status.json")
    watch.on_start(INFO)
    for step in range(1, 1001):
        clock[0] += 1 / 128
        watch.on_step(step)
    assert written == [0, *range(128, 1001, 128)]


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (ValueError("loss is NaN at step 7"), "failed", "ValueError: loss is NaN at step 7"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
    ],
)
def test_status_of_an_ended_run(tmp_path, error, state, text):
    watch = Status(tmp_path / "status.json")
    watch.on_start(INFO)
    watch.on_error(error, 7)
    told = atomic.read_json(tmp_path / "status.json")
    assert (told["state"], told["step"], told["error"], told["eta_seconds"]) == (state, 7, text, None)
    close_status(tmp_path / "status.json", "killed")  # it has said it itself
    assert atomic.read_json(tmp_path / "status.json") == told


def test_a_killed_run_is_dead_and_can_be_closed(tmp_path):
    path = tmp_path / "status.json"
    code = "import sys; from twofold.monitor.status import write_status; write_status(sys.argv[1], 'running', step=3)"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert not is_alive(atomic.read_json(path))
    close_status(path, "rank 1 died of SIGKILL")
    told = atomic.read_json(path)
    assert (told["state"], told["step"], told["error"]) == ("failed", 3, "rank 1 died of SIGKILL")


def test_is_alive():
    here = {"state": "running", "host": platform.node(), "time": 0}
    assert is_alive({**here, "pid": os.getppid()})
    assert not is_alive({**here, "pid": os.getpid()})
    assert not is_alive({**here, "pid": os.getppid(), "state": "done"})
    assert not is_alive({**here, "pid": 1, "host": "elsewhere"})  # silent since 1970
    assert not is_alive(None)


# --- metrics ---


def test_floats_keep_nine_significant_digits():
    written = json.loads(encode_row({"lr": 1.23456789012e-7, "loss": 12345.678901234, "time": 1796116414.312}))
    assert written == {"lr": 1.23456789e-07, "loss": 12345.6789, "time": 1796116414.31}


def test_float32_survives_exactly(tmp_path):
    import numpy as np

    values = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    for value in values:
        assert np.float32(json.loads(encode_row({"loss": value}))["loss"]) == value


def test_rows_that_json_lacks(tmp_path):
    import torch

    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.on_start(INFO)
    metrics.on_log(row(1, a=math.nan, b=math.inf, c=-math.inf, d=None, e=True, f=torch.tensor(0.5), g=[1, math.nan]))
    raw = path.read_text()  # there at once: nothing has been closed

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    told = json.loads(raw, parse_constant=refuse)
    assert [told[name] for name in "abcdefg"] == ["NaN", "Infinity", "-Infinity", None, True, 0.5, [1, "NaN"]]
    (read,) = read_metrics(path)
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


def test_resumed_metrics_are_those_of_one_run(tmp_path):
    def timeless(folder):
        return [{name: value for name, value in one.items() if name != "time"} for one in read_metrics(folder.metrics)]

    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.create("a")
    train(whole, 6)
    train(parts, 5, end=False)  # killed after step 5, last checkpoint at step 3
    before = parts.metrics.read_bytes()
    with parts.metrics.open("a") as file:
        file.write('{"step": 6, "split": "tr')  # the line in hand
    train(parts, 6, start=3)
    assert timeless(parts) == timeless(whole)
    assert [one["step"] for one in timeless(parts)] == [1, 2, 3, 4, 5, 6]
    kept = b"".join(before.splitlines(keepends=True)[:3])
    assert parts.metrics.read_bytes().startswith(kept)


def test_cut_back_counts_and_a_new_run_begins_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\nno json\n{"step": 3}\n{"st')
    assert cut_back(path, 2) == 3
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert cut_back(path, 2) == 0
    MetricsFile(path).on_start(INFO)
    assert path.read_text() == ""


def test_a_reader_leaves_out_the_line_in_hand_but_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: no JSON"):
        read_metrics(path)
