"""Producer channel: waits for room and splits, pauses, and cancellation."""

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
from tests.service.worker.core_driver import CoreDriver, definition
from tests.service.worker.scripted_iterator import SECONDS, ScriptedIterator
from tests.service.worker.test_producer import CollectingSink


class RecordingListener:
    """Records the output of a producer, and can reply at once."""

    def __init__(self) -> None:
        self.events: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.on_need: Callable[[], None] = lambda: None
        self.on_batch: Callable[[], None] = lambda: None

    def batch_produced(self, producer: int, batch: ResultBatch) -> None:
        self.events.put(("produced", producer, batch.first_element))
        self.on_batch()

    def splits_needed(self, producer: int) -> None:
        self.events.put(("needs", producer))
        self.on_need()

    def producer_ended(self, producer: int, failure: str | None) -> None:
        self.events.put(("ended", producer, failure))


def no_flush() -> None:
    """Flush nothing."""


class BackgroundCall:
    """A call on another thread, with its result or error."""

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

    def result(self) -> Any:
        found = self._found.get(timeout=SECONDS)
        self._thread.join(SECONDS)
        return found


def test_there_is_room_for_one_batch_until_the_producer_is_resumed() -> None:
    listener = RecordingListener()
    channel = ProducerChannel(7, listener)
    assert channel.wait_for_room()
    assert channel.wait_for_room()
    channel.put(ResultBatch(first_element=3))
    assert listener.events.get() == ("produced", 7, 3)
    waiting = BackgroundCall(channel.wait_for_room)
    channel.resume()
    assert waiting.result() is True


def test_a_producer_resumed_during_put_continues() -> None:
    listener = RecordingListener()
    channel = ProducerChannel(7, listener)
    listener.on_batch = channel.resume
    channel.put(ResultBatch(first_element=0))
    assert channel.wait_for_room()


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_wait_for_room_ends_when_the_channel_stops_or_closes(end: str) -> None:
    channel = ProducerChannel(7, RecordingListener())
    channel.put(ResultBatch(first_element=0))
    waiting = BackgroundCall(channel.wait_for_room)
    getattr(channel, end)()
    assert waiting.result() is False
    assert channel.wait_for_room() is False


def test_splits_are_requested_once_and_awaited() -> None:
    listener = RecordingListener()
    channel = ProducerChannel(7, listener)
    waiting = BackgroundCall(lambda: channel.next_splits(no_flush))
    assert listener.events.get(timeout=SECONDS) == ("needs", 7)
    channel.grant(SplitGrant(producer=7, splits=(3, 5), deliver_at_once=True))
    assert waiting.result().splits == (3, 5)
    assert channel.delivers_at_once
    listener.on_need = lambda: channel.grant(
        SplitGrant(producer=7, splits=(8, 9), deliver_at_once=False)
    )
    granted = channel.next_splits(no_flush)
    assert granted is not None
    assert granted.splits == (8, 9)
    assert not channel.delivers_at_once


def test_buffered_elements_are_flushed_before_a_wait_for_splits() -> None:
    listener = RecordingListener()
    channel = ProducerChannel(7, listener)
    assert not channel.delivers_at_once
    waiting = BackgroundCall(
        lambda: channel.next_splits(
            lambda: listener.events.put(("flushes", channel.delivers_at_once))
        )
    )
    assert listener.events.get(timeout=SECONDS) == ("needs", 7)
    assert listener.events.get(timeout=SECONDS) == ("flushes", True)
    channel.grant(SplitGrant(producer=7, splits=(0, 1), deliver_at_once=False))
    assert waiting.result().splits == (0, 1)
    assert not channel.delivers_at_once


def test_no_splits_are_requested_after_the_last_ones() -> None:
    listener = RecordingListener()
    channel = ProducerChannel(7, listener)
    listener.on_need = lambda: channel.grant(SplitGrant(producer=7, deliver_at_once=False))
    assert channel.next_splits(no_flush) is None
    assert channel.next_splits(no_flush) is None
    assert listener.events.qsize() == 1


def test_two_threads_of_a_plan_request_splits_in_turn() -> None:
    listener = RecordingListener()
    channel = ProducerChannel(7, listener)
    both = [
        BackgroundCall(lambda: channel.next_splits(no_flush)),
        BackgroundCall(lambda: channel.next_splits(no_flush)),
    ]
    for splits in ((0, 1), (1, 2)):
        assert listener.events.get(timeout=SECONDS) == ("needs", 7)
        assert listener.events.empty()
        channel.grant(SplitGrant(producer=7, splits=splits, deliver_at_once=False))
    assert sorted(each.result().splits for each in both) == [(0, 1), (1, 2)]


def test_a_wait_for_splits_fails_when_the_task_is_cancelled() -> None:
    listener = RecordingListener()
    channel = ProducerChannel(7, listener)
    waiting = BackgroundCall(lambda: channel.next_splits(no_flush))
    listener.events.get(timeout=SECONDS)
    channel.close()
    assert isinstance(waiting.result(), CancelledError)
    with pytest.raises(CancelledError):
        channel.next_splits(no_flush)
    assert listener.events.empty()


