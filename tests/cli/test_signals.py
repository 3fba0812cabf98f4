from __future__ import annotations

import os
import signal

from headrace.cli.signals import Signals


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
