"""Which machine this is, from the variables that SLURM, Kubeflow and people set; and the CPUs of a worker."""

import os
import subprocess
import sys

import pytest

from twofold.errors import UserError
from twofold.mesh.affinity import bind, cpus_by_node, share
from twofold.mesh.cluster import Node, count_nodes, join_step, this_node

# srun --nodes=3 --ntasks-per-node=1, as the second of them sees it
STEP = {
    "SLURM_JOB_ID": "20123", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "3", "SLURM_NTASKS": "3",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """Sets the variables of a cluster, and nothing else of one."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PET_", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "x")  # so that what a test leaves is undone
        monkeypatch.delenv(name)

    def set_all(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_one_machine():
    assert this_node() is None
    assert count_nodes() == 1


def test_a_slurm_step_with_a_task_on_each_node(cluster):
    cluster(STEP)
    expected = Node(1, 3, "gpu07", 15000 + 20123 % 10000, "20123.0")
    assert this_node() == this_node(3) == expected
    assert count_nodes() == 3
    join_step()
    assert "LOCAL_RANK" not in os.environ  # an agent, no rank
    with pytest.raises(UserError, match="num_nodes=2, but the cluster has started 3"):
        this_node(2)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],login", "gpu07"), ("n[3,5-7]", "n3"), ("r[1-2]n[10-20].x,b", "r1n10.x")],
)
def test_the_first_host_of_a_list(cluster, hosts, first):
    cluster(STEP | {"SLURM_STEP_NODELIST": hosts})
    assert this_node().host == first


def test_shells_and_batch_scripts_are_no_steps(cluster):
    cluster(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"})  # srun --pty bash
    assert this_node() is None
    cluster(STEP | {"SLURM_STEP_ID": "batch"})
    assert this_node() is None


def test_a_slurm_step_with_several_tasks_on_a_node_is_a_launcher(cluster):
    cluster(STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "a,b"})
    cluster({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_CPUS_PER_TASK": "5"})
    assert this_node() is None
    join_step()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    assert [os.environ[name] for name in names] == ["3", "1", "4", "2", "a", "15123", "5"]
    assert count_nodes() == 2
    join_step()  # in_launcher_environment now


def test_unequal_slurm_nodes_are_refused(cluster):
    cluster(STEP | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"})
    with pytest.raises(UserError, match=r"2\+2\+1 tasks on 3 nodes.*--ntasks-per-node=2"):
        join_step()


def test_kubeflow(cluster):
    cluster({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"})  # PyTorchJob
    assert this_node() == Node(1, 2, "job-master-0", 23456)
    cluster({"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29400"})
    assert this_node() == Node(3, 4, "node-0", 29400)
    cluster({"PET_NNODES": "1", "WORLD_SIZE": "1"})
    assert this_node() is None


def test_by_hand(cluster):
    with pytest.raises(UserError, match=r"which of the 2 machines.*MASTER_ADDR=HOST_OF_NODE_0 NODE_RANK=N python"):
        this_node(2)
    cluster({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"})
    assert this_node(2) == Node(1, 2, "10.0.0.1", 29500)
    assert this_node(1) is None
    cluster({"NODE_RANK": "2"})
    with pytest.raises(UserError, match=r"NODE_RANK=2.*up to 1 on the last"):
        this_node(2)


def test_a_launcher_knows_the_number_of_machines(cluster):
    cluster({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a"})
    assert count_nodes() == 1  # all of them here, for all that is known
    cluster({"LOCAL_WORLD_SIZE": "4"})
    assert count_nodes() == 2
    assert count_nodes(4) == 4
    assert this_node(4) is None


def test_shares_of_cpus():
    two = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [share("cores", rank, 4, two) for rank in range(4)] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert [share("cores", rank, 3, two) for rank in range(3)] == [{0, 1}, {2, 3}, {4, 5}]
    assert [share("cores", rank, 3, [[0, 1]]) for rank in range(3)] == [{0}, {1}, {0}]
    assert [share("numa", rank, 4, two) for rank in range(4)] == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2
    assert share("numa", 0, 1, two) == {0, 1, 2, 3}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux binds processes")
def test_a_worker_is_bound():
    allowed = os.sched_getaffinity(0)
    assert {cpu for node in cpus_by_node() for cpu in node} == allowed
    code = (
        "from twofold.mesh.affinity import bind; bind('cores', 'cpu'); import os; print(len(os.sched_getaffinity(0)))"
    )
    env = os.environ | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(len(allowed))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    bind("none", "cpu")
    assert os.sched_getaffinity(0) == allowed


def test_torch_knows_the_cpus_of_a_gpu(monkeypatch):
    """The function of torch's that is used there takes what it is given (no GPU here)."""
    from torch.numa import binding

    asked, bound = [], []
    monkeypatch.setattr(binding, "_node_get_logical_cpus_to_bind_to", lambda gpu_index: asked.append(gpu_index) or {5})
    monkeypatch.setattr(binding, "_exclusive_get_logical_cpus_to_bind_to", lambda gpu_index: {gpu_index})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    monkeypatch.setenv("LOCAL_RANK", "1")
    bind("numa", "cuda")
    bind("cores", "cuda", gpus=(2, 3))
    assert (asked, bound) == ([1], [{5}, {3}])
