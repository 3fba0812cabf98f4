"""Tests of copies by two threads, in any order and with interruptions."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from headrace.transport import copying
from headrace.transport.copying import copy_memory

SIZE = (16 << 20) + 77


def copied(size):
    source = np.arange(size, dtype=np.uint8)
    target = np.zeros(size + 1, np.uint8)
    copy_memory(target.ctypes.data, source.ctypes.data, size)
    return np.array_equal(target[:-1], source) and target[-1] == 0


@pytest.mark.parametrize("size", [1, SIZE - 100, SIZE])
def test_all_bytes_are_copied_and_no_others_changed(size):
    assert copied(size)


def test_caller_copies_everything_without_a_thread(monkeypatch):
    def none_left(thread):
        raise RuntimeError("no more threads")

    monkeypatch.setattr(copying, "start_thread", none_left)
    assert copied(SIZE)


def test_late_thread_copies_nothing(monkeypatch):
    late = []
    monkeypatch.setattr(copying, "start_thread", late.append)
    assert copied(SIZE)
    monkeypatch.setattr(copying.ctypes, "memmove", None)
    late[0].start()
    late[0].join(10)
    assert not late[0].is_alive()


def test_interrupted_copy_waits_for_the_other_half(monkeypatch):
    begun, go_on, done = threading.Event(), threading.Event(), []
    real, main = ctypes.memmove, threading.current_thread()

    def memmove(*where):
        if threading.current_thread() is main:
            assert begun.wait(10)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt
        begun.set()
        assert go_on.wait(10)
        real(*where)
        done.append(True)

    monkeypatch.setattr(copying.ctypes, "memmove", memmove)
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        copy_memory(target.ctypes.data, source.ctypes.data, SIZE)
    assert done
