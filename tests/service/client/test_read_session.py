"""Reactions of a client session to replies, losses and silence, without I/O or clock."""

from __future__ import annotations

import gc
import math
import sys
from typing import Any

import msgspec
import pytest

from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    HeadraceError,
    JobLostError,
    JournalUnavailableError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.service import messages
from headrace.service.client.actions import ClientActions
from headrace.service.client.read_session import ReadSession
from headrace.service.messages import (
    ClientHeartbeat,
    ClientHeartbeatReply,
    Done,
    GetElementsReply,
    LostSplits,
    OpenIterationReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)


def address(task_id: int) -> TaskAddress:
    return TaskAddress(
        task_id=task_id, worker_id=f"w{task_id}", worker_address=f"h:{task_id}", task_token="t"
    )


def update(*tasks: int, **fields: Any) -> ClientHeartbeatReply:
    return ClientHeartbeatReply(
        tasks=tuple(map(address, tasks)), finished=fields.pop("finished", False), **fields
    )


def opened(*tasks: int, credit: int = 16, **options: Any) -> ReadSession:
    session = ReadSession("me", "d:1", credit, 0.0, **options)
    session.iteration_opened(
        OpenIterationReply(
            iteration_id=1, tasks=tuple(map(address, tasks)), seed=0, finished=not tasks and False
        ),
        0.0,
    )
    return session


def test_a_client_joining_a_failed_iteration_gets_the_reason() -> None:
    session = ReadSession("me", "d:1", 16, 0.0)
    session.iteration_opened(
        OpenIterationReply(1, (), 0, finished=True, failure_reason="all workers died"), 0.0
    )
    assert session.is_finished
    assert isinstance(session.failure, FailedPreconditionError)
    assert str(session.failure) == "all workers died"


def elements(
    first: int, count: int, done: tuple[int, int] = (0, 0), **fields: Any
) -> GetElementsReply:
    return GetElementsReply(
        first_element=first,
        num_elements=count,
        end_of_task=False,
        done_from=done[0],
        done_to=done[1],
        **fields,
    )


END = GetElementsReply(first_element=0, num_elements=0, end_of_task=True)
REFUSED = UnavailableError("connection refused")
REFUSED.refused = True  # type: ignore[attr-defined]


def numbers(actions: ClientActions, task_id: int = 1) -> list[int]:
    return [ask.request_number for ask in actions.requests if ask.task.task_id == task_id]


def warnings_until(session: ReadSession, end: int, since: int = 0) -> list[str]:
    return [each for second in range(since, end) for each in session.act(float(second)).warnings]


def calls(actions: ClientActions, kind: type) -> list[Any]:
    return [call for call in actions.calls if isinstance(call, kind)]


def test_requests_carry_the_task_token_and_respect_the_budget() -> None:
    session = opened(1, 2, credit=4)
    actions = session.act(0.0)
    assert len(actions.requests) == 4
    assert {ask.task.task_id for ask in actions.requests} == {1, 2}
    assert {ask.message.task_token for ask in actions.requests} == {"t"}
    assert session.act(0.0).requests == []


def test_replies_are_delivered_in_the_order_of_their_numbers() -> None:
    session = opened(1)
    assert numbers(session.act(0.0)) == [0, 1, 2]
    assert session.worker_replied(1, 1, elements(5, 5), "b", 0.1) == []
    found = session.worker_replied(1, 0, elements(0, 5), "a", 0.1)
    assert [delivery.payload for delivery in found] == ["a", "b"]


def test_a_duplicate_reply_is_delivered_once() -> None:
    session = opened(1)
    session.act(0.0)
    assert len(session.worker_replied(1, 0, elements(0, 5), "a", 0.1)) == 1
    assert session.worker_replied(1, 0, elements(0, 5), "a", 0.1) == []


def test_consumed_replies_are_acknowledged_with_the_next_request() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 5), "a", 0.1)
    assert session.act(0.1).requests == []
    session.batch_consumed(1, 0)
    (ask,) = session.act(0.2).requests
    assert (ask.request_number, ask.message.acknowledged) == (3, 1)


def test_requests_of_a_lost_connection_are_resent_with_their_numbers() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 5), "a", 0.1)
    session.disconnected(1, UnavailableError("reset"), 0.2)
    assert numbers(session.act(0.2)) == []
    later = session.act(0.5)
    assert numbers(later)[:2] == [1, 2]


