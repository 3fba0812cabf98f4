"""Warnings of long waits, after 10 s and then once a minute."""

from __future__ import annotations

import threading
from threading import Condition

import pytest

from headrace.execution.threads import WaitWarning


class FakeCondition(Condition):
    """A condition that is never notified: waiting moves the clock."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.clock[0] += timeout
        return False


def test_a_warning_is_logged_after_ten_seconds_and_then_each_minute():
    clock = [100.0]
    message: list[tuple[float, str]] = []
    wait = WaitWarning(
        "map (train.py:3)", lambda: clock[0], lambda text: message.append((clock[0], text))
    )
    changed = FakeCondition(clock)
    for _ in range(3):
        wait.wait(changed)
    assert [when for when, _ in message] == [110.0, 170.0, 230.0]
    assert "map (train.py:3)" in message[0][1]
    assert "10 s" in message[0][1]
    assert "130 s" in message[2][1]


def test_a_short_wait_logs_nothing():
    clock = [0.0]
    message: list[str] = []
    wait = WaitWarning("x", lambda: clock[0], message.append)
    clock[0] = 9.9
    wait.warn_if_due()
    assert message == []


class InterruptedCondition(threading.Condition):
    """A signal arrives while the lock is reacquired after a wait, or just after it."""

    def __init__(self, is_free: bool) -> None:
        super().__init__()
        self._frees = is_free

    def wait(self, timeout=None):
        if self._frees:
            self.release()
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_free", [True, False])
def test_an_interrupted_wait_raises_the_interruption(is_free):
    changed = InterruptedCondition(is_free)
    with pytest.raises(KeyboardInterrupt), changed:
        WaitWarning("nothing").wait(changed)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(changed.acquire(timeout=10)))
    thread.start()
    thread.join()
    assert taken == [True]  # the lock is free
