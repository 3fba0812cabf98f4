"""The threads of a parallel map, and what they work on.

    input --feeder--> batches of elements --grains--> threads --results--> the consumer

A feeder reads the input, so that the threads do not wait while the consumer does something else.
Each thread takes a *grain*: as many elements as take it about `_GRAIN_SECONDS`, mostly one.
Results are delivered element by element. No more than some milliseconds of work for each thread is
read ahead, and no more than `_MAX_BYTES` of inputs and results.

Nobody is woken for one element, which costs more than many a function: the feeder waits until there
is room for a handful, and the consumer for as many results as it asked for, up to half of what is
read ahead: the threads work on the other half meanwhile.

Who may touch what. The feeder and the consumer hold `feeder.lock` for everything here. The threads
hold no lock while they work: each writes `rows` and `results` of its own grain, and appends to
`done` and `_timings`, which is one step of the interpreter. They look at `is_stopped` and at what
the consumer awaits without the lock: a thread that sees it too late is made up for by the consumer,
which looks again after it has said that it waits, and then now and then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.ownership import owned
from headrace.element.wire import frame_bytes
from headrace.execution.iterator import ElementIterator, position_of
from headrace.execution.places import Places
from headrace.execution.threads import PATIENCE, Feeder, Item
from headrace.plan.user_function import UserFunction
from headrace.threads import start_thread

__all__ = ["PENDING", "TAKEN", "Failure", "Work"]

_GRAIN_SECONDS = 0.0002
_LARGEST_GRAIN = 256
_AHEAD_SECONDS = 0.05
"""Work that is read ahead for each thread, so that one slow element holds up none of the others."""
_FEWEST_AHEAD = 2
_MOST_AHEAD = 1024
_MOST_BYTES = 64 << 20
_MOST_BYTES_AT_ONCE = 1 << 20
"""Of inputs. What is read has left the processor's cache before a thread takes it, however little
it is; and as many results as were read at once can be taken at once."""
_MEMORY = 64
"""Elements over which the time for one is averaged, at least."""


class Failure:
    """Stands for the result of an element that failed."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Batch:
    """Elements that the input gave at once."""

    __slots__ = ("first", "places", "results", "rows", "states", "taken")

    def __init__(
        self,
        first: int,
        rows: list[Any],
        results: list[Any],
        states: States,
        places: Places | None = None,
    ) -> None:
        self.first = first  # number of the first of them
        self.rows = rows  # an element that is done is forgotten
        self.results = results
        self.states = states
        self.places = places
        self.taken = 0  # results that were delivered: of the first so many, or only how many


PENDING: Any = object()
TAKEN: Any = object()


