"""Samples of running threads: reading their frames must not harm the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.execution import sampling

# Short calls on three threads are sampled as often as possible, and each collection of garbage lets
# another thread run.
PROGRAM = """
import gc, os, sys, threading, time

import headrace as hr
from headrace.execution import sampling, statistics

def end(error):
    print(f"{error.thread.name}: {error.exc_type.__name__}: {error.exc_value}", flush=True)
    os._exit(1)

def outer(x):
    middle(x)
    return x

def middle(x, y=1, z=2):
    p = q = r = s = print
    return inner(x, y, z)

def inner(*values):
    return call(lambda: values)

def call(function, u=1, v=2, w=3, *, m=4):
    return function()

def many_calls(x):
    for _ in range(20):
        outer(print)
        middle(len)
        inner(1, 2)
    return x

threading.excepthook = end
statistics._SAMPLE_SECONDS = sampling._MIN_JITTER_SECONDS = sampling._MAX_JITTER_SECONDS = 0.0
sampling._SWITCH_SECONDS = 1e-6
gc.callbacks.append(lambda phase, info: time.sleep(0))
gc.set_threshold(1)
deadline = time.monotonic() + 8
dataset = hr.Dataset.range(1 << 40).map(many_calls, num_parallel_calls=3)
with dataset.iterate(stats=True) as elements:
    for _ in elements:
        if time.monotonic() > deadline:
            break
print("sampled")
"""


@pytest.mark.slow
def test_threads_are_sampled_while_garbage_is_collected() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "sampled\n"), ended.stderr


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 10, 10)])
def test_the_collector_is_paused_and_as_before_after_a_sample(
    thresholds: tuple[int, int, int],
) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(*thresholds)
        with sampling.frames_of_threads():
            assert gc.get_threshold()[0] == 0 or sys.version_info >= (3, 12)
        assert gc.get_threshold() == thresholds
        with pytest.raises(KeyError), sampling.frames_of_threads() as frames:
            frames.pop(-1)
        assert gc.get_threshold() == thresholds
    finally:
        gc.set_threshold(*before)


def test_settings_made_during_a_sample_are_kept() -> None:
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    try:
        with (
            sampling.interrupt_threads(threading.Event(), 0.0),
            sampling.frames_of_threads(),
        ):
            assert sys.getswitchinterval() == pytest.approx(2e-5)
            gc.set_threshold(500)
            sys.setswitchinterval(0.003)
        assert gc.get_threshold()[0] == 500
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


class LateEvent(threading.Event):
    """An event whose longer waits take 50 ms too long."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if timeout == 0.01:
            time.sleep(timeout + 0.05)
        else:
            self.pauses.append(timeout)
        return False


def test_the_random_pause_after_a_late_wait_is_as_long_as_the_delay() -> None:
    event = LateEvent()
    for _ in range(12):
        with sampling.interrupt_threads(event, 0.01) as is_stopped:
            assert not is_stopped
    assert 0.01 < max(event.pauses) <= 0.25
    assert min(event.pauses) < 0.04


class Value:
    """Records, when it is released, what was read of calls until then."""

    def __init__(self, found: list[int]) -> None:
        self.found = found

    def __del__(self) -> None:
        self.found += (values["number"] for values in sampling._read_locals.values())


class Step:
    """A method that is sampled while it runs."""

    def values(self, found: list[int]) -> Iterator[None]:
        value, number = Value(found), 0
        while value:
            yield
            value = Value(found)
            number += 1


def test_old_values_are_released_after_the_new_ones_are_read() -> None:
    found: list[int] = []
    step = Step()
    running = step.values(found)
    for number in range(3):
        next(running)
        with sampling.frames_of_threads():
            assert sampling.self_of(running.gi_frame) is step
        # The value of the sample before was released when all variables were the new ones.
        is_copied = sys.version_info < (3, 13)
        assert found == (list(range(1, number + 1)) if is_copied else [])
    running.close()
    with sampling.frames_of_threads():
        pass
    assert not sampling._read_locals


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_during_a_sample_collects_garbage_and_can_sample() -> None:
    thresholds = gc.get_threshold()
    with sampling.frames_of_threads():
        child = os.fork()
        if child == 0:
            is_usable = False
            try:
                # A lock that is still held would end the test by its timeout.
                with sampling.frames_of_threads() as frames:
                    is_usable = len(frames) == 1
                is_usable = is_usable and gc.get_threshold() == thresholds
            finally:
                os._exit(0 if is_usable else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
