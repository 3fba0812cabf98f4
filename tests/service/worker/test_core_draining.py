"""Draining and stopping of a worker: delivery, return of splits, and time limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.errors import CancelledError, NotFoundError
from headrace.service.messages import (
    DrainWorker,
    FinishTask,
    GetSplit,
    RegisterWorker,
    ReportDepartedClient,
    ReturnSplits,
    UnregisterWorker,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from headrace.service.worker.pending_actions import SplitGrant
from tests.service.worker.core_driver import (
    INTERVAL,
    TASK_TOKEN,
    UNREACHABLE,
    CoreDriver,
    batch,
    split_batch,
)


def worker_with_splits() -> tuple[CoreDriver, int]:
    """Return a worker with splits 0 to 3, the first of them delivered, and its producer."""
    worker = CoreDriver().register()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.grant_splits(0, 4)
    worker.produce(producer, split_batch(0), split_batch(1))
    return worker, producer


def stop(worker: CoreDriver) -> Any:
    worker.core.stop(worker.now)
    return worker.act()


def drain(worker: CoreDriver, seconds: float = 25.0) -> Any:
    worker.core.drain(seconds, worker.now)
    return worker.act()


def kinds(worker: CoreDriver) -> list[type]:
    return [type(call) for call in worker.calls]


RETURN_REPORT = ReturnSplits(worker_id="w1", task_id=1, task_token=TASK_TOKEN, splits=((1, 4),))


# --- stop ---------------------------------------------------------------------------------------


def test_a_stopping_worker_returns_undelivered_splits_and_then_unregisters() -> None:
    worker, producer = worker_with_splits()
    waiting = [worker.request(number=n) for n in (1, 2)]
    actions = stop(worker)
    assert actions.cancellations == [producer]
    assert worker.replies[waiting[0]].first_element == 1
    assert isinstance(worker.replies[waiting[1]], CancelledError)
    assert worker.calls_of(ReturnSplits) == [
        ReturnSplits(worker_id="w1", task_id=1, task_token=TASK_TOKEN, splits=((2, 4),))
    ]
    assert worker.calls_of(UnregisterWorker) == []
    worker.acknowledge(ReturnSplits)
    assert worker.calls[-1] == UnregisterWorker(worker_id="w1")
    assert not worker.is_finished
    worker.acknowledge(UnregisterWorker)
    assert worker.is_finished
    assert worker.warnings == []


def test_a_worker_without_tasks_only_unregisters() -> None:
    worker = CoreDriver().register()
    stop(worker)
    worker.acknowledge(UnregisterWorker)
    assert worker.is_finished
    assert kinds(worker) == [RegisterWorker, UnregisterWorker]


def test_splits_granted_after_the_stop_are_returned_as_well() -> None:
    worker, producer = worker_with_splits()
    worker.need_splits(producer)
    stop(worker)
    assert worker.calls_of(ReturnSplits) == []
    actions = worker.grant_splits(8, 12)
    assert actions.grants == []
    assert worker.calls_of(ReturnSplits)[0].splits == ((1, 8),)


def test_a_stopping_worker_waits_only_briefly_for_pending_splits() -> None:
    worker, producer = worker_with_splits()
    worker.need_splits(producer)
    stop(worker)
    worker.pass_time(0.2)
    assert worker.calls_of(ReturnSplits) == [RETURN_REPORT]


@pytest.mark.parametrize("stops_first", [False, True])
def test_a_deferred_split_request_does_not_delay_the_stop(stops_first: bool) -> None:
    worker, producer = worker_with_splits()
    worker.need_splits(producer)
    if stops_first:
        stop(worker)
    worker.grant_splits(0, 0, wait=True)
    if not stops_first:
        stop(worker)
    assert worker.calls_of(ReturnSplits) == [RETURN_REPORT]
    worker.pass_time(0.5)
    assert len(worker.calls_of(GetSplit)) == 2


def test_a_rejected_return_of_splits_is_not_reported_as_loss() -> None:
    worker, _ = worker_with_splits()
    stop(worker)
    worker.reply(ReturnSplits, NotFoundError("closed"))
    worker.reply(UnregisterWorker, NotFoundError("unknown worker"))
    assert worker.is_finished
    assert worker.warnings == []


def test_a_worker_stops_in_time_without_replies_and_reports_lost_splits() -> None:
    worker, _ = worker_with_splits()
    started_at = worker.now
    stop(worker)
    while not worker.is_finished:
        worker.act(worker.wake_in)
    assert worker.now - started_at <= 0.8
    assert "3 undelivered splits lost, because dispatcher d:1 did not" in worker.warnings[-1]


def test_a_return_of_splits_is_repeated_once_after_a_loss() -> None:
    worker, _ = worker_with_splits()
    stop(worker)
    worker.reply(ReturnSplits, UNREACHABLE)
    worker.pass_time(0.05)
    assert worker.calls_of(ReturnSplits) == [RETURN_REPORT] * 2
    worker.reply(ReturnSplits, UNREACHABLE)
    assert worker.is_finished
    assert "undelivered splits lost" in worker.warnings[-1]


def test_a_worker_stopped_during_registration_unregisters() -> None:
    worker = CoreDriver()
    stop(worker)
    assert kinds(worker) == [RegisterWorker, UnregisterWorker]
    worker.register()
    assert not worker.core.is_registered
    worker.acknowledge(UnregisterWorker)
    assert worker.is_finished


def test_a_stopping_worker_does_not_register_again() -> None:
    worker = CoreDriver().register()
    worker.pass_time(INTERVAL)
    stop(worker)
    worker.reply(WorkerHeartbeat, NotFoundError("unknown worker"))
    worker.acknowledge(UnregisterWorker)
    assert kinds(worker) == [RegisterWorker, WorkerHeartbeat, UnregisterWorker]
    assert worker.is_finished


def test_a_stopping_worker_sends_no_heartbeats_and_stops_once() -> None:
    worker, _ = worker_with_splits()
    stop(worker)
    stop(worker)
    drain(worker)
    worker.pass_time(1.0)
    worker.pass_time(10.0)
    assert worker.calls_of(WorkerHeartbeat) == worker.calls_of(DrainWorker) == []
    assert worker.is_finished
    assert worker.act().wake_in == float("inf")


def test_an_unacknowledged_end_of_task_is_reported_before_deregistration() -> None:
    worker = CoreDriver().register()
    producer = worker.start_task()
    worker.produce(producer, batch(0))
    worker.end_producer(producer)
    worker.request(number=1)
    stop(worker)
    assert worker.calls_of(UnregisterWorker) == []
    worker.acknowledge(FinishTask)
    assert kinds(worker)[-2:] == [FinishTask, UnregisterWorker]


def test_a_failed_task_returns_no_splits() -> None:
    worker, producer = worker_with_splits()
    worker.end_producer(producer, "its thread died")
    stop(worker)
    assert worker.calls_of(ReturnSplits) == []


def test_a_stopping_worker_rejects_new_requests_and_repeats_sent_batches() -> None:
    worker, _ = worker_with_splits()
    stop(worker)
    assert worker.replies[worker.request()].first_element == 0
    assert "the worker is shutting down" in str(worker.replies[worker.request(number=1)])
    assert "the worker is shutting down" in str(worker.replies[worker.request(task_id=2)])


# --- drain --------------------------------------------------------------------------------------


def test_a_draining_task_delivers_its_splits_and_requests_no_more() -> None:
    worker, producer = worker_with_splits()
    actions = drain(worker)
    assert worker.calls[-1] == DrainWorker(worker_id="w1")
    assert actions.stops == []
    worker.produce(producer, split_batch(2), split_batch(3))
    assert worker.need_splits(producer).grants == [SplitGrant(producer=producer)]
    worker.end_producer(producer)
    for number in range(1, 4):
        assert worker.replies[worker.request(number=number)].first_element == number
    request = worker.request(number=4)
    worker.acknowledge(FinishTask)
    assert worker.replies[request].end_of_task
    assert worker.calls_of(ReturnSplits) == []
    assert kinds(worker)[-2:] == [FinishTask, UnregisterWorker]
    assert len(worker.calls_of(GetSplit)) == 1


def test_splits_granted_during_the_drain_are_delivered() -> None:
    worker, producer = worker_with_splits()
    worker.need_splits(producer)
    assert drain(worker).grants == []
    assert worker.grant_splits(7, 8).grants == [SplitGrant(producer=producer, splits=(7, 8))]
    assert worker.need_splits(producer).grants == [SplitGrant(producer=producer)]


@pytest.mark.parametrize("waits_again", [False, True])
def test_a_deferred_producer_ends_at_once_when_the_worker_drains(waits_again: bool) -> None:
    worker, producer = worker_with_splits()
    worker.need_splits(producer)
    if waits_again:
        drain(worker)
        actions = worker.grant_splits(0, 0, wait=True)
    else:
        worker.grant_splits(0, 0, wait=True)
        actions = drain(worker)
    assert actions.grants == [SplitGrant(producer=producer)]
    worker.pass_time(0.5)
    assert len(worker.calls_of(GetSplit)) == 2
    # A repeated request may have been granted: its splits are reported as assigned.
    worker.grant_splits(4, 9)
    worker.end_producer(producer)
    worker.request(number=1), worker.request(number=2)
    assert [each.num_assigned for each in worker.calls_of(FinishTask)] == [4]


def test_a_draining_task_without_splits_ends_after_its_buffered_output() -> None:
    worker = CoreDriver().register()
    producer = worker.start_task()
    assert drain(worker).stops == [producer]
    worker.produce(producer, batch(0))
    worker.end_producer(producer)
    request = worker.request(number=1)
    worker.acknowledge(FinishTask)
    assert worker.replies[request].end_of_task
    assert worker.calls[-1] == UnregisterWorker(worker_id="w1")


def test_a_task_first_requested_during_the_drain_ends_at_once() -> None:
    worker = CoreDriver().register()
    worker.start_task()
    drain(worker)
    other = worker.start_task(task_id=2)
    worker.act()
    assert other == 2
    worker.end_producer(other)
    assert (
        FinishTask(worker_id="w1", task_id=2, task_token=TASK_TOKEN, cut_short=True) in worker.calls
    )


def test_a_drain_is_announced_until_acknowledged_and_ends_at_the_deadline() -> None:
    worker, _ = worker_with_splits()
    drain(worker, 5.0)
    worker.pass_time(3.5)
    assert len(worker.calls_of(DrainWorker)) == 4
    worker.acknowledge(DrainWorker)
    worker.pass_time(1.5)
    assert len(worker.calls_of(DrainWorker)) == 4
    assert worker.calls_of(ReturnSplits) == [RETURN_REPORT]
    worker.acknowledge(ReturnSplits)
    worker.acknowledge(UnregisterWorker)
    assert worker.is_finished
    assert (
        "3 splits undelivered (returned), 1 produced elements not requested, 1 elements sent and "
        "not acknowledged"
    ) in worker.warnings[-1]


def test_a_stop_ends_a_drain() -> None:
    worker, _ = worker_with_splits()
    drain(worker)
    stop(worker)
    assert worker.calls_of(ReturnSplits) == [RETURN_REPORT]


def test_a_drain_of_ten_seconds_logs_what_it_waits_for() -> None:
    worker, _ = worker_with_splits()
    drain(worker)
    worker.acknowledge(DrainWorker)
    worker.pass_time(4.0)
    worker.pass_time(2.0)
    worker.reply(WorkerHeartbeat, UNREACHABLE)
    worker.pass_time(4.0)
    assert "has been draining for 10 s: clients of 1 task have not" in worker.warnings[0]
    assert "it stops in 15 s in any case" in worker.warnings[0]


def test_a_drain_without_a_limit_waits_for_its_clients() -> None:
    worker, _ = worker_with_splits()
    drain(worker, math.inf)
    worker.acknowledge(DrainWorker)
    for _ in range(100):
        worker.pass_time(4.0)
    assert worker.warnings[0].endswith("acknowledged all output; it waits for them")
    assert not worker.calls_of(ReturnSplits)


@pytest.mark.parametrize("with_ids", [False, True])
def test_a_drain_after_all_clients_departed_ends_early_only_with_element_ids(
    with_ids: bool,
) -> None:
    worker = CoreDriver().register()
    producer = worker.start_task(assigns_splits=True, with_ids=with_ids)
    worker.need_splits(producer)
    worker.grant_splits(0, 4)
    batches = [batch(n, done_from=n, done_to=n + 1, delivered_end=n + 1) for n in (0, 1)]
    worker.produce(producer, *batches)
    drain(worker)
    worker.acknowledge(DrainWorker)
    worker.pass_time(INTERVAL)
    departure = WorkerHeartbeatReply(
        tasks_to_delete=(), dispatcher_id="first", departed_clients=((1, "a"),)
    )
    worker.reply(WorkerHeartbeat, departure)
    assert (
        worker.calls_of(ReturnSplits) == []
    )  # nothing is returned before the report about the client is acknowledged
    worker.acknowledge(ReportDepartedClient)
    assert worker.calls_of(ReturnSplits) == ([RETURN_REPORT] if with_ids else [])


def test_a_drain_of_an_unregistered_worker_deregisters_at_once() -> None:
    worker = CoreDriver()
    drain(worker)
    worker.acknowledge(UnregisterWorker)
    assert worker.is_finished


def test_a_draining_worker_declared_lost_stops_at_once() -> None:
    worker, _ = worker_with_splits()
    waiting = [worker.request(number=n) for n in (1, 2)]
    drain(worker, 1000.0)
    worker.acknowledge(DrainWorker)
    worker.pass_time(INTERVAL)
    worker.reply(WorkerHeartbeat, NotFoundError("unknown worker"))
    assert isinstance(worker.replies[waiting[1]], CancelledError)
    worker.reply(ReturnSplits, NotFoundError("not yours"))
    worker.acknowledge(UnregisterWorker)
    assert worker.is_finished
    assert len(worker.calls_of(RegisterWorker)) == 1
