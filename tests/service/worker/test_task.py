"""A task hands out its elements once, to whoever asks, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import headrace as hr
from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.execution.iterator import ElementIterator
from headrace.service.config import ShardingPolicy
from headrace.service.messages import SplitGranted
from headrace.service.worker.first_come import Bounds
from headrace.service.worker.task import Task
from headrace.service.worker.unit_feed import UnitFeed
from tests.service.reading import wait_until
from tests.service.worker.asking import SECONDS, Asked, Listed, definition


class Reports:
    """What a task says when it is over."""

    def __init__(self) -> None:
        self.failures: list[str | None] = []
        self.ended = threading.Event()
        self.over = threading.Event()

    def report(self, failure: str | None) -> None:
        self.failures.append(failure)
        self.ended.set()


class FromFeed(ElementIterator):
    """Yields the numbers of the units that its feed deals."""

    def __init__(self, feed: UnitFeed) -> None:
        self._feed = feed
        self._left = range(0)
        self._dealt = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        if not self._left:
            units = self._feed.next_units()
            if units is None:
                return None
            self._left = range(*units)
        taken, self._left = self._left[:limit], self._left[limit:]
        self._dealt += len(taken)
        chunk = Chunk.of_columns(np.array(taken), len(taken))
        before = self._dealt - len(taken)
        return chunk.with_states(lambda index: {"dealt": before + index})

    def get_state(self) -> object:
        return {"dealt": self._dealt}

    def set_state(self, state: object) -> None:
        raise AssertionError("a task does not go back")


class Endless:
    """A dispatcher that deals units without end, and notes what it hears."""

    def __init__(self) -> None:
        self.next = 0
        self.done: list[int] = []

    def ask(self, number: int, want: int, done: int) -> SplitGranted:
        self.done.append(done)
        start, self.next = self.next, self.next + want
        return SplitGranted(start=start, stop=self.next)


@contextmanager
def running(
    open_plan: Callable[[UnitFeed | None], ElementIterator],
    ask: Callable[[int, int, int], SplitGranted] | None = None,
    bounds: Bounds | None = None,
) -> Iterator[tuple[Task, Reports]]:
    reports = Reports()
    mode = ShardingPolicy.OFF if ask is None else ShardingPolicy.DYNAMIC
    task = Task(definition(mode=mode), open_plan, ask, reports.report, reports.over.set, bounds)
    task.start()
    try:
        yield task, reports
    finally:
        task.close()
        task.close()
        task.join(SECONDS)


def of_feed(feed: UnitFeed | None) -> ElementIterator:
    assert feed is not None
    return FromFeed(feed)


def ask(task: Task, client: str, number: int, acknowledged: int = 0) -> Asked:
    request = Asked(client, number, acknowledged)
    task.take(request)
    return request


def test_a_repeated_request_gets_the_same_portion_again() -> None:
    with running(lambda _: Listed([list(range(100))])) as (task, _):
        first = ask(task, "a", 0).elements()
        second = ask(task, "a", 1).elements()
        assert ask(task, "a", 0).elements() == first
        assert ask(task, "a", 1).elements() == second
        late = ask(task, "a", 0, acknowledged=1)
        with pytest.raises(hr.errors.AbortedError, match="acknowledged before"):
            late.elements()


def test_two_clients_get_different_elements() -> None:
    with running(lambda _: Listed([list(range(100))])) as (task, _):
        got = [ask(task, client, 0).elements() for client in "ab"]
    assert got == [[0], [1, 2]]


def test_a_request_with_another_ticket_is_refused_and_disturbs_nobody() -> None:
    with running(lambda _: Listed([list(range(100))])) as (task, _):
        stranger = Asked("a", 0, acknowledged=100, ticket="of another incarnation")
        task.take(stranger)
        with pytest.raises(hr.errors.FailedPreconditionError, match="incarnation of the disp"):
            stranger.elements()
        assert ask(task, "a", 0).elements() == [0]


def test_an_element_that_fails_is_reported_once_and_the_task_goes_on() -> None:
    steps: list[list[int] | BaseException] = [[0], hr.errors.DataLossError("torn"), [1]]
    with running(lambda _: Listed(steps)) as (task, _):
        assert ask(task, "a", 0).elements() == [0]
        with pytest.raises(hr.errors.DataLossError, match="torn"):
            ask(task, "a", 1, 1).elements()
        assert ask(task, "a", 2, 2).elements() == [1]
        assert ask(task, "a", 3, 3).nothing()


def test_the_task_is_over_when_its_only_client_has_used_up_what_it_got() -> None:
    with running(lambda _: Listed([[7]])) as (task, reports):
        assert ask(task, "a", 0).elements() == [7]
        assert ask(task, "a", 1).nothing() is False
        assert not reports.ended.is_set()

        assert ask(task, "a", 2, acknowledged=2).nothing() is True
        assert reports.failures == [None]
        assert task.finished
        assert reports.over.wait(SECONDS)


def test_a_second_client_does_not_wait_for_the_first() -> None:
    with running(lambda _: Listed([[7]])) as (task, reports):
        assert ask(task, "a", 0).elements() == [7]

        assert ask(task, "b", 0).nothing() is True
        assert reports.ended.is_set()
        assert ask(task, "a", 0).elements() == [7]
        assert not reports.over.is_set()
        assert ask(task, "a", 1, 1).nothing() is True
        assert reports.over.wait(SECONDS)


def test_a_task_that_fails_gives_its_clients_the_error_and_then_the_end() -> None:
    with running(lambda _: Listed([[0], SystemExit(3)])) as (task, reports):
        assert ask(task, "a", 0).elements() == [0]
        with pytest.raises(hr.errors.UserFunctionError, match="SystemExit: 3"):
            ask(task, "a", 1, 1).elements()
        assert ask(task, "a", 2, 2).nothing() is True
        assert reports.failures == ["SystemExit: 3"]


def test_a_task_that_is_called_off_answers_everyone_and_closes_its_iterator() -> None:
    began, off = threading.Event(), threading.Event()

    class Waiting(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            began.set()
            off.wait(SECONDS)
            return None

    iterator = Waiting([])
    with running(lambda _: iterator) as (task, _):
        parked = ask(task, "a", 0)
        assert began.wait(SECONDS)
        task.close()
        off.set()
        with pytest.raises(hr.errors.CancelledError, match="has been deleted"):
            parked.elements()
        with pytest.raises(hr.errors.CancelledError, match="has been deleted"):
            ask(task, "a", 1).elements()
    assert iterator.closed


def test_the_dispatcher_hears_how_many_units_are_acknowledged() -> None:
    dispatcher = Endless()
    with running(of_feed, dispatcher.ask) as (task, _):
        for number in range(6):
            ask(task, "a", number, acknowledged=number).elements()
        wait_until(lambda: dispatcher.done[-1] > 0)
        assert dispatcher.done == sorted(dispatcher.done)
        assert task.done <= dispatcher.next


def test_a_dealt_task_that_is_cut_delivers_all_that_it_was_dealt() -> None:
    dispatcher = Endless()
    with running(of_feed, dispatcher.ask) as (task, reports):
        got = ask(task, "a", 0).elements()
        task.cut()
        number = 1
        while not reports.ended.is_set():
            request = ask(task, "a", number, acknowledged=number)
            message, buffers = request.answer()
            if message.end:
                break
            if message.count:
                got += [int(row) for row in wire.decode(buffers).rows()]
            number += 1
        assert got == list(range(dispatcher.next))
        assert reports.failures == [None]
        assert task.is_settled


def test_a_copy_that_is_cut_ends_with_what_was_made_of_it() -> None:
    with running(lambda _: Listed([list(range(1 << 20))])) as (task, _):
        got = ask(task, "a", 0).elements()
        task.cut()
        number = 1
        while True:
            message, buffers = ask(task, "a", number, acknowledged=number).answer()
            if not message.count:
                break
            got += [int(row) for row in wire.decode(buffers).rows()]
            number += 1
        assert message.end
        assert got == list(range(len(got)))
        assert len(got) < 1 << 20


def test_units_of_which_nothing_was_given_are_handed_back() -> None:
    dispatcher = Endless()
    with running(of_feed, dispatcher.ask) as (task, _):
        given = ask(task, "a", 0).elements()
        left = task.close()
        assert given == [0]
        assert task.units_to_hand_back(left, timeout=SECONDS) == ((1, dispatcher.next),)
        assert left.unacknowledged == 1


def test_what_a_client_does_not_acknowledge_is_bounded_in_bytes() -> None:
    bounds = Bounds(client_bytes=1, total_bytes=1 << 20)
    with running(lambda _: Listed([list(range(1000))]), bounds=bounds) as (task, _):
        asked = [ask(task, "a", number) for number in range(5)]
        wait_until(lambda: asked[1].is_answered)
        assert [request.is_answered for request in asked] == [True, True, False, False, False]
        ask(task, "a", 5, acknowledged=1)
        wait_until(lambda: asked[2].is_answered)
        assert not asked[3].is_answered
