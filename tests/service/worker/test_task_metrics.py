"""Counters of a worker's tasks, reported when they change."""

from __future__ import annotations

import headrace as hr
from headrace.execution.build import build_iterator
from headrace.service.messages import WAITING_FOR_CLIENTS, WAITING_FOR_SPLITS
from headrace.service.worker.delivery_policy import BufferedOutput
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.task_metrics import TaskMetrics, WorkerMetrics
from headrace.testing import ManualClock


def test_batches_add_up_and_are_reported_once():
    meters = WorkerMetrics()
    meter = meters.start_task(1, 4000)
    meter.add_batch(10, 80)
    meter.add_batch(5, 40)
    (activity,) = meters.take_changes({4000: BufferedOutput(2, 120)})
    assert (activity.task_id, activity.elements, activity.bytes) == (4000, 15, 120)
    assert (activity.buffered_batches, activity.buffered_bytes) == (2, 120)
    assert meters.take_changes({4000: BufferedOutput(2, 120)}) == ()


def test_a_delivered_buffer_is_a_change():
    meters = WorkerMetrics()
    meters.start_task(1, 4000).add_batch(10, 80)
    meters.take_changes({4000: BufferedOutput(1, 80)})
    (activity,) = meters.take_changes({})
    assert activity.buffered_batches == 0


def test_a_wait_is_reported_at_its_start_and_end_only():
    clock, meters = ManualClock(0.0), WorkerMetrics()
    meter = TaskMetrics(4000, clock)
    meters._running[1] = meter
    meters.take_changes({})
    with meter.track_wait(WAITING_FOR_CLIENTS):
        clock.advance(1.0)
        (activity,) = meters.take_changes({})
        assert (activity.waiting_for, activity.client_wait_seconds) == (WAITING_FOR_CLIENTS, 1.0)
        clock.advance(100.0)
        assert meters.take_changes({}) == ()
    (activity,) = meters.take_changes({})
    assert (activity.waiting_for, activity.client_wait_seconds) == ("", 101.0)


def test_a_plan_that_reads_ahead_may_wait_for_clients_and_splits():
    clock = ManualClock(0.0)
    meter = TaskMetrics(4000, clock)
    with meter.track_wait(WAITING_FOR_CLIENTS):
        clock.advance(1.0)
        with meter.track_wait(WAITING_FOR_SPLITS):
            clock.advance(1.0)
        assert meter.is_waiting
    activity = meter.snapshot()
    assert (activity.client_wait_seconds, activity.split_wait_seconds) == (2.0, 1.0)


def test_an_ended_task_is_reported_once_more_and_stays_in_the_totals():
    meters = WorkerMetrics()
    meters.start_task(1, 4000).add_batch(10, 80)
    meters.end_task(1)
    assert [each.elements for each in meters.take_changes({})] == [10]
    assert meters.take_changes({}) == ()
    meters.start_task(2, 4001).add_batch(5, 40)
    totals = meters.totals({4001: BufferedOutput(1, 40)})
    assert (totals.elements, totals.bytes, totals.buffered_batches) == (15, 120, 1)


def test_buffered_output_of_an_ended_task_is_reported_until_delivered():
    meters = WorkerMetrics()
    meters.start_task(1, 4000).add_batch(10, 80)
    meters.end_task(1)
    assert [
        each.buffered_batches for each in meters.take_changes({4000: BufferedOutput(2, 80)})
    ] == [2]
    assert meters.take_changes({4000: BufferedOutput(2, 80)}) == ()
    assert [each.buffered_batches for each in meters.take_changes({})] == [0]
    assert meters.take_changes({}) == ()


def test_steps_are_named_by_kind_and_location_and_not_wrapped():
    meter = TaskMetrics(4000)
    plan = hr.Dataset.range(4).map(lambda x: x + 1).plan
    iterator = build_iterator(plan, instrument=meter.register_step)
    try:
        assert meter.find_step(iterator).startswith("map at test_task_metrics.py:")
        assert meter.find_step(meter) is None
        assert meter.find_step([]) is None
        assert iterator.next_chunk(4).size
    finally:
        iterator.close()


def test_excess_steps_are_combined():
    meter = TaskMetrics(4000)
    for number in range(1000):
        meter.add_step_seconds(f"map at file.py:{number}", 1.0)
    steps = meter.snapshot().steps
    assert len(steps) <= 65
    assert sum(each.seconds for each in steps) == 1000.0


def test_a_partly_constructed_object_is_no_step_even_if_its_hash_fails():
    grant = object.__new__(SplitGrant)  # as the profiler may find it during its construction
    assert TaskMetrics(4000, ManualClock(0.0)).find_step(grant) is None
