"""Tests of arguments, keys, addresses and messages, without a Ray cluster."""

from __future__ import annotations

import pickle
import sys

import pytest

from headrace.errors import FailedPreconditionError
from headrace.ray import DataCluster, nodes
from headrace.ray.actor_launcher import describe_shortage, resource_options
from headrace.transport import address as addresses


def test_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FailedPreconditionError, match=r"pip install 'headrace\[ray\]'"):
        nodes.import_ray()


@pytest.mark.parametrize("version", ["2.9.3", "1.13.0"])
def test_old_version_of_ray_is_rejected(version):
    with pytest.raises(FailedPreconditionError, match=rf"requires ray>=2\.10, .* {version} "):
        nodes.check_version(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.60.0", "3.0.0.dev0"])
def test_supported_version_of_ray_is_accepted(version):
    nodes.check_version(version)


def test_secret_keys_are_neither_printed_nor_in_a_pickled_client():
    keys = nodes.ClusterKeys.create()
    client = keys.client("some-actor")
    for secret in (keys.server_secret, keys.client_secret):
        assert secret not in repr(keys)
        assert secret not in repr(client)
        assert secret.encode() not in pickle.dumps(client)
    assert b"some-actor" in pickle.dumps(client)
    with pytest.raises(TypeError, match="secret keys are not pickled"):
        pickle.dumps(keys.client())


def test_server_accepts_the_client_and_other_servers():
    keys = nodes.ClusterKeys.create()
    assert keys.client().server_key == keys.server().public_key
    assert keys.server().authorized_clients == {keys.client().public_key}
    assert keys.server().as_client().server_key == keys.server().public_key


NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0}},
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "TPU": 4.0}},
]


@pytest.mark.parametrize(
    ("needed", "available", "text"),
    [
        ({"CPU": 2}, {"CPU": 1.0}, "each needs 2 CPU, and 1 CPU are unused; add nodes, stop other"),
        ({"CPU": 16}, {"CPU": 1.0}, "no node of the cluster has 16 CPU; add such nodes"),
        ({"CPU": 1, "TPU": 1}, {"CPU": 4.0}, "no node of the cluster has 1 TPU; add such nodes"),
        ({"CPU": 1}, {"CPU": 4.0}, "3 worker processes are starting"),
    ],
)
def test_shortage_names_the_missing_resources(needed, available, text):
    assert text in describe_shortage(3, needed, NODES, available)


def test_resources_become_options_of_an_actor():
    needed = {"CPU": 2, "GPU": 1, "memory": 10, "disk": 1}
    expected = {"num_cpus": 2, "num_gpus": 1, "memory": 10, "resources": {"disk": 1}}
    assert resource_options(needed) == expected
    assert resource_options({"GPU": 1}) == {"num_cpus": 0, "num_gpus": 1}


def test_registered_lookup_is_asked_for_each_connection():
    found = iter(["10.0.0.1:5000", "10.0.0.2:6000"])
    addresses.register_lookup(".test-lookup", lambda host: next(found))
    assert addresses.resolve("input.test-lookup", 1) == "10.0.0.1:5000"
    assert addresses.resolve("input.test-lookup", 1) == "10.0.0.2:6000"
    assert addresses.resolve("127.0.0.1", 1) == "127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"min_workers": -1}, ValueError, "`min_workers` must be at least 0"),
        ({"min_workers": 2, "max_workers": 1}, ValueError, "`max_workers` must be at least 2"),
        ({"name": "a/b"}, ValueError, "must consist of letters, digits"),
        ({"resources_per_worker": 2}, TypeError, r"must be a dict such as \{'CPU': 2\}"),
        ({"resources_per_worker": {"CPU": "2"}}, ValueError, "must be a number >= 0"),
        ({"work_dir": "s3://bucket/journal"}, ValueError, "is a URL"),
    ],
)
def test_invalid_arguments_are_named(arguments, kind, text):
    with pytest.raises(kind, match=text):
        DataCluster(**arguments)
