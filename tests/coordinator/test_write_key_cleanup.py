"""Write-key cleanup: batched, or immediate if a caller waits.

`invariants` checks staleness, errors and cancellations after each event.
"""

from __future__ import annotations

import pytest

from headrace.coordinator.closure import NEVER, Closure, ClosurePhase
from headrace.coordinator.closure_queue import WriteKeyCleanup
from headrace.coordinator.coordinator_runner import ServerNotifier
from tests.coordinator.test_closure_queue import Driver


def test_key_cleanups_without_a_waiting_caller_are_batched():
    driver = Driver(2, key_cleanup_delay=0.1)
    first, second, third = (driver.schedule() for _ in range(3))
    driver.ends(0, first.number, wrote=True)
    assert driver.last.key_cleanups == []
    assert driver.last.wake_in == pytest.approx(0.1)
    driver.decide(after=0.05)
    driver.ends(1, second.number, wrote=True)
    assert driver.last.key_cleanups == []
    driver.decide(after=0.05)
    assert driver.last.key_cleanups == [first.number, second.number]
    assert driver.last.wake_in == NEVER
    driver.ends(0, third.number, wrote=True)
    assert driver.last.wake_in == pytest.approx(0.1), (
        "the delay starts with the first end after that"
    )


def test_results_and_workers_do_not_wait_for_key_cleanup():
    driver = Driver(1, key_cleanup_delay=0.1)
    first, second = driver.schedule(), driver.schedule()
    waits = driver.schedule(inputs=(second.result,))
    driver.ends(0, first.number, wrote=True)
    assert first.result.is_ready
    assert driver.at[0] == [second.number]
    driver.ends(0, second.number, wrote=True)
    assert driver.at[0] == [waits.number]
    assert driver.last.key_cleanups == []


def test_join_triggers_key_cleanup_at_once():
    driver = Driver(2, key_cleanup_delay=0.1)
    first, second = driver.schedule(), driver.schedule()
    driver.ends(0, first.number, wrote=True)
    last = driver.queue.end_round()
    driver.decide()
    assert driver.last.key_cleanups == [], (
        "the other closure still runs; its keys are cleaned up with these"
    )
    driver.ends(1, second.number, wrote=True)
    assert driver.last.key_cleanups == [first.number, second.number]
    driver.forget_keys()
    assert driver.queue.is_done_through(last)


def test_a_join_is_not_delayed_by_a_later_join():
    driver = Driver(2, key_cleanup_delay=0.1)
    first = driver.schedule()
    driver.queue.end_round()
    driver.schedule()
    driver.queue.end_round()
    driver.ends(0, first.number, wrote=True)
    assert driver.last.key_cleanups == [first.number]


def test_key_cleanups_after_a_join_are_batched_again():
    driver = Driver(1, key_cleanup_delay=0.1)
    first = driver.schedule()
    driver.queue.end_round()
    driver.ends(0, first.number, wrote=True)
    assert driver.last.key_cleanups == [first.number]
    driver.forget_keys()
    second = driver.schedule()
    driver.ends(0, second.number, wrote=True)
    assert driver.last.key_cleanups == []


def test_arguments_are_released_when_a_function_has_ended():
    driver = Driver(1, key_cleanup_delay=0.1)
    value = driver.schedule(call_spec="data")
    driver.ends(0, value.number, wrote=True)
    assert value.phase is ClosurePhase.COMPLETING
    assert value.call_spec is None


def test_the_first_unended_number_is_not_delayed():
    driver = Driver(2, key_cleanup_delay=0.1)
    first, second, _ = (driver.schedule() for _ in range(3))
    assert driver.queue.first_unended == first.number
    driver.ends(1, second.number, wrote=True)
    assert driver.queue.first_unended == first.number
    driver.ends(0, first.number, wrote=True)
    assert (driver.queue.first_unended, driver.queue.low_watermark) == (3, 1)


def test_many_pending_keys_trigger_a_cleanup():
    cleanup = WriteKeyCleanup(delay=10.0)
    for number in range(1, 256):
        cleanup.add(Closure("step", number=number))
    assert cleanup.take(0.0, first_unended=256, at_once=False) == []
    cleanup.add(Closure("step", number=256))
    assert cleanup.take(0.0, first_unended=257, at_once=False) == list(range(1, 257))
    assert cleanup.due_at == NEVER


class RecordingServers:
    """Servers that reply at once, and the runner that receives the results."""

    def __init__(self):
        self.told = []

    def forget_write_keys(self, closures, below):
        self.told.append(("settle", list(closures), below))

    def fence(self, worker):
        self.told.append(("fence", worker))

    def low_watermark(self):
        return 7

    def worker_fenced(self, session, error):
        self.told.append(("fenced", session, error))

    def write_keys_forgotten(self, closures, error):
        self.told.append(("settled", list(closures), error))


def test_queued_server_requests_are_sent_before_stop():
    told = RecordingServers()
    talk = ServerNotifier(told, told)
    talk.submit([1], [2], None)
    talk.submit([3], [4], None)
    talk.stop()
    talk.run()
    assert told.told == [
        ("fence", 1),
        ("fenced", 1, None),
        ("fence", 3),
        ("fenced", 3, None),
        ("settle", [2, 4], 7),
        ("settled", [2, 4], None),
    ]
