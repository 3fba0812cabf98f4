"""Collection of elements into windows by key, shared by windows and buckets.

Elements are held in memory and are not saved: a state has the ordinals of the elements held for
each key, and a restore reads them again (`replayable_input`). The key of an element is computed
once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.metadata import concatenate_metadata, group_metadata
from headrace.element.structure import Element
from headrace.execution.element_numbers import IdColumn
from headrace.execution.iterator import ElementIterator, State, element_position
from headrace.execution.replayable_input import (
    MARK_INTERVAL,
    ReplayableInput,
    decode_gaps,
    encode_gaps,
    rows_to_hold,
)
from headrace.plan.user_function import UserFunction

__all__ = ["KeyedWindow", "WindowCollector"]

_MAX_WINDOWS_SCANNED = 64
"""Maximum number of windows to scan for the number of elements that one of them needs."""
_NUM_BLOCKS = 256
"""Number of blocks in the table of windows."""


class KeyedWindow:
    """Elements of one key."""

    __slots__ = ("_metadata", "key", "ordinals", "rows", "size")

    def __init__(self, key: int, element_id: IdColumn | None) -> None:
        self.key: int = key
        #: Metadata of the first element; of all elements if they have element ids.
        self._metadata = [] if element_id is None else [element_id]
        self.rows: list[Element] = []
        #: Ordinals of the elements in the input. Append-only.
        self.ordinals: list[int] = []
        #: Number of elements of a full window; None if not computed yet.
        self.size: int | None = None

    @property
    def ids(self) -> IdColumn | None:
        """Metadata of the first element, including the element ids of all elements if tracked."""
        metadata = self._metadata
        return group_metadata(concatenate_metadata(metadata), len(self.rows)) if metadata else None

    def add_id(self, element_id: IdColumn) -> None:
        """Add the element id of another element."""
        self._metadata.append(element_id)


class _WindowTable:
    """Windows by key, with cheap snapshots; a snapshot may include elements added later.

    Windows are stored in blocks, so that removing one copies only its block.
    """

    def __init__(self) -> None:
        self._blocks: list[dict[int, KeyedWindow]] = [{} for _ in range(_NUM_BLOCKS)]
        self.size = 0

    def get(self, key: int) -> KeyedWindow | None:
        """Return the window of a key, or None."""
        return self._blocks[key % _NUM_BLOCKS].get(key)

    def add(self, window: KeyedWindow) -> None:
        """Add a window for a new key."""
        self._blocks[window.key % _NUM_BLOCKS][window.key] = window
        self.size += 1

    def remove(self, window: KeyedWindow) -> None:
        """Remove a window."""
        blocks, block_index = self._blocks.copy(), window.key % _NUM_BLOCKS
        blocks[block_index] = {
            key: other for key, other in blocks[block_index].items() if other is not window
        }
        self._blocks = blocks
        self.size -= 1

    def snapshot(self) -> Callable[[], list[KeyedWindow]]:
        """Return a function that lists the current windows, oldest first, now or later.

        A later call may also list windows of elements added since.
        """
        blocks = self._blocks

        def list_windows() -> list[KeyedWindow]:
            # `list` copies atomically, as another thread may add windows. Most blocks are empty.
            windows = [window for block in blocks if block for window in list(block.values())]
            return sorted(windows, key=_first_ordinal)

        return list_windows


def _first_ordinal(window: KeyedWindow) -> int:
    return window.ordinals[0]


class WindowCollector:
    """Reads an input and collects its elements by key.

    Args:
        input_: The input.
        step: Name of the step, for errors.
        call: Any function of the step; wraps errors of its functions.
        key_of: Returns the key of an element.
        size_of: Returns the number of elements per window of a key.
        min_size: Minimum result of `size_of`.
    """

    def __init__(
        self,
        input_: ElementIterator,
        step: str,
        call: UserFunction,
        key_of: Callable[[Element], int],
        size_of: Callable[[int], int],
        min_size: int = 1,
    ) -> None:
        self._input = ReplayableInput(input_, step, MARK_INTERVAL)
        self._call = call
        self._key_of = key_of
        self._size_of = size_of
        self._min_size = min_size
        self._reset()

    def _reset(self) -> None:
        self._windows = _WindowTable()
        self._remaining: list[KeyedWindow] | None = None  # at the end of the input, next one last
        self._chunk: Chunk | None = None  # buffered chunk
        self._rows: list[Element] = []
        self._offset = 0  # index of the next row to collect
        self._num_collected = 0  # elements of the input that were collected or failed
        self._limit = 1

    def next_window(self) -> KeyedWindow | None:
        """Return the next full window, at the end the remaining ones, and then None."""
        while True:
            if self._chunk is None and not self._read():
                window = self._next_remaining()
            else:
                window = self._collect()
                if window is None:
                    continue
            if window is not None:
                self._windows.remove(window)
            return window

    def _next_remaining(self) -> KeyedWindow | None:
        """Return the next window that remains at the end of the input."""
        if self._remaining is None:
            self._remaining = self._windows.snapshot()()[::-1]
        return self._remaining.pop() if self._remaining else None

    def _read(self) -> bool:
        """Fill the buffer; return False at the end."""
        input_ = self._input.input
        if input_.can_read_ahead:
            limit = self._limit
            self._limit = min(2 * limit, MARK_INTERVAL)
        else:
            limit = max(input_.preferred_limit, self._min_needed())
        self._input.prune(self._held_ordinals)
        chunk = self._input.read_chunk(limit)
        if chunk is None:
            return False
        self._chunk, self._offset = chunk, 0
        self._rows = rows_to_hold(chunk)
        return True

    def _min_needed(self) -> int:
        """Return the minimum number of elements needed for the next window."""
        if self._min_size == 1 or self._windows.size > _MAX_WINDOWS_SCANNED:
            return 1
        windows = self._windows.snapshot()()
        missing = [(window.size or 1) - len(window.rows) for window in windows]
        return max(1, min([*missing, self._min_size]))

    def _held_ordinals(self) -> Iterator[int]:
        return chain.from_iterable(window.ordinals for window in self._windows.snapshot()())

    def _collect(self) -> KeyedWindow | None:
        """Collect buffered elements until a window is full; return it, or None."""
        assert self._chunk is not None
        windows, rows, offset = self._windows, self._rows, self._offset
        metadata = self._chunk.metadata
        try:
            while offset < len(rows):
                row = rows[offset]
                key = self._key_of(row)
                window = windows.get(key)
                is_new = window is None
                if window is None:
                    window = KeyedWindow(key, self._chunk.take_metadata(slice(offset, offset + 1)))
                elif metadata is not None and metadata.dtype.names:
                    window.add_id(metadata[offset : offset + 1])
                if window.size is None:  # a new window, or one restored from a state
                    window.size = self._size_of(key)
                window.rows.append(row)
                window.ordinals.append(self._num_collected)
                if is_new:
                    windows.add(window)
                offset += 1
                self._num_collected += 1
                if len(window.rows) >= window.size:
                    return window
        except BaseException as error:
            failure: Exception | None = self._call.wrap_error(error, self._position(offset), row)
            offset += 1
            self._num_collected += 1
        else:
            failure = None
        finally:
            self._offset = offset
            if offset >= len(rows):
                self._chunk, self._rows = None, []
        if failure is not None:
            raise failure
        return None

    def _position(self, offset: int) -> int:
        assert self._chunk is not None
        return element_position(self._chunk.state_at(offset), self._num_collected)

    # --- state ----------------------------------------------------------------------------------

    def make_state(self, removed_ordinals: Sequence[int] = ()) -> Callable[[], dict[str, State]]:
        """Return a function that makes the state of the current contents, now or later.

        Args:
            removed_ordinals: Ordinals of a removed window that is still needed.
        """
        windows, num_collected = self._windows.snapshot(), self._num_collected
        mark, failures = self._input.oldest_mark, self._input.num_failed

        def state() -> dict[str, State]:
            first = mark.ordinal
            contents = [
                [
                    window.key,
                    encode_gaps(
                        window.ordinals[: bisect_left(window.ordinals, num_collected)], first
                    ),
                ]
                for window in windows()
            ]
            saved = {
                "windows": [[key, gaps] for key, gaps in contents if gaps],
                **mark.to_json(num_collected, failures),
            }
            return (
                {**saved, "removed": encode_gaps(removed_ordinals, first)}
                if removed_ordinals
                else saved
            )

        return state

    def restore(self, state: State) -> tuple[list[Element], list[int], IdColumn | None]:
        """Restore a state; return the removed window: rows, ordinals and metadata."""
        self._reset()
        first = state["first_ordinal"]
        contents = [(key, decode_gaps(gaps, first)) for key, gaps in state["windows"]]
        removed = decode_gaps(state.get("removed", ()), first)
        needed = sorted([o for _, ordinals in contents for o in ordinals] + removed)
        chunks = self._input.restore(state, np.array(needed, np.int64))
        rows: list[Element] = []
        columns: list[IdColumn | None] = []
        for chunk in chunks:
            rows += rows_to_hold(chunk)
            columns += [chunk.take_metadata(slice(index, index + 1)) for index in range(chunk.size)]
        index_of = {ordinal: index for index, ordinal in enumerate(needed)}
        for key, ordinals in contents:
            window = KeyedWindow(key, columns[index_of[ordinals[0]]])
            window.rows = [rows[index_of[ordinal]] for ordinal in ordinals]
            window.ordinals = ordinals
            self._windows.add(window)
        self._num_collected = state["first_ordinal"] + state["num_read"]
        metadata = columns[index_of[removed[0]]] if removed else None
        return [rows[index_of[ordinal]] for ordinal in removed], removed, metadata

    @property
    def input(self) -> ElementIterator:
        """The input iterator."""
        return self._input.input

    def close(self) -> None:
        """Close the input."""
        self._reset()
        self._input.close()
