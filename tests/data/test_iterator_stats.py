"""Statistics of an iterator: counts are exact, times name the step that limits the speed."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

import headrace as hr
from headrace.data.iterator import DatasetIterator
from headrace.errors import FailedPreconditionError, InvalidElementError, UserFunctionError
from headrace.execution.elements import RowsIterator
from headrace.execution.iterator import InstrumentedIterator
from headrace.execution.statistics import StatisticsCollector
from tests.execution.contract import plain
from tests.execution.pipelines import PIPELINES

Dataset = hr.Dataset


def sleep(x):
    time.sleep(0.004)
    return x


def read_briefly(x):
    """Release the interpreter lock for long enough that another thread gets it."""
    time.sleep(0.0001)
    return x


def compute_with_releases(x):
    """Release the lock too briefly for others, which then do not interrupt this function."""
    deadline = time.perf_counter() + 0.003
    while time.perf_counter() < deadline:
        pass
    np.zeros(2000).copy()
    return x


def fail_at_three(x):
    if x == 3:
        raise ValueError(x)
    return x if x % 2 else -x


def elements_of(stats):
    return {f"{step.name}": step.elements for step in stats.steps}


def step_of(stats, name):
    return next(step for step in stats.steps if step.name == name)


def outcomes(iterator, most=60):
    """Return elements and errors, with the state before each."""
    found = []
    while len(found) < most:
        state = iterator.get_state()
        try:
            found.append((state, plain(next(iterator))))
        except StopIteration:
            break
        except (InvalidElementError, UserFunctionError) as error:
            found.append((state, str(error)))
    return found


def without_numbers(outcome):
    """Return an outcome in which an error does not tell its element's number in a window."""
    return re.sub(r"element \d+", "element", outcome) if isinstance(outcome, str) else outcome


@pytest.mark.parametrize("name", PIPELINES)
def test_statistics_change_neither_elements_nor_states(name):
    plans = [PIPELINES[name]().with_options(hr.Options(seed=7)).plan for _ in range(2)]
    with (
        DatasetIterator(plans[0]) as without,
        DatasetIterator(plans[1], statistics=StatisticsCollector()) as with_statistics,
    ):
        wanted, found = outcomes(without), outcomes(with_statistics)
        expected = [outcome for _, outcome in wanted]
        assert [outcome for _, outcome in found] == expected
        # A position between two elements has several states, depending on the sizes of chunks.
        for position in range(0, len(wanted), 1 + len(wanted) // 3):
            without.set_state(found[position][0])
            with_statistics.set_state(wanted[position][0])
            for restored in (without, with_statistics):
                rest = [outcome for _, outcome in outcomes(restored, 5)]
                assert list(map(without_numbers, rest)) == list(
                    map(without_numbers, expected[position : position + len(rest)])
                )
        stats = with_statistics.stats()
    assert stats.steps[0].depth == 0
    assert json.loads(json.dumps(stats.to_dict()))["seconds"] == stats.seconds


def test_elements_are_counted_for_each_step():
    dataset = Dataset.range(100).map(lambda x: x if x % 2 else -x).filter(lambda x: x > 0).batch(8)
    iterator = dataset.iterate(stats=True)
    assert len(list(iterator)) == 7
    assert elements_of(iterator.stats()) == {
        "batch": 7, "filter": 50, "map": 100, "gather": 100, "indices": 100
    }  # fmt: skip


def test_single_elements_and_failed_ones_are_counted_when_they_are_returned():
    iterator = Dataset.range(6).map(fail_at_three).iterate(stats=True)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, -2]
    assert elements_of(iterator.stats())["map"] == 3
    assert elements_of(iterator.stats())["map"] == 3
    with pytest.raises(UserFunctionError):
        next(iterator)
    assert len(list(iterator)) == 2
    assert elements_of(iterator.stats())["map"] == 5


def test_bytes_of_equal_elements_are_exact():
    iterator = Dataset.from_tensor_slices(np.zeros((64, 100))).batch(4).iterate(stats=True)
    list(iterator)
    assert iterator.stats().steps[0].bytes == pytest.approx(64 * 800, rel=0.01)


def test_nested_steps_of_one_line_are_joined():
    dataset = Dataset.range(9).flat_map(lambda x: Dataset.range(4).map(fail_at_three))
    with dataset.iterate(stats=True) as iterator:
        taken = [int(next(iterator)) for _ in range(3)]
        stats = iterator.stats()
    assert taken == [0, 1, -2]
    nested = [step for step in stats.steps if step.is_nested]
    assert {step.name for step in nested} >= {"map", "gather"}


