"""What one of several consumers asks, delivers and says: events and times in, actions out."""

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


def opened(
    *tasks: TaskAddress, horizon: int = 16, most: int = 4, **options: Any
) -> CoordinatedReadSession:
    session = CoordinatedReadSession(
        "client", "dispatcher:1", most, 0.0, consumer=0, num_consumers=2, **options
    )
    session.iteration_opened(
        OpenIterationReply(2000, tasks, 7, finished=False, horizon=horizon), 0.0
    )
    return session


def test_a_consumer_that_joins_what_has_failed_hears_why() -> None:
    session = CoordinatedReadSession("client", "dispatcher:1", 4, 0.0, consumer=0, num_consumers=2)
    session.iteration_opened(
        OpenIterationReply(1, (), 0, finished=True, failure_reason="all workers died"), 0.0
    )
    assert isinstance(session.failure, FailedPreconditionError)
    assert session.is_finished


def part(number: int, whole: int = 0) -> GetElementsReply:
    return GetElementsReply(
        first_element=number,
        num_elements=1,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=whole),
    )


def asked(session: CoordinatedReadSession, now: float) -> list[tuple[int, int]]:
    return [(ask.task.task_id, ask.request_number) for ask in session.act(now).requests]


def test_rounds_are_asked_for_ahead_in_the_order_of_their_turns() -> None:
    session = opened(address(1), address(2))
    assert sorted(asked(session, 0.0)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_what_was_asked_before_a_task_was_lost_takes_room_though_its_turn_comes_later() -> None:
    session = opened(address(1), address(2), address(4), address(3, starting_round=3))
    assert sorted(asked(session, 0.0)) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    rest = (address(1), address(2), address(3, starting_round=3))
    lost = ClientHeartbeatReply(rest, finished=False, reports_needed=(4,), version=1, horizon=16)
    session.dispatcher_replied(ClientHeartbeat("client"), lost, 0.2)
    actions = session.act(0.25)
    assert not actions.requests
    (settled,) = [each for each in actions.calls if isinstance(each, ReportDelivery)]
    session.dispatcher_replied(settled, Done(), 0.3)
    told = ClientHeartbeatReply(
        rest, finished=False, complete_rounds=((4, 0),), version=2, horizon=16
    )
    session.dispatcher_replied(ClientHeartbeat("client"), told, 0.3)
    # Next are 1, 2, 1 and 2, and only then 3: with that there is room for four.
    assert asked(session, 0.3) == [(1, 1)]
    for task_id in (1, 2):
        session.worker_replied(task_id, 0, part(0), "a round", 0.4)
    assert asked(session, 0.4) == [(1, PROGRESS_REQUEST), (2, PROGRESS_REQUEST)]


def test_a_round_is_delivered_once_it_is_whole_and_in_its_turn() -> None:
    session = opened(address(1), address(2))
    asked(session, 0.0)
    assert session.worker_replied(2, 0, part(0), "two", 0.1) == []
    assert session.worker_replied(1, 0, part(0), "one", 0.1) == []
    assert set(asked(session, 0.1)) == {(1, PROGRESS_REQUEST), (2, PROGRESS_REQUEST)}
    word = GetElementsReply(
        first_element=1, num_elements=0, end_of_task=False, mode_data=RoundProgress(num_complete=1)
    )
    assert session.worker_replied(2, PROGRESS_REQUEST, word, None, 0.2) == []
    found = session.worker_replied(1, PROGRESS_REQUEST, word, None, 0.2)
    assert [each.payload for each in found] == ["one", "two"]


def test_a_lost_task_is_settled_by_rounds_and_only_those_that_all_have_are_used() -> None:
    session = opened(address(1), address(2))
    asked(session, 0.0)
    for number in (0, 1):
        assert session.worker_replied(1, number, part(number), f"one {number}", 0.1) == []
    lost = ClientHeartbeatReply(
        (address(2),), finished=False, reports_needed=(1,), version=1, horizon=16
    )
    session.dispatcher_replied(ClientHeartbeat("client"), lost, 0.2)
    (settled,) = [each for each in session.act(0.25).calls if isinstance(each, ReportDelivery)]
    assert (settled.task_id, settled.rounds) == (1, 2)
    known = ClientHeartbeatReply(
        (address(2),), False, version=2, horizon=16, complete_rounds=((1, 1),)
    )
    session.dispatcher_replied(ClientHeartbeat("client"), known, 0.3)
    assert [each.payload for each in session.take_due(0.3)] == ["one 0"]
    session.worker_replied(2, 0, part(0, whole=1), "two 0", 0.4)
    asked(session, 0.4)
    word = GetElementsReply(
        first_element=1, num_elements=0, end_of_task=False, mode_data=RoundProgress(num_complete=1)
    )
    found = session.worker_replied(2, PROGRESS_REQUEST, word, None, 0.5)
    assert [each.payload for each in found] in (["two 0"], []), "round 1 of task 1 never was"


def test_the_reading_ends_though_the_worker_of_a_last_task_never_heard_of_it() -> None:
    session = opened(address(1), address(2, starting_round=1))
    asked(session, 0.0)
    end = GetElementsReply(first_element=0, num_elements=0, end_of_task=True)
    session.worker_replied(1, 0, end, None, 0.1)
    over = ClientHeartbeatReply((), finished=True, version=1, horizon=16)
    session.dispatcher_replied(ClientHeartbeat("client"), over, 0.2)
    assert session.take_due(0.2) == []
    assert session.is_finished


def test_the_reading_ends_though_others_ended_without_a_round_of_a_task_that_had_no_units() -> None:
    session = opened(address(1))
    asked(session, 0.0)
    session.worker_replied(1, 0, part(0), "it cannot be opened", 0.1)
    over = ClientHeartbeatReply((), finished=True, version=1, horizon=16, redeliverable=())
    session.dispatcher_replied(ClientHeartbeat("client"), over, 0.2)
    assert session.take_due(0.2) == []
    assert session.is_finished


def test_it_asks_to_go_on_before_it_gets_to_the_horizon() -> None:
    session = opened(address(1), horizon=0)
    actions = session.act(0.0)
    assert actions.requests == []
    (beat,) = [each for each in actions.calls if isinstance(each, ClientHeartbeat)]
    assert beat.horizon >= 16
    further = ClientHeartbeatReply((address(1),), finished=False, version=1, horizon=2)
    session.dispatcher_replied(ClientHeartbeat("client"), further, 0.1)
    assert asked(session, 0.1) == [(1, 0), (1, 1)]


def test_a_wait_for_another_consumer_ends_at_the_deadline_and_names_it() -> None:
    session = opened(address(1), wait_timeout=30.0)
    asked(session, 0.0)
    session.worker_replied(1, 0, part(0), "one", 0.1)
    session.set_waiting(0.1)
    word = GetElementsReply(
        first_element=1,
        num_elements=0,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=0, lagging_consumers=(1,)),
    )
    warnings = []
    for second in range(1, 40):
        actions = session.act(float(second))
        warnings += actions.warnings
        for ask in actions.requests:
            if ask.request_number == PROGRESS_REQUEST and ask.message.known_rounds < 0:
                session.worker_replied(1, PROGRESS_REQUEST, word, None, float(second))
    assert isinstance(session.failure, DeadlineExceededError)
    assert "consumer 1 of 2 did not take part in round 0" in str(session.failure)
    assert "consumer 1 of 2" in warnings[0]


