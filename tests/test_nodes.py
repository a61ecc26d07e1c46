"""Two agents as two machines: on the loopback, and in two network namespaces with a wire between them."""

import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

HEAD = """
import os, sys
from twofold.mesh.launch import ensure_workers
ensure_workers("cpu", 2, 2, sys.argv[1])
import torch
from twofold.mesh.mesh import Mesh
mesh = Mesh.join("cpu")
"""
TRAIN = """
import sys, torch
from twofold import Loss, Task, Trainer
class Line(Task):
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
    def inputs(self, batch): return {"input": batch[0]}
    def loss(self, output, batch): return Loss.of((output - batch[1]).square().sum(), len(batch[1]))
x = torch.arange(16.0).reshape(8, 2) / 8
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
trainer = Trainer("cpu", devices=int(sys.argv[1]), num_nodes=int(sys.argv[2]), strategy="ddp", max_steps=4, lr=0.1,
    optimizer="sgd", global_batch_size=8, micro_batch_size=2, folder=sys.argv[3], progress="off", logging_steps=1)
trainer.fit(Line(), data)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder: Path, rank: int, code: str, *words: str, host="127.0.0.1", port=29500, before=(), **env):
    """Starts the agent of machine `rank` of two, in a folder of its own as on machines that share no disk."""
    here = folder / f"node-{rank}"
    here.mkdir(exist_ok=True)
    (here / "train.py").write_text(code)
    gone = ("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "GLOO_SOCKET_IFNAME")
    clean = {k: v for k, v in os.environ.items() if k not in gone}
    clean |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*before, sys.executable, "train.py", *words],
        cwd=here, env=clean | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(*agents: subprocess.Popen) -> list[tuple[int, str, str]]:
    ends = []
    try:
        for agent in agents:
            out, err = agent.communicate(timeout=60)
            ends.append((agent.returncode, out, err))
    finally:
        for agent in agents:
            agent.kill()
    return ends


def losses(folder: Path) -> list[str]:
    (metrics,) = folder.glob("*/metrics.jsonl")
    return re.findall(r'"loss": ?([^,}]+)', metrics.read_text())


def test_two_machines_train_as_one_process_does(tmp_path):
    port = free_port()
    agents = [start(tmp_path, rank, TRAIN, "1", "2", "runs", port=port) for rank in (1, 0)]
    for rc, _, err in finish(*agents):
        assert rc == 0, err
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    alone = subprocess.run([sys.executable, "-c", TRAIN, "1", "1", str(tmp_path / "one")], env=env, check=True)
    assert alone.returncode == 0
    ours, expected = losses(tmp_path / "node-0" / "runs"), losses(tmp_path / "one")
    assert len(ours) == 4
    assert [float(v) for v in ours] == pytest.approx([float(v) for v in expected], abs=1e-6)
    assert not (tmp_path / "node-1" / "runs").exists()  # machine 0 has the run folder


def test_a_failure_on_another_machine_is_named_on_both(tmp_path):
    code = (
        HEAD
        + """
if mesh.rank == 3: {"text": 1}["messages"]
mesh.all_reduce_sum(torch.ones(2))
"""
    )
    port = free_port()
    agents = [start(tmp_path, rank, code, f"logs-{rank}", port=port) for rank in (0, 1)]
    (rc0, _, err0), (rc1, _, err1) = finish(*agents)
    host = re.escape(socket.gethostname())
    assert (rc0, rc1) == (1, 1)
    assert re.match(rf"rank 3 of 4 on {host} failed: KeyError: 'messages'\n", err0), err0
    assert '{"text": 1}["messages"]' in err0  # the traceback of the other machine's worker
    assert re.fullmatch(rf"rank 3 of 4 on {host} failed: KeyError: 'messages'\n", err1), err1


def test_machines_that_do_not_come_or_do_not_agree(tmp_path):
    port = free_port()
    ((rc, _, err),) = finish(start(tmp_path, 1, HEAD, "logs", port=port, TWOFOLD_TIMEOUT="3"))
    assert rc == 1  # the exception itself; trainer and command line turn it into exit code 2
    assert f"UserError: node 1 cannot reach node 0 at 127.0.0.1:{port} within 3 s: is it started" in err
    ((rc, _, err),) = finish(start(tmp_path, 0, TRAIN, "1", "2", "runs", port=port, TWOFOLD_TIMEOUT="2"))
    assert rc == 2
    assert err == (
        "waiting for node 1 of 2 …\nerror: node 1 of 2 did not come within 2 s. "
        "Start the same command on each machine, with MASTER_ADDR=127.0.0.1.\n"
    )
    agents = [start(tmp_path, rank, TRAIN, f"{rank + 1}", "2", "runs", port=port) for rank in (0, 1)]
    for rc, _, err in finish(*agents):
        assert rc == 2
        assert re.fullmatch(r"error: run.devices must be the same on each node; it is 1 on \S+, 2 on \S+\.\n", err), err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ((rc, _, err),) = finish(start(tmp_path, 0, TRAIN, "1", "2", "runs-2", port=port))
    assert rc == 2
    assert f"node 0 cannot listen on port {port}" in err
    assert "Set MASTER_PORT to a free port" in err


@pytest.fixture
def two_hosts():
    """Names of two network namespaces that a wire joins: 10.77.0.1 in the first, 10.77.0.2 in the second."""
    ip = shutil.which("ip") or "/usr/sbin/ip"
    tag = uuid.uuid4().hex[:6]
    names = [f"tf{tag}{i}" for i in (0, 1)]

    def run(*words: str) -> None:
        subprocess.run([ip, *words], check=True, capture_output=True)

    try:
        for name in names:
            run("netns", "add", name)
        run("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for i, name in enumerate(names):
            run("link", "set", name, "netns", name)
            run("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", name)
            run("-n", name, "link", "set", name, "up")
            run("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"network namespaces need root on Linux: {problem}")
    yield [([ip, "netns", "exec", name], name) for name in names]
    for name in names:
        run("netns", "del", name)


def test_two_hosts_with_a_wire_between_them(tmp_path, two_hosts):
    code = (
        HEAD
        + """
total = mesh.all_reduce_sum(torch.tensor([1.0, mesh.rank]))
print(mesh.rank, mesh.world_size, total.tolist(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
mesh.barrier()
"""
    )
    agents = [
        start(tmp_path, rank, code, "logs", host="10.77.0.1", before=before)
        for rank, (before, _) in enumerate(two_hosts)
    ]
    (rc0, out, err0), (rc1, out1, err1) = finish(*agents)
    assert (rc0, rc1) == (0, 0), err0 + err1
    assert out == f"0 4 [4.0, 6.0] {two_hosts[0][1]}\n"
    assert out1 == ""  # the terminal is rank 0's; the others write to logs
    for rank in (1, 2, 3):
        (log,) = tmp_path.glob(f"node-*/logs/rank-{rank}.log")
        assert f"{rank} 4 [4.0, 6.0] {two_hosts[rank // 2][1]}\n" in log.read_text()