def test_the_end_is_passed_on() -> None:
    listener = RecordingListener()
    ProducerChannel(7, listener).end("disk is full")
    assert listener.events.get() == ("ended", 7, "disk is full")


# --- batches divided by a wait for splits ---------------------------------------------------------


def test_a_wait_for_splits_does_not_change_the_batch_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("headrace.service.worker.producer.time", clock)
    asked: list[int] = []
    waited_at: list[int] = []

    class Waits(ScriptedIterator):
        def next_chunk(self, limit: int) -> Chunk | None:
            asked.append(limit)
            # In the middle of a batch, with elements buffered.
            if not waited_at and limit < max(asked) == 8:
                waited_at.append(len(asked))
                producer.flush()
                now[0] += 10.0
            return super().next_chunk(limit)

    sink = CollectingSink()
    iterator = Waits([[2 * pair, 2 * pair + 1] for pair in range(30)])
    producer = Producer("task-1", lambda *_: iterator, sink, counts_splits=False)
    producer.start()
    assert sink.ended.wait(SECONDS)
    producer.join(SECONDS)
    [index] = waited_at
    assert asked[index] == 8  # the next batch has the limit of the divided one
    assert [row for rows in sink.elements() for row in rows] == list(range(60))


# --- pauses: all elements held by steps are delivered, and their splits are complete -------------


def test_a_task_pauses_once_per_assignment_and_then_retries_with_backoff() -> None:
    worker = CoreDriver(heartbeat_interval=1000.0).register()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.grant_splits(0, 2)
    worker.need_splits(producer)

    paused = worker.grant_splits(0, 0, wait=True, flush=True)
    assert paused.grants == [SplitGrant(producer=producer, is_pause=True)]
    assert worker.calls_of(GetSplit)[-1].assignment_number == 1, (
        "no request before splits are needed"
    )
    asked = len(worker.calls_of(GetSplit))

    worker.need_splits(producer)
    assert len(worker.calls_of(GetSplit)) == asked + 1
    repeated = worker.grant_splits(0, 0, wait=True, flush=True)
    assert (repeated.grants, repeated.deferrals) == ([], [producer])
    worker.pass_time(0.05)
    assert worker.grant_splits(5, 7).grants == [SplitGrant(producer=producer, splits=(5, 7))]
    worker.need_splits(producer)
    more = worker.grant_splits(0, 0, wait=True, flush=True)
    assert more.grants == [SplitGrant(producer=producer, is_pause=True)]
    worker.need_splits(producer)
    assert worker.grant_splits(0, 0).grants == [SplitGrant(producer=producer)], (
        "the end is not a pause"
    )


def test_a_pause_flushes_a_shuffle_and_completes_its_splits() -> None:
    dataset = hr.Dataset.range(100).filter(lambda x: x < 5).shuffle(1000, seed=3)
    task = definition(assigns_splits=True, with_ids=True)
    batches: list[ResultBatch] = []
    needed: list[int] = []
    grants = iter([SplitGrant(producer=1, splits=(0, 8)), SplitGrant(producer=1, is_pause=True)])

    class Listener:
        def batch_produced(self, producer: int, batch: ResultBatch) -> None:
            batches.append(batch)
            channel.resume()

        def splits_needed(self, producer: int) -> None:
            needed.append(len(batches))
            grant = next(grants, None)
            if grant is not None:
                channel.grant(grant)

        def producer_ended(self, producer: int, failure: str | None) -> None:
            assert failure is None
            needed.append(-1)

    channel = ProducerChannel(1, Listener())
    producer = Producer(
        "task-1",
        lambda flush: open_plan(
            dump_plan(dataset.plan), task, partial(channel.next_splits, flush), worker="w:1"
        ),
        channel,
        counts_splits=True,
        reports_element_ids=True,
    )
    producer.start()
    try:
        wait_until(lambda: batches and batches[-1].done_to == 8)
        assert [batches[0].done_from, needed[:2]] == [0, [0, 0]], (
            "nothing is delivered before the pause"
        )
        channel.grant(SplitGrant(producer=1, splits=(2, 3)))
        channel.resume()
        wait_until(lambda: len(needed) == 4)
        channel.grant(SplitGrant(producer=1))
        wait_until(lambda: needed[-1] == -1)
    finally:
        channel.close()
        producer.join(SECONDS)
    rows = [
        row for batch in batches if batch.num_elements for row in wire.decode(batch.buffers).rows()
    ]
    assert sorted(int(np.max(row)) for row in rows) == [0, 1, 2, 2, 3, 4]
    ends = [
        run for batch in batches for run in batch.element_ids.runs if run[2] + run[3] == END_ORDINAL
    ]
    ended = {split for first, splits, _, _ in ends for split in range(first, first + splits)}
    assert ended >= set(range(8)), "splits without elements have ended as well"
