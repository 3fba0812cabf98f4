"""The tasks of a cluster by type and number."""

from __future__ import annotations

import pytest

from headrace.distribute import ClusterSpec


@pytest.mark.catalogue("1.10.1", "3.28.1-3")
def test_a_list_numbers_its_tasks_from_zero_and_a_dict_names_the_numbers():
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "c:1", 0: "d:1"}})
    assert spec.jobs == ["ps", "worker"]
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": {0: "d:1", 3: "c:1"}}
    assert spec.num_tasks("ps") == 2
    assert spec.task_indices("ps") == [0, 3]
    assert spec.task_address("ps", 3) == "c:1"
    assert spec.job_tasks("ps") == ["d:1", None, None, "c:1"]
    assert spec.job_tasks("worker") == ["a:1", "b:1"]


def test_numbers_without_gaps_are_a_list_however_they_were_given():
    spec = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}})
    assert spec.as_dict() == {"worker": ["a:1", "b:1"]}
    assert spec == ClusterSpec({"worker": ["a:1", "b:1"]}) == ClusterSpec(spec)
    assert hash(spec) == hash(ClusterSpec(spec))
    assert spec != ClusterSpec({"worker": ["b:1", "a:1"]})


def test_a_cluster_without_tasks_is_false():
    assert not ClusterSpec({})
    assert not ClusterSpec({"worker": []})
    assert ClusterSpec({"worker": ["a:1"]})


def test_a_spec_is_written_as_it_is_read():
    assert repr(ClusterSpec({"worker": ["a:1"]})) == "ClusterSpec({'worker': ['a:1']})"


@pytest.mark.catalogue("1.10.1")
def test_what_is_not_there_is_named_with_what_is():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'; it has 'worker'"):
        spec.num_tasks("ps")
    with pytest.raises(ValueError, match="No task with index 9 in job 'worker'; it has 0, 1"):
        spec.task_address("worker", 9)
    with pytest.raises(ValueError, match="'ps'; it has none at all"):
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
def test_what_is_no_cluster_is_refused(cluster, words):
    with pytest.raises(TypeError, match=words):
        ClusterSpec(cluster)


def test_numbers_are_not_negative():
    with pytest.raises(ValueError, match="at least 0, but got -1"):
        ClusterSpec({"worker": {-1: "a:1"}})


def test_a_task_is_asked_for_by_number():
    with pytest.raises(TypeError, match="`task_index` must be an integer, but got '1'"):
        ClusterSpec({"worker": ["a:1", "b:1"]}).task_address("worker", "1")
