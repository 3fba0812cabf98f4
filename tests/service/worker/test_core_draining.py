"""How a worker leaves: what it delivers, what it hands back, how long that takes."""

from __future__ import annotations

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
from tests.service.worker.driving import AWAY, INTERVAL, TASK_TOKEN, Driven, portion, units


def dealt() -> tuple[Driven, int]:
    """Return a worker with units 0 to 3, of which the client got the first, and a producer."""
    worker = Driven().registered()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.grants(0, 4)
    worker.produce(producer, units(0), units(1))
    return worker, producer


def stop(worker: Driven) -> Any:
    worker.session.stop(worker.now)
    return worker.act()


def drain(worker: Driven, seconds: float = 25.0) -> Any:
    worker.session.drain(seconds, worker.now)
    return worker.act()


def kinds(worker: Driven) -> list[type]:
    return [type(call) for call in worker.calls]


HANDED_BACK = ReturnSplits(worker_id="w1", task_id=1, task_token=TASK_TOKEN, splits=((1, 4),))


# --- stop ---------------------------------------------------------------------------------------


def test_a_worker_that_stops_hands_back_what_nobody_was_given_and_then_says_that_it_left() -> None:
    worker, producer = dealt()
    waiting = [worker.ask(number=n) for n in (1, 2)]
    actions = stop(worker)
    assert actions.cancellations == [producer]
    assert worker.answers[waiting[0]].first_element == 1
    assert isinstance(worker.answers[waiting[1]], CancelledError)
    assert worker.of(ReturnSplits) == [
        ReturnSplits(worker_id="w1", task_id=1, task_token=TASK_TOKEN, splits=((2, 4),))
    ]
    assert worker.of(UnregisterWorker) == []
    worker.done(ReturnSplits)
    assert worker.calls[-1] == UnregisterWorker(worker_id="w1")
    assert not worker.over
    worker.done(UnregisterWorker)
    assert worker.over
    assert worker.warnings == []


def test_a_worker_without_tasks_only_says_that_it_left() -> None:
    worker = Driven().registered()
    stop(worker)
    worker.done(UnregisterWorker)
    assert worker.over
    assert kinds(worker) == [RegisterWorker, UnregisterWorker]


def test_units_that_are_under_way_when_a_worker_stops_are_handed_back_as_well() -> None:
    worker, producer = dealt()
    worker.need(producer)
    stop(worker)
    assert worker.of(ReturnSplits) == []
    actions = worker.grants(8, 12)
    assert actions.grants == []
    assert worker.of(ReturnSplits)[0].splits == ((1, 8),)


def test_units_that_are_not_granted_soon_are_not_waited_for() -> None:
    worker, producer = dealt()
    worker.need(producer)
    stop(worker)
    worker.pass_time(0.2)
    assert worker.of(ReturnSplits) == [HANDED_BACK]


@pytest.mark.parametrize("stops_first", [False, True])
def test_a_task_that_is_to_wait_holds_up_no_stop_and_asks_no_more(stops_first: bool) -> None:
    worker, producer = dealt()
    worker.need(producer)
    if stops_first:
        stop(worker)
    worker.grants(0, 0, wait=True)
    if not stops_first:
        stop(worker)
    assert worker.of(ReturnSplits) == [HANDED_BACK]
    worker.pass_time(0.5)
    assert len(worker.of(GetSplit)) == 2


def test_a_hand_back_that_the_dispatcher_has_no_use_for_is_no_loss() -> None:
    worker, _ = dealt()
    stop(worker)
    worker.say(ReturnSplits, NotFoundError("closed"))
    worker.say(UnregisterWorker, NotFoundError("who?"))
    assert worker.over
    assert worker.warnings == []


def test_a_worker_is_over_in_time_though_nobody_answers_and_says_what_is_lost() -> None:
    worker, _ = dealt()
    began = worker.now
    stop(worker)
    while not worker.over:
        worker.act(worker.wake_in)
    assert worker.now - began <= 0.8
    assert "3 undelivered splits lost, because dispatcher d:1 did not" in worker.warnings[-1]


