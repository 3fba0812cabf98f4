"""A task hands out its elements once, to whoever asks, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.execution.iterator import ElementIterator
from headrace.service.messages import Elements, GetElements
from headrace.service.worker.task_runner import TaskRunner
from headrace.transport.channel import Buffer, Request

_SECONDS = 10.0


class Asked(Request):
    """A request whose answer can be waited for."""

    def __init__(self, client: str, number: int, acknowledged: int = 0) -> None:
        self.message = GetElements(
            task_id=1, client_id=client, number=number, acknowledged=acknowledged
        )
        self.buffers = ()
        self.peer = client
        self._answers: SimpleQueue[tuple[Any, Sequence[Buffer]]] = SimpleQueue()

    def reply(self, message: Any, buffers: Sequence[Buffer] = ()) -> None:
        self._answers.put((message, buffers))

    def fail(self, error: Exception) -> None:
        self._answers.put((error, ()))

    def elements(self) -> list[int]:
        """Return the elements that came; raise the error that came."""
        message, buffers = self._answers.get(timeout=_SECONDS)
        if isinstance(message, Exception):
            raise message
        return [int(row) for row in wire.decode(buffers).rows()]

    def nothing(self) -> bool:
        """Whether the answer is that nothing is left: True at the end, False "come again"."""
        message, _ = self._answers.get(timeout=_SECONDS)
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, Elements)
        assert message.count == 0
        return message.end


class Listed(ElementIterator):
    """Yields chunks, raises errors, as listed."""

    def __init__(self, steps: list[list[int] | Exception]) -> None:
        self._steps = steps
        self.closed = False

    def next_chunk(self, limit: int) -> Chunk | None:
        if not self._steps:
            return None
        step = self._steps[0]
        if isinstance(step, Exception):
            self._steps.pop(0)
            raise step
        values, rest = step[:limit], step[limit:]
        self._steps[:1] = [rest] if rest else []
        return Chunk.of_columns(np.array(values), len(values))

    def get_state(self) -> Any:
        return None

    def set_state(self, state: Any) -> None:
        raise AssertionError("a task does not go back")

    def close(self) -> None:
        self.closed = True


@contextmanager
def running(
    build: Callable[[ExitStack], ElementIterator],
) -> Iterator[tuple[TaskRunner, threading.Event]]:
    told = threading.Event()
    runner = TaskRunner(1, build, told.set, threading.Event())
    try:
        yield runner, told
    finally:
        runner.close()
        runner.close()


def ask(runner: TaskRunner, client: str, number: int, acknowledged: int = 0) -> Asked:
    request = Asked(client, number, acknowledged)
    runner.take(request)
    return request


def test_the_first_frame_holds_one_element_and_frames_grow() -> None:
    with running(lambda _: Listed([list(range(100))])) as (runner, _):
        sizes = [len(ask(runner, "a", number, number).elements()) for number in range(3)]
    assert sizes == [1, 2, 4]


def test_a_repeated_request_gets_the_same_frame_again() -> None:
    with running(lambda _: Listed([list(range(100))])) as (runner, _):
        first = ask(runner, "a", 0).elements()
        second = ask(runner, "a", 1).elements()
        assert ask(runner, "a", 0).elements() == first
        assert ask(runner, "a", 1).elements() == second
        late = ask(runner, "a", 0, acknowledged=1)
        with pytest.raises(hr.errors.AbortedError, match="acknowledged before"):
            late.elements()


def test_two_clients_get_different_elements() -> None:
    with running(lambda _: Listed([list(range(100))])) as (runner, _):
        got = [ask(runner, client, 0).elements() for client in "ab"]
    assert got == [[0], [1, 2]]


def test_an_element_that_fails_is_told_once_and_the_task_goes_on() -> None:
    steps: list[list[int] | Exception] = [[0], hr.errors.DataLossError("torn"), [1]]
    with running(lambda _: Listed(steps)) as (runner, _):
        assert ask(runner, "a", 0).elements() == [0]
        with pytest.raises(hr.errors.DataLossError, match="torn"):
            ask(runner, "a", 1, 1).elements()
        assert ask(runner, "a", 2, 2).elements() == [1]
        assert ask(runner, "a", 3, 3).nothing()


def test_the_end_waits_until_the_only_client_has_used_up_what_it_got() -> None:
    with running(lambda _: Listed([[7]])) as (runner, told):
        assert ask(runner, "a", 0).elements() == [7]
        assert ask(runner, "a", 1).nothing() is False
        assert not told.is_set()

        assert ask(runner, "a", 2, acknowledged=2).nothing() is True
        assert told.is_set()
        assert runner.finished


def test_a_second_client_does_not_wait_for_the_first() -> None:
    with running(lambda _: Listed([[7]])) as (runner, told):
        assert ask(runner, "a", 0).elements() == [7]

        assert ask(runner, "b", 0).nothing() is True
        assert told.is_set()
        assert ask(runner, "a", 0).elements() == [7]


def test_a_plan_that_cannot_be_built_is_told_once_and_ends() -> None:
    def build(_: ExitStack) -> ElementIterator:
        raise ImportError("no such module")

    with running(build) as (runner, _):
        with pytest.raises(hr.errors.HeadraceError, match="ImportError: no such module"):
            ask(runner, "a", 0).elements()
        assert ask(runner, "a", 1, 1).nothing() is True


def test_a_plan_that_fails_alike_for_ever_ends() -> None:
    class Broken(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            raise OSError("disk is gone")

    with running(lambda _: Broken([])) as (runner, told):
        failures = 0
        while not told.is_set():
            request = ask(runner, "a", failures, failures)
            try:
                assert request.nothing()
            except hr.errors.HeadraceError:
                failures += 1
            assert failures < 1000
    assert failures == 100


def test_a_task_that_is_called_off_answers_everyone_and_closes_its_iterator() -> None:
    began = threading.Event()
    off = threading.Event()

    class Waiting(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            began.set()
            off.wait(_SECONDS)
            return None

    iterator = Waiting([])
    with running(lambda _: iterator) as (runner, _):
        parked = ask(runner, "a", 0)
        assert began.wait(_SECONDS)
        runner.close(wait=False)
        off.set()
        with pytest.raises(hr.errors.CancelledError, match="has been deleted"):
            parked.elements()
        with pytest.raises(hr.errors.CancelledError, match="has been deleted"):
            ask(runner, "a", 1).elements()
    assert iterator.closed
