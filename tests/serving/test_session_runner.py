"""Tests of `SessionRunner`: turns on one thread, and waits of other threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from headrace.serving.connections import PeerLost, ReplyReceived
from headrace.serving.session_runner import SessionRunner

SECONDS = 10.0


class Counting:
    """Counts turns."""

    def __init__(self, pause: float = 60.0, fails: Sequence[int] = (), goes_on: bool = True):
        self.turns = 0
        self.errors: list[BaseException] = []
        self.has_ended = False
        self.runner = SessionRunner("headrace-test", self._turn, self._failed, self._end)
        self._pause, self._fails, self._goes_on = pause, fails, goes_on

    def _turn(self, events: Sequence[ReplyReceived | PeerLost]) -> float:
        with self.runner.lock:
            self.turns += 1
            self.runner.notify()
        if self.turns in self._fails:
            raise OSError(f"turn {self.turns}")
        return self._pause

    def _failed(self, error: BaseException) -> bool:
        self.errors.append(error)
        return self._goes_on

    def _end(self) -> None:
        self.has_ended = True


def test_wake_or_timer_starts_a_turn() -> None:
    counting = Counting()
    runner = counting.runner
    runner.start()
    assert runner.wait(lambda: counting.turns == 1, SECONDS)
    runner.wake()
    assert runner.wait(lambda: counting.turns == 2, SECONDS)
    assert not runner.wait(lambda: counting.turns == 3, 0.05)
    counting._pause = 0.001
    runner.wake()
    assert runner.wait(lambda: counting.turns > 5, SECONDS)
    runner.close(SECONDS)
    assert counting.has_ended
    assert not any(each.name == "headrace-test" for each in threading.enumerate())


@pytest.mark.parametrize("goes_on", [True, False])
def test_session_continues_after_an_error_if_requested(goes_on: bool) -> None:
    counting = Counting(0.0, fails=[2], goes_on=goes_on)
    counting.runner.start()
    assert counting.runner.wait(lambda: counting.turns >= 4, SECONDS) is goes_on
    counting.runner.close(SECONDS)
    assert [str(each) for each in counting.errors] == ["turn 2"]
    assert counting.has_ended
    assert (counting.turns == 2) is not goes_on


def test_check_can_end_a_wait() -> None:
    counting = Counting()
    counting.runner.start()

    def check() -> None:
        if counting.runner.is_closed:
            raise KeyError("closed")

    def close() -> None:
        with counting.runner.lock:
            counting.runner.is_closed = True
            counting.runner.notify(notify_all=True)

    timer = threading.Timer(0.02, close)
    timer.start()
    with pytest.raises(KeyError, match="closed"):
        counting.runner.wait(lambda: False, SECONDS, check)
    counting.runner.close(SECONDS)
    timer.join()
