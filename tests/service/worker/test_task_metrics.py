"""What a worker has done for its tasks: counted by portions, said when it changed."""

from __future__ import annotations

import headrace as hr
from headrace.execution.build import build_iterator
from headrace.service.messages import WAITING_FOR_CLIENTS, WAITING_FOR_SPLITS
from headrace.service.worker.delivery_policy import BufferedOutput
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.task_metrics import TaskMetrics, WorkerMetrics
from headrace.testing import ManualClock


def test_portions_add_up_and_are_said_once():
    meters = WorkerMetrics()
    meter = meters.start_task(1, 4000)
    meter.add_batch(10, 80)
    meter.add_batch(5, 40)
    (said,) = meters.take_changes({4000: BufferedOutput(2, 120)})
    assert (said.task_id, said.elements, said.bytes) == (4000, 15, 120)
    assert (said.buffered_batches, said.buffered_bytes) == (2, 120)
    assert meters.take_changes({4000: BufferedOutput(2, 120)}) == ()


def test_buffers_that_clients_emptied_are_a_change():
    meters = WorkerMetrics()
    meters.start_task(1, 4000).add_batch(10, 80)
    meters.take_changes({4000: BufferedOutput(1, 80)})
    (said,) = meters.take_changes({})
    assert said.buffered_batches == 0


def test_a_wait_is_said_when_it_begins_and_when_it_ends_and_not_between():
    clock, meters = ManualClock(0.0), WorkerMetrics()
    meter = TaskMetrics(4000, clock)
    meters._running[1] = meter
    meters.take_changes({})
    with meter.track_wait(WAITING_FOR_CLIENTS):
        clock.advance(1.0)
        (said,) = meters.take_changes({})
        assert (said.waiting_for, said.client_wait_seconds) == (WAITING_FOR_CLIENTS, 1.0)
        clock.advance(100.0)
        assert meters.take_changes({}) == ()
    (said,) = meters.take_changes({})
    assert (said.waiting_for, said.client_wait_seconds) == ("", 101.0)


def test_a_plan_that_reads_ahead_may_wait_for_both():
    clock = ManualClock(0.0)
    meter = TaskMetrics(4000, clock)
    with meter.track_wait(WAITING_FOR_CLIENTS):
        clock.advance(1.0)
        with meter.track_wait(WAITING_FOR_SPLITS):
            clock.advance(1.0)
        assert meter.is_waiting
    said = meter.snapshot()
    assert (said.client_wait_seconds, said.split_wait_seconds) == (2.0, 1.0)


def test_a_task_that_ended_is_said_once_more_and_stays_in_the_totals():
    meters = WorkerMetrics()
    meters.start_task(1, 4000).add_batch(10, 80)
    meters.end_task(1)
    assert [each.elements for each in meters.take_changes({})] == [10]
    assert meters.take_changes({}) == ()
    meters.start_task(2, 4001).add_batch(5, 40)
    totals = meters.totals({4001: BufferedOutput(1, 40)})
    assert (totals.elements, totals.bytes, totals.buffered_batches) == (15, 120, 1)


def test_what_an_ended_task_has_ready_is_said_until_clients_have_taken_it():
    meters = WorkerMetrics()
    meters.start_task(1, 4000).add_batch(10, 80)
    meters.end_task(1)
    assert [
        each.buffered_batches for each in meters.take_changes({4000: BufferedOutput(2, 80)})
    ] == [2]
    assert meters.take_changes({4000: BufferedOutput(2, 80)}) == ()
    assert [each.buffered_batches for each in meters.take_changes({})] == [0]
    assert meters.take_changes({}) == ()


def test_steps_are_named_by_kind_and_place_and_nothing_stands_in_their_place():
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


def test_very_many_steps_become_one():
    meter = TaskMetrics(4000)
    for number in range(1000):
        meter.add_step_seconds(f"map at file.py:{number}", 1.0)
    stages = meter.snapshot().steps
    assert len(stages) <= 65
    assert sum(each.seconds for each in stages) == 1000.0


def test_what_is_being_made_is_no_step_though_its_hash_fails():
    grant = object.__new__(SplitGrant)  # as a sampler finds it within its own constructor
    assert TaskMetrics(4000, ManualClock(0.0)).find_step(grant) is None
