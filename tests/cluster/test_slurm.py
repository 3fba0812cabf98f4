"""Tests of the resolver for a Slurm step."""

from __future__ import annotations

import os

import pytest

from headrace.cluster.slurm import parse_hosts, parse_tasks_per_node
from headrace.distribute import SlurmClusterResolver
from headrace.errors import FailedPreconditionError, InvalidArgumentError


@pytest.fixture
def step(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "CUDA_"))]:
        monkeypatch.delenv(name)

    def write(*, rank=0, tasks=3, nodes="t02n13,t02n41,t02n43", per_node="1(x3)", gpus=None):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(tasks))
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", per_node)
        if gpus is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)

    return write


@pytest.mark.catalogue("3.27.30")
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1,3]", ["n1", "n3"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        (
            "n[1-2],m5,o[3-4,6,7-9]",
            ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"],
        ),
        (
            "n[0001-0003],m5,o[009-011]",
            ["n0001", "n0002", "n0003", "m5", "o009", "o010", "o011"],
        ),
        ("r[1-2]n[8-10]-ib", [f"r{r}n{n}-ib" for r in (1, 2) for n in (8, 9, 10)]),
    ],
)
def test_node_lists_are_expanded(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[]", "n[3-1]", "n[a]", "", "a,,b", "n]1[", "n[1-2]]"])
def test_invalid_node_list_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="Slurm nodes"):
        parse_hosts(text)


@pytest.mark.catalogue("3.27.31")
@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2", [2]),
        ("2,1,3", [2, 1, 3]),
        ("3(x2),2,1", [3, 3, 2, 1]),
        ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]),
        ("13(x10)", [13] * 10),
    ],
)
def test_tasks_per_node_are_parsed(text, counts):
    assert parse_tasks_per_node(text) == counts


def test_invalid_tasks_per_node_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"a form like '3\(x2\),1'"):
        parse_tasks_per_node("3x2")


@pytest.mark.catalogue("1.10.5", "3.27.32", "3.27.33")
def test_all_tasks_are_workers_by_default(step):
    step(rank=2, tasks=4, nodes="n[1-2]", per_node="2(x2)")
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["n1:8888", "n1:8889", "n2:8888", "n2:8889"]
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "n2:8888"
    assert resolver.master("worker", 1, rpc_layer="grpc") == "grpc://n1:8889"


@pytest.mark.catalogue("3.27.34", "3.27.35")
def test_task_types_are_assigned_in_alphabetical_order(step):
    step(rank=0)
    resolver = SlurmClusterResolver({"worker": 2, "ps": 1})
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["t02n13:8888"],
        "worker": ["t02n41:8888", "t02n43:8888"],
    }
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)


@pytest.mark.catalogue("3.27.36")
def test_tasks_of_a_node_have_consecutive_ports_and_separate_gpus(step):
    step(rank=1, tasks=5, per_node="2(x2),1", gpus="0,1")
    resolver = SlurmClusterResolver({"ps": 1, "worker": 4})
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["t02n13:8888"],
        "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert resolver.num_accelerators() == {"GPU": 1}
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.catalogue("3.27.37")
def test_task_may_have_several_gpus(step):
    step(rank=1, tasks=5, per_node="2(x2),1", gpus="")
    SlurmClusterResolver(gpus_per_node=4, gpus_per_task=2).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("gpus", "own"), [("2,5", "5"), ("GPU-1f, GPU-2e", "GPU-2e"), ("0,1,4,7", "4,7")]
)
def test_tasks_share_the_gpus_of_the_step(step, gpus, own):
    step(rank=1, tasks=2, nodes="n1", per_node="2", gpus=gpus)
    SlurmClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


@pytest.mark.parametrize(("gpus", "own"), [("4,5,6,7", "6,7"), ("6,7", "6,7"), ("0,1", "0,1")])
def test_gpus_assigned_by_slurm_are_kept(step, gpus, own):
    step(rank=1, tasks=2, nodes="n1", per_node="2", gpus=gpus)
    for _ in range(2):
        SlurmClusterResolver(gpus_per_node=4).cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_gpus_are_not_assigned_if_disabled(step):
    step(gpus="0,1,2,3")
    SlurmClusterResolver(auto_set_gpu=False).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_tasks_per_node_can_be_passed(step):
    step(tasks=6, per_node="1(x3)")
    expected = ["t02n13:8888", "t02n13:8889", "t02n41:8888", "t02n41:8889"]
    spec = SlurmClusterResolver(tasks_per_node=2).cluster_spec()
    assert spec.job_tasks("worker")[:4] == expected
    with pytest.raises(InvalidArgumentError, match=r"3 nodes .* but numbers of tasks for 2"):
        SlurmClusterResolver(tasks_per_node=[2, 1])


def test_surplus_task_has_no_type(step):
    step(rank=2)
    resolver = SlurmClusterResolver({"worker": 2})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_missing_slurm_step_is_an_error(step):
    with pytest.raises(FailedPreconditionError, match="SLURM_PROCID is not set"):
        SlurmClusterResolver()


def test_too_many_tasks_or_gpus_are_refused(step):
    step(gpus="0")
    with pytest.raises(
        InvalidArgumentError, match=r"`jobs` requires 4 tasks .* but the step has 3"
    ):
        SlurmClusterResolver({"worker": 4})
    with pytest.raises(InvalidArgumentError, match="require 2 GPUs, but a node has 1"):
        SlurmClusterResolver(gpus_per_task=2)
    step(tasks=4)
    with pytest.raises(
        InvalidArgumentError, match=r"`jobs` requires 4 tasks .* but the step has 3"
    ):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (["worker"], r"`jobs` must be a dict from task types to counts, .* but got \['worker'\]"),
        ({"worker": "2"}, r"`jobs\['worker'\]` must be an integer"),
        ({1: 2}, "`task_type` must be a string, but got 1"),
    ],
)
def test_jobs_must_map_types_to_counts(step, jobs, words):
    step()
    with pytest.raises(TypeError, match=words):
        SlurmClusterResolver(jobs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"port_base": 65535}, "`port_base` must be at most 65534"),
        ({"gpus_per_node": "2"}, "`gpus_per_node` must be an integer"),
        ({"gpus_per_task": -1}, "`gpus_per_task` must be at least 0"),
    ],
)
def test_invalid_arguments_are_named(step, arguments, words):
    step(tasks=2, nodes="n1", per_node="2")
    with pytest.raises((TypeError, ValueError), match=words):
        SlurmClusterResolver(**arguments)


def test_procid_outside_the_step_is_refused(step):
    step(rank=9, tasks=4, nodes="n1", per_node="4")
    with pytest.raises(InvalidArgumentError, match="SLURM_PROCID=9 must be less than the 4 tasks"):
        SlurmClusterResolver()
