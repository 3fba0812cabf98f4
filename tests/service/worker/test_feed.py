"""A producer waits at its feed for room and for units, and is never left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from headrace.errors import CancelledError
from headrace.service.worker.agenda import Grant
from headrace.service.worker.feed import Feed
from headrace.service.worker.portion import Portion
from tests.service.worker.listed import SECONDS


class Heard:
    """Takes note of what a producer does, and answers at once where it is to."""

    def __init__(self) -> None:
        self.events: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.on_need: Callable[[], None] = lambda: None
        self.on_portion: Callable[[], None] = lambda: None

    def produced(self, producer: int, portion: Portion) -> None:
        self.events.put(("produced", producer, portion.first))
        self.on_portion()

    def needs_units(self, producer: int) -> None:
        self.events.put(("needs", producer))
        self.on_need()

    def ended(self, producer: int, failure: str | None) -> None:
        self.events.put(("ended", producer, failure))


def nothing_in_hand() -> None:
    """Hand over nothing."""


class Waiting:
    """What a call on a thread of its own returned, or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: SimpleQueue[Any] = SimpleQueue()
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.put(self._call())
        except Exception as error:
            self._found.put(error)

    def found(self) -> Any:
        found = self._found.get(timeout=SECONDS)
        self._thread.join(SECONDS)
        return found


def test_there_is_room_for_one_portion_until_the_producer_is_resumed() -> None:
    heard = Heard()
    feed = Feed(7, heard)
    assert feed.wait_for_room()
    assert feed.wait_for_room()
    feed.put(Portion(first=3))
    assert heard.events.get() == ("produced", 7, 3)
    waiting = Waiting(feed.wait_for_room)
    feed.resume()
    assert waiting.found() is True


def test_a_producer_that_is_resumed_while_it_hands_over_goes_on() -> None:
    heard = Heard()
    feed = Feed(7, heard)
    heard.on_portion = feed.resume
    feed.put(Portion(first=0))
    assert feed.wait_for_room()


@pytest.mark.parametrize("end", ["cut", "close"])
def test_a_producer_that_waits_for_room_hears_that_nothing_more_is_wanted(end: str) -> None:
    feed = Feed(7, Heard())
    feed.put(Portion(first=0))
    waiting = Waiting(feed.wait_for_room)
    getattr(feed, end)()
    assert waiting.found() is False
    assert feed.wait_for_room() is False


def test_units_are_asked_for_once_and_waited_for() -> None:
    heard = Heard()
    feed = Feed(7, heard)
    waiting = Waiting(lambda: feed.next_units(nothing_in_hand))
    assert heard.events.get(timeout=SECONDS) == ("needs", 7)
    feed.grant(Grant(producer=7, units=(3, 5), is_alone=True))
    assert waiting.found().units == (3, 5)
    assert feed.puts_at_once
    heard.on_need = lambda: feed.grant(Grant(producer=7, units=(8, 9), is_alone=False))
    granted = feed.next_units(nothing_in_hand)
    assert granted is not None
    assert granted.units == (8, 9)
    assert not feed.puts_at_once


def test_what_is_in_hand_is_put_before_units_are_waited_for_and_nothing_is_kept_meanwhile() -> None:
    heard = Heard()
    feed = Feed(7, heard)
    assert not feed.puts_at_once
    waiting = Waiting(
        lambda: feed.next_units(lambda: heard.events.put(("hands over", feed.puts_at_once)))
    )
    assert heard.events.get(timeout=SECONDS) == ("needs", 7)
    assert heard.events.get(timeout=SECONDS) == ("hands over", True)
    feed.grant(Grant(producer=7, units=(0, 1), is_alone=False))
    assert waiting.found().units == (0, 1)
    assert not feed.puts_at_once


def test_after_the_last_units_nobody_is_asked_again() -> None:
    heard = Heard()
    feed = Feed(7, heard)
    heard.on_need = lambda: feed.grant(Grant(producer=7, is_alone=False))
    assert feed.next_units(nothing_in_hand) is None
    assert feed.next_units(nothing_in_hand) is None
    assert heard.events.qsize() == 1


def test_two_threads_of_a_plan_ask_one_after_the_other() -> None:
    heard = Heard()
    feed = Feed(7, heard)
    both = [
        Waiting(lambda: feed.next_units(nothing_in_hand)),
        Waiting(lambda: feed.next_units(nothing_in_hand)),
    ]
    for units in ((0, 1), (1, 2)):
        assert heard.events.get(timeout=SECONDS) == ("needs", 7)
        assert heard.events.empty()
        feed.grant(Grant(producer=7, units=units, is_alone=False))
    assert sorted(each.found().units for each in both) == [(0, 1), (1, 2)]


def test_a_producer_that_waits_for_units_hears_that_its_task_was_called_off() -> None:
    heard = Heard()
    feed = Feed(7, heard)
    waiting = Waiting(lambda: feed.next_units(nothing_in_hand))
    heard.events.get(timeout=SECONDS)
    feed.close()
    assert isinstance(waiting.found(), CancelledError)
    with pytest.raises(CancelledError):
        feed.next_units(nothing_in_hand)
    assert heard.events.empty()


def test_the_end_is_handed_on() -> None:
    heard = Heard()
    Feed(7, heard).end("it broke")
    assert heard.events.get() == ("ended", 7, "it broke")
