"""Session of one of several consumers: inputs and times in, actions out."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from headrace.service.client.actions import ReceivedBatch
from headrace.service.messages import (
    PROGRESS_REQUEST,
    ClientHeartbeat,
    ClientHeartbeatReply,
    Done,
    GetElementsReply,
    OpenIterationReply,
    ReportDelivery,
    RoundProgress,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.coordinated_session import CoordinatedReadSession
from headrace.service.modes.coordinated_reads.round_delivery import RoundDelivery
from headrace.service.modes.coordinated_reads.round_task_reader import RoundTaskReader


def address(task_id: int, starting_round: int = 0) -> TaskAddress:
    return TaskAddress(
        task_id=task_id,
        worker_id=f"w{task_id}",
        worker_address=f"w{task_id}:1",
        task_token="token",
        starting_round=starting_round,
    )


def open_session(
    *tasks: TaskAddress, horizon: int = 16, max_outstanding: int = 4, **options: Any
) -> CoordinatedReadSession:
    session = CoordinatedReadSession(
        "client", "dispatcher:1", max_outstanding, 0.0, consumer=0, num_consumers=2, **options
    )
    session.iteration_opened(
        OpenIterationReply(2000, tasks, 7, finished=False, horizon=horizon), 0.0
    )
    return session


def test_joining_a_failed_iteration_raises_its_failure_reason() -> None:
    session = CoordinatedReadSession("client", "dispatcher:1", 4, 0.0, consumer=0, num_consumers=2)
    session.iteration_opened(
        OpenIterationReply(1, (), 0, finished=True, failure_reason="all workers died"), 0.0
    )
    assert isinstance(session.failure, FailedPreconditionError)
    assert session.is_finished


def batch_reply(number: int, num_complete: int = 0) -> GetElementsReply:
    return GetElementsReply(
        first_element=number,
        num_elements=1,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=num_complete),
    )


def requested_rounds(session: CoordinatedReadSession, now: float) -> list[tuple[int, int]]:
    return [(each.task.task_id, each.request_number) for each in session.act(now).requests]


def test_rounds_are_requested_ahead_in_consumption_order() -> None:
    session = open_session(address(1), address(2))
    assert sorted(requested_rounds(session, 0.0)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_requests_sent_before_a_loss_count_as_outstanding_until_their_turn() -> None:
    session = open_session(address(1), address(2), address(4), address(3, starting_round=3))
    assert sorted(requested_rounds(session, 0.0)) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    others = (address(1), address(2), address(3, starting_round=3))
    lost = ClientHeartbeatReply(others, finished=False, reports_needed=(4,), version=1, horizon=16)
    session.dispatcher_replied(ClientHeartbeat("client"), lost, 0.2)
    actions = session.act(0.25)
    assert not actions.requests
    (report,) = [each for each in actions.calls if isinstance(each, ReportDelivery)]
    session.dispatcher_replied(report, Done(), 0.3)
    listed = ClientHeartbeatReply(
        others, finished=False, complete_rounds=((4, 0),), version=2, horizon=16
    )
    session.dispatcher_replied(ClientHeartbeat("client"), listed, 0.3)
    # The next turns are those of tasks 1, 2, 1, 2 and then 3, which leaves room for four requests.
    assert requested_rounds(session, 0.3) == [(1, 1)]
    for task_id in (1, 2):
        session.worker_replied(task_id, 0, batch_reply(0), "a round", 0.4)
    assert requested_rounds(session, 0.4) == [(1, PROGRESS_REQUEST), (2, PROGRESS_REQUEST)]


def test_a_round_is_delivered_in_turn_once_it_is_complete() -> None:
    session = open_session(address(1), address(2))
    requested_rounds(session, 0.0)
    assert session.worker_replied(2, 0, batch_reply(0), "two", 0.1) == []
    assert session.worker_replied(1, 0, batch_reply(0), "one", 0.1) == []
    assert set(requested_rounds(session, 0.1)) == {(1, PROGRESS_REQUEST), (2, PROGRESS_REQUEST)}
    progress = GetElementsReply(
        first_element=1, num_elements=0, end_of_task=False, mode_data=RoundProgress(num_complete=1)
    )
    assert session.worker_replied(2, PROGRESS_REQUEST, progress, None, 0.2) == []
    found = session.worker_replied(1, PROGRESS_REQUEST, progress, None, 0.2)
    assert [each.payload for each in found] == ["one", "two"]


def test_of_a_lost_task_only_rounds_that_all_consumers_received_are_consumed() -> None:
    session = open_session(address(1), address(2))
    requested_rounds(session, 0.0)
    for number in (0, 1):
        assert session.worker_replied(1, number, batch_reply(number), f"one {number}", 0.1) == []
    lost = ClientHeartbeatReply(
        (address(2),), finished=False, reports_needed=(1,), version=1, horizon=16
    )
    session.dispatcher_replied(ClientHeartbeat("client"), lost, 0.2)
    (report,) = [each for each in session.act(0.25).calls if isinstance(each, ReportDelivery)]
    assert (report.task_id, report.rounds) == (1, 2)
    known = ClientHeartbeatReply(
        (address(2),), False, version=2, horizon=16, complete_rounds=((1, 1),)
    )
    session.dispatcher_replied(ClientHeartbeat("client"), known, 0.3)
    assert [each.payload for each in session.take_due(0.3)] == ["one 0"]
    session.worker_replied(2, 0, batch_reply(0, num_complete=1), "two 0", 0.4)
    requested_rounds(session, 0.4)
    progress = GetElementsReply(
        first_element=1, num_elements=0, end_of_task=False, mode_data=RoundProgress(num_complete=1)
    )
    found = session.worker_replied(2, PROGRESS_REQUEST, progress, None, 0.5)
    assert [each.payload for each in found] in (["two 0"], []), "round 1 of task 1 does not exist"


def test_reading_ends_if_the_worker_never_received_its_last_task() -> None:
    session = open_session(address(1), address(2, starting_round=1))
    requested_rounds(session, 0.0)
    end = GetElementsReply(first_element=0, num_elements=0, end_of_task=True)
    session.worker_replied(1, 0, end, None, 0.1)
    update = ClientHeartbeatReply((), finished=True, version=1, horizon=16)
    session.dispatcher_replied(ClientHeartbeat("client"), update, 0.2)
    assert session.take_due(0.2) == []
    assert session.is_finished


def test_reading_ends_although_a_task_without_splits_had_no_rounds() -> None:
    session = open_session(address(1))
    requested_rounds(session, 0.0)
    session.worker_replied(1, 0, batch_reply(0), "it cannot be opened", 0.1)
    update = ClientHeartbeatReply((), finished=True, version=1, horizon=16, redeliverable=())
    session.dispatcher_replied(ClientHeartbeat("client"), update, 0.2)
    assert session.take_due(0.2) == []
    assert session.is_finished


def test_a_new_horizon_is_requested_before_the_current_one_is_reached() -> None:
    session = open_session(address(1), horizon=0)
    actions = session.act(0.0)
    assert actions.requests == []
    (heartbeat,) = [each for each in actions.calls if isinstance(each, ClientHeartbeat)]
    assert heartbeat.horizon >= 16
    further = ClientHeartbeatReply((address(1),), finished=False, version=1, horizon=2)
    session.dispatcher_replied(ClientHeartbeat("client"), further, 0.1)
    assert requested_rounds(session, 0.1) == [(1, 0), (1, 1)]


def test_a_wait_for_another_consumer_times_out_and_names_it() -> None:
    session = open_session(address(1), wait_timeout=30.0)
    requested_rounds(session, 0.0)
    session.worker_replied(1, 0, batch_reply(0), "one", 0.1)
    session.set_waiting(0.1)
    progress = GetElementsReply(
        first_element=1,
        num_elements=0,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=0, lagging_consumers=(1,)),
    )
    warnings = []
    for second in range(1, 40):
        actions = session.act(float(second))
        warnings += actions.warnings
        for request in actions.requests:
            if request.request_number == PROGRESS_REQUEST and request.message.known_rounds < 0:
                session.worker_replied(1, PROGRESS_REQUEST, progress, None, float(second))
    assert isinstance(session.failure, DeadlineExceededError)
    assert "consumer 1 of 2 did not read round 0" in str(session.failure)
    assert "consumer 1 of 2" in warnings[0]


def test_reading_fails_and_names_a_consumer_that_left() -> None:
    session = open_session(address(1))
    requested_rounds(session, 0.0)
    session.set_waiting(0.0)
    update = ClientHeartbeatReply(
        (address(1),), False, version=1, horizon=16, missing_consumer="consumer 1 has left"
    )
    session.dispatcher_replied(ClientHeartbeat("client"), update, 0.5)
    session.act(0.5)
    assert session.failure is None, "complete rounds may still be in flight"
    session.act(2.0)
    assert isinstance(session.failure, FailedPreconditionError)
    assert "cannot read round 0: consumer 1 has left" in str(session.failure)


def test_an_aborted_round_request_is_sent_again() -> None:
    session = open_session(address(1))
    late_request = session.act(0.0).requests[0].message
    session.disconnected(1, UnavailableError("connection lost"), 0.1)
    later = session.act(0.2).requests[0].message
    assert (late_request.request_number, later.request_number) == (0, 0)
    # The earlier request arrives late; the worker takes it for a repetition of the later one.
    rounds: RoundDelivery[str] = RoundDelivery(2)
    assert rounds.request_received("the later one", later, 0.3) == []
    ((name, refusal),) = rounds.request_received("the earlier one", late_request, 0.3)
    assert name == "the later one"
    assert isinstance(refusal, AbortedError)
    assert session.worker_replied(1, 0, refusal, None, 0.3) == []
    assert session.failure is None
    assert requested_rounds(session, 0.35) == []
    assert requested_rounds(session, 0.45) == [(1, 0)]
    assert requested_rounds(session, 9.0) == []


def test_an_aborted_progress_request_is_not_repeated() -> None:
    session = open_session(address(1), max_outstanding=1)
    requested_rounds(session, 0.0)
    session.worker_replied(1, 0, batch_reply(0), "one", 0.1)
    assert requested_rounds(session, 0.1) == [(1, PROGRESS_REQUEST)]
    session.worker_replied(1, PROGRESS_REQUEST, AbortedError("request -1 was repeated"), None, 0.2)
    for now in (0.2, 0.5, 3.0):
        assert requested_rounds(session, now) == []


def test_a_request_is_retried_soon_if_the_worker_cannot_reply_now() -> None:
    session = open_session(address(1))
    requested_rounds(session, 0.0)
    session.worker_replied(1, 0, UnavailableError("not now"), None, 0.1)
    assert requested_rounds(session, 0.15) == []
    assert requested_rounds(session, 0.25) == [(1, 0)]


def session_after_departure(session: CoordinatedReadSession, now: float) -> None:
    update = ClientHeartbeatReply(
        (address(1),), False, version=1, horizon=16, missing_consumer="consumer 1 has left"
    )
    session.dispatcher_replied(ClientHeartbeat("client"), update, now)
    session.act(now)


def test_after_a_consumer_left_complete_rounds_are_awaited_for_a_second() -> None:
    session = open_session(address(1))
    session.set_waiting(0.0)
    for second in range(10):
        session.act(float(second))
    session_after_departure(session, 9.5)
    session.act(10.4)
    assert session.failure is None, "0.9 s after the departure became known"
    session.act(10.6)
    assert "cannot read round 0" in str(session.failure)


def test_a_wait_that_begins_long_after_a_consumer_left_lasts_a_second() -> None:
    session = open_session(address(1))
    session_after_departure(session, 0.5)
    for second in range(1, 11):
        session.act(float(second))
    session.set_waiting(10.0)
    session.act(10.9)
    assert session.failure is None
    session.act(11.1)
    assert "cannot read round 0" in str(session.failure)


def test_pauses_of_this_process_do_not_count_as_waiting_time() -> None:
    session = open_session(address(1), wait_timeout=30.0)
    requested_rounds(session, 0.0)
    session.worker_replied(1, 0, batch_reply(0), "one", 0.1)
    session.set_waiting(0.1)
    session.act(0.1)
    progress = GetElementsReply(
        first_element=1,
        num_elements=0,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=0, lagging_consumers=(1,)),
    )
    session.worker_replied(1, PROGRESS_REQUEST, progress, None, 0.2)
    session.act(1.0)
    session.act(101.0)  # the process was paused for 100 s
    assert session.failure is None
    now = 101.0
    while session.failure is None and now < 200.0:
        now += 1.0
        session.act(now)
    assert isinstance(session.failure, DeadlineExceededError)
    assert 120.0 < now < 135.0, "only the 30 s in which the process ran count"


def test_the_requested_horizon_covers_the_rounds_of_four_seconds() -> None:
    session = open_session(address(1), horizon=300)
    for number in range(200):
        now = number / 100  # 100 rounds per second
        session.act(now)
        for each in session.worker_replied(
            1, number, batch_reply(number, num_complete=number + 1), "one", now
        ):
            session.batch_consumed(each.task.task_id, each.request_number)
    horizons = []
    for now in (2.0, 2.1, 3.1):
        calls = session.act(now).calls
        heartbeats = [each for each in calls if isinstance(each, ClientHeartbeat)]
        horizons += [each.horizon for each in heartbeats if each.horizon]
    assert horizons
    assert 550 <= horizons[0] <= 650, "200 rounds so far, and 100 per second for 4 s"


def test_rounds_that_arrive_during_a_progress_request_are_reported_together() -> None:
    task = RoundTaskReader(address(1), 0)
    batch = ReceivedBatch(address(1), 0, 1, "one")
    task.requested |= {0, 1, 2}
    task.add_batch(0, batch_reply(0), batch)
    ((number, progress_request),) = task.take_requests("client", 0.0, urgent=False)
    assert (number, progress_request.acknowledged) == (PROGRESS_REQUEST, 1)
    task.add_batch(1, batch_reply(1), batch)
    assert task.take_requests("client", 0.1, urgent=False) == []
    task.add_batch(2, batch_reply(2), batch)
    assert task.take_requests("client", 0.101, urgent=False) == []
    ((number, progress_request),) = task.take_requests("client", 0.103, urgent=False)
    assert (number, progress_request.acknowledged) == (PROGRESS_REQUEST, 3)
    assert task.take_requests("client", 9.0, urgent=False) == []


@pytest.mark.parametrize(("max_outstanding", "due"), [(1, 1), (4, 1), (7, 1), (16, 4)])
def test_rounds_are_requested_once_a_quarter_of_the_window_is_consumed(
    max_outstanding: int, due: int
) -> None:
    session = open_session(address(1), max_outstanding=max_outstanding, horizon=64)
    numbers = [number for _, number in requested_rounds(session, 0.0)]
    assert numbers == list(range(max_outstanding))
    for number in numbers:
        session.worker_replied(1, number, batch_reply(number), "part", 0.1)
    requested_rounds(session, 0.1)
    progress = GetElementsReply(
        first_element=max_outstanding,
        num_elements=0,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=max_outstanding),
    )
    assert len(session.worker_replied(1, PROGRESS_REQUEST, progress, None, 0.2)) == max_outstanding
    assert requested_rounds(session, 0.2) == [], "no round was consumed"
    calls = [session.batch_consumed(1, number) for number in range(due)]
    assert calls == [False] * (due - 1) + [True]
    assert requested_rounds(session, 0.3) == [
        (1, max_outstanding + number) for number in range(due)
    ]
