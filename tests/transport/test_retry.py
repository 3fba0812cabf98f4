from __future__ import annotations

import itertools
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    NotFoundError,
    UnavailableError,
)
from headrace.testing import ManualClock
from headrace.transport.address import lasting_port
from headrace.transport.retry import RetryPolicy, delays, retry


class ScriptedPeer:
    """Answers from a list of answers and errors, each after the time it is said to take."""

    def __init__(self, clock, *script):
        self.clock = clock
        self.script = iter(script)
        self.timeouts = []

    def ask(self, timeout):
        self.timeouts.append(timeout)
        seconds, answer = next(self.script)
        self.clock.advance(seconds)
        if isinstance(answer, Exception):
            raise answer
        return answer


def call(peer, policy, **options):
    clock = peer.clock
    return retry(
        peer.ask,
        policy,
        whom="the dispatcher at 127.0.0.1:5050",
        attempt_timeout=5.0,
        clock=clock,
        sleep=clock.advance,
        chance=lambda: 0.0,
        **options,
    )


def test_delays_grow_up_to_the_largest():
    policy = RetryPolicy(first_delay=1, backoff=2, max_delay=5, jitter=0)
    assert list(itertools.islice(delays(policy, lambda: 0.5), 5)) == [1, 2, 4, 5, 5]


@given(
    first=st.floats(0, 10),
    backoff=st.floats(1, 10),
    most=st.floats(0, 10),
    jitter=st.floats(0, 1),
    chances=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50),
)
def test_a_delay_is_between_zero_and_the_largest(first, backoff, most, jitter, chances):
    policy = RetryPolicy(first_delay=first, backoff=backoff, max_delay=most, jitter=jitter)
    chance = iter(chances)
    for delay in itertools.islice(delays(policy, lambda: next(chance)), len(chances)):
        assert 0 <= delay <= most


@pytest.mark.parametrize(
    ("name", "value"),
    [("deadline", -1), ("first_delay", -0.1), ("backoff", 0.9), ("jitter", 1.5), ("max_delay", -1)],
)
def test_a_policy_that_makes_no_sense_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        RetryPolicy(**{name: value})


def test_a_call_is_repeated_until_it_is_answered(clock: ManualClock):
    gone, late = UnavailableError("gone"), DeadlineExceededError("late")
    peer = ScriptedPeer(clock, (0, gone), (5, late), (1, 4))
    began = clock()
    assert call(peer, RetryPolicy()) == 4
    assert clock() - began == pytest.approx(5 + 1 + 0.05 + 0.065)


def test_waiting_leaves_the_random_state_of_the_program(clock: ManualClock):
    state = random.getstate()
    peer = ScriptedPeer(clock, (0, UnavailableError("connection refused")), (0, "yes"))
    waits = {"clock": clock, "sleep": clock.advance}
    assert retry(peer.ask, RetryPolicy(), whom="it", attempt_timeout=5.0, **waits) == "yes"
    assert lasting_port()
    assert random.getstate() == state


def test_an_answer_that_is_an_error_is_not_repeated(clock: ManualClock):
    peer = ScriptedPeer(clock, (0, NotFoundError("no such dataset")))
    with pytest.raises(NotFoundError, match="no such dataset"):
        call(peer, RetryPolicy())


def test_at_the_deadline_the_error_tells_the_story(clock: ManualClock):
    peer = ScriptedPeer(clock, *[(0, UnavailableError("connection refused"))] * 1000)
    began = clock()
    with pytest.raises(UnavailableError) as caught:
        call(peer, RetryPolicy(deadline=30))
    assert 25 < clock() - began < 30
    text = str(caught.value)
    assert "the dispatcher at 127.0.0.1:5050 did not answer for 30 s" in text
    assert "is it running" in text
    assert "connection refused" in text


def test_no_try_lasts_beyond_the_deadline(clock: ManualClock):
    late = DeadlineExceededError("late")
    peer = ScriptedPeer(clock, (5, late), (2.9, late))
    with pytest.raises(UnavailableError):
        call(peer, RetryPolicy(deadline=8, first_delay=0.1))
    assert peer.timeouts == pytest.approx([5, 2.9])


def test_a_call_that_is_stopped_begins_no_other_try(clock: ManualClock):
    stop = threading.Event()
    stop.set()
    peer = ScriptedPeer(clock)
    with pytest.raises(CancelledError, match="called off after 0 tries"):
        call(peer, RetryPolicy(), stop=stop.wait)
    assert peer.timeouts == []


def test_who_waits_is_warned_once_within_two_seconds(clock: ManualClock):
    gone = UnavailableError("connection refused")
    said = []
    peer = ScriptedPeer(clock, *[(1, gone)] * 20, (0, 4))
    began = clock()
    answer = call(
        peer, RetryPolicy(deadline=60), say=lambda text: said.append((clock() - began, text))
    )
    assert answer == 4
    ((at, text),) = said
    assert 1.5 <= at <= 2.5
    assert "the dispatcher at 127.0.0.1:5050 has not answered for 2 s" in text
    assert "is asked for 60 s in all" in text
    assert "connection refused" in text


def test_a_long_wait_is_said_again_each_minute(clock: ManualClock):
    said = []
    peer = ScriptedPeer(clock, *[(1, UnavailableError("gone"))] * 60, (0, 4))
    began = clock()
    assert (
        call(peer, RetryPolicy(deadline=3600), say=lambda text: said.append(clock() - began)) == 4
    )
    assert [round(at, -1) for at in said] == [0, 60, 120]


def test_a_wait_of_less_is_not_worth_a_word(clock: ManualClock):
    said = []
    peer = ScriptedPeer(clock, *[(0.3, UnavailableError("gone"))] * 3, (0, 4))
    assert call(peer, RetryPolicy(deadline=60), say=said.append) == 4
    assert said == []
