"""The profiler finds the step that a thread executes, without side effects."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import headrace as hr
from headrace.errors import CancelledError
from headrace.execution.build import build_iterator
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.producer_channel import ProducerChannel
from headrace.service.worker.step_profiler import StepProfiler, find_step
from headrace.service.worker.task_metrics import TaskMetrics, WorkerMetrics
from tests.service.reading import wait_until


def slowly(x):
    time.sleep(0.02)
    return x


def read_all(iterator):
    while iterator.next_chunk(8) is not None:
        pass


def test_time_in_a_function_counts_for_the_step_that_calls_it():
    meters = WorkerMetrics()
    meter = meters.start_task(1, 4000)
    plan = hr.Dataset.range(60).map(slowly).batch(4).plan
    iterator = build_iterator(plan, instrument=meter.register_step)
    profiler = StepProfiler(meters)
    profiler.start()
    reader = threading.Thread(target=read_all, args=(iterator,))
    reader.start()
    reader.join()
    profiler.stop()
    profiler.join(5.0)
    iterator.close()
    spent = {each.step.split(" ")[0]: each.seconds for each in meter.snapshot().steps}
    assert max(spent, key=spent.__getitem__) == "map"
    assert spent["map"] > 0.2


def test_a_thread_outside_any_step_is_not_attributed():
    assert find_step(sys._getframe(), [TaskMetrics(1)]) is None


class Step:
    """Stand-in for a step with local variables."""

    def work(self):
        total = 1
        for value in range(3):
            total += value
        return total


def test_sampling_a_traced_step_does_not_change_its_locals():
    meter, step = TaskMetrics(1), Step()
    meter.register_step(hr.Dataset.range(1).plan, step)
    found = []

    def trace(frame, event, argument):
        # Like a debugger: changes to the frame's snapshot are written back into the frame.
        found.append(find_step(frame, [meter]))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        total = step.work()
    finally:
        sys.settrace(before)
    assert total == 4
    assert found[0] is not None
    assert found[0][0] is meter


class WaitingStep:
    """Stand-in for a step that waits for splits."""

    def work(self, channel):
        with contextlib.suppress(CancelledError):
            channel.next_splits(lambda: None)


class IgnoringListener:
    def splits_needed(self, producer):
        pass


def is_in_function(thread, code):
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def test_a_thread_waiting_for_splits_is_attributed_to_no_step():
    meter, step, channel = TaskMetrics(1), WaitingStep(), ProducerChannel(1, IgnoringListener())
    meter.register_step(hr.Dataset.range(1).plan, step)
    thread = threading.Thread(target=step.work, args=(channel,))
    thread.start()
    try:
        wait_until(
            lambda: is_in_function(thread, ProducerChannel._wait_for_grant_or_deferral.__code__)
        )
        assert find_step(sys._current_frames()[thread.ident], [meter]) is None
        channel.defer()
        wait_until(lambda: is_in_function(thread, ProducerChannel._wait_for_splits.__code__))
        assert find_step(sys._current_frames()[thread.ident], [meter]) is None
    finally:
        channel.close()
        thread.join()


def test_a_partly_constructed_object_is_no_step():
    meter = TaskMetrics(1)
    assert meter.find_step(SplitGrant.__new__(SplitGrant)) is None


def test_a_profiler_stopped_before_its_start_can_be_joined():
    profiler = StepProfiler(WorkerMetrics())
    profiler.stop()
    profiler.join(1.0)


def compute(x):
    total = 0
    for step in range(150_000):
        total ^= step & 1
    return x


def wait_briefly(x):
    time.sleep(0.0005)
    return x


def test_a_function_that_holds_the_interpreter_lock_is_sampled():
    meters = WorkerMetrics()
    meter = meters.start_task(1, 4000)
    computed = hr.Dataset.range(400).map(compute)
    waited = computed.map(wait_briefly)
    iterator = build_iterator(waited.plan, instrument=meter.register_step)
    profiler = StepProfiler(meters)
    profiler.start()
    read_all(iterator)
    profiler.stop()
    profiler.join(5.0)
    iterator.close()
    found = {each.position: each.seconds for each in meter.snapshot().steps if "map" in each.step}
    assert len(found) == 2
    assert min(found.values()) > 0