def test_a_hand_back_that_is_lost_once_is_said_again_and_twice_is_enough() -> None:
    worker, _ = dealt()
    stop(worker)
    worker.say(ReturnSplits, AWAY)
    worker.pass_time(0.05)
    assert worker.of(ReturnSplits) == [HANDED_BACK] * 2
    worker.say(ReturnSplits, AWAY)
    assert worker.over
    assert "undelivered splits lost" in worker.warnings[-1]


def test_a_worker_that_stops_while_it_registers_says_that_it_left_in_any_case() -> None:
    worker = Driven()
    stop(worker)
    assert kinds(worker) == [RegisterWorker, UnregisterWorker]
    worker.registered()
    assert not worker.session.is_registered
    worker.done(UnregisterWorker)
    assert worker.over


def test_a_worker_that_stops_while_it_is_to_register_again_does_not() -> None:
    worker = Driven().registered()
    worker.pass_time(INTERVAL)
    stop(worker)
    worker.say(WorkerHeartbeat, NotFoundError("who are you?"))
    worker.done(UnregisterWorker)
    assert kinds(worker) == [RegisterWorker, WorkerHeartbeat, UnregisterWorker]
    assert worker.over


def test_a_worker_that_stops_beats_no_more_and_stops_once() -> None:
    worker, _ = dealt()
    stop(worker)
    stop(worker)
    drain(worker)
    worker.pass_time(1.0)
    worker.pass_time(10.0)
    assert worker.of(WorkerHeartbeat) == worker.of(DrainWorker) == []
    assert worker.over
    assert worker.act().wake_in == float("inf")


def test_the_end_of_a_task_that_was_not_heard_of_is_said_before_the_worker_leaves() -> None:
    worker = Driven().registered()
    producer = worker.begin()
    worker.produce(producer, portion(0))
    worker.end(producer)
    worker.ask(number=1)
    stop(worker)
    assert worker.of(UnregisterWorker) == []
    worker.done(FinishTask)
    assert kinds(worker)[-2:] == [FinishTask, UnregisterWorker]


def test_a_task_that_failed_hands_back_nothing() -> None:
    worker, producer = dealt()
    worker.end(producer, "its thread died")
    stop(worker)
    assert worker.of(ReturnSplits) == []


def test_who_asks_a_worker_that_stops_hears_so_and_gets_what_it_was_given_before() -> None:
    worker, _ = dealt()
    stop(worker)
    assert worker.answers[worker.ask()].first_element == 0
    assert "the worker is shutting down" in str(worker.answers[worker.ask(number=1)])
    assert "the worker is shutting down" in str(worker.answers[worker.ask(task_id=2)])


# --- drain --------------------------------------------------------------------------------------


def test_a_dealt_task_that_drains_delivers_what_it_was_dealt_and_takes_no_more() -> None:
    worker, producer = dealt()
    actions = drain(worker)
    assert worker.calls[-1] == DrainWorker(worker_id="w1")
    assert actions.stops == []
    worker.produce(producer, units(2), units(3))
    assert worker.need(producer).grants == [SplitGrant(producer=producer)]
    worker.end(producer)
    for number in range(1, 4):
        assert worker.answers[worker.ask(number=number)].first_element == number
    request = worker.ask(number=4)
    worker.done(FinishTask)
    assert worker.answers[request].end_of_task
    assert worker.of(ReturnSplits) == []
    assert kinds(worker)[-2:] == [FinishTask, UnregisterWorker]
    assert len(worker.of(GetSplit)) == 1


def test_units_that_are_under_way_when_a_worker_drains_are_delivered() -> None:
    worker, producer = dealt()
    worker.need(producer)
    assert drain(worker).grants == []
    assert worker.grants(7, 8).grants == [SplitGrant(producer=producer, splits=(7, 8))]
    assert worker.need(producer).grants == [SplitGrant(producer=producer)]


@pytest.mark.parametrize("waits_again", [False, True])
def test_a_task_that_is_to_wait_hears_at_once_that_it_is_drained(waits_again: bool) -> None:
    worker, producer = dealt()
    worker.need(producer)
    if waits_again:
        drain(worker)
        actions = worker.grants(0, 0, wait=True)
    else:
        worker.grants(0, 0, wait=True)
        actions = drain(worker)
    assert actions.grants == [SplitGrant(producer=producer)]
    worker.pass_time(0.5)
    assert len(worker.of(GetSplit)) == 2
    # A repeated request may have been granted: what came is said.
    worker.grants(4, 9)
    worker.end(producer)
    worker.ask(number=1), worker.ask(number=2)
    assert [each.num_assigned for each in worker.of(FinishTask)] == [4]


