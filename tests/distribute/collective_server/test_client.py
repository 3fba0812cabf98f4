"""A worker's end, with a channel that says what the test says and a clock that the test moves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.distribute.collective_server.client import CollectiveClient
from headrace.distribute.collective_server.messages import (
    AwaitSessionFailure,
    CollectiveFailed,
    CollectiveResult,
    Contribute,
    GetMissingWorkers,
    LeaveSession,
    MissingWorkers,
    RetryContribution,
)
from headrace.distribute.collective_server.state import ANY
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.transport.channel import Reply


class Line:
    """A channel: keeps what was sent; `answers` are functions of the time that pass it on."""

    def __init__(self, clock):
        self.clock, self.sent, self.script, self.closed = clock, [], [], False

    def send(self, message, buffers=()):
        self.sent.append(message)
        return len(self.sent)

    def receive(self, timeout):
        if not self.script:
            self.clock.advance(timeout)
            return None
        return self.script.pop(0)()

    def close(self):
        self.closed = True

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def reply(self, ticket, message):
        self.script.append(lambda: Reply(ticket, message, ()))

    def lose(self, refused=True):
        def lost():
            error = UnavailableError("connection refused" if refused else "silent")
            error.refused = refused
            raise error

        self.script.append(lost)


@pytest.fixture
def line(clock):
    return Line(clock)


@pytest.fixture
def member(line, clock):
    found = CollectiveClient(
        line, rank=1, names=["worker 0", "worker 1"], timeout=60.0, clock=clock
    )
    yield found
    found.closer.close()


YES = CollectiveResult(session_id="here", flag=True, arrays=())


def test_results_come_in_any_order_and_each_is_taken_once(line, member):
    first, second = member.start("a", ANY, True), member.start("b", ANY, True)
    line.reply(2, YES)
    line.reply(1, YES)
    assert member.wait(second).flag
    assert member.wait(first).flag
    assert [each.number for each in line.of(Contribute)] == [0, 1]
    assert len(line.of(AwaitSessionFailure)) == 1
    third = member.start("c", ANY)
    assert line.sent[-1].acknowledged == 2
    assert line.sent[-1].session_id == "here"
    member.discard([third])
    line.reply(len(line.sent), YES)
    line.reply(len(line.sent) + 1, YES)
    member.run("d", ANY)


def test_before_the_first_result_a_refusal_is_no_reason_to_give_up(line, member, clock):
    number = member.start("the beginning", ANY)
    begun = clock()
    for _ in range(5):
        line.lose()
        line.script.append(lambda: clock.advance(1.0) and None)
    with pytest.raises(UnavailableError, match=r"worker 0.* did not answer .*connection refused"):
        member.wait(number)
    assert clock() - begun >= 60.0
    assert len(line.of(Contribute)) > 3


def test_after_it_two_refusals_in_a_row_are_the_end(line, member):
    line.reply(1, YES)
    member.run("the beginning", ANY)
    number = member.start("a sum", ANY)
    line.lose()
    line.lose()
    with pytest.raises(UnavailableError, match="worker 0, where the workers meet, is gone"):
        member.wait(number)
    with pytest.raises(UnavailableError, match="is gone"):
        member.start("more", ANY)


def test_what_was_under_way_is_sent_again_after_a_loss_with_all_else_as_it_was(line, member):
    line.reply(1, YES)
    member.run("the beginning", ANY)
    first, second = member.start("a", ANY, True), member.start("b", ANY)
    before = line.of(Contribute)[-2:]
    line.lose(refused=False)
    line.script.append(lambda: None)
    line.script.append(lambda: Reply(len(line.sent) - 1, YES, ()))
    line.script.append(lambda: Reply(len(line.sent) - 1, YES, ()))
    assert member.wait(first).flag
    again = line.of(Contribute)[-2:]
    assert [each.attempt for each in again] == [4, 5]
    assert [replace(each, attempt=0) for each in again] == [
        replace(each, attempt=0) for each in before
    ]
    assert member.wait(second).flag


def test_one_that_is_to_come_again_does_so_after_that_time(line, member, clock):
    line.reply(1, YES)
    member.run("the beginning", ANY)
    number = member.start("a", ANY)
    asked, begun = len(line.sent), clock()
    line.reply(asked, RetryContribution(seconds=0.5))
    line.script.append(lambda: clock.advance(0.5) and None)
    line.script.append(lambda: Reply(len(line.sent), YES, ()))
    assert member.wait(number).flag
    assert clock() - begun == 0.5
    assert len(line.sent) == asked + 1


def test_an_error_of_one_meeting_is_raised_there_and_the_next_takes_place(line, member):
    line.reply(1, CollectiveFailed(error="InvalidArgumentError", text="shapes", is_permanent=False))
    with pytest.raises(InvalidArgumentError, match="shapes"):
        member.run("a", ANY)
    line.reply(2, YES)
    assert member.run("b", ANY).flag


def test_the_end_of_the_session_is_raised_by_whatever_comes_next(line, member):
    line.reply(1, YES)
    member.run("the beginning", ANY)
    number = member.start("a", ANY)
    line.reply(
        2, CollectiveFailed(error="UnavailableError", text="worker 7 is gone", is_permanent=True)
    )
    for _ in range(2):
        with pytest.raises(UnavailableError, match="worker 7 is gone"):
            member.wait(number)


def test_who_waits_too_long_has_the_session_ended(line, member, clock, caplog):
    number = member.start("a", ANY)
    line.script.append(lambda: clock.advance(10.0) and None)
    line.script.append(lambda: Reply(2, MissingWorkers(descriptions=("worker 2 is slow",)), ()))
    line.script.append(lambda: clock.advance(50.0) and None)
    ended = CollectiveFailed(
        error="UnavailableError", text="worker 2 was given up", is_permanent=True
    )
    line.script.append(lambda: Reply(1, ended, ()))
    with pytest.raises(UnavailableError, match="worker 2 was given up"):
        member.wait(number)
    assert [(each.ends_session, each.waited) for each in line.of(GetMissingWorkers)] == [
        (False, 10.0),
        (True, 60.0),
    ]
    assert "worker 1 has waited for 10 s, of 60, for: worker 2 is slow" in caplog.text


def test_a_first_worker_that_stands_still_is_named_after_ten_seconds(line, member, caplog):
    number = member.start("a", ANY)
    with pytest.raises(UnavailableError, match="worker 0, where the workers meet, did not answer"):
        member.wait(number)
    assert "worker 1 has waited for 10 s, of 60, for: worker 0 does not answer" in caplog.text


def test_an_answer_that_was_lost_on_its_way_is_asked_for_when_nobody_is_missing(
    line, member, clock
):
    number = member.start("a", ANY)
    line.script.append(lambda: clock.advance(10.0) and None)
    line.script.append(lambda: Reply(2, MissingWorkers(descriptions=()), ()))
    line.script.append(lambda: Reply(3, YES, ()))
    assert member.wait(number).flag
    assert [each.number for each in line.of(Contribute)] == [0, 0]


def test_an_answer_that_an_interrupted_look_took_off_the_channel_is_asked_for_at_once(
    line, member, clock
):
    def interrupted():
        raise KeyboardInterrupt

    number, begun = member.start("a", ANY), clock()
    line.script.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        member.poll()
    line.script.append(lambda: Reply(2, YES, ()))
    assert member.wait(number).flag
    assert clock() == begun
    assert [each.number for each in line.of(Contribute)] == [0, 0]


def test_time_in_which_the_process_stood_still_is_no_waiting(line, member, clock):
    number = member.start("a", ANY)
    line.script.append(lambda: clock.advance(3600.0) and None)
    line.reply(1, YES)
    assert member.wait(number).flag
    assert not any(each.ends_session for each in line.of(GetMissingWorkers))


def test_who_leaves_says_so_once_and_can_do_nothing_more(line, member):
    member.closer.close()
    member.closer.close()
    assert len(line.of(LeaveSession)) == 1
    assert line.closed
    with pytest.raises(FailedPreconditionError, match="was closed"):
        member.start("a", ANY)
