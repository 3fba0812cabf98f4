"""Tests of the cluster resolver for `TF_CONFIG`."""

from __future__ import annotations

import json

import pytest

from headrace.distribute import ClusterSpec, TFConfigClusterResolver
from headrace.errors import InvalidArgumentError

CLUSTER = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222"]}


@pytest.fixture
def config(monkeypatch):
    def write(**parts):
        monkeypatch.setenv("TF_CONFIG", json.dumps(parts))

    return write


@pytest.mark.catalogue("1.10.4", "3.27.17-19")
def test_cluster_and_task_are_read(config):
    config(cluster=CLUSTER, task={"type": "ps", "index": 0})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert (resolver.rpc_layer, resolver.environment) == (None, "")
    assert resolver.master() == "ps0:2222"
    assert resolver.master("worker", 1) == "worker1:2222"


def test_variable_is_read_on_each_use(config):
    config(cluster=CLUSTER, task={"type": "ps", "index": 0})
    resolver = TFConfigClusterResolver()
    assert resolver.task_id == 0
    config(cluster={"worker": ["a:1", "b:1"]}, task={"type": "worker", "index": 1})
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "b:1"


@pytest.mark.catalogue("3.27.25", "3.27.26")
def test_task_types_become_str_and_indices_int(config):
    config(cluster={"123456": ["a:1", "b:1"]}, task={"type": 123456, "index": "1"})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("123456", 1)
    resolver.task_id = "0"
    assert resolver.task_id == 0


@pytest.mark.catalogue("3.27.20-22")
def test_rpc_layer_and_session_master_are_used(config):
    config(cluster=CLUSTER, task={"type": "ps", "index": 0}, rpc_layer="grpc")
    assert TFConfigClusterResolver().master() == "grpc://ps0:2222"
    assert TFConfigClusterResolver().master("worker", 0, rpc_layer="http") == "http://worker0:2222"
    config(cluster=CLUSTER, task={"type": "ps", "index": 0}, session_master="sessionmaster:2222")
    assert TFConfigClusterResolver().master() == "sessionmaster:2222"


@pytest.mark.catalogue("3.27.23", "3.27.24")
def test_arguments_take_precedence_over_the_variable(config):
    config(cluster=CLUSTER, task={"type": "ps", "index": 1}, rpc_layer="grpc", environment="cloud")
    resolver = TFConfigClusterResolver("worker", 0, "http", "here")
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert (resolver.rpc_layer, resolver.environment) == ("http", "here")
    assert resolver.master() == "http://worker0:2222"
    assert TFConfigClusterResolver().environment == "cloud"


@pytest.mark.catalogue("3.27.27", "3.27.28")
@pytest.mark.parametrize("cluster", [{}, {"worker": ["a:1"]}])
def test_cluster_of_at_most_one_task_has_no_master(config, cluster):
    config(cluster=cluster, task={"type": "worker", "index": 0})
    assert TFConfigClusterResolver().master() == ""


def test_unset_variable_gives_no_tasks(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_indices_with_gaps_are_supported(config):
    config(cluster={"worker": {"0": "a:1", "3": "b:1"}}, task={"type": "worker", "index": 3})
    assert TFConfigClusterResolver().cluster_spec().task_indices("worker") == [0, 3]
    assert TFConfigClusterResolver().master() == "b:1"


@pytest.mark.catalogue("2.14.3")
def test_evaluator_need_not_be_in_the_cluster(config):
    config(task={"type": "evaluator", "index": 0})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("evaluator", 0, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "TF_CONFIG is no JSON"),
        ("[1]", "TF_CONFIG must be a JSON object"),
        (
            '{"clustr": {"worker": ["a:1"]}}',
            "TF_CONFIG has the unknown key 'clustr'; did you mean 'cluster'",
        ),
        ('{"cluster": [1]}', "'cluster' in TF_CONFIG must be a JSON object"),
        ('{"cluster": {"worker": {"x": "a:1"}}}', "must be an integer, but got 'x'"),
    ],
)
def test_invalid_description_is_an_error_that_names_it(monkeypatch, text, words):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(InvalidArgumentError, match=words):
        TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize("index", [0.5, True, "x", [0], "-1", -1])
def test_invalid_index_is_an_error_that_names_the_variable(config, index):
    config(cluster=CLUSTER, task={"type": "worker", "index": index})
    with pytest.raises(InvalidArgumentError, match="'index' in TF_CONFIG must be "):
        print(TFConfigClusterResolver().task_id)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"type": "worker", "index": 7}, "No task with index 7 in job 'worker'; it has 0, 1"),
        ({"type": "wroker", "index": 0}, "No such job in cluster: 'wroker'; it has 'ps', 'worker'"),
    ],
)
def test_missing_task_is_an_error_that_names_the_variable(config, task, words):
    config(cluster=CLUSTER, task=task)
    with pytest.raises(ValueError, match=f"{words}, according to TF_CONFIG"):
        TFConfigClusterResolver().master()


def test_invalid_addresses_are_an_error_that_names_the_variable(config):
    config(cluster={"worker": "a:1"})
    with pytest.raises(InvalidArgumentError, match="'cluster' in TF_CONFIG: the tasks of 'worker'"):
        TFConfigClusterResolver().cluster_spec()


def test_repr_works_with_any_value_of_the_variable(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    assert repr(TFConfigClusterResolver()) == "TFConfigClusterResolver(TF_CONFIG='{')"


def test_other_keys_of_launchers_are_ignored(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"job": {}, "trial": "3", "cluster": {"worker": ["a:1"]}}')
    assert TFConfigClusterResolver().cluster_spec().as_dict() == {"worker": ["a:1"]}