def test_an_unreachable_worker_is_retried_with_backoff() -> None:
    session = opened(1)
    session.act(0.0)
    now, waits = 0.0, []
    for _ in range(10):
        session.disconnected(1, REFUSED, now)
        wake = next(
            step / 1000 for step in range(1, 3000) if numbers(session.act(now + step / 1000))
        )
        waits.append(wake)
        now += wake
    assert waits[0] < 0.05
    assert 0.9 <= waits[-1] <= 1.1


def test_a_loss_is_reported_at_once_until_acknowledged() -> None:
    session = opened(1)
    session.act(0.0)
    session.disconnected(1, REFUSED, 0.2)
    actions = session.act(0.2)
    assert calls(actions, ReportUnreachable) == [
        ReportUnreachable(client_id="me", task_id=1, connection_refused=True)
    ]
    assert len(calls(actions, ClientHeartbeat)) == 1
    session.dispatcher_unreachable(0.3)  # no reply: reported again
    (report,) = calls(session.act(1.5), ReportUnreachable)
    session.dispatcher_replied(report, Done(), 1.5)
    session.update_received(update(1), 1.6)
    assert not calls(session.act(1.7), ReportUnreachable)


def test_a_lost_reply_of_a_finished_task_is_requested_again() -> None:
    session = opened(1)
    session.act(0.0)
    session.disconnected(1, REFUSED, 0.2)
    for attempt in range(20):
        now = 2.0 * attempt + 0.3
        session.update_received(update(finished=True, redeliverable=(1,)), now)
        session.update_received(update(unchanged=True), now)
        assert not session.is_finished
        assert numbers(session.act(now + 1.1), 1) == [0, 1, 2]
        session.disconnected(1, UnavailableError("no answer"), now + 1.1)


def test_a_finished_task_ends_when_its_worker_is_lost() -> None:
    session = opened(1)
    session.act(0.0)
    session.disconnected(1, REFUSED, 0.2)
    session.update_received(update(finished=True, redeliverable=(1,)), 0.3)
    session.update_received(update(finished=True), 5.2)
    assert session.is_finished
    (warning,) = session.act(5.2).warnings
    assert "the worker at h:1 (finished task 1), which has been unreachable for 5 s" in warning


def test_a_warning_names_the_shard_of_an_unreachable_worker() -> None:
    session = opened(1, has_shards=True)
    session.act(0.0)
    session.disconnected(1, REFUSED, 0.2)
    session.update_received(update(finished=True), 5.2)
    assert session.is_finished
    (warning,) = session.act(5.2).warnings
    assert "the worker at h:1 (shard None, task 1), which has been unreachable" in warning
    assert warning.endswith("are lost, unless another worker has read the shard again")


def test_a_restarted_worker_without_the_finished_task_causes_a_warning() -> None:
    session = opened(1, has_shards=True)
    session.act(0.0)
    session.update_received(update(finished=True, redeliverable=(1,)), 0.3)
    session.worker_replied(1, 0, CancelledError("task 1 is not on this worker"), None, 0.5)
    assert session.is_finished
    (warning,) = session.act(0.5).warnings
    assert "no longer has the finished task 1" in warning


def test_a_shard_that_is_read_again_is_not_abandoned() -> None:
    session = opened(has_shards=True)
    lost, again = (msgspec.structs.replace(address(task), shard_index=1) for task in (1, 2))
    session.update_received(msgspec.structs.replace(update(), tasks=(lost,)), 0.0)
    session.act(0.0)
    session.worker_replied(1, 0, CancelledError("stopped"), None, 0.1)
    assert session.unfinished_tasks == ([], [lost])
    session.update_received(msgspec.structs.replace(update(), tasks=(again,)), 0.2)
    assert session.unfinished_tasks == ([again], [])
    session.act(0.2)
    session.worker_replied(2, 0, END, None, 0.3)
    assert session.unfinished_tasks == ([], [])


def test_an_aborted_request_is_resent() -> None:
    session = opened(1)
    session.act(0.0)
    assert session.worker_replied(1, 0, AbortedError("request 0 was repeated"), None, 0.1) == []
    assert numbers(session.act(1.0), 1) == [0]


def test_an_unreachable_unlisted_task_ends() -> None:
    session = opened(1, 2)
    session.act(0.0)
    session.disconnected(1, REFUSED, 0.2)
    session.update_received(update(2), 0.3)
    assert numbers(session.act(5.0), 1) == []
    session.worker_replied(2, 0, END, None, 5.1)
    session.worker_replied(2, 1, END, None, 5.1)
    session.worker_replied(2, 2, END, None, 5.1)
    session.update_received(update(finished=True), 5.2)
    assert session.is_finished


