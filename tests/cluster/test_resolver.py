"""Tests of cluster specs, roles of tasks, simple and union resolvers, and waiting."""

from __future__ import annotations

import json
import sys

import pytest

import headrace as hr
from headrace.cluster.resolver import import_package, wait_for
from headrace.cluster.spec import check_task, is_chief, rank, workers
from headrace.distribute import ClusterSpec, SimpleClusterResolver, UnionResolver
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.testing import ManualClock

WORKERS = ClusterSpec({"worker": ["worker0:2222", "worker1:2222"]})
SERVERS = ClusterSpec({"ps": ["ps0:2222", "ps1:2222"]})


@pytest.mark.catalogue("1.10.2", "3.27.2-4")
def test_simple_resolver_returns_its_arguments():
    resolver = SimpleClusterResolver(
        WORKERS,
        master="worker0:2222",
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    assert resolver.cluster_spec() == WORKERS
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.num_accelerators() == {"GPU": 8}
    assert resolver.master() == "grpc://worker0:2222"
    assert SimpleClusterResolver(WORKERS).num_accelerators() == {}


@pytest.mark.catalogue("3.27.6", "3.27.7")
def test_task_arguments_take_precedence_over_the_master():
    resolver = SimpleClusterResolver(WORKERS, master="worker0:2222")
    assert resolver.master() == "worker0:2222"
    assert resolver.master("worker", 0) == "worker0:2222"
    assert resolver.master("worker", 1, rpc_layer="grpc") == "grpc://worker1:2222"
    assert SimpleClusterResolver(WORKERS).master(rpc_layer="grpc") == ""


@pytest.mark.catalogue("3.27.5")
def test_task_and_rpc_layer_can_be_set():
    resolver = SimpleClusterResolver(WORKERS)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "http"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "http")
    with pytest.raises(TypeError, match="`task_id` must be an integer"):
        resolver.task_id = "1"
    with pytest.raises(ValueError, match="`task_id` must be at least 0"):
        resolver.task_id = -1


@pytest.mark.catalogue("1.10.2")
def test_simple_resolver_accepts_a_spec_and_a_string():
    with pytest.raises(TypeError, match="`cluster_spec` must be a ClusterSpec"):
        SimpleClusterResolver({"worker": ["a:1"]})
    with pytest.raises(TypeError, match="`master` must be a string"):
        SimpleClusterResolver(WORKERS, master=3)


@pytest.mark.catalogue("1.10.3", "3.27.8-11")
def test_union_has_all_tasks_and_the_properties_of_the_first():
    first = SimpleClusterResolver(
        WORKERS, "worker0:2222", "worker", 1, "cloud", {"GPU": 2}, rpc_layer="grpc"
    )
    union = UnionResolver(first, SimpleClusterResolver(SERVERS, task_type="ps", task_id=0))
    assert union.cluster_spec().as_dict() == WORKERS.as_dict() | SERVERS.as_dict()
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, "grpc")
    assert (union.environment, union.num_accelerators()) == ("cloud", {"GPU": 2})
    assert union.master() == "grpc://worker0:2222"
    assert union.master(rpc_layer="http") == "http://worker0:2222"
    assert union.master("ps", 1) == "grpc://ps1:2222"


@pytest.mark.catalogue("1.10.3")
def test_task_id_0_takes_precedence_over_the_first_resolver():
    first = SimpleClusterResolver(WORKERS, task_type="worker", task_id=1)
    assert UnionResolver(first, task_id=0).task_id == 0
    assert UnionResolver(first, task_type="").task_type == ""


@pytest.mark.catalogue("3.27.12")
def test_lists_of_one_type_are_concatenated_in_order():
    later = SimpleClusterResolver(ClusterSpec({"worker": ["worker4:2222", "worker5:2222"]}))
    union = UnionResolver(later, SimpleClusterResolver(WORKERS))
    assert union.cluster_spec().job_tasks("worker") == [
        "worker4:2222", "worker5:2222", "worker0:2222", "worker1:2222",
    ]  # fmt: skip


