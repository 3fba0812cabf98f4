"""Threads of a strategy: interruptions, forks, long waits."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from headrace.distribute import get_replica_context
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from tests.distribute.replicas import mirrored


def total():
    return get_replica_context().all_reduce("SUM", 1)


@pytest.mark.parametrize("interruptions", [1, 2])
def test_after_an_interruption_the_next_run_is_complete(interruptions):
    strategy = mirrored(3)
    left = [interruptions]
    ended = threading.Event()
    waiting = threading.Event()

    def interrupt(*_):
        left[0] -= 1
        raise KeyboardInterrupt

    def step():
        if get_replica_context().replica_id_in_sync_group:
            waiting.set()
            ended.wait(30 if interruptions == 2 else 0.2)
        return total()

    def send():
        waiting.wait(30)
        while left[0]:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step)
    finally:
        left[0] = 0
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        ended.set()
    assert strategy.run(total).values == (3, 3, 3)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_replica_threads():
    strategy = mirrored(2)
    assert strategy.run(total).values == (2, 2)
    child = os.fork()
    if child == 0:
        os._exit(0 if strategy.run(total).values == (2, 2) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert strategy.run(total).values == (2, 2)


def test_a_long_wait_logs_the_missing_replicas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.2)
    strategy = mirrored(3)

    def step() -> int:
        deadline = time.monotonic() + 30
        while get_replica_context().replica_id_in_sync_group == 1 and time.monotonic() < deadline:
            # Both others wait, and one of them has logged it.
            if "replica 0, 2 has waited for replica 1" in caplog.text:
                break
            time.sleep(0.005)
        return total()

    assert strategy.run(step).values == (3, 3, 3)
    messages = [
        record.message for record in caplog.records if "has waited for replica" in record.message
    ]
    assert messages[-1].startswith("replica 0, 2 has waited for replica 1 for 0 s, in merge_call")


def test_a_slow_merge_function_logs_no_missing_replicas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.01)

    def step() -> None:
        get_replica_context().merge_call(lambda s: time.sleep(0.1))

    mirrored(2).run(step)
    assert not [
        record for record in caplog.records if "has waited for replica  for" in record.message
    ]


def test_run_in_a_merge_call_function_raises_instead_of_hanging():
    strategy = mirrored(2)

    def step():
        return get_replica_context().merge_call(lambda s: s.run(total))

    with pytest.raises(
        FailedPreconditionError, match="run was called in the function of merge_call"
    ):
        strategy.run(step)
    assert strategy.run(total).values == (2, 2)


def test_a_replica_that_catches_a_merge_error_cannot_merge_again():
    strategy = mirrored(3)
    caught = []

    def step():
        context = get_replica_context()
        try:
            context.all_reduce("SUM", np.ones(context.replica_id_in_sync_group + 1))
        except InvalidArgumentError as error:
            caught.append(error)
            return context.all_reduce("SUM", np.ones(1))
        return None

    with pytest.raises(InvalidArgumentError, match=r"shapes \(1,\), \(2,\), \(3,\)"):
        strategy.run(step)
    assert len(caught) == 1
    assert strategy.run(total).values == (3, 3, 3)