def test_unchanged_tasks_are_not_examined() -> None:
    def steps(tasks: int) -> int:
        session = opened(*range(1, tasks + 1), credit=8)
        session.act(0.0)
        session.worker_replied(1, 0, elements(0, 1), "a", 0.01)
        session.batch_consumed(1, 0)
        taken = []
        # A collection may come at any time, and calls what others have asked it to.
        gc.disable()
        sys.setprofile(lambda *event: taken.append(event))
        try:
            actions = session.act(0.02)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert len(actions.requests) == 1
        return len(taken)

    assert steps(1000) == steps(20)


def test_each_of_many_tasks_sends_requests() -> None:
    session = opened(*range(1, 101), credit=3)
    turns: list[int] = []
    for step in range(300):
        for ask in session.act(step / 100).requests:
            task_id = ask.task.task_id
            turns.append(task_id)
            session.worker_replied(
                task_id, ask.request_number, elements(0, 0, error=b"e"), "a", step / 100
            )
            session.batch_consumed(task_id, ask.request_number)
    assert set(turns[:100]) == set(turns[100:200]) == set(range(1, 101))


def test_consumption_is_acknowledged_after_the_credit_per_task_shrinks() -> None:
    session = opened(1, credit=3)
    assert numbers(session.act(0.0), 1) == [0, 1, 2]
    session.update_received(update(1, 2, 3), 0.0)
    for number in (0, 1):
        session.worker_replied(1, number, elements(number, 1), "a", 0.1)
        session.batch_consumed(1, number)
    assert numbers(session.act(0.1), 1) == []
    # The worker may delay the reply to number 2 until then; the same request acknowledges.
    (ask,) = [ask for ask in session.act(0.7).requests if ask.task.task_id == 1]
    assert (ask.request_number, ask.message.acknowledged) == (2, 2)
    # The first one is answered now, which says nothing of the second.
    assert session.worker_replied(1, 2, AbortedError("request 2 was repeated"), None, 0.71) == []
    assert numbers(session.act(0.9), 1) == numbers(session.act(9.0), 1) == []
    assert session.worker_replied(1, 2, elements(2, 1), "a", 9.0)


def test_a_task_ended_but_still_listed_is_named_in_the_warning() -> None:
    session = opened(1)
    session.set_waiting(0.0)
    for number in numbers(session.act(0.0)):
        session.worker_replied(1, number, END, None, 0.1)
    assert warnings_until(session, 10) == []
    session.update_received(update(1), 9.9)
    (warning,) = warnings_until(session, 12, since=10)
    assert (
        "the tasks of h:1 have ended for this client, but the dispatcher still lists them"
        in warning
    )


def test_with_a_silent_dispatcher_its_task_list_is_not_blamed() -> None:
    session = opened(1)
    session.set_waiting(0.0)
    for number in numbers(session.act(0.0)):
        session.worker_replied(1, number, END, None, 0.1)
    (warning,) = warnings_until(session, 12)
    assert "no reply from the dispatcher at d:1 for 10 s" in warning
    assert warning.endswith("; the tasks of h:1 have ended for this client")


def test_missing_workers_are_reported_after_time_to_reassign() -> None:
    session = opened(1)
    session.set_waiting(0.0)
    session.act(0.0)
    assert warnings_until(session, 10) == []
    session.worker_replied(1, 0, CancelledError("off"), None, 9.99)
    session.update_received(update(), 9.99)
    (warning,) = warnings_until(session, 12, since=10)
    assert "the last worker was lost or has finished; the dispatcher is reassigning" in warning
    assert warnings_until(session, 65, since=12) == []
    session.update_received(update(), 65.0)
    (warning,) = warnings_until(session, 72, since=65)
    assert "no worker is registered" in warning


@pytest.mark.parametrize("before", [{"awaited_clients": ("another",)}, {"redeliverable": (1,)}])
def test_workers_are_not_reported_missing_after_a_wait_for_others(before: dict[str, Any]) -> None:
    session = opened(1)
    session.set_waiting(0.0)
    session.act(0.0)
    session.worker_replied(1, 0, CancelledError("off"), None, 0.1)
    session.update_received(update(**before), 0.2)
    assert warnings_until(session, 10) == []
    session.update_received(update(), 9.5)
    (warning,) = warnings_until(session, 12, since=10)
    assert "the dispatcher is reassigning the remaining splits" in warning
    assert warnings_until(session, 65, since=12) == []
    session.update_received(update(), 65.0)
    (warning,) = warnings_until(session, 72, since=65)
    assert "no worker is registered" in warning


