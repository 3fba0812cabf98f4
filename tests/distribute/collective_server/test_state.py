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


class Play:
    """A collective state; each method is an input of a worker."""

    def __init__(self, workers=3):
        self.hall = CollectiveState(NAMES[:workers], total)
        self.now = 100.0

    def comes(self, rank, number, value=1, *, done=0, what="a sum", life="first"):
        brought = Contribution(what, "sum", value)
        dues = self.hall.contribute(rank, f"{life} {rank}", number, done, brought, self.now)
        return sorted(dues, key=lambda due: (due.number, due.rank))

    def all_come(self, number, *, done=0):
        for rank in range(len(self.hall._names)):
            dues = self.comes(rank, number, done=done)
        return dues


@pytest.fixture
def play():
    return Play()


def test_a_collective_completes_when_all_have_contributed(play):
    assert play.comes(2, 0, 4) == []
    assert play.comes(0, 0, 1) == []
    assert play.comes(1, 0, 2) == [RankAnswer(rank, 0, CollectiveOutcome(7)) for rank in range(3)]


def test_values_are_combined_in_the_order_of_ranks():
    hall = CollectiveState(NAMES, lambda kind, values: list(values))
    for rank in (2, 0, 1):
        dues = hall.contribute(rank, "life", 0, 0, Contribution("all", "all", rank), 0.0)
    assert dues[0].answer == CollectiveOutcome([0, 1, 2])


def test_a_worker_may_have_several_collectives_in_flight(play):
    for number in range(4):
        assert play.comes(0, number, number) == []
    assert play.comes(1, 0) == play.comes(1, 1) == []
    assert [due.number for due in play.comes(2, 1, 5)] == [1, 1, 1]
    assert [due.number for due in play.comes(2, 0, 5)] == [0, 0, 0]


def test_a_repeated_contribution_is_answered_again_and_ignored(play):
    play.comes(0, 0, 1)
    assert play.comes(0, 0, 1000) == []
    play.comes(1, 0, 1)
    play.comes(2, 0, 1)
    assert play.comes(0, 0, 1000) == [RankAnswer(0, 0, CollectiveOutcome(3))]
    assert play.comes(2, 0) == [RankAnswer(2, 0, CollectiveOutcome(3))]


def test_a_result_is_kept_until_every_worker_acknowledged_it(play):
    play.all_come(0)
    play.comes(0, 1, done=1)
    play.comes(1, 1, done=1)
    assert play.hall.num_results == 1
    play.comes(2, 1, done=1)
    assert play.hall.num_results == 1  # acknowledges the next one
    assert play.comes(2, 0, done=1) == []  # late: ignored, since no worker waits for it


def test_mismatched_values_fail_only_their_collective(play):
    play.comes(0, 0, None)
    play.comes(1, 0)
    dues = play.comes(2, 0)
    assert [str(due.answer) for due in dues] == ["nothing to add"] * 3
    assert play.all_come(1)[0].answer == CollectiveOutcome(3)


def test_workers_with_different_operations_fail_and_name_both(play):
    play.comes(0, 0, what="step 3 of a dataset")
    dues = play.comes(2, 0, what="a gathering")
    assert [due.rank for due in dues] == [0, 2]
    assert all(isinstance(due.answer, FailedPreconditionError) for due in dues)
    said = str(dues[0].answer)
    assert "worker 0 (a:1) is in step 3 of a dataset" in said
    assert "worker 2 (c:3) is at a gathering" in said
    assert play.comes(1, 0)[0].answer is dues[0].answer


def test_a_worker_that_times_out_is_named_to_all_workers(play):
    play.comes(1, 0)
    play.comes(2, 0)
    play.now += 5.0
    play.all_come(0)
    play.comes(0, 1, what="step 2")
    play.now += 60.0
    play.comes(2, 1, what="step 2")
    words = play.hall.describe_missing(1, play.now)
    assert words == ["worker 1 (b:2) was last heard from 60 s ago, in a sum"]
    dues = play.hall.fail_missing(1, 60.0, play.hall.describe_missing(1, play.now))
    assert sorted(due.rank for due in dues) == [0, 2]
    assert isinstance(dues[0].answer, UnavailableError)
    assert "worker 1 (b:2)" in str(dues[0].answer)
    assert "at step 2" in str(dues[0].answer)
    assert "60 s" in str(dues[0].answer)
    # It contributes late, as after a pause.
    assert play.comes(1, 1, what="step 2") == [RankAnswer(1, 1, dues[0].answer)]


def test_a_worker_that_never_connected_is_described(play):
    play.comes(0, 0)
    assert [
        words.partition(" was ")[0] for words in play.hall.describe_missing(0, play.now)
    ] == list(NAMES[1:])
    assert "was not heard of so far" in play.hall.describe_missing(0, play.now)[0]


