"""A producer's feed: where it waits for room and for units, and hands over what it makes.

Locks, in the order in which they are taken: `_asking` (one thread at a time waits for units), the
producer's (what it has in hand), the session's, `_changed`. The owner of the session fills the feed
under the session's lock; so whoever holds that takes neither of the first two, and a producer never
holds `_changed` while it calls the owner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from headrace.errors import CancelledError
from headrace.service.messages import WAITING_FOR_CLIENTS, WAITING_FOR_SPLITS
from headrace.service.rows import OriginRun
from headrace.service.worker.agenda import Grant
from headrace.service.worker.dealt_order import DealtOrder
from headrace.service.worker.meters import Meter
from headrace.service.worker.portion import Portion

__all__ = ["Feed", "Outlet", "Owner"]


class Owner(Protocol):
    """Who hears what a producer does."""

    def produced(self, producer: int, portion: Portion) -> None:
        """Take a portion."""

    def needs_units(self, producer: int) -> None:
        """Take note that a producer waits for units."""

    def ended(self, producer: int, failure: str | None) -> None:
        """Take note that a producer makes no more portions."""


class Feed:
    """What one producer gets (`producer.Outlet`).

    Args:
        producer: Its number.
        owner: Who hears of what it does.
        meter: Counts what it does.
    """

    def __init__(self, producer: int, owner: Owner, meter: Meter | None = None) -> None:
        self._producer = producer
        self._owner = owner
        self._meter = meter or Meter(0)
        self._changed = threading.Condition()
        #: Units are asked for by one thread at a time; a plan may read ahead on threads.
        self._asking = threading.Lock()
        self._has_room = True
        self._most: int | None = None
        self._granted: Grant | None = None
        #: What was granted and may be spoken of; and how much of it was done at the last grant.
        self._order, self._done = DealtOrder(), 0
        self._has_no_more_units = False
        self._is_cut = False
        self._is_closed = False
        self._is_alone = False
        self._waits_for_units = False
        self._is_told_to_wait = False

    # --- the owner ------------------------------------------------------------------------------

    def resume(self, most: int | None = None) -> None:
        """Let the producer make one more portion, of at most so many elements."""
        with self._changed:
            self._has_room, self._most = True, most
            self._changed.notify_all()

    def grant(self, grant: Grant) -> None:
        """Give the producer units, or let it know that no more come, or none for now."""
        with self._changed:
            self._granted = grant
            if grant.units is not None:
                # That units ended may be said late: of those done at the grant before, it was.
                self._order.forget(self._done)
                self._order.deal(*grant.units, grant.rows)
                self._done = grant.done
            self._changed.notify_all()

    def let_wait(self) -> None:
        """Let the producer know that it is to wait for units, as others are to have them first."""
        with self._changed:
            self._is_told_to_wait = True
            self._changed.notify_all()

    def cut(self) -> None:
        """Let the producer make no more portions."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the producer as soon as it looks: nobody wants what it makes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # --- the producer ---------------------------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Wait until another portion may be made; False: nothing more is wanted."""
        with self._changed:
            if not (self._has_room or self._is_cut or self._is_closed):
                with self._meter.waits_for(WAITING_FOR_CLIENTS):
                    while not (self._has_room or self._is_cut or self._is_closed):
                        self._changed.wait()
            return not (self._is_cut or self._is_closed)

    def pause(self, seconds: float) -> bool:
        """Wait for so long, or until the producer is to end; return whether it is to go on."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._is_closed, seconds)

    @property
    def most(self) -> int | None:
        """How many elements the next portion may have; None: as is usual."""
        return self._most

    @property
    def puts_at_once(self) -> bool:
        """Whether nothing is to be kept in hand: workers died with it, or units are waited for."""
        return self._is_alone or self._waits_for_units

    @property
    def is_told_to_wait(self) -> bool:
        """Whether units are waited for, and others are to have them first."""
        return self._is_told_to_wait

    def next_units(self, hand_over: Callable[[], None]) -> Grant | None:
        """Return the next units, perhaps after a wait; None: no more come.

        Args:
            hand_over: Puts what the producer has in hand. It is called before units are waited for,
                on whatever thread does so: elements that are ready must not wait with it.

        Raises:
            CancelledError: The task was called off.
        """
        with self._asking:
            if self._has_no_more_units:
                return None
            if not self._is_closed:
                self._owner.needs_units(self._producer)
            self._waits_for_units = self._meter.asks_for_splits = True
            try:
                hand_over()
                if self._has_to_wait():
                    hand_over()
                return self._wait_for_units()
            finally:
                self._waits_for_units = self._is_told_to_wait = False
                self._meter.asks_for_splits = False

    def _has_to_wait(self) -> bool:
        """Wait until units are granted, or are not to be for now; return which."""
        with self._changed:
            while self._granted is None and not (self._is_closed or self._is_told_to_wait):
                self._changed.wait()
            return self._is_told_to_wait

    def _wait_for_units(self) -> Grant | None:
        with self._changed:
            if self._granted is None and not self._is_closed:
                with self._meter.waits_for(WAITING_FOR_SPLITS):
                    while self._granted is None and not self._is_closed:
                        self._changed.wait()
            if self._granted is None:
                raise CancelledError("the task was called off")
            grant, self._granted = self._granted, None
            self._meter.assigned(grant.units)
            self._is_alone = grant.is_alone
            self._has_no_more_units = grant.units is None and not grant.is_pause
            return None if self._has_no_more_units else grant

    def origins(
        self, runs: Iterable[OriginRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[OriginRun, ...]:
        """Return origins in dealt order (`DealtOrder.origins`)."""
        with self._changed:
            return self._order.origins(runs, ended)

    def put(self, portion: Portion) -> None:
        """Hand over a portion."""
        with self._changed:
            self._has_room = False
        self._meter.made(portion.count, portion.size)
        self._owner.produced(self._producer, portion)

    def end(self, failure: str | None) -> None:
        """Say that no portion will follow, and why, if the task failed."""
        self._owner.ended(self._producer, failure)


# --- where a producer's portions go: the contract -------------------------------------------------


class Outlet(Protocol):
    """Where a producer's portions go."""

    @property
    def puts_at_once(self) -> bool:
        """Whether what is yielded is to be put at once, before more is asked for."""

    @property
    def most(self) -> int | None:
        """How many elements the next portion may have; None: as is usual."""

    def wait_for_room(self) -> bool:
        """Wait until another portion may be made; False: nothing more is wanted."""

    def origins(
        self, runs: Iterable[OriginRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[OriginRun, ...]:
        """Return origins in dealt order, given those by units of the stream."""

    def put(self, portion: Portion) -> None:
        """Take a portion."""

    def end(self, failure: str | None) -> None:
        """Take note that no portion will follow, and why, if the task failed."""
