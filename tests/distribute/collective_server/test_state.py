"""State machine of collectives, without threads, sockets or clock."""

from __future__ import annotations

import pytest

from headrace.distribute.collective_server.state import (
    RECONNECT_SECONDS,
    CollectiveOutcome,
    CollectiveState,
    Contribution,
    RankAnswer,
    RetryAfter,
)
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

NAMES = ("worker 0 (a:1)", "worker 1 (b:2)", "worker 2 (c:3)")


def total(kind, values):
    if None in values:
        raise InvalidArgumentError("nothing to add")
    return sum(values)


class Session:
    """A collective state; each method is an input of a worker."""

    def __init__(self, workers=3):
        self.state = CollectiveState(NAMES[:workers], total)
        self.now = 100.0

    def contribute(self, rank, number, value=1, *, done=0, what="a sum", process="first"):
        brought = Contribution(what, "sum", value)
        answers = self.state.contribute(rank, f"{process} {rank}", number, done, brought, self.now)
        return sorted(answers, key=lambda due: (due.number, due.rank))

    def all_contribute(self, number, *, done=0):
        for rank in range(len(self.state._names)):
            answers = self.contribute(rank, number, done=done)
        return answers


@pytest.fixture
def session():
    return Session()


def test_a_collective_completes_when_all_have_contributed(session):
    assert session.contribute(2, 0, 4) == []
    assert session.contribute(0, 0, 1) == []
    assert session.contribute(1, 0, 2) == [
        RankAnswer(rank, 0, CollectiveOutcome(7)) for rank in range(3)
    ]


def test_values_are_combined_in_the_order_of_ranks():
    hall = CollectiveState(NAMES, lambda kind, values: list(values))
    for rank in (2, 0, 1):
        answers = hall.contribute(rank, "process", 0, 0, Contribution("all", "all", rank), 0.0)
    assert answers[0].answer == CollectiveOutcome([0, 1, 2])


def test_a_worker_may_have_several_collectives_in_flight(session):
    for number in range(4):
        assert session.contribute(0, number, number) == []
    assert session.contribute(1, 0) == session.contribute(1, 1) == []
    assert [due.number for due in session.contribute(2, 1, 5)] == [1, 1, 1]
    assert [due.number for due in session.contribute(2, 0, 5)] == [0, 0, 0]


def test_a_repeated_contribution_is_answered_again_and_ignored(session):
    session.contribute(0, 0, 1)
    assert session.contribute(0, 0, 1000) == []
    session.contribute(1, 0, 1)
    session.contribute(2, 0, 1)
    assert session.contribute(0, 0, 1000) == [RankAnswer(0, 0, CollectiveOutcome(3))]
    assert session.contribute(2, 0) == [RankAnswer(2, 0, CollectiveOutcome(3))]


def test_a_result_is_kept_until_every_worker_acknowledged_it(session):
    session.all_contribute(0)
    session.contribute(0, 1, done=1)
    session.contribute(1, 1, done=1)
    assert session.state.num_results == 1
    session.contribute(2, 1, done=1)
    assert session.state.num_results == 1  # acknowledges the next one
    assert session.contribute(2, 0, done=1) == []  # late: ignored, since no worker waits for it


def test_mismatched_values_fail_only_their_collective(session):
    session.contribute(0, 0, None)
    session.contribute(1, 0)
    answers = session.contribute(2, 0)
    assert [str(due.answer) for due in answers] == ["nothing to add"] * 3
    assert session.all_contribute(1)[0].answer == CollectiveOutcome(3)


def test_workers_with_different_operations_fail_and_name_both(session):
    session.contribute(0, 0, what="step 3 of a dataset")
    answers = session.contribute(2, 0, what="a gathering")
    assert [due.rank for due in answers] == [0, 2]
    assert all(isinstance(due.answer, FailedPreconditionError) for due in answers)
    text = str(answers[0].answer)
    assert "worker 0 (a:1) is in step 3 of a dataset" in text
    assert "worker 2 (c:3) is in a gathering" in text
    assert session.contribute(1, 0)[0].answer is answers[0].answer


def test_a_worker_that_times_out_is_named_to_all_workers(session):
    session.contribute(1, 0)
    session.contribute(2, 0)
    session.now += 5.0
    session.all_contribute(0)
    session.contribute(0, 1, what="step 2")
    session.now += 60.0
    session.contribute(2, 1, what="step 2")
    words = session.state.describe_missing(1, session.now)
    assert words == ["worker 1 (b:2) was last heard from 60 s ago, in a sum"]
    answers = session.state.fail_missing(1, 60.0, session.state.describe_missing(1, session.now))
    assert sorted(due.rank for due in answers) == [0, 2]
    assert isinstance(answers[0].answer, UnavailableError)
    assert "worker 1 (b:2)" in str(answers[0].answer)
    assert "in step 2" in str(answers[0].answer)
    assert "60 s" in str(answers[0].answer)
    # It contributes late, as after a pause.
    assert session.contribute(1, 1, what="step 2") == [RankAnswer(1, 1, answers[0].answer)]


