"""Tests that an interrupted start of a thread is completed or undone."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from headrace import threads
from headrace.threads import run_in_thread, start_thread


class Alarm(BaseException):
    """An interruption from outside, not an error."""


def interrupt(call: Callable[[], object], at: int) -> bool:
    """Make a call, interrupted at its n-th instruction; return whether it had that many."""
    left = at

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code is interrupt.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise Alarm
        return trace

    before = sys.gettrace()
    # Otherwise finalizers of the garbage collector could be interrupted instead of the call.
    gc.disable()
    try:
        sys.settrace(trace)
        call()
    except Alarm:
        pass
    finally:
        sys.settrace(before)
        gc.enable()
    return left <= 0


def test_interrupted_start_leaves_no_half_started_thread() -> None:
    at = 0
    is_longer = True
    while is_longer:
        at += 1
        ended = threading.Event()
        thread = threading.Thread(target=ended.set, daemon=True, name=f"interrupted at {at}")
        is_longer = interrupt(lambda thread=thread: start_thread(thread), at)  # type: ignore[misc]
    assert at > 20
    assert ended.wait(10.0)


def test_started_thread_runs() -> None:
    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    start_thread(thread)
    assert thread.ident is not None
    thread.join(10.0)
    assert ran.is_set()


def test_thread_can_start_another_thread() -> None:
    ran = threading.Event()
    inner = threading.Thread(target=ran.set)
    outer = threading.Thread(target=start_thread, args=(inner,))
    start_thread(outer)
    outer.join(10.0)
    inner.join(10.0)
    assert ran.is_set()


def test_refused_thread_start_raises_in_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(threading.Thread(target=print))


def test_background_thread_is_joined_with_a_timeout() -> None:
    done = threading.Event()
    run_in_thread(done.set)
    assert done.is_set()
    lock = threading.Lock()
    with lock:
        # An unlimited wait would wait for this thread itself.
        run_in_thread(lambda: (lock.acquire(), lock.release(), done.clear()), wait_seconds=0.01)
        assert done.is_set()
    while done.is_set():
        pass
