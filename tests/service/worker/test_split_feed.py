"""How much of a source a task asks for, and under which numbers."""

from __future__ import annotations

import threading

import pytest

from headrace.errors import CancelledError, UnavailableError
from headrace.service.messages import GetSplit, SplitGranted
from headrace.service.worker.split_feed import SplitFeed, next_want


@pytest.mark.parametrize(
    ("want", "seconds", "expected"),
    [(1, 0.001, 2), (8, 0.05, 8), (8, 2.0, 4), (1, 2.0, 1), (1 << 24, 0.0, 1 << 24)],
)
def test_a_range_used_up_soon_is_followed_by_a_longer_one(
    want: int, seconds: float, expected: int
) -> None:
    assert next_want(want, seconds) == expected


class _Dealer:
    def __init__(self, size: int) -> None:
        self.size = size
        self.dealt = 0
        self.asked: list[GetSplit] = []
        self.away = False

    def __call__(self, request: GetSplit) -> SplitGranted:
        if self.away:
            raise UnavailableError("away")
        self.asked.append(request)
        start = self.dealt
        self.dealt = min(start + request.want, self.size)
        return SplitGranted(start=start, stop=self.dealt)


def test_numbers_ascend_and_the_end_is_none() -> None:
    dealer = _Dealer(5)
    feed = SplitFeed(7, dealer, threading.Event())

    splits = list(iter(lambda: feed.next_split(0, (0,)), None))

    assert [index for start, stop in splits for index in range(start, stop)] == [0, 1, 2, 3, 4]
    assert [request.number for request in dealer.asked] == list(range(len(dealer.asked)))
    assert all(request.task_id == 7 for request in dealer.asked)


def test_sources_are_numbered_apart_and_a_new_repetition_goes_on_counting() -> None:
    dealer = _Dealer(100)
    feed = SplitFeed(1, dealer, threading.Event())

    feed.next_split(0, (0,))
    feed.next_split(1, (0,))
    feed.next_split(0, (1,))

    assert [(r.source, r.number, r.repetition) for r in dealer.asked] == [
        (0, 0, (0,)),
        (1, 0, (0,)),
        (0, 1, (1,)),
    ]


def test_a_request_that_failed_is_repeated_under_its_number() -> None:
    dealer = _Dealer(100)
    feed = SplitFeed(1, dealer, threading.Event())
    feed.next_split(0, (0,))
    dealer.away = True
    with pytest.raises(UnavailableError):
        feed.next_split(0, (0,))
    dealer.away = False

    feed.next_split(0, (0,))

    assert [request.number for request in dealer.asked] == [0, 1]


def test_a_task_that_was_called_off_gets_no_splits() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(CancelledError):
        SplitFeed(1, _Dealer(1), stopped).next_split(0, (0,))
