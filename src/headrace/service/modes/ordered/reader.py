"""The client's half of a plan, over what comes from the workers (`plan.source.Reader`).

In order, it opens unit after unit; what arrives is sorted by `units`. In any order it reads what
comes, as it comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.counts import count_delivered
from headrace.element.chunk import Chunk
from headrace.element.places import named
from headrace.errors import CancelledError, FailedPreconditionError
from headrace.execution.context import UnitReader, UnitSource
from headrace.execution.iterator import ElementIterator
from headrace.plan.source import Position
from headrace.service.client.actions import Delivery, content_of
from headrace.service.client.schedule import MOST_REQUESTS
from headrace.service.client.session import Session
from headrace.service.client.shell import Shell
from headrace.service.messages import LostSplits, OpenIterationReply
from headrace.service.modes.ordered.units import Found, Units
from headrace.transport import address as addresses

__all__ = ["NO_UNITS", "ArrivingUnits", "UpperReader", "new_session"]

_log = logging.getLogger(__name__)

_HELD_BYTES = 256 << 20
"""Of elements that came before their turn, over all workers."""


class UpperReader:
    """Reads the upper half of a plan.

    Args:
        begin: Makes its iterator, when the first element is asked for.
        position: Where to begin.
        end: Closes what it reads from.
        named: What is said with each position, so that others can go on from there; None: they are
            places of this process alone.
        at_end: Called when the end is reached; it may raise an error.
        earlier_loss: What an earlier pass of the same iterator lost, to be raised first.
    """

    def __init__(
        self,
        begin: Callable[[], ElementIterator],
        position: Position,
        end: Callable[[], None] | None = None,
        named: dict[str, Any] | None = None,
        at_end: Callable[[], None] | None = None,
        earlier_loss: Exception | None = None,
    ) -> None:
        self._earlier_loss = earlier_loss
        self._begin, self._end, self._named = begin, end, named
        self._at_end = at_end
        self._position = position
        self._iterator: ElementIterator | None = None
        self._is_closed = False

    def read(self, limit: int) -> Chunk | None:
        """Return at most `limit` of the next elements; None at the end."""
        if self._is_closed:
            return None
        earlier, self._earlier_loss = self._earlier_loss, None
        if earlier is not None:
            raise earlier
        if self._iterator is None:
            iterator = self._begin()
            if self._position is not None:
                iterator.set_state(self._position)
            self._iterator = iterator
        chunk = self._iterator.next_chunk(limit)
        if chunk is None:
            at_end, self._at_end = self._at_end, None
            if at_end is not None:
                at_end()
            return None
        states = chunk.states
        return chunk.with_places(None).with_states(lambda index: self._said(states(index)))

    def get_position(self) -> Position:
        """Return the place before the next element."""
        if self._iterator is not None:
            return self._said(self._iterator.get_state())
        return None if self._position is None else self._said(self._position)

    def _said(self, place: Any) -> Position:
        return place if self._named is None else {"units": place, **self._named}

    def close(self) -> None:
        """Close what runs, and what it reads from."""
        self._is_closed = True
        if self._end is not None:
            # First: a thread of the steps may wait there.
            self._end()
        if self._iterator is not None:
            self._iterator.close()


class ArrivingUnits:
    """Opens units that arrive in any order (`execution.context.UnitSource`).

    Args:
        session: Of the iteration, which wants all answers.
        make_shell: Makes its shell.
        join: Opens the iteration, given the shell; returns what the dispatcher said.
        units: How many there are, or INFINITE.
    """

    def __init__(
        self,
        session: Session,
        make_shell: Callable[[Session], Shell],
        join: Callable[[Shell], OpenIterationReply],
        units: int,
    ) -> None:
        self._shell = make_shell(session)
        self._join = join
        self._is_joining = False
        self._units_left = units
        self._lock = threading.Lock()
        self._units = Units(_HELD_BYTES)
        #: Errors of no unit, to be raised next.
        self._errors: list[Exception] = []
        #: An answer could not be read: what is missing then is not known, and nothing is given.
        self._broken: Exception | None = None
        #: How far units were read that are open.
        self._reached: dict[int, int] = {}
        #: Ranges of units that nobody will give.
        self.given_up: tuple[tuple[int, int], ...] = ()
        #: Tasks that the dispatcher names for what is waited for.
        self._helpers: frozenset[int] = frozenset()
        #: Elements that each worker, by address, sent.
        self._delivered: dict[str, int] = {}

    def join(self) -> OpenIterationReply:
        """Open the iteration."""
        self._is_joining = True
        opened = self._join(self._shell)
        self._shell.begin(_nothing_in_hand)
        return opened

    def open(self, unit: int, first: int) -> ArrivingUnit:
        """Return a reader of a unit from an ordinal on.

        Raises:
            FailedPreconditionError: It was read already, and does not come again.
        """
        with self._lock:
            if self._units.was_read(unit) or self._reached.get(unit, 0) > first:
                raise FailedPreconditionError(_ONCE)
        return ArrivingUnit(self, unit, first)

    def reached(self, unit: int, ordinal: int | None) -> None:
        """Take note that a unit was read up to an ordinal; None: to its end."""
        if ordinal is None:
            self._reached.pop(unit, None)
        else:
            self._reached[unit] = ordinal

    def elements_by_worker(self) -> dict[str, int]:
        """Return how many elements each worker, by address, has sent so far."""
        return dict(self._delivered)

    @property
    def skipped(self) -> int:
        """Nothing is: no trainer shares what comes in order."""
        return 0

    @property
    def lost(self) -> tuple[LostSplits, ...]:
        """What was lost, once the iteration is over."""
        return self._shell.lost

    def found(self, unit: int, ordinal: int, limit: int) -> Found:
        """Return what comes next of a unit, perhaps after a wait.

        Raises:
            HeadraceError: Nothing can be read any more.
            CancelledError: It was closed.
        """
        has_waited = False
        with self._lock:
            while True:
                reading = self._sort()
                if self._broken is not None:
                    raise self._broken.with_traceback(None)
                if self._errors:
                    raise self._errors.pop(0).with_traceback(None)
                found = self._units.found(unit, ordinal, limit)
                wanted = unit if found is None else None
                asked = self._units.askable(wanted, reading, self._helpers)
                self._shell.allow(asked, wanted)
                if found is not None:
                    if has_waited:
                        self._shell.wait_no_more()
                    return found
                has_waited = True
                if self._shell.await_delivery():
                    continue
                if self._shell.failure is not None:
                    raise self._shell.failure.with_traceback(None)
                if self._shell.is_closing:
                    raise CancelledError("the iterator was closed")
                self._sort()
                # It is over: whatever is missing was lost for good.
                self._units.give_up([(unit, unit + 1)])

    def whole(self, unit: int, most: int, limit: int) -> tuple[Chunk, int] | None:
        """Return units in a row that are here and whole (`context.GivesWholeUnits`)."""
        with self._lock:
            reading = self._sort()
            stops = self._errors or self._broken
            given = None if stops else self._units.whole(unit, most, limit)
            if given is None:
                return None
            self._shell.allow(self._units.askable(None, reading), None)
        chunk, units = given
        count_delivered(chunk.size)
        self.is_over(units)
        return given

    def _sort(self) -> set[int]:
        """Take what arrived; return the tasks that are being read."""
        reading, given_up, self._helpers = self._shell.survey()
        for delivery in self._shell.delivered():
            self._take(delivery)
        self._units.forget(self._units.tasks - reading)
        if given_up != self.given_up:
            self.given_up = given_up
            self._units.give_up(given_up)
            _log.warning("positions %s of the dataset are given up: %s", given_up, _DIED)
        return reading

    def _take(self, delivery: Delivery) -> None:
        task, answer = delivery.task, delivery.answer
        content: Chunk | Exception | None = None
        size = 0
        if isinstance(delivery.payload, Exception):
            content = content_of(delivery)
        elif delivery.count:
            size = sum(memoryview(buffer).nbytes for buffer in delivery.payload)
            content = content_of(delivery)
            if isinstance(content, Exception):
                self._broken = self._broken or content
                return
        if isinstance(content, Exception) and (
            answer is None or answer.element_ids.failed_split < 0
        ):
            self._errors.append(content)
        if delivery.count:
            address = task.worker_address
            self._delivered[address] = self._delivered.get(address, 0) + delivery.count
        if answer is not None:
            self._units.take(task.task_id, answer, content, size)

    def is_over(self, units: int) -> None:
        """Take note that so many units were read to their ends."""
        self._units_left -= units
        if self._units_left == 0 and not self._shell.is_closing:
            # The dispatcher is to know that nothing is missing.
            while self._shell.await_delivery():
                self._shell.delivered()
            self._shell.wait_no_more()

    def close(self) -> None:
        """Say goodbye."""
        self._shell.close(_nothing_in_hand, is_known=self._is_joining)


_ONCE = (
    "the dataset reads the same elements a second time, and what is read in order over the service "
    "comes once: write `cache` after `distribute`, where the client keeps it; a state of a "
    "step that holds elements (a window, buckets) is gone on from in one process"
)
_DIED = "worker processes ended while they computed them"


def _nothing_in_hand() -> None:
    """All that arrives counts as used."""
    return None


class ArrivingUnit:
    """Reads one unit (`execution.context.UnitReader`)."""

    def __init__(self, units: ArrivingUnits, unit: int, first: int) -> None:
        self._units = units
        self._unit, self._ordinal = unit, first
        self._elements: int | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next elements, with their origins; None at the end."""
        if self._elements is not None:
            return None
        found = self._units.found(self._unit, self._ordinal, limit)
        if found.error is not None:
            raise found.error.with_traceback(None)
        if found.chunk is None:
            self._elements = found.elements
            self._units.reached(self._unit, None)
            self._units.is_over(1)
            return None
        size = found.chunk.size
        count_delivered(size)
        ordinals = np.arange(found.ordinal, found.ordinal + size)
        self._ordinal = found.ordinal + size
        self._units.reached(self._unit, self._ordinal)
        return found.chunk.with_places(named(self._unit, ordinals))

    @property
    def elements(self) -> int:
        """How many elements the unit had, once its end was read."""
        assert self._elements is not None
        return self._elements

    def close(self) -> None:
        """Let go of it."""


def new_session(
    client_id: str,
    dispatcher: str,
    most: int | None,
    wait_timeout: float,
    codec: str,
) -> Session:
    """Return the session of a client that reads in order."""
    return Session(
        client_id,
        dispatcher,
        most or MOST_REQUESTS,
        time.monotonic(),
        counts_elements=most is not None,
        wait_timeout=wait_timeout,
        codec=codec,
        is_far=lambda address: not addresses.is_local_host(addresses.split(address)[0]),
        deals=True,
        wants_all=True,
    )


class _NoUnits:
    """Where elements come as they come, and no unit is asked for."""

    def open(self, unit: int, first: int) -> UnitReader:
        raise AssertionError(f"unit {unit} is opened where elements have no order")


NO_UNITS: UnitSource = _NoUnits()
