"""Collective client, with a scripted channel and a simulated clock."""

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


class ScriptedChannel:
    """A channel that records requests; `answers` are functions of the time."""

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

    def sent_of_kind(self, kind):
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
    return ScriptedChannel(clock)


@pytest.fixture
def member(line, clock):
    found = CollectiveClient(
        line, rank=1, names=["worker 0", "worker 1"], timeout=60.0, clock=clock
    )
    yield found
    found.closer.close()


YES = CollectiveResult(session_id="here", flag=True, arrays=())


def test_results_arrive_in_any_order_and_are_taken_once(line, member):
    first, second = member.start("a", ANY, True), member.start("b", ANY, True)
    line.reply(2, YES)
    line.reply(1, YES)
    assert member.wait(second).flag
    assert member.wait(first).flag
    assert [each.number for each in line.sent_of_kind(Contribute)] == [0, 1]
    assert len(line.sent_of_kind(AwaitSessionFailure)) == 1
    third = member.start("c", ANY)
    assert line.sent[-1].acknowledged == 2
    assert line.sent[-1].session_id == "here"
    member.discard([third])
    line.reply(len(line.sent), YES)
    line.reply(len(line.sent) + 1, YES)
    member.run("d", ANY)


def test_refused_connections_before_the_first_result_are_retried(line, member, clock):
    number = member.start("the beginning", ANY)
    begun = clock()
    for _ in range(5):
        line.lose()
        line.script.append(lambda: clock.advance(1.0) and None)
    with pytest.raises(UnavailableError, match=r"worker 0.* has not replied .*connection refused"):
        member.wait(number)
    assert clock() - begun >= 60.0
    assert len(line.sent_of_kind(Contribute)) > 3


def test_two_refused_connections_after_a_result_fail_the_session(line, member):
    line.reply(1, YES)
    member.run("the beginning", ANY)
    number = member.start("a sum", ANY)
    line.lose()
    line.lose()
    with pytest.raises(
        UnavailableError, match="worker 0, which runs the collective server, is lost"
    ):
        member.wait(number)
    with pytest.raises(UnavailableError, match="is lost"):
        member.start("more", ANY)


def test_pending_contributions_are_resent_after_a_lost_connection(line, member):
    line.reply(1, YES)
    member.run("the beginning", ANY)
    first, second = member.start("a", ANY, True), member.start("b", ANY)
    before = line.sent_of_kind(Contribute)[-2:]
    line.lose(refused=False)
    line.script.append(lambda: None)
    line.script.append(lambda: Reply(len(line.sent) - 1, YES, ()))
    line.script.append(lambda: Reply(len(line.sent) - 1, YES, ()))
    assert member.wait(first).flag
    again = line.sent_of_kind(Contribute)[-2:]
    assert [each.attempt for each in again] == [4, 5]
    assert [replace(each, attempt=0) for each in again] == [
        replace(each, attempt=0) for each in before
    ]
    assert member.wait(second).flag


def test_a_contribution_is_retried_after_the_requested_delay(line, member, clock):
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


def test_an_error_of_one_collective_does_not_affect_the_next(line, member):
    line.reply(1, CollectiveFailed(error="InvalidArgumentError", text="shapes", is_permanent=False))
    with pytest.raises(InvalidArgumentError, match="shapes"):
        member.run("a", ANY)
    line.reply(2, YES)
    assert member.run("b", ANY).flag


def test_a_failed_session_raises_in_the_next_call(line, member):
    line.reply(1, YES)
    member.run("the beginning", ANY)
    number = member.start("a", ANY)
    line.reply(
        2, CollectiveFailed(error="UnavailableError", text="worker 7 is lost", is_permanent=True)
    )
    for _ in range(2):
        with pytest.raises(UnavailableError, match="worker 7 is lost"):
            member.wait(number)


def test_a_wait_beyond_the_timeout_fails_the_session(line, member, clock, caplog):
    number = member.start("a", ANY)
    line.script.append(lambda: clock.advance(10.0) and None)
    line.script.append(lambda: Reply(2, MissingWorkers(descriptions=("worker 2 is slow",)), ()))
    line.script.append(lambda: clock.advance(50.0) and None)
    ended = CollectiveFailed(error="UnavailableError", text="worker 2 timed out", is_permanent=True)
    line.script.append(lambda: Reply(1, ended, ()))
    with pytest.raises(UnavailableError, match="worker 2 timed out"):
        member.wait(number)
    assert [(each.ends_session, each.waited) for each in line.sent_of_kind(GetMissingWorkers)] == [
        (False, 10.0),
        (True, 60.0),
    ]
    assert "worker 1 has been waiting for 10 s (timeout 60 s): worker 2 is slow" in caplog.text


def test_a_hanging_first_worker_is_named_after_ten_seconds(line, member, caplog):
    number = member.start("a", ANY)
    with pytest.raises(
        UnavailableError, match="worker 0, which runs the collective server, has not replied"
    ):
        member.wait(number)
    assert (
        "worker 1 has been waiting for 10 s (timeout 60 s): worker 0 has not replied" in caplog.text
    )


def test_a_lost_reply_is_requested_again_if_no_worker_is_missing(line, member, clock):
    number = member.start("a", ANY)
    line.script.append(lambda: clock.advance(10.0) and None)
    line.script.append(lambda: Reply(2, MissingWorkers(descriptions=()), ()))
    line.script.append(lambda: Reply(3, YES, ()))
    assert member.wait(number).flag
    assert [each.number for each in line.sent_of_kind(Contribute)] == [0, 0]


def test_a_reply_lost_to_an_interruption_is_requested_again(line, member, clock):
    def interrupted():
        raise KeyboardInterrupt

    number, begun = member.start("a", ANY), clock()
    line.script.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        member.poll()
    line.script.append(lambda: Reply(2, YES, ()))
    assert member.wait(number).flag
    assert clock() == begun
    assert [each.number for each in line.sent_of_kind(Contribute)] == [0, 0]


def test_time_while_the_process_is_paused_does_not_count(line, member, clock):
    number = member.start("a", ANY)
    line.script.append(lambda: clock.advance(3600.0) and None)
    line.reply(1, YES)
    assert member.wait(number).flag
    assert not any(each.ends_session for each in line.sent_of_kind(GetMissingWorkers))


def test_a_closed_client_leaves_once_and_rejects_calls(line, member):
    member.closer.close()
    member.closer.close()
    assert len(line.sent_of_kind(LeaveSession)) == 1
    assert line.closed
    with pytest.raises(FailedPreconditionError, match="is closed"):
        member.start("a", ANY)