def test_remaining_tasks_get_the_credit_of_finished_ones() -> None:
    session = opened(1, 2, 3, credit=3)
    assert sorted(ask.task.task_id for ask in session.act(0.0).requests) == [1, 2, 3]
    session.worker_replied(1, 0, CancelledError("off"), None, 0.1)
    session.worker_replied(2, 0, CancelledError("off"), None, 0.1)
    assert numbers(session.act(0.1), 3) == [1, 2]


def test_each_new_attempt_after_losing_all_copies_is_logged() -> None:
    session = opened(1)
    assert session.act(0.0).warnings == []
    session.worker_replied(1, 0, CancelledError("off"), None, 0.1)
    again = [msgspec.structs.replace(address(task_id), attempt=1) for task_id in (2, 3)]
    session.update_received(
        ClientHeartbeatReply(tasks=tuple(again), finished=False, version=1), 0.2
    )
    (warning,) = session.act(0.2).warnings
    assert "every worker with a copy of the dataset was lost" in warning
    assert "h:2" in warning
    session.update_received(
        ClientHeartbeatReply(tasks=tuple(again), finished=False, version=2), 0.3
    )
    assert session.act(0.3).warnings == []


def test_a_reachable_unlisted_task_is_read_to_its_end() -> None:
    session = opened(1)
    session.act(0.0)
    session.update_received(update(finished=True), 0.1)
    assert not session.is_finished
    assert len(session.worker_replied(1, 0, elements(0, 3), "a", 0.2)) == 1
    for number in (1, 2):
        session.worker_replied(1, number, END, None, 0.3)
    assert session.is_finished


def test_ordered_reading_ends_without_waiting_for_task_ends() -> None:
    session = opened(1, 2, delivers_empty=True)
    session.act(0.0)
    session.update_received(update(finished=True), 1.0)
    for number in (0, 1, 2):
        session.worker_replied(2, number, END, None, 1.1)
    assert not session.is_finished, "as a rule it comes at once"
    session.update_received(update(unchanged=True), 2.0)
    assert session.is_finished


def test_a_lost_task_is_reported_with_its_elements_and_fenced() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 3, done=(0, 2)), "a", 0.1)
    session.worker_replied(1, 1, elements(3, 3, done=(2, 5)), "b", 0.1)
    session.update_received(update(reports_needed=(1,)), 0.2)
    # It comes back after a pause: what it still has may have gone to others.
    assert session.worker_replied(1, 2, elements(6, 3, done=(5, 9)), "c", 0.3) == []
    (settled,) = calls(session.act(0.3), ReportDelivery)
    assert settled == ReportDelivery(
        client_id="me", task_id=1, delivered=((0, 5),), partially_delivered=((0, 5),)
    )
    session.dispatcher_replied(settled, Done(), 0.4)
    session.update_received(
        update(
            finished=True,
            lost=(LostSplits(worker_address="h:1", task_id=1, splits=(), num_splits=4),),
        ),
        0.4,
    )
    assert session.is_finished
    assert session.losses[0].num_splits == 4


def test_a_report_awaited_by_others_is_sent_at_once() -> None:
    session = opened(1)
    session.act(0.0)
    session.disconnected(1, REFUSED, 0.1)
    now = 0.2
    for _ in range(8):  # more and more patiently
        session.update_received(update(awaited_clients=("another",)), now)
        session.act(now + 2.0)
        now += 2.0
    session.update_received(update(reports_needed=(1,)), now)
    assert calls(session.act(now), ReportDelivery)
    session.update_received(update(reports_needed=(1,)), now + 0.1)
    assert not calls(session.act(now + 0.1), ReportDelivery), "again, in the usual rhythm"


def test_partially_received_splits_are_reported() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 3, done=(0, 2), delivered_end=6), "a", 0.1)
    session.worker_replied(1, 1, elements(5, 3, done=(3, 4), delivered_end=4), "b", 0.1)
    session.worker_replied(1, 2, elements(9, 3, done=(9, 9), delivered_end=12), "c", 0.1)
    session.update_received(update(reports_needed=(1,)), 0.2)
    (settled,) = calls(session.act(0.3), ReportDelivery)
    assert settled.delivered == ((0, 2), (3, 4))
    assert settled.partially_delivered == ((0, 6), (9, 12))


