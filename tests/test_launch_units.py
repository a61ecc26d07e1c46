"""Devices, command lines, root causes and the mesh: what needs no launch."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import RankFailed, run_ranks

from twofold.errors import UserError
from twofold.mesh import devices, launch
from twofold.mesh.command import parse
from twofold.mesh.devices import indices, resolve
from twofold.mesh.launch import ensure_workers
from twofold.mesh.mesh import Mesh
from twofold.mesh.report import Death, explain

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def start_of_torchrun(monkeypatch, world_size, here):
    values = ("0", "0", str(world_size), str(here), "127.0.0.1")
    for name, value in zip(LAUNCHER, values, strict=True):
        monkeypatch.setenv(name, value)


# --- devices ---


def test_devices_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve("auto", "auto") == ("cpu", 1)
    assert resolve("cpu", 3) == ("cpu", 3)
    assert resolve("auto", "2") == ("cpu", 2)
    for name in ("gpu", "cuda"):
        with pytest.raises(UserError, match="no GPU is visible") as caught:
            resolve(name, 1)
        text = str(caught.value)
        assert f"accelerator '{name}'" in text
        assert f"torch {torch.__version__}" in text
        assert f"cpu ({len(os.sched_getaffinity(0))} core" in text
        assert "\n" not in text
    with pytest.raises(UserError, match="every GPU"):
        resolve("auto", -1)


def test_devices_with_four_gpus(monkeypatch):
    monkeypatch.setattr(devices, "_count_gpus", lambda: 4)
    assert resolve("auto", "auto") == ("cuda", 4)
    assert resolve("gpu", -1) == ("cuda", 4)
    assert resolve("cuda", 3) == ("cuda", 3)
    assert resolve("cpu", "auto") == ("cpu", 1)
    with pytest.raises(UserError, match=r"devices=5: this machine has 4 visible GPUs"):
        resolve("gpu", 5)


def test_devices_by_number(monkeypatch):
    monkeypatch.setattr(devices, "_count_gpus", lambda: 4)
    assert resolve("gpu", [0, 2]) == ("cuda", 2)
    assert indices([0, 2]) == (0, 2)
    assert indices(2) == indices("auto") == ()
    with pytest.raises(UserError, match=r"devices=\[1, 4\]: the visible GPUs of this machine are 0 to 3"):
        resolve("gpu", [1, 4])
    with pytest.raises(UserError, match=r"\[0, 1\] are GPUs, and this run is on cpu: give the number"):
        resolve("cpu", [0, 1])
    for wrong in ([], [1, 1], [-1], ["0"], [True]):
        with pytest.raises(UserError, match=r"names GPUs by number, each once, as \[0, 2\]"):
            resolve("gpu", wrong)


@pytest.mark.parametrize("count", [0, -2, "two", "", True, 1.5, None])
def test_devices_that_mean_nothing(count):
    with pytest.raises(UserError, match="give 'auto', a number"):
        resolve("cpu", count)


def test_unknown_accelerator():
    with pytest.raises(UserError, match="Did you mean 'cuda'"):
        resolve("cudaa", 1)


def test_a_launcher_decides_auto_and_must_agree(monkeypatch):
    start_of_torchrun(monkeypatch, world_size=4, here=2)
    assert resolve("cpu", "auto") == ("cpu", 2)
    ensure_workers("cpu", 2, num_nodes=1)
    ensure_workers("cpu", 2, num_nodes=2)
    with pytest.raises(UserError, match="started 2 workers on this node"):
        ensure_workers("cpu", 4)
    with pytest.raises(UserError, match="has started 2 nodes"):
        ensure_workers("cpu", 2, num_nodes=3)


def test_node_numbers_of_a_cluster_are_no_ranks(monkeypatch):
    start_of_torchrun(monkeypatch, world_size=4, here=2)
    monkeypatch.delenv("LOCAL_RANK")
    assert not launch.is_worker()


def test_one_device_needs_no_workers():
    ensure_workers("cpu", 1)


def test_a_test_is_not_run_again():
    with pytest.raises(UserError, match=r"inside pytest.*devices=1"):
        ensure_workers("cpu", 2)


# --- the command that is run again ---


@pytest.mark.parametrize(
    ("line", "options", "is_module", "target", "arguments"),
    [
        (["train.py"], [], False, "train.py", []),
        (["-u", "train.py", "-m", "x"], ["-u"], False, "train.py", ["-m", "x"]),
        (["-m", "tool.cli", "train", "-c"], [], True, "tool.cli", ["train", "-c"]),
        (["-Bum", "tool"], ["-Bu"], True, "tool", []),
        (["-mtool", "a"], [], True, "tool", ["a"]),
        (["-X", "dev", "-Wignore", "-O", "a.py"], ["-X", "dev", "-W", "ignore", "-O"], False, "a.py", []),
        (["--check-hash-based-pycs", "never", "a"], ["--check-hash-based-pycs", "never"], False, "a", []),
        (["/usr/bin/twofold", "train", "c.yaml"], [], False, "/usr/bin/twofold", ["train", "c.yaml"]),
    ],
)
def test_command_lines(line, options, is_module, target, arguments):
    command = parse(["python", *line])
    assert (list(command.options), command.is_module, command.target, list(command.arguments)) == (
        options, is_module, target, arguments,
    )  # fmt: skip


@pytest.mark.parametrize("line", [[], ["-"], ["-c", "pass"], ["-uc", "pass"], ["-i"]])
def test_command_lines_without_a_file(line):
    assert parse(["python", *line]) is None


# --- the root cause ---


def record(folder: Path, rank, ns, kind, text, victim=False, user=False, code=1):
    errors = folder / "errors"
    errors.mkdir(exist_ok=True)
    row = {"rank": rank, "world_size": 4, "pid": 1, "ns": ns, "type": kind, "text": text, "frames": []}
    row |= {"user": user, "victim": victim, "exit_code": code, "traceback": f"Traceback\n{kind}: {text}\n"}
    (errors / f"rank-{rank}.json").write_text(json.dumps(row))


def test_the_root_is_the_first_that_is_no_victim(tmp_path):
    record(tmp_path, 0, 10, "RuntimeError", "Connection closed by peer", victim=True)
    record(tmp_path, 1, 30, "KeyError", "'messages'")
    record(tmp_path, 2, 40, "ValueError", "another")
    record(tmp_path, 3, 20, "RuntimeError", "Broken pipe", victim=True)
    text, code = explain([Death(0, 1, 1, 5), Death(1, 2, 1, 5)], tmp_path, 4)
    assert code == 1
    assert text.splitlines()[0] == "rank 1 of 4 failed: KeyError: 'messages'"
    assert "2 other ranks only lost the connection to it (0, 3)" in text
    assert "rank 2 failed too, later: ValueError: another" in text


def test_a_killed_rank_is_the_root_of_lost_connections(tmp_path):
    record(tmp_path, 0, 10, "RuntimeError", "Connection closed by peer", victim=True)
    (tmp_path / "rank-1.log").write_text(
        "--- old rank 1 of 2, pid 1 ---\nold words\n--- now rank 1 of 2, pid 2 ---\nlast words\n"
    )
    deaths = [Death(0, 1, 1, 100), Death(1, 2, -signal.SIGKILL, 100)]
    text, code = explain(deaths, tmp_path, 2)
    assert code == 1
    assert text.startswith("rank 1 of 2 died of SIGKILL (pid 2): often the kernel's out-of-memory killer")
    assert "last words" in text
    assert "old words" not in text


def test_what_the_agent_killed_is_no_root(tmp_path):
    record(tmp_path, 0, 10, "RuntimeError", "Timed out waiting 60000ms for recv", victim=True)
    deaths = [Death(0, 1, 1, 100), Death(1, 2, -signal.SIGKILL, 131), Death(2, 2, -signal.SIGTERM, 100)]
    text, _ = explain(deaths, tmp_path, 3)
    assert text.startswith("rank 0 of 3 failed: RuntimeError: Timed out")
    assert "Hint: a rank did not reach an exchange" in text


def test_user_errors_and_exit_codes_speak_for_themselves(tmp_path):
    record(tmp_path, 1, 10, "UserError", "max_length: too short. Raise it.", user=True, code=2)
    assert explain([Death(1, 1, 2, 5)], tmp_path, 2) == ("max_length: too short. Raise it.", 2)
    record(tmp_path, 0, 5, "SystemExit", "7", code=7)
    assert explain([Death(0, 1, 7, 5)], tmp_path, 2) == ("", 7)
    text, code = explain([Death(2, 9, 3, 5), Death(0, 1, -signal.SIGTERM, 5)], tmp_path / "empty", 4)
    assert text.startswith("rank 2 of 4 ended with exit code 3 and no Python error (pid 9)")
    assert code == 1


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", "micro_batch_tokens"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "micro_batch_tokens"),
        ("The server socket has failed to listen: EADDRINUSE, address already in use", "port"),
        ("Expected to have finished reduction in the prior iteration before starting", "requires_grad"),
    ],
)
def test_hints(tmp_path, text, hint):
    record(tmp_path, 0, 1, "RuntimeError", text)
    last = explain([Death(0, 1, 1, 5)], tmp_path, 2)[0].splitlines()[-1]
    assert last.startswith("  Hint: ")
    assert hint in last


# --- the mesh and the harness for ranks ---


def exchange():
    mesh = Mesh.join("cpu")
    total = mesh.all_reduce_sum(torch.tensor([1.0, float(mesh.rank)]))
    word = mesh.broadcast_object({"from": mesh.rank})
    order = []
    with mesh.rank_zero_first():
        order.append(time.monotonic())
        if mesh.is_zero:
            time.sleep(0.2)
            order.append(time.monotonic())
    again = Mesh.join("cpu")  # adopts the group and does not own it
    again.leave()
    mesh.barrier()
    big = torch.full((2_000_000,), mesh.rank)  # 16 MB: more than a pipe holds
    return mesh.rank, mesh.world_size, total.tolist(), word, order, big


def test_mesh_of_three_ranks():
    results = run_ranks(3, exchange)
    assert [r[0] for r in results] == [0, 1, 2]
    for rank, (_, world_size, total, word, _, big) in enumerate(results):
        assert (world_size, total, word) == (3, [3.0, 3.0], {"from": 0})
        assert big.shape == (2_000_000,)
        assert int(big[-1]) == rank
    zero_finished = results[0][4][1]
    assert all(result[4][0] >= zero_finished for result in results[1:])


def test_mesh_of_one_process_needs_no_group():
    mesh = Mesh.join("cpu")
    assert (mesh.rank, mesh.world_size, mesh.is_zero) == (0, 1, True)
    assert mesh.all_reduce_sum(torch.ones(2)).tolist() == [1.0, 1.0]
    assert mesh.broadcast_object("x") == "x"
    mesh.barrier()
    with mesh.rank_zero_first():
        pass
    mesh.leave()
    assert not torch.distributed.is_initialized()


def fail_on_one():
    mesh = Mesh.join("cpu")
    if mesh.rank == 1:
        raise KeyError("messages")
    mesh.barrier()


def die_on_one():
    mesh = Mesh.join("cpu")
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.barrier()


def test_the_harness_names_the_rank_that_failed():
    with pytest.raises(RankFailed, match="rank 1 of 3 failed:") as caught:
        run_ranks(3, fail_on_one)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed(?s:.*)exit code -9"):
        run_ranks(2, die_on_one)


def test_the_harness_keeps_its_deadline():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2"):
        run_ranks(2, time.sleep, 60, deadline=0.5)


def test_the_launch_part_imports_no_torch():
    code = "import twofold.mesh.launch, twofold.mesh.worker, sys; print('torch' in sys.modules)"
    assert os.popen(f'{sys.executable} -c "{code}"').read().strip() == "False"
