"""What a task is for the others."""

from __future__ import annotations

import pytest

from headrace.cluster.spec import check_task, is_chief, rank, workers
from headrace.distribute import ClusterSpec
from headrace.errors import InvalidArgumentError

WITH_CHIEF = ClusterSpec({"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]})
WITHOUT = ClusterSpec({"worker": ["a:1", "b:1"]})


@pytest.mark.catalogue("1.10.9", "3.28.5-8")
def test_the_chief_is_the_first_of_those_that_train():
    assert workers(WITH_CHIEF) == [("chief", 0), ("worker", 0), ("worker", 1)]
    assert [rank(WITH_CHIEF, *task) for task in workers(WITH_CHIEF)] == [0, 1, 2]
    assert is_chief(WITH_CHIEF, "chief", 0)
    assert not is_chief(WITH_CHIEF, "worker", 0)


@pytest.mark.catalogue("1.10.9", "3.28.9", "3.28.10")
def test_without_a_chief_the_first_worker_is_it():
    assert is_chief(WITHOUT, "worker", 0)
    assert not is_chief(WITHOUT, "worker", 1)
    assert is_chief(ClusterSpec({}), None, None)


@pytest.mark.catalogue("1.10.10", "2.14.3", "3.28.11-13")
def test_an_evaluator_is_none_of_them_and_need_not_stand_in_the_cluster():
    check_task(WITHOUT, "evaluator", 0)
    assert not is_chief(WITHOUT, "evaluator", 0)
    with pytest.raises(InvalidArgumentError, match="none of the tasks that train together"):
        rank(WITHOUT, "evaluator", 0)


@pytest.mark.catalogue("3.28.14-18")
@pytest.mark.parametrize(
    ("spec", "task", "words"),
    [
        ({"worker": ["a:1"], "foo": ["b:1"]}, ("worker", 0), "tasks of type 'foo'; types are"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "2 chiefs, and there can be one at most"),
        ({"worker": ["a:1"]}, (None, None), "nobody says which of them this process is"),
        ({"worker": ["a:1"]}, ("foobar", 0), "task type 'foobar' is not known"),
        ({"worker": ["a:1"]}, ("ps", 0), "no 'ps' task 0"),
        ({"worker": ["a:1"]}, ("worker", 1), "no 'worker' task 1"),
    ],
)
def test_what_cannot_be_is_refused(spec, task, words):
    with pytest.raises(InvalidArgumentError, match=words):
        check_task(ClusterSpec(spec), *task)


@pytest.mark.parametrize("task", [("chief", 0), ("worker", 1), ("ps", 0)])
def test_each_task_of_the_cluster_is_one(task):
    check_task(WITH_CHIEF, *task)
