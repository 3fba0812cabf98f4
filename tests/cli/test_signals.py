from __future__ import annotations

import os
import signal
import subprocess
import sys

from headrace.cli.running import Signals


def test_a_signal_that_came_before_the_wait_is_not_lost():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wait(timeout=10.0) == {signal.SIGTERM}


def test_a_wait_without_a_signal_ends_with_its_time():
    with Signals() as signals:
        assert signals.wait(timeout=0.0) == frozenset()


def test_two_signals_are_told_together():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(timeout=10.0) == {signal.SIGTERM, signal.SIGINT}


def test_a_stream_that_closes_counts_as_sigterm():
    reader, writer = os.pipe()
    with Signals() as signals, os.fdopen(reader) as stream:
        assert signals.wait(timeout=0.0, closing=[stream]) == frozenset()
        os.close(writer)
        assert signals.wait(timeout=10.0, closing=[stream]) == {signal.SIGTERM}


def test_the_handlers_from_before_are_back_afterwards():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals(children=True):
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


FORKING = """
import os, signal, time
from headrace.cli.running import Signals

with Signals() as signals:
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(signals.wait(timeout=0.0)))
"""


def test_a_forked_child_heeds_signals_and_keeps_them_to_itself():
    result = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=50, check=False
    )
    assert (result.stdout.split(), result.stderr) == (["-15", "0"], "")


AT_ONCE = """
import os, signal, time

def send():
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)

parent = os.getpid()
os.register_at_fork(after_in_child=send)  # before anybody else's

from headrace.cli.running import Signals

with Signals() as signals:
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(signals.wait(timeout=0.0)))
    os.kill(parent, signal.SIGTERM)
    print(len(signals.wait(timeout=10.0)))
"""


def test_a_child_heeds_a_signal_of_the_instant_in_which_it_was_forked():
    result = subprocess.run(
        [sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=90, check=False
    )
    # The parent hears of its own alone.
    assert (result.stdout.split(), result.stderr) == (["-15", "0", "1"], "")
