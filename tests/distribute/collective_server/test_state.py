"""Meetings, decided without a thread, socket or clock."""

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
    """A hall, and what its workers do: each line of a test is one of them."""

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


def test_a_meeting_takes_place_when_all_have_come_whatever_their_order(play):
    assert play.comes(2, 0, 4) == []
    assert play.comes(0, 0, 1) == []
    assert play.comes(1, 0, 2) == [RankAnswer(rank, 0, CollectiveOutcome(7)) for rank in range(3)]


def test_values_are_combined_in_the_order_of_ranks():
    hall = CollectiveState(NAMES, lambda kind, values: list(values))
    for rank in (2, 0, 1):
        dues = hall.contribute(rank, "life", 0, 0, Contribution("all", "all", rank), 0.0)
    assert dues[0].answer == CollectiveOutcome([0, 1, 2])


def test_a_worker_may_be_at_several_meetings_at_once(play):
    for number in range(4):
        assert play.comes(0, number, number) == []
    assert play.comes(1, 0) == play.comes(1, 1) == []
    assert [due.number for due in play.comes(2, 1, 5)] == [1, 1, 1]
    assert [due.number for due in play.comes(2, 0, 5)] == [0, 0, 0]


def test_what_comes_again_is_answered_again_and_its_value_is_not_looked_at(play):
    play.comes(0, 0, 1)
    assert play.comes(0, 0, 1000) == []
    play.comes(1, 0, 1)
    play.comes(2, 0, 1)
    assert play.comes(0, 0, 1000) == [RankAnswer(0, 0, CollectiveOutcome(3))]
    assert play.comes(2, 0) == [RankAnswer(2, 0, CollectiveOutcome(3))]


def test_a_result_is_kept_until_every_worker_has_it(play):
    play.all_come(0)
    play.comes(0, 1, done=1)
    play.comes(1, 1, done=1)
    assert play.hall.num_results == 1
    play.comes(2, 1, done=1)
    assert play.hall.num_results == 1  # that of the next
    assert play.comes(2, 0, done=1) == []  # late: nobody waits for it


def test_what_does_not_fit_together_is_an_error_of_that_meeting_alone(play):
    play.comes(0, 0, None)
    play.comes(1, 0)
    dues = play.comes(2, 0)
    assert [str(due.answer) for due in dues] == ["nothing to add"] * 3
    assert play.all_come(1)[0].answer == CollectiveOutcome(3)


def test_workers_that_do_not_do_the_same_hear_who_is_where(play):
    play.comes(0, 0, what="step 3 of a dataset")
    dues = play.comes(2, 0, what="a gathering")
    assert [due.rank for due in dues] == [0, 2]
    assert all(isinstance(due.answer, FailedPreconditionError) for due in dues)
    said = str(dues[0].answer)
    assert "worker 0 (a:1) is at step 3 of a dataset" in said
    assert "worker 2 (c:3) is at a gathering" in said
    assert play.comes(1, 0)[0].answer is dues[0].answer


def test_a_worker_that_is_waited_for_in_vain_is_named_to_all_and_to_itself(play):
    play.comes(1, 0)
    play.comes(2, 0)
    play.now += 5.0
    play.all_come(0)
    play.comes(0, 1, what="step 2")
    play.now += 60.0
    play.comes(2, 1, what="step 2")
    words = play.hall.describe_missing(1, play.now)
    assert words == ["worker 1 (b:2) was last heard of 60 s ago, at a sum"]
    dues = play.hall.fail_missing(1, 60.0, play.hall.describe_missing(1, play.now))
    assert sorted(due.rank for due in dues) == [0, 2]
    assert isinstance(dues[0].answer, UnavailableError)
    assert "worker 1 (b:2)" in str(dues[0].answer)
    assert "at step 2" in str(dues[0].answer)
    assert "60 s" in str(dues[0].answer)
    # It comes after all, as after a pause.
    assert play.comes(1, 1, what="step 2") == [RankAnswer(1, 1, dues[0].answer)]


def test_one_that_never_came_is_said_to_be_so(play):
    play.comes(0, 0)
    assert [
        words.partition(" was ")[0] for words in play.hall.describe_missing(0, play.now)
    ] == list(NAMES[1:])
    assert "was not heard of so far" in play.hall.describe_missing(0, play.now)[0]


