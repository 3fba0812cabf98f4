"""Tests of `LifeCycle`: a server starts once and stops once, from any thread at any time."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from headrace.errors import CancelledError
from headrace.serving.life_cycle import LifeCycle

SECONDS = 20.0


class Lamp(LifeCycle):
    """Opens three resources, and records how they are closed."""

    def __init__(self, story: list[str], during: Callable[[Lamp, str], None] | None = None) -> None:
        super().__init__()
        self.story = story
        self.during = during

    def _open(self) -> None:
        story = self.story
        for name in ("first", "second", "third"):
            story.append(f"open {name}")
            self._on_stop(lambda name=name: story.append(f"close {name}"))  # type: ignore[misc]
            if self.during is not None:
                self.during(self, name)


OPENED = ["open first", "open second", "open third"]
CLOSED = ["close third", "close second", "close first"]


@pytest.mark.catalogue("SL7", "SL9", "SL11")
def test_server_starts_once_and_closes_in_reverse_order_once() -> None:
    story: list[str] = []
    lamp = Lamp(story)
    lamp.start()
    lamp.start()
    assert story == OPENED
    assert not lamp.is_stopped
    lamp.stop()
    lamp.stop()
    lamp.join()
    assert lamp.is_stopped
    assert story == OPENED + CLOSED
    with pytest.raises(RuntimeError, match="cannot be started after it has been stopped"):
        lamp.start()


def test_with_block_stops_a_server_started_in_it() -> None:
    story: list[str] = []
    with Lamp(story) as lamp:
        lamp.start()
    assert story == OPENED + CLOSED


def test_server_stopped_before_start_never_starts() -> None:
    lamp = Lamp([])
    lamp.stop()
    lamp.join()
    with pytest.raises(RuntimeError, match="after it has been stopped"):
        lamp.start()
    assert lamp.story == []


@pytest.mark.parametrize("error", [OSError("port in use"), KeyboardInterrupt()])
def test_failed_start_closes_its_resources(error: BaseException) -> None:
    def fail(lamp: Lamp, name: str) -> None:
        if name == "second":
            raise error

    lamp = Lamp([], fail)
    with pytest.raises(type(error)) as caught:
        lamp.start()
    assert caught.value is error
    assert lamp.story == ["open first", "open second", "close second", "close first"]
    assert lamp.is_stopped
    lamp.join()
    with pytest.raises(RuntimeError):
        lamp.start()


def test_failing_close_does_not_prevent_the_others() -> None:
    def refuse() -> None:
        raise OSError("will not close")

    def add(lamp: Lamp, name: str) -> None:
        if name == "second":
            lamp._on_stop(refuse)

    lamp = Lamp([], add)
    lamp.start()
    with pytest.raises(OSError, match="will not close"):
        lamp.stop()
    assert lamp.story == OPENED + CLOSED
    assert lamp.is_stopped
    lamp.stop()


def test_stop_from_another_thread_interrupts_start() -> None:
    waits = threading.Event()

    def wait(lamp: Lamp, name: str) -> None:
        if name == "second":
            waits.set()
            assert lamp._stopping.wait(SECONDS)

    lamp = Lamp([], wait)
    outcome: list[BaseException] = []

    def start() -> None:
        try:
            lamp.start()
        except BaseException as error:
            outcome.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    assert waits.wait(SECONDS)
    lamp.stop()
    assert lamp.is_stopped
    assert {"close first", "close second"} <= set(lamp.story)
    starter.join()
    assert [type(error) for error in outcome] == [CancelledError]
    # A resource that is opened after the stop is closed at once.
    assert sorted(lamp.story) == sorted(OPENED + CLOSED)


def test_error_of_a_start_during_stop_is_a_cancellation() -> None:
    def stumble(lamp: Lamp, name: str) -> None:
        stopper = threading.Thread(target=lamp.stop)
        stopper.start()
        stopper.join()
        raise OSError("bad file descriptor")

    lamp = Lamp([], stumble)
    with pytest.raises(CancelledError, match="stopped while it started") as caught:
        lamp.start()
    assert isinstance(caught.value.__cause__, OSError)


def test_second_stop_returns_when_everything_is_closed() -> None:
    closing, go_on = threading.Event(), threading.Event()

    def dawdle() -> None:
        closing.set()
        assert go_on.wait(SECONDS)

    lamp = Lamp([], lambda lamp, name: lamp._on_stop(dawdle) if name == "third" else None)
    lamp.start()
    stoppers = [threading.Thread(target=lamp.stop) for _ in range(4)]
    for stopper in stoppers:
        stopper.start()
    assert closing.wait(SECONDS)
    assert not lamp.is_stopped
    assert all(stopper.is_alive() for stopper in stoppers)
    lamp.join(timeout=0.01)
    go_on.set()
    lamp.join()
    for stopper in stoppers:
        stopper.join()
    assert lamp.story == OPENED + CLOSED


def test_closed_resource_may_stop_the_server_again() -> None:
    lamp = Lamp([], lambda lamp, name: lamp._on_stop(lamp.stop))
    lamp.start()
    lamp.stop()
    assert lamp.story == OPENED + CLOSED


def test_dropped_server_stops() -> None:
    story: list[str] = []
    lamp = Lamp(story)
    lamp.start()
    dropped = weakref.ref(lamp)
    del lamp
    gc.collect()
    assert dropped() is None
    assert story == OPENED + CLOSED


def test_failed_constructor_leaves_nothing_to_stop() -> None:
    class Broken(Lamp):
        def __init__(self) -> None:
            raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        Broken()
    gc.collect()


def test_forked_child_does_not_stop_the_server() -> None:
    story: list[str] = []
    lamp = Lamp(story)
    lamp.start()
    child = os.fork()
    if child == 0:
        lamp.stop()
        lamp.__del__()
        os._exit(0 if story == OPENED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lamp.stop()
    assert story == OPENED + CLOSED


WAITER = """
from headrace.serving.life_cycle import LifeCycle
class Lamp(LifeCycle):
    def _open(self):
        self._on_stop(lambda: print("closed", flush=True))
with Lamp() as lamp:
    lamp.start()
    try:
        print("waits", flush=True)
        lamp.join()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.heavy
def test_ctrl_c_interrupts_join() -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waits\n"
        until = time.monotonic() + SECONDS
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\nclosed\n"
        assert process.wait(SECONDS) == 0
        assert time.monotonic() < until
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