def test_a_complete_collective_has_no_missing_workers(play):
    play.all_come(0)
    assert play.hall.describe_missing(0, play.now) == play.hall.describe_missing(7, play.now) == []
    assert play.hall.fail_missing(0, 60.0, play.hall.describe_missing(0, play.now)) == []
    assert play.hall.failure is None


def test_a_waiting_worker_retries_and_learns_of_a_lost_one(play):
    play.all_come(0)
    play.comes(0, 1)
    play.comes(2, 1)
    assert play.hall.disconnected(1, play.now) == [
        RankAnswer(0, 1, RetryAfter(RECONNECT_SECONDS)),
        RankAnswer(2, 1, RetryAfter(RECONNECT_SECONDS)),
    ]
    play.now += RECONNECT_SECONDS
    (first, second) = play.comes(0, 1)
    assert (first.rank, second.rank) == (0, 2)
    assert "worker 1 (b:2) is lost" in str(first.answer)


def test_a_late_contribution_learns_of_a_lost_worker_at_once(play):
    play.all_come(0)
    assert play.hall.disconnected(1, play.now) == []  # no worker waits for the answer
    play.now += 5.0
    assert "worker 1 (b:2) is lost" in str(play.comes(0, 1)[0].answer)


def test_a_worker_that_reconnects_in_time_is_not_lost(play):
    play.all_come(0)
    play.comes(0, 1)
    play.hall.disconnected(1, play.now)
    play.now += RECONNECT_SECONDS / 2
    assert play.comes(0, 1) == [RankAnswer(0, 1, RetryAfter(RECONNECT_SECONDS / 2))]
    play.comes(1, 1)
    play.now += RECONNECT_SECONDS
    assert play.comes(0, 1) == []
    assert play.comes(2, 1)[0].answer == CollectiveOutcome(3)


def test_a_worker_may_leave_after_its_contribution(play):
    play.all_come(0)
    play.comes(1, 1)
    play.comes(0, 1)
    assert play.hall.disconnected(1, play.now) == []
    play.now += 10 * RECONNECT_SECONDS
    assert play.comes(2, 1)[0].answer == CollectiveOutcome(3)


def test_a_worker_that_leaves_while_others_wait_is_named_to_them(play):
    play.all_come(0)
    play.comes(0, 1)
    (due,) = play.hall.leave(2, "first 2")
    assert (due.rank, due.number) == (0, 1)
    assert "worker 2 (c:3) has left" in str(due.answer)


def test_a_collective_fails_if_a_worker_has_left_before_it(play):
    play.all_come(0)
    assert play.hall.leave(2, "first 2") == []
    assert "worker 2 (c:3) has left" in str(play.comes(0, 1)[0].answer)


def test_a_restarted_worker_fails_the_session_for_all(play):
    play.all_come(0)
    play.comes(0, 1)
    play.comes(1, 1)
    first, second, own = play.comes(1, 1, life="second")[:3]
    assert {first.rank, second.rank, own.rank} == {0, 1}
    assert "worker 1 (b:2) was restarted" in str(first.answer)
    assert "started again" in str(play.comes(2, 1)[0].answer)


@pytest.mark.parametrize("end", ["gone", "leave"])
def test_a_worker_may_restart_before_the_session_starts(play, end):
    play.comes(0, 0)
    play.comes(1, 0, 50)
    if end == "gone":
        assert play.hall.disconnected(1, play.now) == []
    else:
        assert play.hall.leave(1, "first 1") == []
    assert play.comes(2, 0) == []
    assert play.hall.describe_missing(0, play.now)[0].startswith("worker 1 (b:2) was not heard of")
    assert play.comes(1, 0, life="second")[0].answer == CollectiveOutcome(3)


def test_a_new_process_replaces_the_old_one_before_the_session_starts(play):
    play.comes(1, 0, 50)
    assert play.comes(1, 0, life="second") == play.comes(0, 0) == []
    assert play.comes(2, 0)[0].answer == CollectiveOutcome(3)
    assert play.hall.has_worker(1, "second 1")
    assert not play.hall.has_worker(1, "first 1")


def test_a_worker_that_left_cannot_rejoin(play):
    play.all_come(0)
    play.hall.leave(1, "first 1")
    assert isinstance(play.comes(1, 1)[0].answer, UnavailableError)


def test_the_state_is_empty_when_all_workers_have_left(play):
    play.all_come(0)
    for rank in range(3):
        assert not play.hall.is_empty
        play.hall.leave(rank, f"first {rank}")
    assert play.hall.is_empty
    assert play.hall.num_results == 0
