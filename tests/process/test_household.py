"""Children that are started together, waited for, and kept running: real and small ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import UnavailableError
from headrace.process.child import Command, bound_command
from headrace.process.family import BecameReady, Ended, Event, Household

pytestmark = pytest.mark.heavy

_PROGRAM = """
import sys, threading
from headrace.process.parent import die_with_parent, end_when_released, say_ready
words, log_to, lifeline = sys.argv[1:]
if words == "cannot":
    sys.exit("there is no such port")
die_with_parent(int(lifeline))
ended = threading.Event()
end_when_released(ended, 5.0)
say_ready(words, int(log_to))
ended.wait()
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Command]:
    (tmp_path / "small_child.py").write_text(_PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda words: bound_command("small_child", words, environment={"WHO": words})


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def household(events: list[Event]) -> Iterator[Household]:
    household = Household("child", events.append)
    yield household
    household.close()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_children_are_ready_when_start_returns_and_one_that_dies_is_replaced(
    household: Household, command: Callable[[str], Command], events: list[Event]
) -> None:
    (first, child), (second, other) = household.start([command("one"), command("two")])
    assert (child.ready, other.ready) == ("one", "two")
    seen = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
    assert {b"WHO=one", b"CUDA_VISIBLE_DEVICES=", b"JAX_PLATFORMS=cpu"} <= set(seen)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: len(events) == 2)
    match events:
        case [Ended(post, gone, again_in), BecameReady(again, _)]:
            assert (post, gone, again) == (first, child, first)
            assert again_in == 0.5
        case _:
            pytest.fail(f"{events}")
    assert second.child is other
    household.close()
    assert not other.is_running


def test_one_that_is_killed_here_stays_away(
    household: Household, command: Callable[[str], Command], events: list[Event]
) -> None:
    (post, child), (_, other) = household.start([command("one"), command("two")])
    household.kill(post)
    assert not child.is_running
    os.kill(other.pid, signal.SIGKILL)
    wait_until(lambda: len(events) == 2)
    assert post not in {event.post for event in events}


def test_where_one_does_not_start_none_is_left_and_the_error_has_its_words(
    household: Household, command: Callable[[str], Command], events: list[Event]
) -> None:
    with pytest.raises(UnavailableError, match=r"(?s)child \d+ ended with code 1.*no such port"):
        household.start([command("one"), command("cannot")])
    assert events == []
    assert household.start([]) == []