def test_where_another_consumer_has_left_the_reading_ends_with_its_name() -> None:
    session = opened(address(1))
    asked(session, 0.0)
    session.set_waiting(0.0)
    update = ClientHeartbeatReply(
        (address(1),), False, version=1, horizon=16, missing_consumer="consumer 1 has left"
    )
    session.dispatcher_replied(ClientHeartbeat("client"), update, 0.5)
    session.act(0.5)
    assert session.failure is None, "what all have may still be on its way"
    session.act(2.0)
    assert isinstance(session.failure, FailedPreconditionError)
    assert "cannot go on with round 0: consumer 1 has left" in str(session.failure)


def test_a_round_whose_request_gave_way_to_one_of_the_connection_before_is_asked_for_again() -> (
    None
):
    session = opened(address(1))
    before = session.act(0.0).requests[0].message
    session.disconnected(1, UnavailableError("gone"), 0.1)
    later = session.act(0.2).requests[0].message
    assert (before.request_number, later.request_number) == (0, 0)
    # What was sent before comes to the worker only now, which takes it for a repeat of the later.
    rounds: RoundDelivery[str] = RoundDelivery(2)
    assert rounds.request_received("the later one", later, 0.3) == []
    ((who, refusal),) = rounds.request_received("the one of before", before, 0.3)
    assert who == "the later one"
    assert isinstance(refusal, AbortedError)
    assert session.worker_replied(1, 0, refusal, None, 0.3) == []
    assert session.failure is None
    assert asked(session, 0.35) == []
    assert asked(session, 0.45) == [(1, 0)]
    assert asked(session, 9.0) == []


def test_what_another_word_took_the_place_of_is_not_said_again() -> None:
    session = opened(address(1), most=1)
    asked(session, 0.0)
    session.worker_replied(1, 0, part(0), "one", 0.1)
    assert asked(session, 0.1) == [(1, PROGRESS_REQUEST)]
    session.worker_replied(
        1, PROGRESS_REQUEST, AbortedError("request -1 was asked again"), None, 0.2
    )
    for now in (0.2, 0.5, 3.0):
        assert asked(session, now) == []