def test_a_worker_that_never_connected_is_described(session):
    session.contribute(0, 0)
    assert [
        words.partition(" has ")[0] for words in session.state.describe_missing(0, session.now)
    ] == list(NAMES[1:])
    assert "has not connected yet" in session.state.describe_missing(0, session.now)[0]


def test_a_complete_collective_has_no_missing_workers(session):
    session.all_contribute(0)
    assert (
        session.state.describe_missing(0, session.now)
        == session.state.describe_missing(7, session.now)
        == []
    )
    assert session.state.fail_missing(0, 60.0, session.state.describe_missing(0, session.now)) == []
    assert session.state.failure is None


def test_a_waiting_worker_retries_and_learns_of_a_lost_one(session):
    session.all_contribute(0)
    session.contribute(0, 1)
    session.contribute(2, 1)
    assert session.state.disconnected(1, session.now) == [
        RankAnswer(0, 1, RetryAfter(RECONNECT_SECONDS)),
        RankAnswer(2, 1, RetryAfter(RECONNECT_SECONDS)),
    ]
    session.now += RECONNECT_SECONDS
    (first, second) = session.contribute(0, 1)
    assert (first.rank, second.rank) == (0, 2)
    assert "worker 1 (b:2) is lost" in str(first.answer)


def test_a_late_contribution_learns_of_a_lost_worker_at_once(session):
    session.all_contribute(0)
    assert session.state.disconnected(1, session.now) == []  # no worker waits for the answer
    session.now += 5.0
    assert "worker 1 (b:2) is lost" in str(session.contribute(0, 1)[0].answer)


def test_a_worker_that_reconnects_in_time_is_not_lost(session):
    session.all_contribute(0)
    session.contribute(0, 1)
    session.state.disconnected(1, session.now)
    session.now += RECONNECT_SECONDS / 2
    assert session.contribute(0, 1) == [RankAnswer(0, 1, RetryAfter(RECONNECT_SECONDS / 2))]
    session.contribute(1, 1)
    session.now += RECONNECT_SECONDS
    assert session.contribute(0, 1) == []
    assert session.contribute(2, 1)[0].answer == CollectiveOutcome(3)


def test_a_worker_may_leave_after_its_contribution(session):
    session.all_contribute(0)
    session.contribute(1, 1)
    session.contribute(0, 1)
    assert session.state.disconnected(1, session.now) == []
    session.now += 10 * RECONNECT_SECONDS
    assert session.contribute(2, 1)[0].answer == CollectiveOutcome(3)


def test_a_worker_that_leaves_while_others_wait_is_named_to_them(session):
    session.all_contribute(0)
    session.contribute(0, 1)
    (due,) = session.state.leave(2, "first 2")
    assert (due.rank, due.number) == (0, 1)
    assert "worker 2 (c:3) has left" in str(due.answer)


def test_a_collective_fails_if_a_worker_has_left_before_it(session):
    session.all_contribute(0)
    assert session.state.leave(2, "first 2") == []
    assert "worker 2 (c:3) has left" in str(session.contribute(0, 1)[0].answer)


def test_a_restarted_worker_fails_the_session_for_all(session):
    session.all_contribute(0)
    session.contribute(0, 1)
    session.contribute(1, 1)
    first, second, own = session.contribute(1, 1, process="second")[:3]
    assert {first.rank, second.rank, own.rank} == {0, 1}
    assert "worker 1 (b:2) was restarted" in str(first.answer)
    assert "was restarted" in str(session.contribute(2, 1)[0].answer)


@pytest.mark.parametrize("end", ["disconnect", "leave"])
def test_a_worker_may_restart_before_the_session_starts(session, end):
    session.contribute(0, 0)
    session.contribute(1, 0, 50)
    if end == "disconnect":
        assert session.state.disconnected(1, session.now) == []
    else:
        assert session.state.leave(1, "first 1") == []
    assert session.contribute(2, 0) == []
    assert session.state.describe_missing(0, session.now)[0].startswith(
        "worker 1 (b:2) has not connected yet"
    )
    assert session.contribute(1, 0, process="second")[0].answer == CollectiveOutcome(3)


def test_a_new_process_replaces_the_old_one_before_the_session_starts(session):
    session.contribute(1, 0, 50)
    assert session.contribute(1, 0, process="second") == session.contribute(0, 0) == []
    assert session.contribute(2, 0)[0].answer == CollectiveOutcome(3)
    assert session.state.has_worker(1, "second 1")
    assert not session.state.has_worker(1, "first 1")


def test_a_worker_that_left_cannot_rejoin(session):
    session.all_contribute(0)
    session.state.leave(1, "first 1")
    assert isinstance(session.contribute(1, 1)[0].answer, UnavailableError)


def test_the_state_is_empty_when_all_workers_have_left(session):
    session.all_contribute(0)
    for rank in range(3):
        assert not session.state.is_empty
        session.state.leave(rank, f"first {rank}")
    assert session.state.is_empty
    assert session.state.num_results == 0