def test_undelivered_out_of_order_replies_are_not_reported() -> None:
    session = opened(1)
    session.act(0.0)
    assert (
        session.worker_replied(1, 1, elements(3, 3, done=(2, 5), delivered_end=5), "b", 0.1) == []
    )
    session.update_received(update(reports_needed=(1,)), 0.2)
    (settled,) = calls(session.act(0.3), ReportDelivery)
    assert (settled.delivered, settled.partially_delivered) == ((), ())


def test_an_unknown_lost_task_has_an_empty_report() -> None:
    session = opened(1)
    session.update_received(update(1, reports_needed=(7,)), 0.2)
    (settled,) = calls(session.act(0.3), ReportDelivery)
    assert (settled.delivered, settled.partially_delivered) == ((), ())


def test_elements_of_a_lost_task_are_reported_when_consumed() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 3, done=(0, 3)), "a", 0.1)
    session.update_received(update(reports_needed=(1,)), 0.2)
    (report,) = calls(session.act(0.3), ReportDelivery)
    assert (report.delivered, report.consumed) == (((0, 3),), False)
    session.dispatcher_replied(report, Done(), 0.4)
    session.update_received(update(), 0.5)
    assert not calls(session.act(3.0), ReportDelivery)
    session.batch_consumed(1, 0)
    session.update_received(update(), 3.1)
    (report,) = calls(session.act(6.0), ReportDelivery)
    assert (report.delivered, report.consumed) == (((0, 3),), True)
    session.dispatcher_replied(report, Done(), 6.1)
    session.update_received(update(), 6.2)
    assert not calls(session.act(9.0), ReportDelivery)


def test_a_cancelled_task_ends_and_the_dispatcher_is_called() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, CancelledError("deleted"), None, 0.1)
    assert calls(session.act(0.1), ClientHeartbeat)
    session.update_received(update(finished=True), 0.2)
    assert session.is_finished


def test_a_request_error_is_delivered_and_does_not_end_the_task() -> None:
    session = opened(1)
    session.act(0.0)
    refusal = FailedPreconditionError("task 1 has a part which this worker does not know")
    (delivery,) = session.worker_replied(1, 0, refusal, refusal, 0.1)
    assert delivery.payload is refusal


def test_an_element_error_is_delivered_in_order_and_reading_continues() -> None:
    session = opened(1)
    session.act(0.0)
    # Its class does not matter: it is data.
    error = UnavailableError("bad row")
    session.worker_replied(1, 1, elements(1, 1), "b", 0.1)
    found = session.worker_replied(
        1, 0, elements(0, 0, delivered_end=4, error=b"bad row"), error, 0.1
    )
    assert [delivery.payload for delivery in found] == [error, "b"]
    session.batch_consumed(1, 0)
    assert numbers(session.act(0.2)) == [3]


def test_splits_with_only_an_error_count_as_partially_delivered() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(
        1, 0, elements(0, 0, delivered_end=4, error=b"bad row"), ValueError("bad row"), 0.1
    )
    session.update_received(update(reports_needed=(1,)), 0.2)
    (settle,) = calls(session.act(1.5), ReportDelivery)
    assert (settle.delivered, settle.partially_delivered) == ((), ((0, 4),))


def test_a_pause_of_the_client_is_excluded_from_waiting_times() -> None:
    session = opened(1)
    session.act(0.0)
    session.set_waiting(0.0)
    session.act(0.1)
    # Stopped for half a minute, as by Ctrl-Z.
    assert session.act(30.0).warnings == []
    session.update_received(update(1), 30.1)
    now, warnings = 30.1, []
    while not warnings:
        actions = session.act(now)
        warnings = actions.warnings
        session.update_received(update(1), now)
        now += max(0.001, actions.wake_in)
    assert 38.0 < now < 42.0
    assert "waited 10 s" in warnings[0]
    assert "dispatcher" not in warnings[0]


def test_a_worker_not_ready_is_retried_with_the_same_number() -> None:
    session = opened(1)
    session.act(0.0)
    assert session.worker_replied(1, 0, UnavailableError("not ready yet"), None, 0.1) == []
    assert numbers(session.act(0.15)) == []
    assert numbers(session.act(0.25)) == [0]
    assert len(session.worker_replied(1, 0, elements(0, 3), "a", 0.3)) == 1


def test_a_draining_task_is_requested_again_once_consumed() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 3), "a", 0.1)
    for number in (1, 2):
        session.worker_replied(1, number, elements(3, 0), None, 0.1)
    assert numbers(session.act(0.2)) == []
    session.batch_consumed(1, 0)
    assert numbers(session.act(0.3)) == [3]


