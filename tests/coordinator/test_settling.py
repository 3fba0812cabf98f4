"""Servers are told of several ends at a time, and at once where somebody waits."""

from __future__ import annotations

import pytest

from headrace.coordinator.closure import NEVER, Closure, Phase
from headrace.coordinator.closure_queue import Settling
from headrace.errors import UserFunctionError
from tests.coordinator.test_closure_queue import Driver


def _driver(num_workers: int = 1, **options: object) -> Driver:
    return Driver(num_workers, settle_within=0.1, **options)


def _told(driver: Driver) -> list[int]:
    return driver.last.settles


def test_of_ends_that_nobody_waits_for_servers_are_told_together():
    driver = _driver(2)
    first, second, third = (driver.schedule() for _ in range(3))
    driver.ends(0, first.number, wrote=True)
    assert _told(driver) == []
    assert driver.last.wake_in == pytest.approx(0.1)
    driver.decide(after=0.05)
    driver.ends(1, second.number, wrote=True)
    assert _told(driver) == []
    driver.decide(after=0.05)
    assert _told(driver) == [first.number, second.number]
    assert driver.last.wake_in == NEVER
    driver.ends(0, third.number, wrote=True)
    assert driver.last.wake_in == pytest.approx(0.1), "counted from the first end after that"


def test_values_and_workers_do_not_wait_until_servers_are_told():
    driver = _driver()
    first, second = driver.schedule(), driver.schedule()
    waits = driver.schedule(inputs=(second.result,))
    driver.ends(0, first.number, wrote=True)
    assert first.result.is_ready
    assert driver.at[0] == [second.number]
    driver.ends(0, second.number, wrote=True)
    assert driver.at[0] == [waits.number]
    assert _told(driver) == []


def test_who_joins_waits_for_no_clock():
    driver = _driver(2)
    first, second = driver.schedule(), driver.schedule()
    driver.ends(0, first.number, wrote=True)
    last = driver.queue.end_round()
    driver.decide()
    assert _told(driver) == [], "the other one still runs, and is told of with it"
    driver.ends(1, second.number, wrote=True)
    assert _told(driver) == [first.number, second.number]
    driver.settle()
    assert driver.queue.is_over(last)


def test_who_joins_after_all_has_ended_waits_for_no_clock():
    driver = _driver()
    closure = driver.schedule()
    driver.ends(0, closure.number, wrote=True)
    driver.queue.end_round()
    driver.decide()
    assert _told(driver) == [closure.number]


def test_who_joins_does_not_wait_for_what_others_schedule_later():
    driver = _driver(3)
    first, second = driver.schedule(), driver.schedule()
    last = driver.queue.end_round()
    later = driver.schedule()
    driver.ends(2, later.number, wrote=True)
    driver.ends(0, first.number, wrote=True)
    assert _told(driver) == []
    driver.schedule()
    driver.ends(1, second.number, wrote=True)
    assert sorted(_told(driver)) == [first.number, second.number, later.number]
    driver.settle()
    assert driver.queue.is_over(last)


def test_who_joins_is_not_held_back_by_who_joins_later():
    driver = _driver(2)
    first = driver.schedule()
    driver.queue.end_round()
    driver.schedule()
    driver.queue.end_round()
    driver.ends(0, first.number, wrote=True)
    assert _told(driver) == [first.number]


def test_what_follows_a_join_is_held_back_again():
    driver = _driver()
    first = driver.schedule()
    driver.queue.end_round()
    driver.ends(0, first.number, wrote=True)
    assert _told(driver) == [first.number]
    driver.settle()
    second = driver.schedule()
    driver.ends(0, second.number, wrote=True)
    assert _told(driver) == []


@pytest.mark.parametrize("staleness", [0, 3])
def test_with_a_bound_on_staleness_servers_are_told_at_once(staleness):
    driver = _driver(staleness=staleness)
    closure = driver.schedule()
    driver.ends(0, closure.number, wrote=True)
    assert _told(driver) == [closure.number]


def test_after_an_error_servers_are_told_at_once():
    driver = _driver(2)
    first, second = driver.schedule(), driver.schedule()
    driver.ends(0, first.number, wrote=True)
    driver.ends(1, second.number, UserFunctionError("no"), wrote=True)
    assert _told(driver) == [first.number, second.number]


def test_of_what_was_called_off_servers_are_told_at_once():
    driver = _driver(2)
    first, second = driver.schedule(), driver.schedule()
    driver.ends(0, first.number, wrote=True)
    driver.queue.cancel(second, driver.now)
    driver.decide()
    driver.dropped(1, second.number)
    assert _told(driver) == [first.number, second.number]


def test_what_wrote_nothing_is_over_at_once():
    driver = _driver()
    closure = driver.schedule()
    driver.ends(0, closure.number)
    assert closure.phase is Phase.OVER
    assert driver.queue.is_drained


def test_what_a_function_was_given_is_let_go_of_when_it_has_ended():
    driver = _driver()
    value = driver.schedule(work="data")
    driver.ends(0, value.number, wrote=True)
    assert value.phase is Phase.SETTLING
    assert value.work is None


def test_the_first_that_has_not_ended_is_not_held_back():
    driver = _driver(2)
    first, second, _ = (driver.schedule() for _ in range(3))
    assert driver.queue.first == first.number
    driver.ends(1, second.number, wrote=True)
    assert driver.queue.first == first.number
    driver.ends(0, first.number, wrote=True)
    assert (driver.queue.first, driver.queue.low) == (3, 1)


def test_of_many_ends_servers_are_told_though_nobody_waits():
    settling = Settling(within=10.0)
    for number in range(1, 256):
        settling.add(Closure("step", number=number))
    assert settling.take(0.0, first=256, at_once=False) == []
    settling.add(Closure("step", number=256))
    assert settling.take(0.0, first=257, at_once=False) == list(range(1, 257))
    assert settling.due == NEVER