@pytest.mark.catalogue("3.27.13-16")
def test_indices_with_gaps_are_kept_and_unique():
    sparse = SimpleClusterResolver(ClusterSpec({"worker": {3: "c:1", 7: "d:1"}}))
    union = UnionResolver(SimpleClusterResolver(WORKERS), sparse)
    assert union.cluster_spec().task_indices("worker") == [0, 1, 3, 7]
    with pytest.raises(KeyError, match="two clusters define 'worker' task 3"):
        UnionResolver(sparse, sparse).cluster_spec()
    again = SimpleClusterResolver(ClusterSpec({"worker": {1: "x:1"}}))
    with pytest.raises(KeyError, match="worker1:2222 and x:1"):
        UnionResolver(SimpleClusterResolver(WORKERS), again).cluster_spec()


def test_union_requires_resolvers():
    with pytest.raises(ValueError, match="at least one cluster resolver"):
        UnionResolver()
    with pytest.raises(TypeError, match=r"`resolvers\[0\]` must be a ClusterResolver"):
        UnionResolver(WORKERS)
    with pytest.raises(TypeError, match="unexpected keyword"):
        UnionResolver(SimpleClusterResolver(WORKERS), task="worker")


def test_repr_of_resolvers_shows_cluster_and_task():
    simple = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
    shown = "SimpleClusterResolver(ClusterSpec({'worker': ['a:1']}), task_type='worker', task_id=0)"
    assert repr(simple) == shown
    assert repr(UnionResolver(simple)) == f"UnionResolver({shown}, task_type='worker', task_id=0)"


def test_unsupported_resolvers_name_the_alternative():
    with pytest.raises(AttributeError, match=r"hr\.service\.distribute.*parallel models"):
        print(hr.distribute.TPUStrategy)
    with pytest.raises(AttributeError, match="did you mean 'ClusterSpec'"):
        print(hr.distribute.ClusterSpecs)


# --- roles of tasks -------------------------------------------------------------------------------


WITH_CHIEF = ClusterSpec({"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]})
WITHOUT = ClusterSpec({"worker": ["a:1", "b:1"]})


@pytest.mark.catalogue("1.10.9", "3.28.5-8")
def test_chief_is_the_first_training_task():
    assert workers(WITH_CHIEF) == [("chief", 0), ("worker", 0), ("worker", 1)]
    assert [rank(WITH_CHIEF, *task) for task in workers(WITH_CHIEF)] == [0, 1, 2]
    assert is_chief(WITH_CHIEF, "chief", 0)
    assert not is_chief(WITH_CHIEF, "worker", 0)


@pytest.mark.catalogue("1.10.9", "3.28.9", "3.28.10")
def test_first_worker_is_the_chief_without_one():
    assert is_chief(WITHOUT, "worker", 0)
    assert not is_chief(WITHOUT, "worker", 1)
    assert is_chief(ClusterSpec({}), None, None)


@pytest.mark.catalogue("1.10.10", "2.14.3", "3.28.11-13")
def test_evaluator_is_no_training_task_and_may_be_missing():
    check_task(WITHOUT, "evaluator", 0)
    assert not is_chief(WITHOUT, "evaluator", 0)
    with pytest.raises(InvalidArgumentError, match="not one of the training tasks"):
        rank(WITHOUT, "evaluator", 0)


@pytest.mark.catalogue("3.28.14-18")
@pytest.mark.parametrize(
    ("spec", "task", "words"),
    [
        ({"worker": ["a:1"], "foo": ["b:1"]}, ("worker", 0), "tasks of type 'foo'; types are"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "at most one chief, but has 2"),
        ({"worker": ["a:1"]}, (None, None), "the task of this process is not set"),
        ({"worker": ["a:1"]}, ("foobar", 0), "unknown task type 'foobar'"),
        ({"worker": ["a:1"]}, ("ps", 0), "no 'ps' task 0"),
        ({"worker": ["a:1"]}, ("worker", 1), "no 'worker' task 1"),
    ],
)
def test_invalid_clusters_are_refused(spec, task, words):
    with pytest.raises(InvalidArgumentError, match=words):
        check_task(ClusterSpec(spec), *task)


@pytest.mark.parametrize("task", [("chief", 0), ("worker", 1), ("ps", 0)])
def test_each_task_of_the_cluster_is_accepted(task):
    check_task(WITH_CHIEF, *task)


# --- cluster specs: tasks by type and index -------------------------------------------------------


@pytest.mark.catalogue("1.10.1", "3.28.1-3")
def test_list_indices_start_at_0_and_dicts_give_indices():
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "c:1", 0: "d:1"}})
    assert spec.jobs == ["ps", "worker"]
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": {0: "d:1", 3: "c:1"}}
    assert spec.num_tasks("ps") == 2
    assert spec.task_indices("ps") == [0, 3]
    assert spec.task_address("ps", 3) == "c:1"
    assert spec.job_tasks("ps") == ["d:1", None, None, "c:1"]
    assert spec.job_tasks("worker") == ["a:1", "b:1"]


