"""The keys of `headrace top`, on a terminal that a test holds the other end of."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from headrace.cli import top


class Heard:
    """Signals that come at the looks that a test names."""

    def __init__(self, *looks: set[signal.Signals]) -> None:
        self._looks = list(looks)

    def wait(self, timeout: float, readable: object = ()) -> frozenset[signal.Signals]:
        return frozenset(self._looks.pop(0)) if self._looks else frozenset()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Our end of the terminal that stands for stdin."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        yield ours
        os.close(ours)


def is_over(ours: int, heard: Heard, seconds: float = 20.0) -> bool:
    found: list[bool] = []
    with top._screen():
        looking = threading.Thread(
            target=lambda: found.append(top._is_over(heard, seconds))  # type: ignore[arg-type]
        )
        looking.start()
        looking.join(10.0)
        stuck = looking.is_alive()
        os.write(ours, b"q")  # so that it ends in any case
        looking.join(10.0)
    assert not stuck, "it waits for a key"
    return found[0]


def test_a_key_that_ctrl_c_threw_away_is_not_waited_for(
    ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top.select, "select", lambda *args: ([sys.stdin], [], []))
    assert is_over(ours, Heard(set(), {signal.SIGINT}))


def test_the_end_of_the_terminal_is_the_end(ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top.select, "select", lambda *args: ([sys.stdin], [], []))
    assert is_over(ours, Heard())


@pytest.mark.parametrize(("key", "leaves"), [(b"q", True), (b"\x04", True), (b"x", False)])
def test_some_keys_leave_and_others_do_nothing(ours: int, key: bytes, leaves: bool) -> None:
    with top._screen():
        os.write(ours, key)
        assert top._is_over(Heard(), 0.3) is leaves  # type: ignore[arg-type]
