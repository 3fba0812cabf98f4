"""The datasets that an interleave has open, and the threads that read them ahead.

Who may touch what. A dataset is the consumer's, or a thread's: its iterator and its pace belong to
a thread while it is busy, that is from `Readers.read` until the result is there. `result`,
`is_busy` and `is_left` change under the readers' lock; the consumer also looks at a result, takes
it and asks for the next without it, for no thread is in the dataset then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.execution.intake import Pace
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.places import Held, Places, within
from headrace.execution.threads import PATIENCE, Crew, Item, LongWait, close_quietly

__all__ = ["ClosedError", "Inner", "Opened", "Readers"]

_logger = logging.getLogger("headrace")


class ClosedError(Exception):
    """Another thread has closed what this one waits for."""


class Inner:
    """An open dataset: what is in hand of it, and the place of its next element.

    Args:
        origin: States of the outer input; number 0 is that before the outer element.
        number: Number of the outer element.
        iterator: Over the dataset's elements.
        pace: How many to ask for, where they are read ahead.
        place: Of the outer element.
    """

    __slots__ = (
        "held",
        "index",
        "is_busy",
        "is_left",
        "iterator",
        "number",
        "origin",
        "pace",
        "place",
        "result",
        "rows",
        "states",
        "unit",
    )

    def __init__(
        self,
        origin: States,
        number: int,
        iterator: ElementIterator,
        pace: Pace,
        place: Places,
    ) -> None:
        self.origin = origin
        self.number = number
        self.place = place
        #: Of all its elements, where they are to be named.
        self.unit: int | None = None if place.dtype.names is None else int(place["unit"][0])
        self.iterator = iterator
        self.pace = pace
        #: In hand from `index` on.
        self.held: Held | None = None
        #: Single elements that come next, if they were asked for; else None.
        self.rows: Iterator[Any] | None = None
        #: The place of the next element: that before element `index`.
        self.states: States = _nowhere
        self.index = 0
        self._at(iterator.get_state())
        self.is_busy = False  # a thread reads it, or will
        self.is_left = False  # and closes it then
        self.result: Item | None = None  # what a thread has read

    @property
    def in_hand(self) -> int:
        """Elements that can be taken."""
        return 0 if self.held is None else self.held.chunk.size - self.index

    @property
    def is_ready(self) -> bool:
        """Whether what comes next is known without waiting."""
        return self.result is not None

    def _at(self, state: State) -> None:
        self.states, self.index = (lambda index: state), 0

    def take(self, count: int) -> tuple[Held, int]:
        """Take elements in hand; return the chunk that they are in, and where."""
        held, start = self.held, self.index
        assert held is not None
        self.index = start + count
        if self.index == held.chunk.size:
            self.held = None
        return held, start

    def read(self, limit: int, more_is_welcome: bool = False) -> bool:
        """Have elements in hand; False at the end."""
        if self.rows is not None:
            states, index = self.states, self.index
            for row in self.rows:
                self._hold(Chunk.of_rows([row], lambda after: states(index + after)))
                return True
            self.rows = None
        iterator = self.iterator
        chunk = self.pace.ask(iterator, limit) if more_is_welcome else iterator.next_chunk(limit)
        if chunk is None:
            return False
        self._hold(chunk)
        return True

    def begin_rows(self) -> bool:
        """Have single elements to take from `rows`; False at the end."""
        if self.rows is None:
            got = self.iterator.singles()
            if got is None:
                return False
            (self.rows, self.states), self.index = got, 0
        return True

    def skip(self, count: int) -> int:
        """Pass over elements that are not in hand; return how many there were."""
        if self.rows is not None:
            self.set_state(self.states(self.index))
        passed = self.iterator.skip(count)
        self._at(self.iterator.get_state())
        return passed

    def receive(self) -> bool:
        """Take over what a thread has read, or raise its error; False at the end."""
        item = self.result
        assert item is not None
        if item.error is not None:
            raise item.error
        if item.chunk is None:
            return False
        self.result = None
        self._hold(item.chunk)
        return True

    def _hold(self, chunk: Chunk) -> None:
        if chunk.places is not None:
            chunk = chunk.with_places(within(self.place, chunk.places))
            unit = None
        else:
            unit = self.unit  # one number, until it is known what these are mixed with
        self.held, self.states, self.index = Held(chunk, unit), chunk.states, 0

    def pass_over_error(self) -> None:
        """Go to the place after an error that is being raised."""
        item, self.result, self.rows = self.result, None, None
        self._at(self.iterator.get_state() if item is None else item.after)

    def set_state(self, state: State) -> None:
        """Go to a place."""
        self.rows = None
        self.iterator.set_state(state)
        self._at(state)

    def close(self) -> None:
        """Close the iterator, which no thread is in."""
        self.held = self.rows = None
        self.iterator.close()


@dataclass(frozen=True)
class Opened:
    """What became of the next outer element."""

    origin: States
    """Place number 0 is that of the outer element."""
    number: int
    inner: Inner | None = None
    error: Exception | None = None
    is_end: bool = False
    """There is none."""


class Readers:
    """Threads that read datasets ahead, a chunk each."""

    def __init__(self, threads: int) -> None:
        self._crew = Crew(threads, "headrace-interleave")
        self._lock = threading.RLock()  # taken as it is: see `Feeder.lock`
        self._changed = threading.Condition(self._lock)
        self._is_closed = False

    def read(self, inner: Inner) -> None:
        """Have the next chunk of a dataset read."""
        if self._is_closed:
            return
        inner.is_busy = True
        self._crew.submit(lambda: self._read(inner))

    def _read(self, inner: Inner) -> None:
        chunk: Chunk | None = None
        error: BaseException | None = None
        after: State = None
        if not self._is_closed:
            try:
                chunk = inner.pace.next_chunk(inner.iterator)
                if chunk is None:
                    after = inner.iterator.get_state()
            except Exception as failure:
                error, after = failure, inner.iterator.get_state()
            except BaseException as escape:
                error = escape
        with self._lock:
            inner.result = Item(chunk, error, after)
            inner.is_busy = False
            is_left = inner.is_left
            self._changed.notify_all()
        if is_left:
            close_quietly(inner.iterator)

    def wait_for(self, inner: Inner, step: str) -> None:
        """Wait until something was read of a dataset, have it read if need be."""
        if inner.result is None and not inner.is_busy:
            self.read(inner)
        self._wait(lambda: inner.is_ready, f"the dataset of element {inner.number} of {step}")

    def wait_for_any(self, inners: Sequence[Inner], step: str) -> None:
        """Wait until something was read of one of these datasets."""
        for inner in inners:
            if inner.result is None and not inner.is_busy:
                self.read(inner)
        self._wait(lambda: any(inner.is_ready for inner in inners), f"a dataset of {step}")

    def _wait(self, is_over: Callable[[], bool], awaited: str) -> None:
        if is_over():
            return
        wait = LongWait(awaited)
        with self._lock:
            while not is_over() and not self._is_closed:
                wait.wait(self._changed)
        if not is_over():
            raise ClosedError

    def close(self, inners: Sequence[Inner], step: str) -> None:
        """Close these datasets; one that a thread does not come out of, that thread closes."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._crew.dismiss()
        left = self._busy_after_a_moment(inners)
        for inner in left:
            # A wait for a peer ends when it is closed from here.
            close_quietly(inner.iterator)
        left = self._busy_after_a_moment(left)
        if left:
            _logger.warning(
                "%s: %d of its datasets do not return; their threads go on until they do, and end "
                "then",
                step,
                len(left),
            )
        for inner in inners:
            if inner not in left:
                inner.close()

    def _busy_after_a_moment(self, inners: Sequence[Inner]) -> list[Inner]:
        """Return those that a thread is in, after a short wait; it is to close them."""
        deadline = time.monotonic() + PATIENCE
        with self._lock:
            while any(inner.is_busy for inner in inners) and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            left = [inner for inner in inners if inner.is_busy]
            for inner in left:
                inner.is_left = True
        return left


def _nowhere(index: int) -> State:
    raise AssertionError("no place is known yet")
