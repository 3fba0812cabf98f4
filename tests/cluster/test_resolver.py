"""Resolvers that are told what they answer, alone and together."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.distribute import ClusterSpec, SimpleClusterResolver, UnionResolver

WORKERS = ClusterSpec({"worker": ["worker0:2222", "worker1:2222"]})
SERVERS = ClusterSpec({"ps": ["ps0:2222", "ps1:2222"]})


@pytest.mark.catalogue("1.10.2", "3.27.2-4")
def test_a_simple_resolver_answers_what_it_is_given():
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
def test_a_task_that_is_named_goes_before_the_master():
    resolver = SimpleClusterResolver(WORKERS, master="worker0:2222")
    assert resolver.master() == "worker0:2222"
    assert resolver.master("worker", 0) == "worker0:2222"
    assert resolver.master("worker", 1, rpc_layer="grpc") == "grpc://worker1:2222"
    assert SimpleClusterResolver(WORKERS).master(rpc_layer="grpc") == ""


@pytest.mark.catalogue("3.27.5")
def test_task_and_layer_may_be_set():
    resolver = SimpleClusterResolver(WORKERS)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "http"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "http")
    with pytest.raises(TypeError, match="`task_id` must be an integer"):
        resolver.task_id = "1"
    with pytest.raises(ValueError, match="`task_id` must be at least 0"):
        resolver.task_id = -1


@pytest.mark.catalogue("1.10.2")
def test_a_simple_resolver_takes_a_spec_and_a_string():
    with pytest.raises(TypeError, match="`cluster_spec` must be a ClusterSpec"):
        SimpleClusterResolver({"worker": ["a:1"]})
    with pytest.raises(TypeError, match="`master` must be a string"):
        SimpleClusterResolver(WORKERS, master=3)


@pytest.mark.catalogue("1.10.3", "3.27.8-11")
def test_a_union_has_the_tasks_of_all_and_the_answers_of_the_first():
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
def test_a_task_number_of_zero_goes_before_the_first_resolvers():
    first = SimpleClusterResolver(WORKERS, task_type="worker", task_id=1)
    assert UnionResolver(first, task_id=0).task_id == 0
    assert UnionResolver(first, task_type="").task_type == ""


@pytest.mark.catalogue("3.27.12")
def test_lists_of_one_type_are_joined_in_the_order_of_the_resolvers():
    later = SimpleClusterResolver(ClusterSpec({"worker": ["worker4:2222", "worker5:2222"]}))
    union = UnionResolver(later, SimpleClusterResolver(WORKERS))
    assert union.cluster_spec().job_tasks("worker") == [
        "worker4:2222", "worker5:2222", "worker0:2222", "worker1:2222",
    ]  # fmt: skip


@pytest.mark.catalogue("3.27.13-16")
def test_numbers_with_gaps_stay_and_occur_once():
    sparse = SimpleClusterResolver(ClusterSpec({"worker": {3: "c:1", 7: "d:1"}}))
    union = UnionResolver(SimpleClusterResolver(WORKERS), sparse)
    assert union.cluster_spec().task_indices("worker") == [0, 1, 3, 7]
    with pytest.raises(KeyError, match="two of the clusters have a 'worker' task 3"):
        UnionResolver(sparse, sparse).cluster_spec()
    again = SimpleClusterResolver(ClusterSpec({"worker": {1: "x:1"}}))
    with pytest.raises(KeyError, match="worker1:2222 and x:1"):
        UnionResolver(SimpleClusterResolver(WORKERS), again).cluster_spec()


def test_a_union_needs_resolvers():
    with pytest.raises(ValueError, match="at least one cluster resolver"):
        UnionResolver()
    with pytest.raises(TypeError, match=r"`resolvers\[0\]` must be a ClusterResolver"):
        UnionResolver(WORKERS)
    with pytest.raises(TypeError, match="unexpected keyword"):
        UnionResolver(SimpleClusterResolver(WORKERS), task="worker")


def test_resolvers_show_what_they_answer():
    simple = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
    shown = "SimpleClusterResolver(ClusterSpec({'worker': ['a:1']}), task_type='worker', task_id=0)"
    assert repr(simple) == shown
    assert repr(UnionResolver(simple)) == f"UnionResolver({shown}, task_type='worker', task_id=0)"


def test_what_is_not_here_yet_is_named_with_what_does_the_work():
    with pytest.raises(AttributeError, match=r"hr\.service\.distribute.*it is not here"):
        print(hr.distribute.TPUStrategy)
    with pytest.raises(AttributeError, match="did you mean 'ClusterSpec'"):
        print(hr.distribute.ClusterSpecs)
