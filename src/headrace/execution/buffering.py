"""The iterator of `prefetch`: elements are read ahead of their use.

Who may touch what. The items and what is counted of them change under the feeder's `changed`, on
its thread and on the consumer's. The place of the next element is the consumer's alone.
"""

from __future__ import annotations

import time
from collections import deque

from headrace.element.chunk import Chunk, States
from headrace.element.wire import frame_bytes
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.threads import Feeder, Item, LongWait
from headrace.plan.buffering import Prefetch
from headrace.plan.node import AUTOTUNE
from headrace.plan.user_function import step_name

__all__ = ["PrefetchIterator"]

_AUTOTUNE_BYTES = 64 << 20
_AUTOTUNE_ELEMENTS = 1 << 16
_FEWEST_CHUNKS = 2
_MOST_ITEMS = 1024
_CHEAP_SECONDS = 5e-5
"""About what it takes to hand an element from one thread to another, and both to Python again."""
_SPENT_SECONDS = 1e-2
"""So much longer than that elements may have taken in all before a thread reads them ahead. With a
tenth of it a few turns of other processes began the thread where elements were cheap, for good."""


@make_iterator.register(Prefetch)
def _make_prefetch(node: Prefetch, context: Context) -> ElementIterator:
    if node.buffer_size == 0:
        return make_iterator(node.input, context)
    return PrefetchIterator(node, context)


