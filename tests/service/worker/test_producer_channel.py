"""A producer waits for room and for units, pauses once, and is never left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.errors import CancelledError
from headrace.plan.serialize import dump_plan
from headrace.service.element_sets import END_ORDINAL
from headrace.service.messages import GetSplit
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.producer import Producer
from headrace.service.worker.producer_channel import ProducerChannel
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task_iterator import open_plan
from tests.service.reading import wait_until
from tests.service.worker.driving import Driven, definition
from tests.service.worker.listed import SECONDS, Listed
from tests.service.worker.test_producer import Collected


class Heard:
    """Takes note of what a producer does, and answers at once where it is to."""

    def __init__(self) -> None:
        self.events: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.on_need: Callable[[], None] = lambda: None
        self.on_portion: Callable[[], None] = lambda: None

    def batch_produced(self, producer: int, portion: ResultBatch) -> None:
        self.events.put(("produced", producer, portion.first_element))
        self.on_portion()

    def splits_needed(self, producer: int) -> None:
        self.events.put(("needs", producer))
        self.on_need()

    def producer_ended(self, producer: int, failure: str | None) -> None:
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
    feed = ProducerChannel(7, heard)
    assert feed.wait_for_room()
    assert feed.wait_for_room()
    feed.put(ResultBatch(first_element=3))
    assert heard.events.get() == ("produced", 7, 3)
    waiting = Waiting(feed.wait_for_room)
    feed.resume()
    assert waiting.found() is True


def test_a_producer_that_is_resumed_while_it_hands_over_goes_on() -> None:
    heard = Heard()
    feed = ProducerChannel(7, heard)
    heard.on_portion = feed.resume
    feed.put(ResultBatch(first_element=0))
    assert feed.wait_for_room()


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_producer_that_waits_for_room_hears_that_nothing_more_is_wanted(end: str) -> None:
    feed = ProducerChannel(7, Heard())
    feed.put(ResultBatch(first_element=0))
    waiting = Waiting(feed.wait_for_room)
    getattr(feed, end)()
    assert waiting.found() is False
    assert feed.wait_for_room() is False


def test_units_are_asked_for_once_and_waited_for() -> None:
    heard = Heard()
    feed = ProducerChannel(7, heard)
    waiting = Waiting(lambda: feed.next_splits(nothing_in_hand))
    assert heard.events.get(timeout=SECONDS) == ("needs", 7)
    feed.grant(SplitGrant(producer=7, splits=(3, 5), deliver_at_once=True))
    assert waiting.found().splits == (3, 5)
    assert feed.delivers_at_once
    heard.on_need = lambda: feed.grant(SplitGrant(producer=7, splits=(8, 9), deliver_at_once=False))
    granted = feed.next_splits(nothing_in_hand)
    assert granted is not None
    assert granted.splits == (8, 9)
    assert not feed.delivers_at_once


def test_what_is_in_hand_is_put_before_units_are_waited_for_and_nothing_is_kept_meanwhile() -> None:
    heard = Heard()
    feed = ProducerChannel(7, heard)
    assert not feed.delivers_at_once
    waiting = Waiting(
        lambda: feed.next_splits(lambda: heard.events.put(("hands over", feed.delivers_at_once)))
    )
    assert heard.events.get(timeout=SECONDS) == ("needs", 7)
    assert heard.events.get(timeout=SECONDS) == ("hands over", True)
    feed.grant(SplitGrant(producer=7, splits=(0, 1), deliver_at_once=False))
    assert waiting.found().splits == (0, 1)
    assert not feed.delivers_at_once


def test_after_the_last_units_nobody_is_asked_again() -> None:
    heard = Heard()
    feed = ProducerChannel(7, heard)
    heard.on_need = lambda: feed.grant(SplitGrant(producer=7, deliver_at_once=False))
    assert feed.next_splits(nothing_in_hand) is None
    assert feed.next_splits(nothing_in_hand) is None
    assert heard.events.qsize() == 1


def test_two_threads_of_a_plan_ask_one_after_the_other() -> None:
    heard = Heard()
    feed = ProducerChannel(7, heard)
    both = [
        Waiting(lambda: feed.next_splits(nothing_in_hand)),
        Waiting(lambda: feed.next_splits(nothing_in_hand)),
    ]
    for units in ((0, 1), (1, 2)):
        assert heard.events.get(timeout=SECONDS) == ("needs", 7)
        assert heard.events.empty()
        feed.grant(SplitGrant(producer=7, splits=units, deliver_at_once=False))
    assert sorted(each.found().splits for each in both) == [(0, 1), (1, 2)]


def test_a_producer_that_waits_for_units_hears_that_its_task_was_called_off() -> None:
    heard = Heard()
    feed = ProducerChannel(7, heard)
    waiting = Waiting(lambda: feed.next_splits(nothing_in_hand))
    heard.events.get(timeout=SECONDS)
    feed.close()
    assert isinstance(waiting.found(), CancelledError)
    with pytest.raises(CancelledError):
        feed.next_splits(nothing_in_hand)
    assert heard.events.empty()


def test_the_end_is_handed_on() -> None:
    heard = Heard()
    ProducerChannel(7, heard).end("it broke")
    assert heard.events.get() == ("ended", 7, "it broke")


# --- A portion of which a part was put while units were waited for --------------------------------


def test_a_wait_for_units_says_nothing_of_how_fast_portions_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("headrace.service.worker.producer.time", clock)
    asked: list[int] = []
    waited_at: list[int] = []

    class Waits(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            asked.append(limit)
            # In the middle of a portion, of which a part is in hand.
            if not waited_at and limit < max(asked) == 8:
                waited_at.append(len(asked))
                producer.flush()
                now[0] += 10.0
            return super().next_chunk(limit)

    outlet = Collected()
    iterator = Waits([[2 * pair, 2 * pair + 1] for pair in range(30)])
    producer = Producer("task-1", lambda *_: iterator, outlet, counts_splits=False)
    producer.start()
    assert outlet.ended.wait(SECONDS)
    producer.join(SECONDS)
    [place] = waited_at
    assert asked[place] == 8  # the next portion may hold as much as the one that was parted
    assert [row for rows in outlet.elements() for row in rows] == list(range(60))


# A task that is to give what it holds: its producer pauses once, and says that all is whole.


def test_it_pauses_once_for_what_it_was_granted_and_then_asks_less_and_less_often() -> None:
    worker = Driven(heartbeat_interval=1000.0).registered()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.grants(0, 2)
    worker.need(producer)

    paused = worker.grants(0, 0, wait=True, flush=True)
    assert paused.grants == [SplitGrant(producer=producer, is_pause=True)]
    assert worker.of(GetSplit)[-1].assignment_number == 1, "nobody is asked before more is needed"
    asked = len(worker.of(GetSplit))

    worker.need(producer)
    assert len(worker.of(GetSplit)) == asked + 1
    again = worker.grants(0, 0, wait=True, flush=True)
    assert (again.grants, again.deferrals) == ([], [producer])
    worker.pass_time(0.05)
    assert worker.grants(5, 7).grants == [SplitGrant(producer=producer, splits=(5, 7))]
    worker.need(producer)
    more = worker.grants(0, 0, wait=True, flush=True)
    assert more.grants == [SplitGrant(producer=producer, is_pause=True)]
    worker.need(producer)
    assert worker.grants(0, 0).grants == [SplitGrant(producer=producer)], "the end is the end"


def test_all_that_a_shuffle_holds_is_put_and_its_units_are_whole() -> None:
    dataset = hr.Dataset.range(100).filter(lambda x: x < 5).shuffle(1000, seed=3)
    task = definition(dealt=True, origins=True)
    put: list[ResultBatch] = []
    needed: list[int] = []
    grants = iter([SplitGrant(producer=1, splits=(0, 8)), SplitGrant(producer=1, is_pause=True)])

    class Owner:
        def batch_produced(self, producer: int, portion: ResultBatch) -> None:
            put.append(portion)
            feed.resume()

        def splits_needed(self, producer: int) -> None:
            needed.append(len(put))
            grant = next(grants, None)
            if grant is not None:
                feed.grant(grant)

        def producer_ended(self, producer: int, failure: str | None) -> None:
            assert failure is None
            needed.append(-1)

    feed = ProducerChannel(1, Owner())
    producer = Producer(
        "task-1",
        lambda hand_over: open_plan(
            dump_plan(dataset.plan), task, partial(feed.next_splits, hand_over), worker="w:1"
        ),
        feed,
        counts_splits=True,
        reports_element_ids=True,
    )
    producer.start()
    try:
        wait_until(lambda: put and put[-1].done_to == 8)
        assert [put[0].done_from, needed[:2]] == [0, [0, 0]], "before the pause nothing was put"
        feed.grant(SplitGrant(producer=1, splits=(2, 3)))
        feed.resume()
        wait_until(lambda: len(needed) == 4)
        feed.grant(SplitGrant(producer=1))
        wait_until(lambda: needed[-1] == -1)
    finally:
        feed.close()
        producer.join(SECONDS)
    rows = [
        row
        for portion in put
        if portion.num_elements
        for row in wire.decode(portion.buffers).rows()
    ]
    assert sorted(int(np.max(row)) for row in rows) == [0, 1, 2, 2, 3, 4]
    ends = [
        run for portion in put for run in portion.element_ids.runs if run[2] + run[3] == END_ORDINAL
    ]
    ended = {unit for first, units, _, _ in ends for unit in range(first, first + units)}
    assert ended >= set(range(8)), "all units ended, those without elements as well"