def test_heartbeats_are_sent_every_second_one_at_a_time() -> None:
    session = opened(1)
    assert not calls(session.act(0.5), ClientHeartbeat)
    assert calls(session.act(1.0), ClientHeartbeat)
    assert not calls(session.act(1.5), ClientHeartbeat)
    session.update_received(update(1), 1.6)
    assert not calls(session.act(2.5), ClientHeartbeat)
    assert calls(session.act(2.7), ClientHeartbeat)


def test_heartbeats_follow_the_requested_interval_unless_urgent() -> None:
    session = opened(1)
    session.act(1.0)
    session.update_received(update(1, heartbeat_interval=5.0), 1.0)
    assert not calls(session.act(5.9), ClientHeartbeat)
    assert calls(session.act(6.0), ClientHeartbeat)
    session.update_received(update(1, heartbeat_interval=5.0), 6.0)
    session.disconnected(1, REFUSED, 6.1)
    assert calls(session.act(6.1), ClientHeartbeat)


def test_a_long_heartbeat_interval_is_not_reported_as_silence() -> None:
    session = opened()
    session.set_waiting(0.0)
    warnings = []
    for now in range(0, 40, 8):
        session.update_received(update(heartbeat_interval=8.0), float(now))
        warnings += session.act(now + 7.9).warnings
    assert warnings
    assert not any("no reply from the dispatcher" in text for text in warnings)


def test_an_unanswered_heartbeat_is_repeated() -> None:
    session = opened(1)
    session.act(1.0)
    assert not calls(session.act(2.9), ClientHeartbeat)
    asked = [now for now in range(3, 20) if calls(session.act(float(now)), ClientHeartbeat)]
    assert 4 <= len(asked) <= 8


def test_a_task_added_later_is_read() -> None:
    session = opened(1)
    session.act(0.0)
    session.update_received(update(1, 2), 1.0)
    assert numbers(session.act(1.0), 2)


# --- waiting ------------------------------------------------------------------------------------


def test_a_wait_is_logged_after_ten_seconds_and_then_each_minute() -> None:
    session = opened(1)
    session.set_waiting(0.0)
    warnings = []
    for now in range(200):
        session.update_received(update(1), float(now))
        warnings += [(now, text) for text in session.act(float(now)).warnings]
    assert [now for now, _ in warnings] == [10, 70, 130, 190]
    assert "h:1" in warnings[0][1]


def test_an_overdue_split_is_reported_to_the_dispatcher() -> None:
    session = opened(1, 2, delivers_empty=True)
    assert session.restrict_requests({1}, 7, 0.2)
    session.set_waiting(0.2)
    (before,) = calls(session.act(1.0), ClientHeartbeat)
    session.update_received(update(1, 2, heartbeat_interval=5.0), 1.1)
    assert session.act(1.1).wake_in == pytest.approx(0.1)
    (beat,) = calls(session.act(1.2), ClientHeartbeat)
    assert (before.wanted_split, beat.wanted_split) == (-1, 7)
    session.update_received(update(1, 2, heartbeat_interval=1.0, urgent_tasks=(2,)), 1.3)
    assert session.urgent_tasks == {2}
    assert not calls(session.act(1.4), ClientHeartbeat)
    (again,) = calls(session.act(2.4), ClientHeartbeat)
    assert again.wanted_split == 7


def test_a_pause_of_the_client_makes_no_split_overdue() -> None:
    session = opened(1, 2, delivers_empty=True)
    session.restrict_requests({1}, 7, 0.0)
    session.act(0.1)
    (beat,) = calls(session.act(30.0), ClientHeartbeat)
    assert beat.wanted_split == -1


def test_urgent_tasks_are_reset_with_the_next_split() -> None:
    session = opened(1, 2, delivers_empty=True)
    session.restrict_requests({1}, 7, 0.0)
    session.act(1.0)
    session.update_received(update(1, 2, urgent_tasks=(2,)), 1.1)
    session.restrict_requests({1}, 8, 1.2)
    assert session.urgent_tasks == frozenset()
    (beat,) = calls(session.act(2.3), ClientHeartbeat)
    assert beat.wanted_split == 8
    session.restrict_requests(None, None, 2.4)
    session.update_received(update(1, 2, urgent_tasks=(2,)), 2.5)
    assert session.urgent_tasks == frozenset(), "the update concerned the split before"
    (beat,) = calls(session.act(3.6), ClientHeartbeat)
    assert beat.wanted_split == -1