def test_nobody_lacks_at_a_meeting_that_is_over_and_it_is_not_given_up(play):
    play.all_come(0)
    assert play.hall.describe_missing(0, play.now) == play.hall.describe_missing(7, play.now) == []
    assert play.hall.fail_missing(0, 60.0, play.hall.describe_missing(0, play.now)) == []
    assert play.hall.failure is None


def test_who_waits_for_a_worker_that_is_gone_asks_again_and_hears_it_then(play):
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
    assert "worker 1 (b:2) is gone" in str(first.answer)


def test_who_comes_after_a_worker_was_gone_for_long_hears_it_at_once(play):
    play.all_come(0)
    assert play.hall.disconnected(1, play.now) == []  # nobody waits for it
    play.now += 5.0
    assert "worker 1 (b:2) is gone" in str(play.comes(0, 1)[0].answer)


def test_a_worker_that_comes_back_in_time_was_never_gone(play):
    play.all_come(0)
    play.comes(0, 1)
    play.hall.disconnected(1, play.now)
    play.now += RECONNECT_SECONDS / 2
    assert play.comes(0, 1) == [RankAnswer(0, 1, RetryAfter(RECONNECT_SECONDS / 2))]
    play.comes(1, 1)
    play.now += RECONNECT_SECONDS
    assert play.comes(0, 1) == []
    assert play.comes(2, 1)[0].answer == CollectiveOutcome(3)


def test_one_that_has_brought_what_it_had_to_may_go_in_peace(play):
    play.all_come(0)
    play.comes(1, 1)
    play.comes(0, 1)
    assert play.hall.disconnected(1, play.now) == []
    play.now += 10 * RECONNECT_SECONDS
    assert play.comes(2, 1)[0].answer == CollectiveOutcome(3)


def test_who_leaves_while_others_wait_is_named(play):
    play.all_come(0)
    play.comes(0, 1)
    (due,) = play.hall.leave(2, "first 2")
    assert (due.rank, due.number) == (0, 1)
    assert "worker 2 (c:3) has left" in str(due.answer)


def test_who_comes_to_a_meeting_that_a_worker_left_before_hears_it(play):
    play.all_come(0)
    assert play.hall.leave(2, "first 2") == []
    assert "worker 2 (c:3) has left" in str(play.comes(0, 1)[0].answer)


def test_a_worker_that_was_started_again_ends_the_session_for_all(play):
    play.all_come(0)
    play.comes(0, 1)
    play.comes(1, 1)
    first, second, own = play.comes(1, 1, life="second")[:3]
    assert {first.rank, second.rank, own.rank} == {0, 1}
    assert "worker 1 (b:2) was started again" in str(first.answer)
    assert "started again" in str(play.comes(2, 1)[0].answer)


@pytest.mark.parametrize("end", ["gone", "leave"])
def test_before_all_were_there_a_worker_may_end_and_be_started_again(play, end):
    play.comes(0, 0)
    play.comes(1, 0, 50)
    if end == "gone":
        assert play.hall.disconnected(1, play.now) == []
    else:
        assert play.hall.leave(1, "first 1") == []
    assert play.comes(2, 0) == []
    assert play.hall.describe_missing(0, play.now)[0].startswith("worker 1 (b:2) was not heard of")
    assert play.comes(1, 0, life="second")[0].answer == CollectiveOutcome(3)


def test_before_all_were_there_another_process_takes_the_place_of_the_one_before(play):
    play.comes(1, 0, 50)
    assert play.comes(1, 0, life="second") == play.comes(0, 0) == []
    assert play.comes(2, 0)[0].answer == CollectiveOutcome(3)
    assert play.hall.has_worker(1, "second 1")
    assert not play.hall.has_worker(1, "first 1")


def test_a_worker_that_left_is_not_let_in_again(play):
    play.all_come(0)
    play.hall.leave(1, "first 1")
    assert isinstance(play.comes(1, 1)[0].answer, UnavailableError)


def test_a_hall_is_empty_and_keeps_nothing_when_all_have_left(play):
    play.all_come(0)
    for rank in range(3):
        assert not play.hall.is_empty
        play.hall.leave(rank, f"first {rank}")
    assert play.hall.is_empty
    assert play.hall.num_results == 0