def test_indices_without_gaps_become_a_list():
    spec = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}})
    assert spec.as_dict() == {"worker": ["a:1", "b:1"]}
    assert spec == ClusterSpec({"worker": ["a:1", "b:1"]}) == ClusterSpec(spec)
    assert hash(spec) == hash(ClusterSpec(spec))
    assert spec != ClusterSpec({"worker": ["b:1", "a:1"]})


def test_cluster_without_tasks_is_false():
    assert not ClusterSpec({})
    assert not ClusterSpec({"worker": []})
    assert ClusterSpec({"worker": ["a:1"]})


def test_spec_round_trips_through_its_dict():
    assert repr(ClusterSpec({"worker": ["a:1"]})) == "ClusterSpec({'worker': ['a:1']})"


@pytest.mark.catalogue("1.10.1")
def test_missing_job_or_task_is_named_with_the_existing_ones():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'; it has 'worker'"):
        spec.num_tasks("ps")
    with pytest.raises(ValueError, match="No task with index 9 in job 'worker'; it has 0, 1"):
        spec.task_address("worker", 9)
    with pytest.raises(ValueError, match="'ps'; it has no jobs"):
        ClusterSpec({}).job_tasks("ps")


@pytest.mark.catalogue("1.10.1", "3.28.1-3")
@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (["a:1"], r"`cluster` must be a dict"),
        ({1: ["a:1"]}, "a task type must be a string"),
        ({"worker": "a:1"}, "the tasks of 'worker' must be a list"),
        ({"worker": [1]}, "the address of 'worker' task 0 must be a string"),
        ({"worker": {"0": "a:1"}}, "must be an integer, but got '0'"),
    ],
)
def test_invalid_cluster_argument_is_refused(cluster, words):
    with pytest.raises(TypeError, match=words):
        ClusterSpec(cluster)


def test_negative_indices_are_refused():
    with pytest.raises(ValueError, match="at least 0, but got -1"):
        ClusterSpec({"worker": {-1: "a:1"}})


def test_task_address_requires_an_integer():
    with pytest.raises(TypeError, match="`task_index` must be an integer, but got '1'"):
        ClusterSpec({"worker": ["a:1", "b:1"]}).task_address("worker", "1")


# --- waiting for tasks, with a manual clock -------------------------------------------------------


def wait(clock, look, seconds=60.0):
    return wait_for(look, what="cluster", seconds=seconds, clock=clock, sleep=clock.advance)


def test_available_result_is_returned_at_once(clock: ManualClock):
    assert wait(clock, lambda: 7) == 7
    assert clock() == 1000.0


def test_missing_result_is_polled_until_available(clock: ManualClock):
    def look():
        if clock() < 1005.0:
            raise UnavailableError("worker 1 is missing")
        return "all"

    assert wait(clock, look) == "all"
    assert 1005.0 <= clock() <= 1006.0


def test_wait_warns_after_10_seconds_and_then_each_minute(clock, caplog):
    def look():
        raise UnavailableError("worker 1 is missing")

    with pytest.raises(UnavailableError, match="no cluster after 150 s: worker 1 is missing"):
        wait(clock, look, seconds=150.0)
    assert clock() == pytest.approx(1150.0)
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == 3
    assert words[0].startswith("no cluster after 10 s: worker 1 is missing; the timeout is 150 s")


def test_other_errors_are_not_retried(clock):
    def look():
        raise ValueError("wrong label")

    with pytest.raises(ValueError, match="wrong label"):
        wait(clock, look)
    assert clock() == 1000.0


# --- optional packages ----------------------------------------------------------------------------


def test_optional_package_is_imported_with_its_module():
    assert import_package("json.tool", needed_by="this test") is json
    assert "json.tool" in sys.modules


@pytest.mark.parametrize("module", ["ray", "torch.distributed", "kubernetes"])
def test_missing_package_is_named_with_the_command_to_install_it(monkeypatch, module):
    package = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, module, None)
    words = rf"Resolver requires the package {package}, .*'headrace\[{package}\]', or else"
    with pytest.raises(FailedPreconditionError, match=words):
        import_package(module, needed_by="Resolver", instead=", or else")