class Work:
    """The threads and what they work on, from one `set_state` to the next."""

    def __init__(
        self,
        input_: ElementIterator,
        function: UserFunction,
        threads: int,
        already: int,
        *,
        is_ordered: bool,
    ) -> None:
        self._function = function
        self._threads_wanted = threads
        self._is_ordered = is_ordered
        #: Bit i: element i after the place was delivered before the restore.
        self._already = already
        self._grains: SimpleQueue[tuple[Batch, int, int] | None] = SimpleQueue()
        self.is_stopped = False
        #: Batches of which something is to be delivered, oldest first.
        self.batches: deque[Batch] = deque()
        #: Where free order: elements that are done, in the order in which they were.
        self.done: deque[tuple[Batch, int]] = deque()
        #: Whether the consumer waits, and so is to be notified once it has enough.
        self.is_awaited = False
        self._enough = 0  # elements that are done, where the order is free
        #: In order: the results that are to be there, as a batch and the number in it.
        self._awaited: list[tuple[Batch, int]] = []
        self.fed = 0  # elements of the input read
        self.delivered = 0
        self.window = threads * _FEWEST_AHEAD
        self._is_growing = True
        self.has_ended = False  # the input has
        state = input_.get_state()
        #: The place after all that was read: element `_index` of a chunk with these states.
        self.end: tuple[States, int] = ((lambda index: state), 0)
        self._timings: deque[tuple[float, int]] = deque()
        self._seconds, self._counted = 0.0, 0
        self._bytes_in = 0.0  # of an element
        self._bytes_out = 0.0  # of a result
        self.feeder = Feeder(
            input_, self._room, self._put, "headrace-map-feeder", most_bytes=_MOST_BYTES_AT_ONCE
        )
        self._is_filling = False  # the feeder reads on until there is no room
        #: Notified when the consumer has what it awaits. The feeder waits for something else.
        self.ready = threading.Condition(self.feeder.lock)
        self._threads = [
            threading.Thread(target=self._run, name="headrace-map", daemon=True)
            for _ in range(threads)
        ]

    def start(self) -> None:
        """Begin to work. Whoever may close what owns this knows of it by now."""
        with self.feeder.lock:
            if self.is_stopped:
                return
            for thread in self._threads:
                start_thread(thread)
        self.feeder.start()

    # --- on the feeder's thread, with the lock held ---------------------------------------------

    def _room(self) -> int:
        free = self.window - (self.fed - self.delivered)
        self._is_filling = free >= (1 if self._is_filling else self.handful)
        return free if self._is_filling else 0

    def _put(self, item: Item) -> None:
        states, before = self.end
        if item.chunk is not None:
            chunk = item.chunk
            self._bytes_in = max(self._bytes_in * 0.9, frame_bytes(chunk.slice(0, 1)))
            rows, pending = list(chunk.rows()), [PENDING] * chunk.size
            batch = Batch(self.fed, rows, pending, chunk.states, chunk.places)
            self.end = chunk.states, chunk.size
        elif item.error is not None:
            after = item.after
            batch = Batch(
                self.fed,
                [None],
                [Failure(item.error)],
                lambda index: after if index else states(before),
            )
            self.end = (lambda index: after), 0
            self.has_ended = not isinstance(item.error, Exception)  # after such a one no more comes
        else:
            after = item.after
            self.end = (lambda index: after), 0
            self.has_ended = True
            self.ready.notify_all()
            return
        size = len(batch.rows)
        self.fed += size
        self.batches.append(batch)
        self._hand_out(batch, size)
        if not self._enough:  # the consumer waits for anything at all
            self.ready.notify_all()

    def _hand_out(self, batch: Batch, size: int) -> None:
        """Put the elements of a batch where the threads take them, some at a time."""
        start = 0
        grain = self._grain()
        if not self._already and batch.results[0] is PENDING:
            for start in range(0, size, grain):
                self._grains.put((batch, start, min(start + grain, size)))
            return
        while start < size:
            if self._already >> (batch.first + start) & 1:
                batch.results[start] = TAKEN
                batch.taken += 1
                self.delivered += 1
                start += 1
                continue
            if batch.results[start] is not PENDING:  # an error of the input
                if not self._is_ordered:
                    self.done.append((batch, start))
                start += 1
                continue
            stop = start + 1
            while stop < min(start + grain, size) and not self._already >> (batch.first + stop) & 1:
                stop += 1
            self._grains.put((batch, start, stop))
            start = stop

    def _grain(self) -> int:
        while self._timings:
            seconds, count = self._timings.popleft()
            if self._counted > _MEMORY:
                self._seconds, self._counted = self._seconds / 2, self._counted // 2
            self._seconds += seconds
            self._counted += count
        if not self._counted:
            return 1
        return int(
            max(1, min(_GRAIN_SECONDS * self._counted / (self._seconds + 1e-9), _LARGEST_GRAIN))
        )

    # --- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        grains, clock = self._grains, time.perf_counter
        while (grain := grains.get()) is not None:
            if self.is_stopped:
                continue
            begin = clock()
            batch, start, stop = grain
            self._do(batch, start, stop)
            self._timings.append((clock() - begin, stop - start))
            grain = batch = None  # type: ignore[assignment]  # not kept alive while waiting

    def _do(self, batch: Batch, start: int, stop: int) -> None:
        rows, results, call = batch.rows, batch.results, self._function
        fn = call.fn
        for index in range(start, stop):
            row = rows[index]
            try:
                results[index] = owned(fn(*row) if type(row) is tuple else fn(row))
            except BaseException as error:
                results[index] = self._failed(error, batch, index)
            rows[index] = row = None
            if not self._is_ordered:
                self.done.append((batch, index))
        if self.is_awaited and self._has_enough():
            with self.feeder.lock:
                self.ready.notify_all()

    def _failed(self, error: BaseException, batch: Batch, index: int) -> Failure:
        try:
            number = position_of(batch.states(index), batch.first + index)
            return Failure(self._function.blame(error, number, batch.rows[index]))
        except BaseException as escape:
            return Failure(escape)

    def _has_enough(self) -> bool:
        if self._is_ordered:
            return all(batch.results[number] is not PENDING for batch, number in self._awaited)
        return len(self.done) >= self._enough

    # --- for the consumer -----------------------------------------------------------------------

    @property
    def handful(self) -> int:
        """How many elements to ask for at once: the most stay for the threads."""
        return max(1, self.window // 8)

    def expect(self, limit: int) -> None:
        """Have the consumer notified when about so many elements are done. With the lock held."""
        # As long as the window grows, which it does as results are taken, few: the first come soon.
        most = self.handful if self._is_growing else max(1, self.window // 2)
        self._enough = min(limit, most, self.fed - self.delivered)
        if self._is_ordered:
            self._awaited = self._first_and_last(self._enough)
        self.is_awaited = True

    def _first_and_last(self, count: int) -> list[tuple[Batch, int]]:
        """Return where the next result and the last of the next `count` are to be."""
        found: list[tuple[Batch, int]] = []
        for batch in self.batches:
            if not found:
                found.append((batch, batch.taken))
            left = len(batch.results) - batch.taken
            if count <= left:
                found.append((batch, batch.taken + count - 1))
                break
            count -= left
        return found

    def took(self, chunk: Chunk | None, count: int) -> None:
        """Count elements as delivered, and let the feeder read on. With the lock held."""
        self.delivered += count
        if chunk is not None:
            # Of one element: to look at each would take longer than many a function does.
            self._bytes_out = max(self._bytes_out * 0.9, frame_bytes(chunk.slice(0, 1)))
        each = self._seconds / self._counted if self._counted else _AHEAD_SECONDS
        wished = max(_FEWEST_AHEAD, min(_AHEAD_SECONDS / (each + 1e-9), _MOST_AHEAD))
        affordable = _MOST_BYTES / (self._bytes_in + self._bytes_out + 1)
        threads = self._threads_wanted
        most = min(threads * wished, affordable)
        self._is_growing = 2 * self.window < most
        self.window = int(max(threads, min(most, 2 * self.window)))
        if self._room():
            self.feeder.changed.notify_all()

    def stop(self) -> bool:
        """Stop all threads, and wait a moment; return whether the input is free to use."""
        with self.feeder.lock:
            self.is_stopped = True
            self.ready.notify_all()
        is_free = self.feeder.stop()
        for _ in self._threads:
            self._grains.put(None)
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return is_free
