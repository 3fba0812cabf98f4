"""Samples of running threads: reading their frames must not harm the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

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


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_before_after_a_sample(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(KeyError), sampling.frames_of_threads() as frames:
            frames.pop(-1)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_process_forked_during_a_sample_collects_garbage_and_can_sample() -> None:
    with sampling.frames_of_threads():
        child = os.fork()
        if child == 0:
            # A lock that is still held would end the test by its timeout.
            with sampling.frames_of_threads() as frames:
                is_first = len(frames) == 1
            os._exit(0 if is_first and gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
