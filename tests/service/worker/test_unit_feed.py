"""How many units a task asks for, under which numbers, and how it waits."""

from __future__ import annotations

import itertools
import threading

import pytest

from headrace.errors import CancelledError, UnavailableError
from headrace.service.messages import SplitGranted
from headrace.service.worker.unit_feed import UnitFeed, next_want, waits
from headrace.testing import ManualClock
from tests.service.reading import wait_until

_SECONDS = 10.0


@pytest.mark.parametrize(
    ("want", "seconds", "expected"),
    [(1, 0.001, 2), (8, 0.05, 8), (8, 2.0, 4), (1, 2.0, 1), (1 << 24, 0.0, 1 << 24)],
)
def test_a_range_used_up_soon_is_followed_by_a_longer_one(
    want: int, seconds: float, expected: int
) -> None:
    assert next_want(want, seconds) == expected


def test_waits_grow_from_20_to_200_milliseconds() -> None:
    assert list(itertools.islice(waits(), 6)) == [0.02, 0.04, 0.08, 0.16, 0.2, 0.2]


class Dealer:
    """A dispatcher with so many units, which may be away, or let tasks wait."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.dealt = 0
        self.asked: list[tuple[int, int]] = []
        self.away = False
        self.waits = 0

    def __call__(self, number: int, want: int) -> SplitGranted:
        if self.away:
            raise UnavailableError("away")
        self.asked.append((number, want))
        if self.waits > 0:
            self.waits -= 1
            return SplitGranted(start=0, stop=0, wait=True)
        start = self.dealt
        self.dealt = min(start + want, self.size)
        return SplitGranted(start=start, stop=self.dealt)


def test_numbers_ascend_all_units_are_counted_and_the_end_is_none() -> None:
    dealer = Dealer(5)
    feed = UnitFeed(dealer)

    ranges = list(iter(feed.next_units, None))

    assert [unit for start, stop in ranges for unit in range(start, stop)] == [0, 1, 2, 3, 4]
    assert [number for number, _ in dealer.asked] == list(range(len(dealer.asked)))
    assert feed.dealt == 5


def test_after_the_end_the_dispatcher_is_not_asked_again() -> None:
    dealer = Dealer(0)
    feed = UnitFeed(dealer)
    assert feed.next_units() is None
    assert feed.next_units() is None
    assert len(dealer.asked) == 1


def test_the_length_of_a_range_follows_how_long_the_last_one_took(clock: ManualClock) -> None:
    dealer = Dealer(1000)
    feed = UnitFeed(dealer, clock=clock)
    for seconds in (0.001, 0.001, 0.05, 1.0):
        feed.next_units()
        clock.advance(seconds)
    feed.next_units()
    assert [want for _, want in dealer.asked] == [1, 2, 4, 4, 2]


def test_what_is_dealt_alone_is_so_until_the_next_units() -> None:
    granted = iter(
        [
            SplitGranted(start=3, stop=4, alone=True),
            SplitGranted(start=0, stop=0, wait=True),
            SplitGranted(start=8, stop=9),
        ]
    )
    feed = UnitFeed(lambda number, want: next(granted))
    assert not feed.is_alone
    assert (feed.next_units(), feed.is_alone) == ((3, 4), True)
    assert (feed.next_units(), feed.is_alone) == ((8, 9), False)


def test_a_request_that_failed_is_repeated_under_its_number() -> None:
    dealer = Dealer(100)
    feed = UnitFeed(dealer)
    feed.next_units()
    dealer.away = True
    with pytest.raises(UnavailableError):
        feed.next_units()
    dealer.away = False

    feed.next_units()

    assert [number for number, _ in dealer.asked] == [0, 1]


def test_a_task_that_is_to_wait_asks_again_under_the_same_number() -> None:
    dealer = Dealer(100)
    dealer.waits = 2
    feed = UnitFeed(dealer)

    assert feed.next_units() == (0, 1)
    assert [number for number, _ in dealer.asked] == [0, 0, 0]


@pytest.mark.parametrize("end", ["drain", "close"])
def test_a_task_that_waits_hears_at_once_that_it_is_drained_or_closed(end: str) -> None:
    dealer = Dealer(100)
    dealer.waits = 1_000_000
    feed = UnitFeed(dealer)
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(feed.next_units())
        except CancelledError as error:
            found.append(type(error))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: len(dealer.asked) > 1)
    getattr(feed, end)()
    asking.join(_SECONDS)

    assert found == [None if end == "drain" else CancelledError]


def test_a_task_that_was_called_off_gets_no_units() -> None:
    feed = UnitFeed(Dealer(1))
    feed.close()
    with pytest.raises(CancelledError):
        feed.next_units()


def test_closing_waits_for_the_request_that_is_under_way_so_that_its_units_count() -> None:
    asked, granted = threading.Event(), threading.Event()

    def slowly(number: int, want: int) -> SplitGranted:
        asked.set()
        granted.wait(_SECONDS)
        return SplitGranted(start=0, stop=1)

    feed = UnitFeed(slowly)
    asking = threading.Thread(target=feed.next_units)
    asking.start()
    asked.wait(_SECONDS)
    threading.Timer(0.05, granted.set).start()
    feed.close(timeout=_SECONDS)
    assert feed.dealt == 1
    asking.join(_SECONDS)
