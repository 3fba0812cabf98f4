"""Distributed iterators: their end, their contexts, and states."""

from __future__ import annotations

import json

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import InputOptions, InputReplicationMode
from headrace.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    UserFunctionError,
)
from tests.distribute.replicas import BALANCED, mirrored, rows, steps_of

numbers = hr.Dataset.range


@pytest.mark.catalogue("1.4.1", "2.4.7")
def test_get_next_raises_at_the_end_and_a_new_iterator_restarts():
    distributed = mirrored(2).distribute_dataset(numbers(4).batch(2))
    iterator = iter(distributed)
    assert rows(iterator.get_next()) == [[0], [1]]
    assert rows(next(iterator)) == [[2], [3]]
    for _ in range(3):
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)
    assert steps_of(distributed) == [[[0], [1]], [[2], [3]]]


@pytest.mark.catalogue("1.4.1", "2.4.5")
def test_an_optional_reports_whether_it_has_a_value():
    iterator = iter(mirrored(2).distribute_dataset(numbers(2).batch(2)))
    first = iterator.get_next_as_optional()
    assert isinstance(first, hr.Optional)
    assert first.has_value()
    assert rows(first.get_value()) == [[0], [1]]
    for _ in range(2):
        last = iterator.get_next_as_optional()
        assert not last.has_value()
        with pytest.raises(InvalidArgumentError, match="no value"):
            last.get_value()


@pytest.mark.catalogue("1.4.5", "3.10.10")
def test_reading_on_a_replica_raises():
    strategy = mirrored(2)
    iterator = iter(strategy.distribute_dataset(numbers(4).batch(2)))
    for read in (next, lambda i: i.get_next(), lambda i: i.get_next_as_optional()):
        with pytest.raises(ValueError, match=r"should be called from outside of replica_fn"):
            strategy.run(read, args=(iterator,))
    assert rows(next(iterator)) == [[0], [1]]
    iterator.close()


def test_reading_continues_after_a_failed_element():
    def failing(x):
        if x == 3:
            raise ValueError("three")
        return x

    def read_all(iterator):
        found, errors = [], 0
        while True:
            try:
                found.append(rows(iterator.get_next()))
            except UserFunctionError:
                errors += 1
            except OutOfRangeError:
                return found, errors

    plan = numbers(6).map(failing).batch(1)
    strategy = mirrored(2)
    found, errors = read_all(iter(strategy.distribute_datasets_from_function(lambda c: plan)))
    assert ([x for step in found for part in step for x in part], errors) == ([0, 1, 2, 4, 5], 1)
    found, errors = read_all(iter(strategy.distribute_dataset(plan)))
    assert ([x for step in found for part in step for x in part], errors) == ([0, 1, 2, 4, 5], 1)
    found, errors = read_all(iter(strategy.distribute_dataset(plan, BALANCED)))
    assert ([x for step in found for part in step for x in part], errors) == ([0, 1, 2, 4, 5], 1)


def distributed(strategy, how):
    plan = numbers(23).shuffle(10, seed=7).batch(5)
    if how == "function":
        return strategy.distribute_datasets_from_function(lambda context: plan)
    return strategy.distribute_dataset(plan, InputOptions(split=how))


def taken(step):
    values = rows(step)
    return [x for part in values for x in part] if isinstance(values[0], list) else values


@pytest.mark.catalogue("3.13.26")
@pytest.mark.parametrize("how", ["ceil", "balanced", "function"])
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(2, 2), (2, 3), (3, 2), (4, 1), (1, 4)])
def test_a_state_resumes_on_other_replicas_without_loss_or_duplicates(how, saved_on, resumed_on):
    whole = [x for step in distributed(mirrored(1), how) for x in taken(step)]
    before = []
    iterator = iter(distributed(mirrored(saved_on), how))
    states = [json.dumps(iterator.get_state())]
    for step in iterator:
        before.append(taken(step))
        states.append(json.dumps(iterator.get_state()))
    for index, state in enumerate(states):
        other = iter(distributed(mirrored(resumed_on), how))
        other.set_state(json.loads(state))
        rest = [x for step in other for x in taken(step)]
        assert [x for step in before[:index] for x in step] + rest == whole, (index, state)
    assert len(states) > 2