class PrefetchIterator(ElementIterator):
    """Reads ahead on a thread of its own, which starts with the first read.

    With a number it holds at most as many elements. With AUTOTUNE it holds at least two chunks,
    and more up to 64 MiB. It has no state of its own: its elements are in the input's places.
    """

    def __init__(self, node: Prefetch, context: Context) -> None:
        self._node = node
        self._context = context
        self._size = node.buffer_size
        #: Elements that whoever asks for so many at once may hold, of those that are read ahead.
        self._handful = 1 if self._size == AUTOTUNE else max(1, self._size // 8)
        self._input = make_iterator(node.input, context)
        self._feeder: Feeder | None = None
        #: Seconds that elements took which were made as they were asked for; None: they are read
        #: ahead.
        self._spent: float | None = 0.0 if node.only_if_slow else None
        self._begin()

    @property
    def reads_ahead_freely(self) -> bool:
        # With AUTOTUNE the user has asked for whatever can be had ahead.
        return self._size == AUTOTUNE or self._input.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return self._handful

    @property
    def is_ready(self) -> bool:
        return bool(self._items)

    def _begin(self) -> None:
        self._items: deque[Item] = deque()
        self._held = 0  # elements in `_items`
        self._errors = 0  # in `_items`
        self._held_bytes = 0
        self._offset = 0  # elements taken of the first item
        self._is_awaited = False
        self._has_ended = False
        #: The place of the next element: that of number `_index` of a chunk with these states.
        #: None: that of the input, which no thread reads.
        self._states: States | None = None
        self._index = 0

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._has_ended:
            return None
        if self._spent is not None:
            return self._make(self._spent, limit)
        feeder = self._feeder or self._start()
        with feeder.lock:
            item = self._wait(feeder)
            if item is None or item.chunk is None:
                self._pass_on(feeder, item)
                return None
            chunk, start = item.chunk, self._offset
            stop = min(start + limit, chunk.size)
            self._held -= stop - start
            if stop == chunk.size:
                self._items.popleft()
                self._held_bytes -= self._bytes_of(chunk)
                self._offset = 0
            else:
                self._offset = stop
            self._states, self._index = chunk.states, stop
            if self._room():
                feeder.changed.notify_all()
        return chunk.slice(start, stop)

    def _make(self, spent: float, limit: int) -> Chunk | None:
        """Return what is asked for as it is made, and see whether it is worth a thread."""
        began = time.perf_counter()
        chunk = self._input.next_chunk(min(limit, self._handful))
        took = time.perf_counter() - began
        if chunk is not None:
            # One that is slow may be cheap, on a machine that was busy; and what was long ago
            # counts less and less.
            spent += min(took / chunk.size, 0.6 * _SPENT_SECONDS) * chunk.size
            self._spent = max(0.0, spent - chunk.size * _CHEAP_SECONDS)
            if self._spent > _SPENT_SECONDS:
                self._spent = None
                self._start()
        return chunk

    def _start(self) -> Feeder:
        state = self._input.get_state()
        self._states, self._index = (lambda index: state), 0
        most = _AUTOTUNE_ELEMENTS if self._size == AUTOTUNE else self._size
        self._feeder = Feeder(
            self._input,
            self._room,
            self._take_in,
            "headrace-prefetch",
            most=max(1, min(1024, most // _FEWEST_CHUNKS)),
        )
        self._feeder.start()
        return self._feeder

    def _wait(self, feeder: Feeder) -> Item | None:
        """Return the first item; None: the thread has ended without one."""
        if not self._items:
            node = self._node
            wait = LongWait(f"{step_name(node.input)}, which {step_name(node)} reads ahead")
            # What comes now is as good as taken: the thread goes on to the next at once, and not
            # when this one has woken and has told it so.
            self._is_awaited = True
            try:
                while not self._items:
                    if not feeder.is_reading:
                        return None
                    wait.wait(feeder.changed)
            finally:
                self._is_awaited = False
        return self._items[0]

    def _pass_on(self, feeder: Feeder, item: Item | None) -> None:
        """Raise an error that the thread met, or end."""
        if item is None:
            self._has_ended = True
            return
        after = item.after
        if item.error is None:
            self._states, self._index = (lambda index: after), 0
            self._has_ended = True
            return
        self._items.popleft()
        self._errors -= 1
        feeder.changed.notify_all()
        if isinstance(item.error, Exception):
            self._states, self._index = (lambda index: after), 0
        else:
            self._has_ended = True  # whoever goes on builds this again
        raise item.error

    # --- on the thread, with the lock held ------------------------------------------------------

    def _room(self) -> int:
        if self._size != AUTOTUNE:
            # An eighth is refilled at once: a thread that wakes for each element gains nothing.
            room = self._size - self._handful + 1 - self._held - self._errors + self._is_awaited
            return room if room > self._size // 8 else 0
        if len(self._items) < _FEWEST_CHUNKS:
            return _AUTOTUNE_ELEMENTS
        if len(self._items) > _MOST_ITEMS:  # errors hold nothing, and an input may fail for ever
            return 0
        if self._held_bytes >= _AUTOTUNE_BYTES:
            return 0
        return max(0, _AUTOTUNE_ELEMENTS - self._held)

    def _take_in(self, item: Item) -> None:
        self._items.append(item)
        self._errors += item.error is not None
        if item.chunk is not None:
            self._held += item.chunk.size
            self._held_bytes += self._bytes_of(item.chunk)

    def _bytes_of(self, chunk: Chunk) -> int:
        return frame_bytes(chunk) if self._size == AUTOTUNE else 0  # a number bounds it otherwise

    # --- state ----------------------------------------------------------------------------------

    def get_state(self) -> State:
        if self._states is None:
            return self._input.get_state()
        return self._states(self._index)

    def set_state(self, state: State) -> None:
        self._stop()
        self._begin()
        self._input.set_state(state)

    def skip(self, count: int) -> int:
        if self._states is not None:
            self.set_state(self.get_state())
        return self._input.skip(count)

    def _stop(self) -> None:
        feeder = self._feeder
        if feeder is not None and not feeder.stop():
            feeder.leave(step_name(self._node.input))
            self._input = make_iterator(self._node.input, self._context)
        self._feeder = None  # at last: an interruption before this stops it once more

    def close(self) -> None:
        self._stop()
        self._begin()
        self._has_ended = True
        self._input.close()
