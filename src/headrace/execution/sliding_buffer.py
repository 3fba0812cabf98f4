"""Reading of an input in sliding windows.

The elements are held in a buffer that is only appended to. Windows are parts of it, so they share
the elements in which they overlap. When it is full, the elements that the next window needs are
copied to a new buffer, at least twice as large. So an element is copied about twice, however far
windows overlap.

A state has the state of the input before the first element of the next window, and the number of
errors raised since: after a restore the elements are read again, and those errors are not raised
again. If there is a gap before the next window, it has the state after the last window instead, and
the number of elements to skip, for which no functions are called.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.element.memory import allocate_array
from headrace.element.stack import unstack
from headrace.element.structure import Structure, flatten
from headrace.element.transpose import transpose
from headrace.errors import InvalidElementError
from headrace.execution.element_numbers import IdColumn
from headrace.execution.input_buffer import ChunkSizer
from headrace.execution.iterator import ElementIterator, State
from headrace.plan.sliding_windows import Window

__all__ = ["SlidingBuffer", "WindowRun"]

_MAX_READ = 1024
"""Maximum number of elements to request at once, unless a function is called for each."""


class WindowRun(NamedTuple):
    """Consecutive windows in one buffer."""

    leaves: list[Any]
    """The buffer of each component: an array, or a list if shapes or dtypes differ."""
    structure: Structure
    bounds: list[tuple[int, int]]
    """First index and end of each window in the buffer; one window if there are lists."""
    ids: IdColumn | None
    """Metadata of the first element of each window, if it is tracked."""
    states: States
    """States before each window, and after the last."""


class SlidingBuffer:
    """Reads windows of an input.

    Args:
        input_: The input.
        node: The step.
    """

    def __init__(self, input_: ElementIterator, node: Window) -> None:
        self.input = input_
        self._span, self._shift, self._stride = node.span, node.step, node.stride
        self._drop_remainder = node.drop_remainder
        self._chunk_sizer = ChunkSizer(_MAX_READ)
        self._restart(0, 0)

    def _restart(self, next_window: int, failures: int) -> None:
        """Start at the input's position. Ordinals count the elements read since."""
        state = self.input.get_state()
        self._next = next_window  # ordinal of the next window's first element
        self._anchor = 0  # ordinal of the element before which its state is
        self._num_read = 0
        self._has_ended = False
        #: Number of errors that the input raises again, since a state was restored.
        self._known_failures = failures
        #: Ordinals of the elements before which errors were raised.
        self._failures: list[int] = []
        #: Ordinal, states and size of each chunk; lists are only appended to or replaced.
        self._chunks: list[tuple[int, States, int]] = [(0, lambda index: state, 0)]
        #: Buffers of the components, and the ordinal of their first element.
        self._leaves: list[Any] = []
        self._structure: Structure | None = None
        self._first = 0
        self._num_held = 0
        self._ids: list[Any] = []
        self._id_dtype: Any = None

    # --- windows --------------------------------------------------------------------------------

    def next_run(self, limit: int) -> WindowRun | None:
        """Return the next 1 to `limit` windows, or None at the end."""
        while True:
            available = self._num_read - self._next
            if available >= self._span:
                return self._take(min(limit, (available - self._span) // self._shift + 1))
            if self._has_ended:
                if available <= 0 or self._drop_remainder:
                    return None
                return self._take(min(limit, -(-available // self._shift)))
            self._read(limit)

    @property
    def row_bytes(self) -> int:
        """Approximate size of an element in bytes, if it is known."""
        return sum([leaf[:1].nbytes for leaf in self._leaves if isinstance(leaf, np.ndarray)])

    def _take(self, count: int) -> WindowRun:
        if not isinstance(self._leaves[0], np.ndarray):
            count = 1  # elements may differ in shape, so that each window can fail separately
        first, shift = self._next, self._shift
        starts = range(first, first + count * shift, shift)
        offset, end = self._first, self._num_read
        bounds = [(s - offset, min(s + self._span, end) - offset) for s in starts]
        ids = None
        if self._ids:
            ids = np.array([self._ids[start] for start, _ in bounds], self._id_dtype)
        states = self._states()
        self._next = first + count * shift
        self._anchor = min(self._next, starts[-1] + self._span, end)
        assert self._structure is not None
        return WindowRun(self._leaves, self._structure, bounds, ids, states)

    # --- reading --------------------------------------------------------------------------------

    def _read(self, limit: int) -> None:
        gap = self._next - self._num_read
        input_ = self.input
        if gap > 0:
            num_skipped = input_.skip(gap)
            self._restart(0, self._known_failures)
            self._has_ended = num_skipped < gap
            return
        needed = self._span - (self._num_read - self._next)
        try:
            if input_.can_read_ahead:
                chunk = self._chunk_sizer.read_chunk(input_, min(needed, _MAX_READ))
            else:
                if self._shift <= self._span:
                    needed += (limit - 1) * self._shift
                chunk = input_.next_chunk(max(needed, input_.preferred_limit))
        except Exception:
            self._failures.append(self._num_read)
            if not self._known_failures:
                raise
            self._known_failures -= 1
            return
        if chunk is None:
            self._has_ended = True
            return
        self._append(chunk)
        self._chunks.append((self._num_read, chunk.states, chunk.size))
        self._num_read += chunk.size

    def _append(self, chunk: Chunk) -> None:
        """Add elements to the buffers."""
        leaves, structure = _to_leaves(chunk, self._structure)
        if self._leaves and not _can_append(self._leaves, leaves):
            self._leaves = [_as_list(leaf, self._num_held) for leaf in self._leaves]
            leaves = transpose(chunk.rows(), self._structure)[1]
        is_full = not self._leaves or (
            isinstance(self._leaves[0], np.ndarray)
            and self._num_held + chunk.size > len(self._leaves[0])
        )
        if is_full or self._next - self._first > _MAX_READ + self._num_read - self._next:
            self._reallocate(leaves, chunk.size)
        start, stop = self._num_held, self._num_held + chunk.size
        for held, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(held, np.ndarray):
                held[start:stop] = leaf
            else:
                held.extend(leaf)
        self._structure, self._num_held = structure, stop
        if chunk.metadata is not None:
            self._ids.extend(chunk.metadata)
            self._id_dtype = chunk.metadata.dtype

    def _reallocate(self, leaves: list[Any], size: int) -> None:
        """Replace the buffers by new ones, with the elements that are still needed."""
        start = min(self._next, self._num_read) - self._first
        num_live = self._num_held - start
        capacity = num_live + max(size, num_live)
        held = self._leaves or [leaf[:0] for leaf in leaves]
        self._leaves = []
        for leaf in held:
            live = leaf[start : start + num_live]
            if isinstance(leaf, np.ndarray):
                live, rows = allocate_array((capacity, *leaf.shape[1:]), leaf.dtype), live
                live[:num_live] = rows
            self._leaves.append(live)
        self._first, self._num_held = self._first + start, num_live
        self._ids = self._ids[start:]
        # Elements from the anchor on are in chunks that end at or after it.
        self._chunks = [
            chunk for chunk in self._chunks if chunk[0] + chunk[2] >= self._anchor
        ] or self._chunks[-1:]

    # --- state ----------------------------------------------------------------------------------

    def _states(self) -> States:
        """Return the states before the next windows, which hold what they need."""
        chunks, num_chunks = self._chunks, len(self._chunks)
        failures, num_failures = self._failures, len(self._failures)
        known, end = self._known_failures, self._num_read
        first, anchor, shift, span = self._next, self._anchor, self._shift, self._span

        def state(index: int) -> State:
            start = first + index * shift
            before = min(start, start - shift + span, end) if index else anchor
            number = bisect_right(chunks, before, hi=num_chunks, key=_ordinal_of) - 1
            ordinal, states, size = chunks[number]
            # At the end of a chunk the state is that before the errors that followed.
            is_end = before == ordinal + size
            failed = sum(o >= before if is_end else o > before for o in failures[:num_failures])
            return {
                "input": states(before - ordinal),
                "skip": start - before,
                "failed": failed + known,
            }

        return state

    def get_state(self) -> State:
        """Return the state before the next window."""
        return self._states()(0)

    def set_state(self, state: State) -> None:
        """Restore a state."""
        self.input.set_state(state["input"])
        self._restart(state["skip"], state["failed"])

    def close(self) -> None:
        """Close the input. No window can be read afterwards."""
        self.input.close()


def _ordinal_of(chunk: tuple[int, States, int]) -> int:
    return chunk[0]


def _to_leaves(chunk: Chunk, structure: Structure | None) -> tuple[list[Any], Structure]:
    """Return the components of a chunk: arrays if possible, else lists."""
    try:
        leaves, found = flatten(chunk.columns())
        if structure is None or found == structure:
            return leaves, found
    except InvalidElementError:
        pass
    found, lists = transpose(chunk.rows(), structure)
    return [list(leaf) for leaf in lists], found


def _can_append(held: list[Any], leaves: list[Any]) -> bool:
    """Return whether components can be appended to buffers."""
    for buffer, leaf in zip(held, leaves, strict=True):
        if not isinstance(buffer, np.ndarray):
            if isinstance(leaf, np.ndarray):
                return False
        elif (
            not isinstance(leaf, np.ndarray)
            or leaf.dtype != buffer.dtype
            or leaf.shape[1:] != buffer.shape[1:]
        ):
            return False
    return True


def _as_list(buffer: NDArray[Any] | list[Any], size: int) -> list[Any]:
    """Return the first `size` rows of a buffer as a list."""
    if not isinstance(buffer, np.ndarray):
        return buffer
    return unstack(buffer[:size], size)
