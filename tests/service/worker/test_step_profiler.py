"""The sampler finds at which step a thread is, and changes nothing there."""

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


def read_on(iterator):
    while iterator.next_chunk(8) is not None:
        pass


def test_time_in_a_function_counts_for_the_step_that_calls_it():
    meters = WorkerMetrics()
    meter = meters.start_task(1, 4000)
    plan = hr.Dataset.range(60).map(slowly).batch(4).plan
    iterator = build_iterator(plan, instrument=meter.register_step)
    sampler = StepProfiler(meters)
    sampler.start()
    reader = threading.Thread(target=read_on, args=(iterator,))
    reader.start()
    reader.join()
    sampler.stop()
    sampler.join(5.0)
    iterator.close()
    spent = {each.step.split(" ")[0]: each.seconds for each in meter.snapshot().steps}
    assert max(spent, key=spent.__getitem__) == "map"
    assert spent["map"] > 0.2


def test_a_thread_that_is_at_no_step_is_at_none():
    assert find_step(sys._getframe(), [TaskMetrics(1)]) is None


class Step:
    """Stands for a step: it has values of its own while it works."""

    def work(self):
        total = 1
        for value in range(3):
            total += value
        return total


def test_a_look_at_a_step_that_is_traced_leaves_its_values_alone():
    meter, step = TaskMetrics(1), Step()
    meter.register_step(hr.Dataset.range(1).plan, step)
    found = []

    def trace(frame, event, argument):
        # As a debugger's: what it leaves in the frame's snapshot goes back into the frame.
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


class Asking:
    """Stands for a step that waits for units."""

    def work(self, feed):
        with contextlib.suppress(CancelledError):
            feed.next_splits(lambda: None)


class Nobody:
    def splits_needed(self, producer):
        pass


def stands_in(thread, code):
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def test_a_thread_that_waits_for_units_is_at_no_step():
    meter, step, feed = TaskMetrics(1), Asking(), ProducerChannel(1, Nobody())
    meter.register_step(hr.Dataset.range(1).plan, step)
    thread = threading.Thread(target=step.work, args=(feed,))
    thread.start()
    try:
        wait_until(lambda: stands_in(thread, ProducerChannel._wait_for_grant_or_deferral.__code__))
        assert find_step(sys._current_frames()[thread.ident], [meter]) is None
        feed.defer()
        wait_until(lambda: stands_in(thread, ProducerChannel._wait_for_splits.__code__))
        assert find_step(sys._current_frames()[thread.ident], [meter]) is None
    finally:
        feed.close()
        thread.join()


def test_a_record_that_is_half_made_is_no_step():
    meter = TaskMetrics(1)
    assert meter.find_step(SplitGrant.__new__(SplitGrant)) is None


def test_it_ends_when_it_is_stopped_before_it_was_started():
    sampler = StepProfiler(WorkerMetrics())
    sampler.stop()
    sampler.join(1.0)
