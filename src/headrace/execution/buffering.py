"""Iterators of the steps that keep elements: ahead of their use, or for the next pass."""

from __future__ import annotations

import threading
from collections import deque

from headrace.element.chunk import Chunk
from headrace.element.wire import frame_bytes
from headrace.execution.cache_store import FileStore, MemoryStore, Store, memory_store
from headrace.execution.context import Context
from headrace.execution.intake import skip
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.pace import Pace
from headrace.plan.buffering import Cache, Prefetch
from headrace.plan.node import AUTOTUNE
from headrace.plan.traverse import has_free_order

__all__ = ["CacheIterator", "PrefetchIterator"]

_AUTOTUNE_BYTES = 64 << 20
_AUTOTUNE_ELEMENTS = 1 << 16
_FEWEST_CHUNKS = 2
_MOST_ITEMS = 1024
_PATIENCE = 0.2
"""Seconds for the reading thread to notice a close before its input is closed under it."""


@make_iterator.register(Prefetch)
def _make_prefetch(node: Prefetch, context: Context) -> ElementIterator:
    if node.buffer_size == 0:
        return make_iterator(node.input, context.below(0))
    return PrefetchIterator(node, context)


class _Item:
    """What the thread read at once: elements or an error, and where the input stood before."""

    __slots__ = ("before", "chunk", "error")

    def __init__(self, before: State, chunk: Chunk | None, error: Exception | None) -> None:
        self.before = before
        self.chunk = chunk
        self.error = error


class PrefetchIterator(ElementIterator):
    """Reads ahead on a thread of its own, which starts with the first read.

    With AUTOTUNE it holds at least two chunks, and more up to 64 MiB.
    """

    def __init__(self, node: Prefetch, context: Context) -> None:
        self._input = make_iterator(node.input, context.below(0))
        self._size = node.buffer_size
        # A state within a chunk means "skip so many of what comes": that needs a fixed order.
        self._most = 1 if has_free_order(node.input, context.options) else 1024
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._begin()

    def _begin(self) -> None:
        self._items: deque[_Item] = deque()
        self._held = 0  # elements in `_items`
        self._held_bytes = 0
        self._offset = 0  # elements taken of the first item
        self._after: State = None  # of the input, behind the last item
        self._has_ended = False
        self._is_closed = False

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._thread is None and not self._is_closed and not self._has_ended:
            self._after = self._input.get_state()
            self._thread = threading.Thread(
                target=self._read, name="headrace-prefetch", daemon=True
            )
            self._thread.start()
        with self._changed:
            while not self._items:
                if self._has_ended or self._is_closed:
                    return None
                # The thread that would wake this one is alive, or has set `_has_ended`.
                self._changed.wait()
            item = self._items[0]
            if item.error is not None:
                self._items.popleft()
                self._changed.notify_all()
                raise item.error
            assert item.chunk is not None
            start = self._offset
            stop = min(start + limit, item.chunk.size)
            self._held -= stop - start
            if stop == item.chunk.size:
                self._items.popleft()
                self._held_bytes -= frame_bytes(item.chunk)
                self._offset = 0
            else:
                self._offset = stop
            self._changed.notify_all()
        return item.chunk if stop - start == item.chunk.size else item.chunk.slice(start, stop)

    def _read(self) -> None:
        most = self._size if self._size != AUTOTUNE else _AUTOTUNE_ELEMENTS
        pace = Pace(most=max(1, min(self._most, most // _FEWEST_CHUNKS)))
        while True:
            with self._changed:
                while self._is_full() and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
            before = self._after
            chunk, error = None, None
            try:
                chunk = pace.next_chunk(self._input)
            except Exception as failure:
                error = failure
            with self._changed:
                if self._was_closed():
                    return
                if chunk is None and error is None:
                    self._has_ended = True
                    self._changed.notify_all()
                    return
                self._items.append(_Item(before, chunk, error))
                if chunk is not None:
                    self._held += chunk.size
                    self._held_bytes += frame_bytes(chunk)
                self._changed.notify_all()
                self._after = self._input.get_state()

    def _was_closed(self) -> bool:
        return self._is_closed

    def _is_full(self) -> bool:
        if self._size != AUTOTUNE:
            return self._held >= self._size or len(self._items) > self._size
        if len(self._items) < _FEWEST_CHUNKS:
            return False
        if len(self._items) > _MOST_ITEMS:  # errors hold nothing, and an input may fail for ever
            return True
        return self._held_bytes >= _AUTOTUNE_BYTES or self._held >= _AUTOTUNE_ELEMENTS

    def get_state(self) -> State:
        if self._thread is None and not self._has_ended:
            return {"skip_ahead": 0, "input": self._input.get_state()}
        with self._changed:
            if self._items:
                return {"skip_ahead": self._offset, "input": self._items[0].before}
            return {"skip_ahead": 0, "input": self._after}

    def set_state(self, state: State) -> None:
        self._stop()
        self._begin()
        self._input.set_state(state["input"])
        skip(self._input, state["skip_ahead"])

    def _stop(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_PATIENCE)
        if thread.is_alive():
            self._input.close()  # a source that waits for a peer ends its wait
            thread.join()

    def close(self) -> None:
        self._stop()
        self._items.clear()
        self._input.close()


@make_iterator.register(Cache)
class CacheIterator(ElementIterator):
    """Writes its input's first complete pass to a store; reads from the store ever after.

    Its state is the number of elements that were delivered. What the cache holds is the input's
    first pass, whichever pass this is, so a cache that is filled again has the same elements.
    """

    def __init__(self, node: Cache, context: Context) -> None:
        self._node = node
        self._context = context
        self._memory = memory_store(node.key) if not node.filename else None
        self._seed = context.seed
        self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._input: ElementIterator | None = None
        self._reading: Store | None = None
        self._writing: Store | None = None
        self._has_ended = False

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._reading is None and self._input is None and not self._has_ended:
            self._open()
        chunk: Chunk | None = None
        if self._reading is not None:
            chunk = self._reading.read(self._count, limit)
        elif self._input is not None:
            chunk = self._input.next_chunk(limit)
            assert self._writing is not None
            if chunk is not None:
                self._writing.append(chunk)
            else:
                self._writing.complete()
                self._stop()
        if chunk is None:
            self._has_ended = True
        else:
            self._count += chunk.size
        return chunk

    def _open(self) -> None:
        store = self._memory.complete_store() if self._memory else FileStore.find(self._node)
        if store is not None:
            self._reading = store
            self._seed = store.seed
            return
        self._writing = (
            MemoryStore(self._memory, self._seed)
            if self._memory
            else FileStore.create(self._node, self._seed)
        )
        first_pass = self._context.first_pass(self._seed)
        self._input = make_iterator(self._node.input, first_pass.below(0))

    def get_state(self) -> State:
        return {"count": self._count, "seed": self._seed, "ended": self._has_ended}

    def set_state(self, state: State) -> None:
        self._stop()
        self._begin()
        self._seed = state["seed"]
        if state["ended"]:
            self._count, self._has_ended = state["count"], True
            return
        if state["count"]:
            self._open()
            if self._reading is not None:
                self._count = state["count"]
            else:
                skip(self, state["count"])

    def _stop(self) -> None:
        for held in (self._input, self._reading, self._writing):
            if held is not None:
                held.close()
        self._input = self._reading = self._writing = None

    def close(self) -> None:
        self._stop()
        self._has_ended = True