@pytest.mark.parametrize("threads", [None, 2])
def test_the_bottleneck_is_the_step_that_works_most(threads):
    dataset = Dataset.range(120).shuffle(9).map(sleep, num_parallel_calls=threads).batch(4)
    iterator = dataset.prefetch(2).iterate(stats=True)
    list(iterator)
    stats = iterator.stats()
    assert str(stats.bottleneck).startswith("bound by map at test_iterator_stats.py:")
    assert stats.bottleneck.location.endswith(" (sleep)")
    assert "num_parallel_calls" in stats.bottleneck.advice
    assert str(stats).splitlines()[-1] == str(stats.bottleneck)
    mapping = step_of(stats, "map")
    assert mapping.user_seconds > 0.5 * 120 * 0.004
    assert mapping.num_parallel_calls == threads
    assert step_of(stats, "prefetch").input_wait_seconds > 0.3 * stats.seconds


def test_a_function_that_often_releases_the_interpreter_lock_is_found():
    dataset = Dataset.range(400).map(read_briefly).map(compute_with_releases).batch(32)
    iterator = dataset.prefetch(2).iterate(stats=True)
    list(iterator)
    stats = iterator.stats()
    seconds = {step.function: step.user_seconds for step in stats.steps if step.name == "map"}
    # It takes 95 % of the time.
    assert seconds["read_briefly"] < 0.4 * seconds["compute_with_releases"], str(stats)
    assert stats.bottleneck.location.endswith(" (compute_with_releases)")


def test_functions_tell_steps_on_one_line_apart():
    dataset = Dataset.range(40).map(lambda x: x).map(sleep).filter(fail_at_three)
    iterator = dataset.take(2).iterate(stats=True)
    next(iterator)
    stats = iterator.stats()
    functions = [step.function for step in stats.steps if step.name in ("map", "filter")]
    assert functions == ["fail_at_three", "sleep", ""]
    assert any("(sleep)" in line for line in str(stats).splitlines())


def test_a_slow_program_is_the_bottleneck():
    iterator = Dataset.range(40).map(sleep, num_parallel_calls=2).prefetch(2).iterate(stats=True)
    for _ in iterator:
        time.sleep(0.012)
    stats = iterator.stats()
    assert stats.bottleneck.location == "the reading program"
    assert stats.consumer_seconds > 0.8 * stats.seconds
    assert sum(step.consumer_wait_seconds for step in stats.steps) > 0.3 * stats.seconds


def test_a_short_run_names_no_bottleneck():
    iterator = Dataset.range(3).iterate(stats=True)
    list(iterator)
    assert iterator.stats().bottleneck is None
    assert "too briefly" in str(iterator.stats())


def test_statistics_must_be_requested():
    with pytest.raises(FailedPreconditionError, match="iterate\\(stats=True\\)"):
        iter(Dataset.range(3)).stats()
    with pytest.raises(TypeError, match="`stats` must be a bool"):
        Dataset.range(3).iterate(stats=1)


def test_counts_continue_after_a_restore():
    dataset = Dataset.range(20).map(fail_at_three).skip(4)
    iterator = dataset.iterate(stats=True)
    state = iterator.get_state()
    assert len(list(iterator)) == 16
    iterator.set_state(state)
    assert len(list(iterator)) == 16
    assert iterator.stats().steps[0].elements == 32


def test_waiting_for_workers_is_no_work_of_the_source():
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        distribute = hr.service.distribute("parallel_epochs", cluster.target)
        dataset = Dataset.range(120).map(sleep).batch(2).apply(distribute).map(lambda x: x + 1)
        with dataset.iterate(stats=True) as iterator:
            assert len(list(iterator)) == 60
            stats = iterator.stats()
    source = step_of(stats, "source")
    assert source.input_wait_seconds > 0.5 * stats.seconds
    assert source.own_seconds < 0.3 * stats.seconds
    assert str(stats.bottleneck).startswith("bound by the data service, source at test_iterator")
    assert "waits for workers" in stats.bottleneck.advice


def test_statistics_keep_the_direct_reading_of_rows():
    with Dataset.range(100).iterate(stats=True) as iterator:
        next(iterator)
        innermost = iterator._running[-1]
        while isinstance(innermost, InstrumentedIterator):
            innermost = innermost.iterator
        assert isinstance(innermost, RowsIterator)
        assert len(list(iterator)) == 99
        assert elements_of(iterator.stats()) == {"gather": 100, "indices": 100}
