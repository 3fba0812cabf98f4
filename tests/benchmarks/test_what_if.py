"""The benchmark that compares predictions with measurements."""

from __future__ import annotations

from benchmarks.what_if import PIPELINES, compare
from headrace.execution.what_if import Change


def test_every_kind_of_change_is_compared_once_and_a_slow_reader():
    assert [each.change for each in PIPELINES if not each.step_seconds] == [
        Change.ADD_LOCAL_WORKER,
        Change.PARALLEL_CALLS,
        Change.SAVE_OUTPUT,
        Change.SPEED_UP_STEP,
    ]


def test_threads_for_a_function_that_waits_are_predicted_to_help():
    (pipeline,) = [each for each in PIPELINES if each.change is Change.PARALLEL_CALLS]
    found = compare(pipeline, seconds=4.0, warm_up=1.0)
    assert found.bottleneck.startswith("map at what_if.py:")
    assert found.at_most > found.before  # the lower end depends on other programs
    assert found.measured > 0
