"""Conformance tests of all resolvers, each for the same cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

import headrace.cluster.ray
from headrace.cluster import spec
from headrace.distribute import (
    ClusterResolver,
    ClusterSpec,
    KubernetesClusterResolver,
    RayClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    UnionResolver,
)
from tests.cluster import test_ray
from tests.cluster.recorded_api import serving_recorded_pods

SPEC = ClusterSpec({"ps": ["10.1.2.90:2222"], "worker": ["10.1.2.10:2222", "10.1.2.11:2222"]})


class Pinned(ClusterResolver):
    """Return a user-defined resolver that only defines the cluster."""

    def cluster_spec(self):
        return SPEC


@pytest.fixture
def simple():
    return SimpleClusterResolver(SPEC, "10.1.2.11:2222", task_type="worker", task_id=1)


@pytest.fixture
def of_a_user():
    return Pinned("worker", 1)


@pytest.fixture
def tf_config(monkeypatch):
    config = {"cluster": SPEC.as_dict(), "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    return TFConfigClusterResolver()


@pytest.fixture
def slurm(monkeypatch):
    variables = {
        "PROCID": "2",
        "STEP_NUM_TASKS": "3",
        "STEP_NODELIST": "10.1.2.90,10.1.2.[10-11]",
        "STEP_TASKS_PER_NODE": "1(x3)",
    }
    for name, text in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", text)
    return SlurmClusterResolver({"worker": 2, "ps": 1}, port_base=2222, auto_set_gpu=False)


@pytest.fixture
def kubernetes():
    from kubernetes import client  # noqa: PLC0415 - a second to load

    with (
        serving_recorded_pods() as api,
        client.ApiClient(client.Configuration(host=f"http://{api.address}")) as connection,
    ):
        api.pods = [
            pod for pod in api.pods if pod["status"].get("podIP", "") + ":2222" in str(SPEC)
        ]
        yield KubernetesClusterResolver(
            {"worker": ["role=worker"], "ps": ["role=ps"]},
            2222,
            override_client=client.CoreV1Api(connection),
            task_type="worker",
            task_id=1,
        )


@pytest.fixture
def ray(monkeypatch):
    monkeypatch.setattr(headrace.cluster.ray, "AddressRegistry", test_ray.Place)
    known = {
        (name, index): SPEC.task_address(name, index)
        for name in SPEC.jobs
        for index in SPEC.task_indices(name)
    }
    monkeypatch.setattr(test_ray.Place, "known", known)
    monkeypatch.setattr(test_ray.Place, "actor", "worker-1")
    return RayClusterResolver({"worker": 2, "ps": 1}, port=2222, host="10.1.2.11")


@pytest.fixture
def union(tf_config):
    servers = SimpleClusterResolver(ClusterSpec({"ps": ["10.1.2.90:2222"]}))
    workers = ClusterSpec({"worker": ["10.1.2.10:2222", "10.1.2.11:2222"]})
    return UnionResolver(
        SimpleClusterResolver(workers, "10.1.2.11:2222", "worker", 1), servers, task_id=1
    )


@pytest.fixture(
    params=["simple", "of_a_user", "tf_config", "slurm", "kubernetes", "ray", "union"],
)
def resolver(request):
    return request.getfixturevalue(request.param)


def test_resolver_returns_the_cluster_and_the_task_of_this_process(resolver):
    assert resolver.cluster_spec() == SPEC
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    spec.check_task(resolver.cluster_spec(), resolver.task_type, resolver.task_id)


def test_master_is_an_address_with_the_rpc_layer_as_prefix(resolver):
    assert resolver.master() == "10.1.2.11:2222"
    assert resolver.master("ps", 0) == "10.1.2.90:2222"
    assert resolver.master("worker", 0, rpc_layer="http") == "http://10.1.2.10:2222"
    assert resolver.rpc_layer is None
    resolver.rpc_layer = "grpc"
    assert resolver.master() == "grpc://10.1.2.11:2222"
    assert resolver.master("ps", 0) == "grpc://10.1.2.90:2222"
    assert resolver.master(rpc_layer="") == "10.1.2.11:2222"


@pytest.mark.catalogue("3.27.46-49")
def test_task_id_may_be_set_to_0(resolver):
    resolver.task_type, resolver.task_id = "ps", 0
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.master("worker", 0) == "10.1.2.10:2222"


@pytest.mark.parametrize(
    ("task", "words"),
    [(("worker", 2), "No task with index 2 in job 'worker'"), (("chief", 0), "No such job")],
)
def test_missing_task_is_an_error_that_names_it(resolver, task, words):
    with pytest.raises(ValueError, match=words):
        resolver.master(*task)


@pytest.mark.parametrize("value", [-1, "x", 0.5, True])
def test_invalid_index_is_refused(resolver, value):
    with pytest.raises((TypeError, ValueError), match="`task_id` must be"):
        resolver.task_id = value
    assert resolver.task_id == 1


@pytest.mark.catalogue("3.27.1")
def test_number_of_accelerators_and_environment_are_returned(resolver):
    assert isinstance(resolver.num_accelerators(), Mapping)
    assert isinstance(resolver.environment, str)


def test_resolver_has_a_repr_and_can_join_a_union(resolver):
    assert type(resolver).__name__ in repr(resolver)
    assert "\n" not in repr(resolver)
    more = SimpleClusterResolver(ClusterSpec({"worker": ["c:1"], "chief": ["d:1"]}))
    union = UnionResolver(resolver, more)
    assert union.cluster_spec().num_tasks("worker") == 3
    assert (union.task_type, union.task_id) == ("worker", 1)
    assert union.master("chief", 0) == "d:1"
    assert union.master() == "10.1.2.11:2222"


def test_torchrun_has_workers_only(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    resolver = TorchrunClusterResolver(port=2222, rpc_layer="grpc")
    assert resolver.cluster_spec().as_dict() == {"worker": ["127.0.0.1:2222"]}
    assert (resolver.master(), resolver.master("worker", 0, "http")) == (
        "grpc://127.0.0.1:2222",
        "http://127.0.0.1:2222",
    )
    assert UnionResolver(resolver).master() == "grpc://127.0.0.1:2222"
