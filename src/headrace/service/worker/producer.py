"""The producer: a thread that reads a task's iterator and cuts its elements into portions.

Rule 1. The first portion holds one element and each at most twice as many as the one before, so
        that the first element comes soon and a short dataset is shared fairly.
Rule 2. An element that fails is a portion of its own: an error, answered once; the task goes on.
        The unit that ends with it is whole with it: if the worker dies, nobody deals it again.
Rule 3. A task fails if its plan cannot be opened, if it raises `_MOST_FAILURES` times in a row
        with the same words, or if something escapes from it that is no `Exception`: what its
        iterator would yield after that is not known.
Rule 4. Whatever happens, the outlet hears of the end.
Rule 5. What is in hand is put before units are waited for (`hand_over`), be it on this thread or on
        one of the plan's that reads ahead: there may be none for long. What comes then is put at
        once, so that nobody makes more than two portions where there was room for one.
Rule 6. After a pause, before which the plan's steps gave all that they held, a portion without
        elements says that all units so far are whole: clients say at once what they used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from headrace.counts import count_user_function_error
from headrace.element import wire
from headrace.element.brief import joined_columns
from headrace.element.chunk import Chunk, concatenate
from headrace.errors import HeadraceError, UserFunctionError
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.origins import ErrorOrigin, by_unit, origin_of_error
from headrace.service.messages import ElementIds
from headrace.service.rows import END, OriginRun
from headrace.service.worker.failure import describe, for_clients
from headrace.service.worker.feed import Outlet
from headrace.service.worker.opening import (
    origins_of,
    state_after,
    units_begun,
    units_ended,
    units_given,
)
from headrace.service.worker.portion import Portion
from headrace.service.worker.task_thread import TaskThread
from headrace.service.worker.unit_ends import UnitEnds
from headrace.transport.channel import Buffer

__all__ = ["MOST_ELEMENTS", "Producer", "next_limit"]

_log = logging.getLogger(__name__)

MOST_ELEMENTS = 1 << 16
_PORTION_BYTES = 8 << 20
"""What a portion costs beside its elements, at both ends together, is as much as to copy some three
megabytes; and much larger ones leave the caches between those who make, send and use them."""
_PORTION_SECONDS = 0.04
"""Where elements are made slowly, threads of two processes wake for each portion, which costs them
a millisecond or two."""
_MOST_FAILURES = 100


def next_limit(
    limit: int, count: int, size: int, seconds: float, portion_bytes: int = _PORTION_BYTES
) -> int:
    """Return how many elements the next portion may hold.

    Args:
        limit: How many the last one might hold.
        count: How many it held.
        size: Bytes of these.
        seconds: How long they took.
        portion_bytes: How large it may be, if it has more than one.
    """
    if seconds > _PORTION_SECONDS:
        return max(1, limit // 2)
    if count == limit and seconds < _PORTION_SECONDS / 2:
        affordable = max(1, portion_bytes * count // max(size, 1))
        return max(1, min(limit * 2, MOST_ELEMENTS, affordable))
    return limit


class Producer(TaskThread[Outlet]):
    """Produces one task's portions on a thread of its own.

    Args:
        name: Of the task, for the thread and the log.
        open_plan: Makes the iterator, given what puts what is in hand (`hand_over`).
        outlet: Who takes the portions.
        counts_units: Whether the iterator's states are to be asked for units.
        most_elements: How many a portion may hold.
        says_origins: Whether portions are to say whence their elements are.
        portion_bytes: How large portions of several elements may be; None: 8 MiB.
        in_order: Whether they are wanted in order: unit by unit, with each end.
    """

    def __init__(
        self,
        name: str,
        open_plan: Callable[[Callable[[], None]], ElementIterator],
        outlet: Outlet,
        *,
        counts_units: bool = False,
        most_elements: int = MOST_ELEMENTS,
        says_origins: bool = False,
        portion_bytes: int | None = None,
        in_order: bool = False,
    ) -> None:
        super().__init__(name, open_plan, outlet)
        self._portion_bytes = min(_PORTION_BYTES, portion_bytes or _PORTION_BYTES)
        #: What is larger is cut apart.
        self._largest = math.inf if portion_bytes is None else 2 * portion_bytes
        self._counts_units = counts_units
        self._most_elements = most_elements
        self._says_origins = says_origins
        self._in_order = in_order
        self._ends = UnitEnds(in_order=in_order)
        #: What is read, while it is.
        self._iterator: ElementIterator | None = None
        #: What was yielded and is in no portion.
        self._in_hand: list[Chunk] = []
        #: The state after that, and of how many units something was yielded at most.
        self._at: tuple[State, int] | None = None
        #: Whether a part of this portion was put before units were waited for.
        self._was_parted = False
        self._produced = 0
        #: Units that are whole with what was put.
        self._units_put = 0
        #: Those that were dealt before the last pause.
        self._given = 0

    def hand_over(self) -> None:
        with self._hand:
            self._was_parted = self._was_parted or bool(self._in_hand)
            self._put_hand()
            given = 0 if self._iterator is None else units_given(self._iterator)
            if given > self._given:
                self._given = self._units = self._touched = given
                before, self._units_put = self._units_put, given
                self._put_nothing(before, self._ended())

    def _give_up(self, error: BaseException) -> str:
        failure = describe(error)
        try:
            _log.error("%s ends: %s", self._name, failure, exc_info=error)
            self._put_error(for_clients(error))
        except BaseException:
            _log.exception("%s cannot report its error", self._name)
        return failure

    def _produce(self) -> str | None:
        try:
            iterator = self._open()
        except BaseException as error:
            self._put_error(for_clients(error))
            return f"its plan cannot be opened: {describe(error)}"
        self._iterator = iterator
        try:
            return self._produce_from(iterator)
        finally:
            self._iterator = None
            iterator.close()

    def _produce_from(self, iterator: ElementIterator) -> str | None:
        limit, failures, last_words = 1, 0, ""
        while self._outlet.wait_for_room():
            limit = min(limit, self._outlet.most or limit)
            error: BaseException | None = None
            at_end = False
            count = size = 0
            self._was_parted = False
            since = time.perf_counter()
            while count < limit and size < self._portion_bytes:
                try:
                    chunk = iterator.next_chunk(limit - count)
                except BaseException as raised:
                    error = raised
                    break
                if chunk is None:
                    at_end = True
                    break
                self._take(iterator, chunk)
                count += chunk.size
                size += wire.frame_bytes(chunk)
                slow = time.perf_counter() - since > _PORTION_SECONDS / 2
                if slow or self._outlet.puts_at_once or self._was_parted:
                    break
            seconds = time.perf_counter() - since
            with self._hand:
                # That a unit ended with an error is said with the error.
                self._put_hand(says_ends=error is None)
            if count:
                failures = 0
            if at_end:
                self._put_ends()
                return None
            if error is None:
                if not self._was_parted:
                    wanted = next_limit(limit, count, size, seconds, self._portion_bytes)
                    limit = min(self._most_elements, wanted)
                continue
            said = for_clients(error)
            # Where the iterator stands after what is no `Exception` is not known. And as in
            # `_take`: its state is asked for without the lock.
            knows = self._counts_units and isinstance(error, Exception)
            state = iterator.get_state() if knows else None
            # A unit that ends with a failure is whole with it, and nobody needs it again.
            self._put_error(said, state, units_begun(iterator), origin_of_error(error))
            if not isinstance(error, Exception):
                return describe(error)
            failures = failures + 1 if str(said) == last_words else 1
            last_words = str(said)
            if failures >= _MOST_FAILURES:
                _log.warning("%s ends: %d times in a row: %s", self._name, failures, last_words)
                return f"{failures} times in a row: {last_words}"
        return None

    def _take(self, iterator: ElementIterator, chunk: Chunk) -> None:
        """Have a chunk in hand."""
        # Asked for here and not when it is put: another thread must not ask for states. And without
        # the lock: a thread of the plan that waits for it may hold what a state has to wait for.
        at = (state_after(chunk), units_begun(iterator)) if self._counts_units else None
        with self._hand:
            self._in_hand.append(chunk)
            self._at = at

    def _put_hand(self, *, says_ends: bool = True) -> None:
        chunks, self._in_hand = self._in_hand, []
        if chunks:
            if self._at is not None:
                self._count(*self._at)
            before, self._units_put = self._units_put, self._units
            ended = self._ended() if says_ends else ()
            self._put_chunk(_joined(chunks), before, self._units, ended)

    def _put_ends(self) -> None:
        """Say which units ended that no portion was put after, where they are wanted in order."""
        with self._hand:
            ended = self._ended(at_end=True) if self._in_order else ()
            if ended:
                self._put_nothing(self._units_put, ended)

    def _put_nothing(self, done_from: int, ended: tuple[OriginRun, ...]) -> None:
        """Put a portion without elements: it says of units that they are whole, or ended."""
        self._outlet.put(
            Portion(
                first=self._produced,
                done_from=done_from,
                done_to=self._units_put,
                touched=self._touched,
                mode=ElementIds(runs=ended) if ended else None,
            )
        )

    def _ended(self, *, at_end: bool = False) -> tuple[OriginRun, ...]:
        """Return what is to be said of units that ended (`rows`)."""
        iterator = self._iterator if self._says_origins else None
        ended = () if iterator is None else units_ended(iterator)
        runs = self._outlet.origins((), ended) if ended else ()
        return self._ends.due(runs, END if at_end else self._units)

    def _put_chunk(
        self,
        chunk: Chunk,
        done_from: int,
        done_to: int,
        ended: tuple[OriginRun, ...],
    ) -> None:
        buffers: list[Buffer] = []
        error: HeadraceError | None = None
        if self._in_order:
            chunk = by_unit(chunk)
        try:
            buffers = wire.encode(chunk)
        except HeadraceError as raised:
            error = raised
        size = sum([memoryview(buffer).nbytes for buffer in buffers])
        if chunk.size > 1 and (error is not None or size > self._largest):
            # Perhaps it is one element that cannot be sent: the others can.
            middle = chunk.size // 2
            self._put_chunk(chunk.slice(0, middle), done_from, done_from, ())
            self._put_chunk(chunk.slice(middle, chunk.size), done_from, done_to, ended)
            return
        mode: ElementIds | None = None
        if self._says_origins:
            origins = origins_of(chunk)
            runs = self._outlet.origins(origins.runs, ()) + ended
            mode = ElementIds(
                runs=runs,
                is_permuted=origins.is_mixed,
                permutation=origins.order,
                interleaving=origins.turns,
                ids_per_element=origins.sizes,
                failed_split=runs[0][0] if error is not None and runs else -1,
                failed_position=(runs[0][2] + 1, 0) if error is not None and runs else (0, 0),
            )
        number, self._produced = self._produced, self._produced + chunk.size
        self._outlet.put(
            Portion(
                first=number,
                count=0 if error else chunk.size,
                buffers=buffers,
                size=size,
                done_from=done_from,
                done_to=done_to,
                touched=self._touched,
                error=error,
                mode=mode,
            )
        )

    def _put_error(
        self,
        error: HeadraceError,
        state: State | None = None,
        begun_at_most: int = 0,
        origin: ErrorOrigin | None = None,
    ) -> None:
        """Put an error.

        Args:
            error: Which.
            state: That of the iterator after it, where it counts units and that is known.
            begun_at_most: From which unit on nothing was yielded.
            origin: Where it stands among the elements, if that is known.
        """
        if isinstance(error, UserFunctionError):
            count_user_function_error()
        with self._hand:
            if state is not None:
                self._count(state, begun_at_most)
            else:
                self._touched = max(self._touched, begun_at_most)
            before, self._units_put = self._units_put, self._units
            ended = self._ended()
            mode = ElementIds(runs=ended) if ended else None
            if origin is not None and self._in_order:
                run = (origin.unit, 1, origin.element, 1)
                ((failed, *_),) = self._outlet.origins((run,), ())
                at = (origin.ordinal, origin.number)
                mode = ElementIds(runs=ended, failed_split=failed, failed_position=at)
            self._outlet.put(
                Portion(
                    first=self._produced,
                    error=error,
                    done_from=before,
                    done_to=self._units,
                    touched=self._touched,
                    mode=mode,
                )
            )


def _joined(chunks: list[Chunk]) -> Chunk:
    """Return the elements of all chunks; large ones stay where they are until they are sent."""
    count = sum(chunk.size for chunk in chunks)
    if len(chunks) > 1 and sum(map(wire.frame_bytes, chunks)) >= count * wire.OWN_BUFFER_BYTES:
        rows = [row for chunk in chunks for row in chunk.rows()]
        places = [column for chunk in chunks if (column := chunk.column) is not None]
        return Chunk.of_rows(rows, None, joined_columns(places) if places else None)
    return concatenate(chunks)
