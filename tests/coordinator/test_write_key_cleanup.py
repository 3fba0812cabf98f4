"""Servers are told of several ends at a time, and at once where somebody waits.

Of staleness, errors and what was called off `invariants` says more, after each event.
"""

from __future__ import annotations

import pytest

from headrace.coordinator.closure import NEVER, Closure, ClosurePhase
from headrace.coordinator.closure_queue import WriteKeyCleanup
from headrace.coordinator.coordinator_runner import ServerNotifier
from tests.coordinator.test_closure_queue import Driver


def test_of_ends_that_nobody_waits_for_servers_are_told_together():
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
    assert driver.last.wake_in == pytest.approx(0.1), "counted from the first end after that"


def test_values_and_workers_do_not_wait_until_servers_are_told():
    driver = Driver(1, key_cleanup_delay=0.1)
    first, second = driver.schedule(), driver.schedule()
    waits = driver.schedule(inputs=(second.result,))
    driver.ends(0, first.number, wrote=True)
    assert first.result.is_ready
    assert driver.at[0] == [second.number]
    driver.ends(0, second.number, wrote=True)
    assert driver.at[0] == [waits.number]
    assert driver.last.key_cleanups == []


def test_who_joins_waits_for_no_clock():
    driver = Driver(2, key_cleanup_delay=0.1)
    first, second = driver.schedule(), driver.schedule()
    driver.ends(0, first.number, wrote=True)
    last = driver.queue.end_round()
    driver.decide()
    assert driver.last.key_cleanups == [], "the other one still runs, and is told of with it"
    driver.ends(1, second.number, wrote=True)
    assert driver.last.key_cleanups == [first.number, second.number]
    driver.settle()
    assert driver.queue.is_done_through(last)


def test_who_joins_is_not_held_back_by_who_joins_later():
    driver = Driver(2, key_cleanup_delay=0.1)
    first = driver.schedule()
    driver.queue.end_round()
    driver.schedule()
    driver.queue.end_round()
    driver.ends(0, first.number, wrote=True)
    assert driver.last.key_cleanups == [first.number]


def test_what_follows_a_join_is_held_back_again():
    driver = Driver(1, key_cleanup_delay=0.1)
    first = driver.schedule()
    driver.queue.end_round()
    driver.ends(0, first.number, wrote=True)
    assert driver.last.key_cleanups == [first.number]
    driver.settle()
    second = driver.schedule()
    driver.ends(0, second.number, wrote=True)
    assert driver.last.key_cleanups == []


def test_what_a_function_was_given_is_let_go_of_when_it_has_ended():
    driver = Driver(1, key_cleanup_delay=0.1)
    value = driver.schedule(call_spec="data")
    driver.ends(0, value.number, wrote=True)
    assert value.phase is ClosurePhase.COMPLETING
    assert value.call_spec is None


def test_the_first_that_has_not_ended_is_not_held_back():
    driver = Driver(2, key_cleanup_delay=0.1)
    first, second, _ = (driver.schedule() for _ in range(3))
    assert driver.queue.first_unended == first.number
    driver.ends(1, second.number, wrote=True)
    assert driver.queue.first_unended == first.number
    driver.ends(0, first.number, wrote=True)
    assert (driver.queue.first_unended, driver.queue.low_watermark) == (3, 1)


def test_of_many_ends_servers_are_told_though_nobody_waits():
    settling = WriteKeyCleanup(delay=10.0)
    for number in range(1, 256):
        settling.add(Closure("step", number=number))
    assert settling.take(0.0, first_unended=256, at_once=False) == []
    settling.add(Closure("step", number=256))
    assert settling.take(0.0, first_unended=257, at_once=False) == list(range(1, 257))
    assert settling.due_at == NEVER


class Told:
    """Servers that answer at once, and who hears of it."""

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


def test_what_was_to_be_told_before_the_end_is_told():
    told = Told()
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