def test_an_ordered_wait_names_the_worker_of_the_next_element() -> None:
    session = opened(1, 2, delivers_empty=True)
    session.restrict_requests(None, 7, 0.0)
    session.set_waiting(0.0)
    session.act(0.0)
    warnings = []
    for now in range(1, 11):
        session.update_received(update(1, 2, urgent_tasks=(2,)), float(now))
        session.worker_replied(1, now - 1, elements(now, 1), "later", float(now))
        session.batch_consumed(1, now - 1)
        warnings += session.act(float(now)).warnings
    (text,) = warnings
    assert text.startswith("waited 10 s for the next element in order: connected to h:2, no data")


def test_delivered_elements_postpone_the_warning() -> None:
    session = opened(1)
    session.act(0.0)
    session.set_waiting(0.0)
    session.worker_replied(1, 0, elements(0, 1), "a", 8.0)
    for now in range(8, 18):
        assert not session.act(float(now)).warnings
    assert session.act(18.1).warnings


def test_a_consumer_that_does_not_wait_is_not_warned() -> None:
    session = opened(1)
    session.set_waiting(0.0)
    session.set_waiting(None)
    assert not session.act(100.0).warnings


def test_without_a_worker_the_warning_says_how_to_start_one() -> None:
    session = opened()
    session.set_waiting(0.0)
    session.update_received(update(), 9.5)
    (warning,) = session.act(10.0).warnings
    assert "headrace worker --dispatcher d:1" in warning


def test_an_unreachable_dispatcher_and_worker_are_named() -> None:
    session = opened(1)
    session.set_waiting(0.0)
    session.disconnected(1, UnavailableError("no reply from h:1"), 0.5)
    (warning,) = session.act(12.0).warnings
    assert "no reply from the dispatcher at d:1 for 12 s" in warning
    assert "h:1 has been unreachable for 12 s" in warning


def test_a_wait_without_workers_fails_after_the_timeout() -> None:
    session = opened(1, wait_timeout=100.0)
    session.act(0.0)
    session.set_waiting(0.0)
    session.disconnected(1, REFUSED, 5.0)
    for now in range(5, 105):
        session.act(float(now))
    assert not session.is_finished
    session.act(106.0)
    assert session.is_finished
    assert isinstance(session.failure, UnavailableError)
    assert "h:1" in str(session.failure)


@pytest.mark.parametrize("deals", [True, False])
def test_a_wait_without_a_dispatcher_fails_after_the_timeout(deals: bool) -> None:
    session = opened(1, wait_timeout=20.0, assigns_splits=deals)
    session.act(0.0)
    session.set_waiting(0.0)
    for now in range(1, 40):
        session.dispatcher_unreachable(float(now))
        session.act(float(now))
    assert session.is_finished == deals
    assert not deals or "no reply from the dispatcher at d:1" in str(session.failure)


@pytest.mark.parametrize("is_answered", [True, False])
def test_an_unwritable_journal_is_named_in_the_warning(is_answered: bool) -> None:
    session = opened(1, wait_timeout=15.0, assigns_splits=True)
    session.set_waiting(0.0)
    warnings = []
    for now in map(float, range(1, 20)):
        if is_answered:
            session.update_received(update(1, journal_problem="no space"), now)
        else:
            session.dispatcher_replied(None, JournalUnavailableError("no space"), now)
        warnings += session.act(now).warnings
    (warning,) = warnings
    assert "d:1 cannot assign splits: no space" in warning
    assert "function" not in warning
    assert "d:1 cannot assign splits: no space" in str(session.failure)


def test_a_worker_in_user_code_has_no_timeout() -> None:
    session = opened(1, wait_timeout=100.0)
    session.set_waiting(0.0)
    for now in range(0, 10_000, 10):
        session.update_received(update(1), float(now))
        session.act(float(now))
    assert session.failure is None


def test_the_first_failure_is_kept() -> None:
    session = opened(1)
    session.fail(FailedPreconditionError("first"))
    session.fail(FailedPreconditionError("second"))
    assert session.is_finished
    assert str(session.failure) == "first"


def test_actions_always_have_a_wake_time() -> None:
    session = opened(1)
    assert 0 < session.act(0.0).wake_in <= 1.0
    session.disconnected(1, REFUSED, 0.1)
    assert session.act(0.1).wake_in <= 0.05
    assert math.isfinite(session.act(50.0).wake_in)


