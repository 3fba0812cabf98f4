from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.testing import ManualClock, assert_no_leaks


def test_code_that_releases_everything_passes():
    with assert_no_leaks(grace=0.0):
        os.close(os.open("/dev/zero", os.O_RDONLY))


def test_running_thread_is_named():
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="forgotten", daemon=True)
    with pytest.raises(AssertionError, match="thread 'forgotten'"), assert_no_leaks(grace=0.0):
        thread.start()
    leave.set()
    thread.join()


def test_thread_that_ends_within_the_grace_period_is_no_leak():
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, daemon=True)
    with assert_no_leaks(grace=30.0):
        thread.start()
        leave.set()


def test_resource_freed_during_garbage_collection_is_no_leak(monkeypatch):
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, daemon=True)

    def collect():
        leave.set()
        thread.join()

    monkeypatch.setattr(gc, "collect", collect)
    # No time remains after the garbage collection, as if it took longer than the grace period.
    with assert_no_leaks(grace=0.0):
        thread.start()


def test_process_paused_beyond_the_grace_period_checks_again(monkeypatch):
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, daemon=True)
    looks, clock = [], ManualClock()

    def sleep(seconds):
        looks.append(clock.advance(100.0))
        if len(looks) == 5:
            leave.set()
            thread.join()

    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", sleep)
    with assert_no_leaks(grace=1.0):
        thread.start()


def test_garbage_of_the_grace_period_is_collected():
    class Holder:
        def __init__(self):
            self.itself = self
            self.file = open("/dev/zero")  # noqa: SIM115 - a cycle closes it

        def __del__(self):
            self.file.close()

    leave = threading.Event()

    def hold(holder):
        leave.wait()

    def go_when_collected(phase, info):
        # Not garbage for the first collection: the thread is still running.
        if phase == "stop":
            leave.set()

    with assert_no_leaks(grace=5.0):
        threading.Thread(target=hold, args=(Holder(),), daemon=True).start()
        gc.callbacks.append(go_when_collected)
    gc.callbacks.remove(go_when_collected)


def test_open_file_is_named():
    opened = []
    with (
        pytest.raises(AssertionError, match=r"file descriptor \d+ -> /dev/zero"),
        assert_no_leaks(grace=0.0),
    ):
        opened.append(os.open("/dev/zero", os.O_RDONLY))
    os.close(opened[0])


def test_child_process_is_named():
    started = []
    with pytest.raises(AssertionError, match=r"child process \d+: "), assert_no_leaks(grace=0.0):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        )
    started[0].communicate()


def test_shared_memory_of_this_process_is_named():
    entry = Path(f"/dev/shm/headrace-{os.getpid()}-left")
    with pytest.raises(AssertionError, match=f"shared memory {entry}"), assert_no_leaks(grace=0.0):
        entry.touch()
    entry.unlink()


def test_shared_memory_of_another_live_process_is_ignored():
    entry = Path(f"/dev/shm/headrace-{os.getppid()}-other")
    with assert_no_leaks(grace=0.0):
        entry.touch()
    entry.unlink()


def test_allowed_resources_are_ignored():
    with assert_no_leaks(grace=0.0, allowed=["/dev/zero"]):
        opened = os.open("/dev/zero", os.O_RDONLY)
    os.close(opened)


def test_error_of_the_block_is_raised_first():
    opened = []

    def open_and_fail():
        opened.append(os.open("/dev/zero", os.O_RDONLY))
        raise RuntimeError("the real one")

    with pytest.raises(RuntimeError, match="the real one"), assert_no_leaks(grace=0.0):
        open_and_fail()
    os.close(opened[0])


def test_manual_clock_moves_only_on_request():
    clock = ManualClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(2.5)
    assert clock() == 7.5


def test_manual_clock_does_not_run_backwards():
    with pytest.raises(ValueError, match="seconds=-1"):
        ManualClock().advance(-1)