def test_a_worker_that_cannot_answer_now_is_asked_again_in_a_moment() -> None:
    session = opened(address(1))
    asked(session, 0.0)
    session.worker_replied(1, 0, UnavailableError("not now"), None, 0.1)
    assert asked(session, 0.15) == []
    assert asked(session, 0.25) == [(1, 0)]


def left_by_another(session: CoordinatedReadSession, now: float) -> None:
    update = ClientHeartbeatReply(
        (address(1),), False, version=1, horizon=16, missing_consumer="consumer 1 has left"
    )
    session.dispatcher_replied(ClientHeartbeat("client"), update, now)
    session.act(now)


def test_what_all_have_is_waited_for_after_a_consumer_left_however_long_the_wait_was() -> None:
    session = opened(address(1))
    session.set_waiting(0.0)
    for second in range(10):
        session.act(float(second))
    left_by_another(session, 9.5)
    session.act(10.4)
    assert session.failure is None, "0.9 s after it became known"
    session.act(10.6)
    assert "cannot go on with round 0" in str(session.failure)


def test_a_wait_that_begins_long_after_a_consumer_left_lasts_a_second_as_well() -> None:
    session = opened(address(1))
    left_by_another(session, 0.5)
    for second in range(1, 11):
        session.act(float(second))
    session.set_waiting(10.0)
    session.act(10.9)
    assert session.failure is None
    session.act(11.1)
    assert "cannot go on with round 0" in str(session.failure)


def test_time_in_which_this_process_stood_still_is_no_wait_for_others() -> None:
    session = opened(address(1), wait_timeout=30.0)
    asked(session, 0.0)
    session.worker_replied(1, 0, part(0), "one", 0.1)
    session.set_waiting(0.1)
    session.act(0.1)
    word = GetElementsReply(
        first_element=1,
        num_elements=0,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=0, lagging_consumers=(1,)),
    )
    session.worker_replied(1, PROGRESS_REQUEST, word, None, 0.2)
    session.act(1.0)
    session.act(101.0)  # a hundred seconds without a look
    assert session.failure is None
    now = 101.0
    while session.failure is None and now < 200.0:
        now += 1.0
        session.act(now)
    assert isinstance(session.failure, DeadlineExceededError)
    assert 120.0 < now < 135.0, "the thirty seconds are those in which it looked"


def test_it_asks_to_go_on_for_as_many_rounds_as_it_uses_in_four_seconds() -> None:
    session = opened(address(1), horizon=300)
    for number in range(200):
        now = number / 100  # a hundred rounds a second
        session.act(now)
        for each in session.worker_replied(1, number, part(number, whole=number + 1), "one", now):
            session.batch_consumed(each.task.task_id, each.request_number)
    wanted = []
    for now in (2.0, 2.1, 3.1):
        calls = session.act(now).calls
        beats = [each for each in calls if isinstance(each, ClientHeartbeat)]
        wanted += [each.horizon for each in beats if each.horizon]
    assert wanted
    assert 550 <= wanted[0] <= 650, "the 200 of now, and four seconds of a hundred each"


def test_rounds_that_arrive_while_a_word_is_under_way_are_said_together_in_a_moment() -> None:
    task = RoundTaskReader(address(1), 0)
    delivery = ReceivedBatch(address(1), 0, 1, "one")
    task.requested |= {0, 1, 2}
    task.add_batch(0, part(0), delivery)
    ((number, question),) = task.take_requests("client", 0.0, urgent=False)
    assert (number, question.acknowledged) == (PROGRESS_REQUEST, 1)
    task.add_batch(1, part(1), delivery)
    assert task.take_requests("client", 0.1, urgent=False) == []
    task.add_batch(2, part(2), delivery)
    assert task.take_requests("client", 0.101, urgent=False) == []
    ((number, question),) = task.take_requests("client", 0.103, urgent=False)
    assert (number, question.acknowledged) == (PROGRESS_REQUEST, 3)
    assert task.take_requests("client", 9.0, urgent=False) == []


@pytest.mark.parametrize(("most", "together"), [(1, 1), (4, 1), (7, 1), (16, 4)])
def test_rounds_are_asked_for_once_a_quarter_of_them_is_used_up(most: int, together: int) -> None:
    session = opened(address(1), most=most, horizon=64)
    numbers = [number for _, number in asked(session, 0.0)]
    assert numbers == list(range(most))
    for number in numbers:
        session.worker_replied(1, number, part(number), "part", 0.1)
    asked(session, 0.1)
    word = GetElementsReply(
        first_element=most,
        num_elements=0,
        end_of_task=False,
        mode_data=RoundProgress(num_complete=most),
    )
    assert len(session.worker_replied(1, PROGRESS_REQUEST, word, None, 0.2)) == most
    assert asked(session, 0.2) == [], "nothing is used up"
    looks = [session.batch_consumed(1, number) for number in range(together)]
    assert looks == [False] * (together - 1) + [True]
    assert asked(session, 0.3) == [(1, most + number) for number in range(together)]