def test_a_copy_that_drains_ends_with_what_was_made_of_it() -> None:
    worker = Driven().registered()
    producer = worker.begin()
    assert drain(worker).stops == [producer]
    worker.produce(producer, portion(0))
    worker.end(producer)
    request = worker.ask(number=1)
    worker.done(FinishTask)
    assert worker.answers[request].end_of_task
    assert worker.calls[-1] == UnregisterWorker(worker_id="w1")


def test_a_task_that_is_asked_for_while_the_worker_drains_ends_at_once() -> None:
    worker = Driven().registered()
    worker.begin()
    drain(worker)
    other = worker.begin(task_id=2)
    worker.act()
    assert other == 2
    worker.end(other)
    assert (
        FinishTask(worker_id="w1", task_id=2, task_token=TASK_TOKEN, cut_short=True) in worker.calls
    )


def test_a_worker_that_drains_says_so_until_it_is_heard_and_leaves_when_time_is_up() -> None:
    worker, _ = dealt()
    drain(worker, 5.0)
    worker.pass_time(3.5)
    assert len(worker.of(DrainWorker)) == 4
    worker.done(DrainWorker)
    worker.pass_time(1.5)
    assert len(worker.of(DrainWorker)) == 4
    assert worker.of(ReturnSplits) == [HANDED_BACK]
    worker.done(ReturnSplits)
    worker.done(UnregisterWorker)
    assert worker.over
    assert (
        "3 splits undelivered (returned), 1 produced elements not requested, 1 elements sent and "
        "not acknowledged"
    ) in worker.warnings[-1]


def test_a_stop_ends_a_drain() -> None:
    worker, _ = dealt()
    drain(worker)
    stop(worker)
    assert worker.of(ReturnSplits) == [HANDED_BACK]


def test_a_drain_that_takes_ten_seconds_says_what_it_waits_for() -> None:
    worker, _ = dealt()
    drain(worker)
    worker.done(DrainWorker)
    worker.pass_time(4.0)
    worker.pass_time(2.0)
    worker.say(WorkerHeartbeat, AWAY)
    worker.pass_time(4.0)
    assert "has been draining for 10 s: clients of 1 task have not" in worker.warnings[0]
    assert "it stops in 15 s in any case" in worker.warnings[0]


@pytest.mark.parametrize("origins", [False, True])
def test_a_drain_waits_for_nobody_where_all_clients_are_gone_and_nothing_is_lost_by_it(
    origins: bool,
) -> None:
    worker = Driven().registered()
    producer = worker.begin(dealt=True, origins=origins)
    worker.need(producer)
    worker.grants(0, 4)
    of_one = [portion(n, done_from=n, done_to=n + 1, delivered_end=n + 1) for n in (0, 1)]
    worker.produce(producer, *of_one)
    drain(worker)
    worker.done(DrainWorker)
    worker.pass_time(INTERVAL)
    gone = WorkerHeartbeatReply(
        tasks_to_delete=(), dispatcher_id="first", departed_clients=((1, "a"),)
    )
    worker.say(WorkerHeartbeat, gone)
    assert (
        worker.of(ReturnSplits) == []
    )  # nor anything else before the dispatcher heard of the client
    worker.done(ReportDepartedClient)
    assert worker.of(ReturnSplits) == ([HANDED_BACK] if origins else [])


def test_a_worker_that_is_not_registered_has_nothing_to_drain() -> None:
    worker = Driven()
    drain(worker)
    worker.done(UnregisterWorker)
    assert worker.over


def test_a_worker_that_counts_as_lost_while_it_drains_leaves_at_once() -> None:
    worker, _ = dealt()
    waiting = [worker.ask(number=n) for n in (1, 2)]
    drain(worker, 1000.0)
    worker.done(DrainWorker)
    worker.pass_time(INTERVAL)
    worker.say(WorkerHeartbeat, NotFoundError("who are you?"))
    assert isinstance(worker.answers[waiting[1]], CancelledError)
    worker.say(ReturnSplits, NotFoundError("not yours"))
    worker.done(UnregisterWorker)
    assert worker.over
    assert len(worker.of(RegisterWorker)) == 1
