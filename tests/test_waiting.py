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
from headrace.transport.address import find_stable_port
from headrace.waiting import Backoff, WaitWarningLimiter, retry


class ScriptedPeer:
    """Replies with given results and errors, each after a given time."""

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


def call(peer, deadline=30.0, **options):
    clock = peer.clock
    return retry(
        peer.ask,
        deadline=deadline,
        peer="the dispatcher at 127.0.0.1:5050",
        attempt_timeout=5.0,
        clock=clock,
        sleep=clock.advance,
        chance=lambda: 0.0,
        **options,
    )


def test_pauses_grow_up_to_the_maximum():
    backoff = Backoff(1, longest=5)
    assert list(itertools.islice(backoff, 5)) == [1, 2, 4, 5, 5]
    backoff.reset()
    assert next(backoff) == 1


@given(
    first=st.floats(0, 10),
    factor=st.floats(1, 10),
    longest=st.floats(0, 10),
    jitter=st.floats(0, 1),
    chances=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50),
)
def test_pause_is_between_zero_and_the_maximum(first, factor, longest, jitter, chances):
    chance = iter(chances)
    backoff = Backoff(
        first, longest=longest, factor=factor, jitter=jitter, chance=lambda: next(chance)
    )
    for pause in itertools.islice(backoff, len(chances)):
        assert 0 <= pause <= longest


def test_call_is_retried_until_it_succeeds(clock: ManualClock):
    gone, late = UnavailableError("gone"), DeadlineExceededError("late")
    peer = ScriptedPeer(clock, (0, gone), (5, late), (1, 4))
    began = clock()
    assert call(peer) == 4
    assert clock() - began == pytest.approx(5 + 1 + 0.05 + 0.065)


def test_retry_does_not_change_the_global_random_state(clock: ManualClock):
    state = random.getstate()
    peer = ScriptedPeer(clock, (0, UnavailableError("connection refused")), (0, "yes"))
    waits = {"clock": clock, "sleep": clock.advance}
    assert retry(peer.ask, deadline=30.0, peer="it", attempt_timeout=5.0, **waits) == "yes"
    assert find_stable_port()
    assert random.getstate() == state


def test_other_errors_are_not_retried(clock: ManualClock):
    peer = ScriptedPeer(clock, (0, NotFoundError("no such dataset")))
    with pytest.raises(NotFoundError, match="no such dataset"):
        call(peer)


def test_error_at_the_deadline_names_peer_and_last_error(clock: ManualClock):
    peer = ScriptedPeer(clock, *[(0, UnavailableError("connection refused"))] * 1000)
    began = clock()
    with pytest.raises(UnavailableError) as caught:
        call(peer, 30)
    assert 25 < clock() - began < 30
    text = str(caught.value)
    assert "the dispatcher at 127.0.0.1:5050 did not reply within 30 s" in text
    assert "is it running" in text
    assert "connection refused" in text


def test_no_attempt_lasts_beyond_the_deadline(clock: ManualClock):
    late = DeadlineExceededError("late")
    peer = ScriptedPeer(clock, (5, late), (2.95, late))
    with pytest.raises(UnavailableError):
        call(peer, 8)
    assert peer.timeouts == pytest.approx([5, 2.95])


def test_stopped_call_is_not_retried(clock: ManualClock):
    stop = threading.Event()
    stop.set()
    peer = ScriptedPeer(clock)
    with pytest.raises(CancelledError, match="cancelled after 0 tries"):
        call(peer, stop=stop.wait)
    assert peer.timeouts == []


def test_stoppable_call_waits_between_attempts(clock: ManualClock):
    peer = ScriptedPeer(clock, *[(0, UnavailableError("gone"))] * 2, (0, 4))
    began = clock()

    def stop(seconds: float) -> bool:
        clock.advance(seconds)
        return False

    assert call(peer, stop=stop) == 4
    assert clock() - began == pytest.approx(0.05 + 0.065)


def test_first_retry_warning_comes_within_two_seconds(clock: ManualClock):
    gone = UnavailableError("connection refused")
    said = []
    peer = ScriptedPeer(clock, *[(1, gone)] * 20, (0, 4))
    began = clock()
    answer = call(peer, 60, warn=lambda text: said.append((clock() - began, text)))
    assert answer == 4
    ((at, text),) = said
    assert 1.5 <= at <= 2.5
    assert "no reply from the dispatcher at 127.0.0.1:5050 for 2 s" in text
    assert "retrying for 60 s in total" in text
    assert "connection refused" in text


def test_retry_warning_repeats_each_minute(clock: ManualClock):
    said = []
    peer = ScriptedPeer(clock, *[(1, UnavailableError("gone"))] * 60, (0, 4))
    began = clock()
    assert call(peer, 3600, warn=lambda text: said.append(clock() - began)) == 4
    assert [round(at, -1) for at in said] == [0, 60, 120]


def test_short_wait_gives_no_warning(clock: ManualClock):
    said = []
    peer = ScriptedPeer(clock, *[(0.3, UnavailableError("gone"))] * 3, (0, 4))
    assert call(peer, 60, warn=said.append) == 4
    assert said == []


def warned(warnings: WaitWarningLimiter, until: int) -> list[int]:
    """Return the seconds of a wait at which warnings are due."""
    return [waited for waited in range(until) if warnings.should_warn(waited)]


def test_wait_warnings_are_due_after_10_s_and_then_each_minute() -> None:
    assert warned(WaitWarningLimiter(), 200) == [10, 70, 130, 190]


def test_late_warning_delays_the_next_one_by_a_minute() -> None:
    warnings = WaitWarningLimiter()
    assert warnings.should_warn(45.0)
    assert warnings.next_warning_after == 105.0


def test_reset_starts_a_new_wait() -> None:
    warnings = WaitWarningLimiter()
    assert warned(warnings, 30) == [10]
    warnings.reset()
    assert warned(warnings, 30) == [10]
