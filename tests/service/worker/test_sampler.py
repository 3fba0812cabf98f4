"""The sampler finds at which step a thread is, and changes nothing there."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import headrace as hr
from headrace.errors import CancelledError
from headrace.execution.build import start
from headrace.service.worker.agenda import Grant
from headrace.service.worker.feed import Feed
from headrace.service.worker.meters import Meter, Meters
from headrace.service.worker.sampler import Sampler, find_stage
from tests.service.reading import wait_until


def slowly(x):
    time.sleep(0.02)
    return x


def read_on(iterator):
    while iterator.next_chunk(8) is not None:
        pass


def test_time_in_a_function_counts_for_the_step_that_calls_it():
    meters = Meters()
    meter = meters.begin(1, 4000)
    plan = hr.Dataset.range(60).map(slowly).batch(4).plan
    iterator = start(plan, watch=meter.watch)
    sampler = Sampler(meters)
    sampler.start()
    reader = threading.Thread(target=read_on, args=(iterator,))
    reader.start()
    reader.join()
    sampler.stop()
    sampler.join(5.0)
    iterator.close()
    spent = {each.step.split(" ")[0]: each.seconds for each in meter.read().steps}
    assert max(spent, key=spent.__getitem__) == "map"
    assert spent["map"] > 0.2


def test_a_thread_that_is_at_no_step_is_at_none():
    assert find_stage(sys._getframe(), [Meter(1)]) is None


class Step:
    """Stands for a step: it has values of its own while it works."""

    def work(self):
        total = 1
        for value in range(3):
            total += value
        return total


def test_a_look_at_a_step_that_is_traced_leaves_its_values_alone():
    meter, step = Meter(1), Step()
    meter.watch(hr.Dataset.range(1).plan, step)
    found = []

    def trace(frame, event, argument):
        # As a debugger's: what it leaves in the frame's snapshot goes back into the frame.
        found.append(find_stage(frame, [meter]))
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
            feed.next_units(lambda: None)


class Nobody:
    def needs_units(self, producer):
        pass


def stands_in(thread, code):
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def test_a_thread_that_waits_for_units_is_at_no_step():
    meter, step, feed = Meter(1), Asking(), Feed(1, Nobody())
    meter.watch(hr.Dataset.range(1).plan, step)
    thread = threading.Thread(target=step.work, args=(feed,))
    thread.start()
    try:
        wait_until(lambda: stands_in(thread, Feed._has_to_wait.__code__))
        assert find_stage(sys._current_frames()[thread.ident], [meter]) is None
        feed.let_wait()
        wait_until(lambda: stands_in(thread, Feed._wait_for_units.__code__))
        assert find_stage(sys._current_frames()[thread.ident], [meter]) is None
    finally:
        feed.close()
        thread.join()


def test_a_record_that_is_half_made_is_no_step():
    meter = Meter(1)
    assert meter.stage_of(Grant.__new__(Grant)) is None


def test_it_ends_when_it_is_stopped_before_it_was_started():
    sampler = Sampler(Meters())
    sampler.stop()
    sampler.join(1.0)