def test_a_client_that_leaves_early_reports_only_consumed_elements() -> None:
    session = opened(1, 2)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 3, done=(0, 3)), "a", 0.1)
    session.worker_replied(1, 1, elements(3, 3, done=(3, 6)), "b", 0.1)
    session.worker_replied(1, 2, elements(6, 3, done=(6, 9)), "c", 0.1)
    session.worker_replied(2, 0, elements(0, 1, done=(0, 1)), "d", 0.1)
    session.batch_consumed(1, 0)
    (report,) = session.final_reports(partial=(1, 1, 1))
    assert report == ReportDelivery(
        client_id="me", task_id=1, delivered=((0, 3),), partially_delivered=((0, 6),), consumed=True
    )


def test_unconsumed_elements_of_a_cancelled_task_are_not_reported() -> None:
    session = opened(1, 2)
    session.act(0.0)
    session.worker_replied(1, 0, elements(0, 3, done=(0, 3)), "a", 0.1)
    session.worker_replied(1, 1, elements(3, 3, done=(3, 6)), "b", 0.1)
    session.batch_consumed(1, 0)
    session.worker_replied(1, 2, CancelledError("off"), None, 0.1)
    (report,) = session.final_reports(partial=None)
    assert report == ReportDelivery(
        client_id="me", task_id=1, delivered=((0, 3),), partially_delivered=((0, 3),), consumed=True
    )


def test_after_a_long_pause_the_lease_is_confirmed_first() -> None:
    session = ReadSession("me", "d:1", 16, 0.0)
    session.iteration_opened(
        OpenIterationReply(
            iteration_id=1, tasks=(address(1),), seed=0, finished=False, lease=300.0
        ),
        0.0,
    )
    session.act(0.0)
    assert session.may_consume(100.0)
    session.act(100.0)
    session.update_received(update(1), 100.1)
    session.act(101.2)  # a heartbeat is under way
    assert not session.may_consume(400.0)
    actions = session.act(400.0)
    session.update_received(update(1), 400.1)  # sent before the pause
    assert not session.may_consume(400.1)
    actions = session.act(400.1)
    assert calls(actions, ClientHeartbeat)
    session.update_received(update(1), 400.2)
    assert session.may_consume(400.2)


def test_a_wait_for_an_unresponsive_client_is_named() -> None:
    session = opened(1)
    session.act(0.0)
    session.worker_replied(1, 0, END, None, 0.1)
    session.worker_replied(1, 1, END, None, 0.1)
    session.worker_replied(1, 2, END, None, 0.1)
    session.set_waiting(0.1)
    session.update_received(update(awaited_clients=("other",)), 0.2)
    for second in range(1, 10):
        session.act(float(second))
        session.update_received(update(awaited_clients=("other",), version=second), second + 0.1)
    (warning,) = session.act(10.2).warnings
    assert "no heartbeat from other of the same job" in warning
    assert "no worker" not in warning


def test_all_session_messages_are_dispatcher_requests() -> None:
    known = set(messages.DispatcherRequest.__args__)  # type: ignore[attr-defined]
    assert {ClientHeartbeat, ReportUnreachable, ReportDelivery} <= known


# --- what the dispatcher answers ----------------------------------------------------------------

HEARTBEAT = ClientHeartbeat(client_id="me")


def failure_of(session: ReadSession) -> tuple[type | None, str]:
    return (None if session.failure is None else type(session.failure)), str(session.failure)


def test_an_unknown_client_fails_with_possible_causes() -> None:
    session = opened(1)
    session.dispatcher_replied(HEARTBEAT, NotFoundError("Unknown iteration client id me"), 1.0)
    kind, words = failure_of(session)
    assert kind is JobLostError
    assert "the dispatcher at d:1 no longer knows this client (Unknown" in words
    assert session.is_finished


def test_an_unreachable_dispatcher_does_not_end_the_reading() -> None:
    session = opened(1)
    session.dispatcher_replied(None, UnavailableError("reset"), 1.0)
    assert session.failure is None
    session.dispatcher_replied(None, UnauthenticatedError("wrong key"), 2.0)
    assert failure_of(session) == (UnauthenticatedError, "wrong key")


def test_reports_end_with_any_reply_of_the_dispatcher() -> None:
    session = opened(1)
    session.disconnected(1, REFUSED, 1.0)
    (report,) = calls(session.act(1.0), ReportUnreachable)
    session.dispatcher_replied(report, HeadraceError("it is over"), 1.1)
    assert session.failure is None
    session.dispatcher_replied(HEARTBEAT, update(1), 1.2)
    assert calls(session.act(3.0), ReportUnreachable) == []