@pytest.mark.parametrize("how", ["ceil", "balanced", "function"])
def test_restored_on_the_same_replicas_the_steps_are_equal(how):
    iterator = iter(distributed(mirrored(3), how))
    next(iterator)
    state = iterator.get_state()
    rest = steps_of(iterator)
    assert rest
    iterator.set_state(state)
    assert steps_of(iterator) == rest


def test_states_of_per_replica_datasets_require_the_same_replicas():
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)

    def made(replicas):
        return iter(
            mirrored(replicas).distribute_datasets_from_function(
                lambda context: numbers(6), options
            )
        )

    iterator = made(2)
    next(iterator)
    state = iterator.get_state()
    with made(2) as other:
        other.set_state(state)
        assert next(other).values == next(iterator).values == (1, 1)
    with (
        made(3) as more,
        pytest.raises(FailedPreconditionError, match="restore it with 2 replicas"),
    ):
        more.set_state(state)
    iterator.close()


def test_a_state_before_the_first_batch_resets_the_known_batch_size():
    def batches():
        return iter([np.arange(5), np.arange(4), np.arange(5)])

    plan = hr.Dataset.from_generator(
        batches, output_signature=hr.ArraySpec((None,), np.dtype("int64"))
    )
    iterator = iter(mirrored(2).distribute_dataset(plan, BALANCED))
    state = iterator.get_state()
    steps = steps_of(iterator)
    iterator.set_state(state)
    assert iterator.get_state() == state
    assert steps_of(iterator) == steps


@pytest.mark.parametrize(
    "places",
    [None, {}, {"streams": None}, {"streams": []}, {"streams": [{}]}, {"streams": [[1]]}],
)
def test_a_damaged_state_is_rejected_and_leaves_the_position(places):
    iterator = iter(mirrored(2).distribute_dataset(numbers(4).batch(2)))
    next(iterator)
    with pytest.raises(TypeError, match="`state` must be a value of a DistributedIterator's"):
        iterator.set_state({"version": 1, "distributed": places})
    assert steps_of(iterator) == [[[2], [3]]]


@pytest.mark.parametrize(("resumed_on", "how"), [(1, "ceil"), (2, "ceil"), (2, "balanced")])
def test_a_batch_that_fails_after_a_restore_skips_no_rows_of_the_next(resumed_on, how):
    fails = [False]

    def failing(x):
        if fails[0]:
            fails[0] = False
            raise OSError("not there for a moment")
        return x

    plan = numbers(3).batch(3).concatenate(numbers(3, 12).batch(4)).map(failing)

    def iterator_over(replicas, split):
        options = InputOptions(split=split, experimental_per_replica_buffer_size=0)
        return iter(mirrored(replicas).distribute_dataset(plan, options))

    iterator = iterator_over(4, "balanced")
    before = taken(next(iterator)) + taken(next(iterator))
    state = iterator.get_state()
    assert state["distributed"]["streams"][0]["rows"] > 0
    fails[0] = True
    iterator = iterator_over(resumed_on, how)
    iterator.set_state(state)
    with pytest.raises(UserFunctionError):
        next(iterator)
    rest = [x for step in iterator for x in taken(step)]
    # Three rows of the batch of 3 to 6 had been used; only its remaining rows are lost.
    assert (before, rest) == ([0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11])


def test_a_state_of_another_kind_is_rejected():
    iterator = iter(mirrored(2).distribute_dataset(numbers(4).batch(2)))
    with pytest.raises(TypeError, match="`state` must be a value of"):
        iterator.set_state({"a": 1})
    other = iter(mirrored(2).distribute_dataset(numbers(4).batch(3)))
    with pytest.raises(FailedPreconditionError, match="other steps"):
        other.set_state(iterator.get_state())
    with pytest.raises(FailedPreconditionError, match="version 9"):
        iterator.set_state({**iterator.get_state(), "version": 9})
