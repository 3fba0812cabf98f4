"""The buffer of a shuffle: the sequence of drawn slots, and the contents of the slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.chunk import concatenate as concatenate_chunks
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.execution.element_numbers import IdColumn

__all__ = [
    "OWN_MEMORY",
    "SlotContents",
    "SlotDraws",
    "SlotExchange",
    "slot_ordinals",
    "unpinned",
    "unpinned_rows",
]

# --- Arithmetic of draws and slot contents --------------------------------------------------------
#
# A buffer of `size` slots is filled with the first inputs. Draw number t empties one slot at random
# and refills it with input `size + t`; when the input ends, the remaining elements are yielded in
# random order.
#
# The draws come from Philox, a counter-based generator, so draw t is known without the draws before
# it. The content of a slot at time t comes from the last draw before t that chose it; looking
# backwards finds all slots after about `size * ln(size)` draws. So a buffer is restored at any
# position in a time that depends only on its size.

_WORDS_PER_COUNT = 4  # Philox 4x64 produces four words per counter increment.


class SlotDraws:
    """The sequence of drawn slots.

    Args:
        entropy: Non-negative integers that identify the sequence.
        size: Number of slots.
    """

    def __init__(self, entropy: Sequence[int], size: int) -> None:
        self._key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
        self._size = np.uint64(size)
        self.size = size
        self._stream = np.random.Philox(key=self._key)

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the next `count` draws, int64 in [0, size)."""
        return self._bounded(self._stream.random_raw(count))

    def seek(self, number: int) -> None:
        """Make `number` the next draw."""
        self._stream = np.random.Philox(key=self._key)
        self._stream.advance(number // _WORDS_PER_COUNT)
        self._stream.random_raw(number % _WORDS_PER_COUNT)

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return draws `start` to `stop` - 1 without changing the current position."""
        stream = np.random.Philox(key=self._key)
        stream.advance(start // _WORDS_PER_COUNT)
        lead = start % _WORDS_PER_COUNT
        return self._bounded(stream.random_raw(lead + stop - start)[lead:])

    def last_order(self, count: int) -> NDArray[np.int64]:
        """Return the order in which `count` slots are emptied once the input has ended."""
        # Uses a separate key, so that the random words of the draws are not reused.
        rng = np.random.Generator(np.random.Philox(key=self._key ^ np.uint64(1)))
        return rng.permutation(count)

    def _bounded(self, random_bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        # Multiply and shift instead of a remainder: the bias is below size / 2**32.
        return (((random_bits >> np.uint64(32)) * self._size) >> np.uint64(32)).astype(np.int64)


class SlotExchange:
    """Effect of several draws, independent of the slots' contents.

    Args:
        slots: The drawn slots, in order.
    """

    __slots__ = ("_filled_slots", "_last_draws", "_repeated_draws", "_source_draws", "slots")

    def __init__(self, slots: NDArray[np.int64]) -> None:
        self.slots = slots
        count = len(slots)
        # Draw t yields the content that the latest earlier draw of the same slot stored. Sorting by
        # (slot, t) makes these pairs adjacent.
        bits = (count - 1).bit_length()
        order = np.sort(slots << bits | np.arange(count))
        slot_of, draw = order >> bits, order & (1 << bits) - 1
        is_repeated = slot_of[1:] == slot_of[:-1]
        #: Draws that yield an element of an earlier draw in this sequence, and that draw.
        self._repeated_draws, self._source_draws = draw[1:][is_repeated], draw[:-1][is_repeated]
        is_last = np.append(~is_repeated, True)
        #: The distinct drawn slots, and the last draw that filled each.
        self._filled_slots, self._last_draws = slot_of[is_last], draw[is_last]

    def apply(self, contents: NDArray[Any], incoming: NDArray[Any]) -> NDArray[Any]:
        """Return the yielded contents, and update `contents` in place.

        Args:
            contents: Contents of the slots, one row per slot; changed in place.
            incoming: Content that each draw stores in the slot it emptied.
        """
        out = contents[self.slots]
        out[self._repeated_draws] = incoming[self._source_draws]
        contents[self._filled_slots] = incoming[self._last_draws]
        return out


def slot_ordinals(draws: SlotDraws, num_drawn: int, num_slots: int) -> NDArray[np.int64]:
    """Return the ordinal of the input that each slot holds after `num_drawn` draws.

    Args:
        draws: The sequence of draws.
        num_drawn: Number of draws made.
        num_slots: Slots in use: fewer than `draws.size` when the input is shorter than the buffer.
    """
    ordinals = np.full(num_slots, -1, np.int64)
    window = max(4 * draws.size, 4096)
    stop, missing = num_drawn, num_slots
    while stop > 0 and missing:
        start = max(0, stop - window)
        latest = np.full(num_slots, -1, np.int64)
        # for equal indices the last value is stored
        latest[draws.between(start, stop)] = np.arange(start, stop)
        found = (ordinals < 0) & (latest >= 0)
        ordinals[found] = latest[found] + draws.size
        missing -= int(found.sum())
        stop = start
    is_untouched = ordinals < 0
    ordinals[is_untouched] = np.flatnonzero(is_untouched)
    return ordinals


# --- Contents of the slots: columns while all elements have the same layout, otherwise rows -------
#
# Columns are the buffer's own memory, one row per slot, so nothing else is kept alive. A row that
# is a small view of a large array is copied: a long-lived view would keep the whole array alive.

_MAX_PINNED_RATIO = 4
"""Maximum ratio of the memory a row keeps alive to its size; above it the row is copied."""


class SlotContents:
    """The elements in the slots.

    Args:
        chunks: The elements, in any number of chunks.
        order: Index of the element of each slot; None stores element i in slot i.
    """

    def __init__(self, chunks: Sequence[Chunk], order: NDArray[np.int64] | None = None) -> None:
        whole = concatenate_chunks(chunks) if chunks else Chunk.of_rows([])
        self.size: int = whole.size
        self._columns: list[NDArray[Any]] | None = None
        self._structure: Structure | None = None
        self.rows: list[Any] = []
        """Contents of the slots, if `are_rows`; new rows must be `unpinned`."""
        #: One more column with element numbers, if they are wanted; otherwise empty.
        self._metadata: list[IdColumn] = []
        if whole.metadata is not None:
            self._metadata = [whole.metadata.copy() if order is None else whole.metadata[order]]
        if whole.is_columnar:
            leaves, self._structure = flatten(whole.columns())
            if order is not None:
                leaves = [leaf[order] for leaf in leaves]
            elif len(chunks) == 1:  # otherwise `whole` is already a copy
                leaves = [leaf.copy() for leaf in leaves]
            self._columns = leaves
        else:
            rows = _unpinned_row_list(whole)
            self.rows = rows if order is None else [rows[index] for index in order.tolist()]

    @property
    def bytes_each(self) -> int:
        """Approximate memory per slot in bytes; 0 if unknown."""
        if not self._columns or not self.size:
            return 0
        return sum([leaf.nbytes for leaf in self._columns]) // self.size

    def exchange(self, slots: NDArray[np.int64], incoming: Chunk) -> Chunk:
        """Return the elements that the draws yield, in order, and store the incoming ones.

        Args:
            slots: The drawn slots, as many as there are incoming elements.
            incoming: The elements that replace them.
        """
        metadata, new = self._metadata, [] if incoming.metadata is None else [incoming.metadata]
        if self._columns is not None:
            leaves = self._matching_columns(incoming)
            if leaves is not None:
                out = _exchange_columns(slots, [*self._columns, *metadata], [*leaves, *new])
                id_column = out.pop() if metadata else None
                return self._chunk(out, len(slots), id_column)
            self._become_rows()
        rows, yielded = self.rows, []
        for slot, row in zip(slots.tolist(), _unpinned_row_list(incoming), strict=True):
            yielded.append(rows[slot])
            rows[slot] = row
        id_column = _exchange_columns(slots, metadata, new)[0] if metadata else None
        return Chunk.of_rows(yielded, None, id_column)

    @property
    def are_rows(self) -> bool:
        """Whether all contents are in `rows`, without metadata."""
        return self._columns is None and not self._metadata

    def get(self, slots: NDArray[np.int64]) -> Chunk:
        """Return the contents of these slots."""
        metadata = self._metadata[0][slots] if self._metadata else None
        if self._columns is not None:
            return self._chunk([leaf[slots] for leaf in self._columns], len(slots), metadata)
        return Chunk.of_rows([self.rows[slot] for slot in slots.tolist()], None, metadata)

    def _chunk(
        self, leaves: list[NDArray[Any]], size: int, metadata: IdColumn | None = None
    ) -> Chunk:
        assert self._structure is not None
        return Chunk.of_columns(unflatten(self._structure, leaves), size, None, metadata)

    def _matching_columns(self, chunk: Chunk) -> list[NDArray[Any]] | None:
        """Return the columns of a chunk if they match the layout of the slots, else None."""
        if not chunk.is_columnar:
            return None
        assert self._columns is not None
        leaves, structure = flatten(chunk.columns())
        if structure != self._structure:
            return None
        for column, new in zip(self._columns, leaves, strict=True):
            if column.dtype != new.dtype or column.shape[1:] != new.shape[1:]:
                return None
        return leaves

    def _become_rows(self) -> None:
        assert self._columns is not None
        self.rows = _unpinned_row_list(self._chunk(self._columns, self.size))
        self._columns = None


def _exchange_columns(
    slots: NDArray[np.int64], columns: Sequence[NDArray[Any]], incoming: Sequence[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return the yielded values of slot columns, and store the incoming values in place."""
    if len(slots) == 1:  # no slot is drawn twice
        out = [column[slots] for column in columns]
        for column, new in zip(columns, incoming, strict=True):
            column[slots] = new
        return out
    exchange = SlotExchange(slots)
    return [exchange.apply(column, new) for column, new in zip(columns, incoming, strict=True)]


def _unpinned_row_list(chunk: Chunk) -> list[Any]:
    """Return the rows of a chunk; rows that keep much more memory alive are copied."""
    rows = chunk.rows()
    # Rows of one chunk have the same origin: the first and last show whether to check the others.
    if rows and (_pins_memory(rows[0]) or (len(rows) > 1 and _pins_memory(rows[-1]))):
        return [map_leaves(_unpinned_leaf, row) for row in rows]
    return list(rows)


def unpinned_rows(chunk: Chunk) -> Chunk:
    """Return a chunk to be held with others, with rows copied that keep much more memory alive.

    Chunks are treated separately, because their rows have different origins.
    """
    if chunk.is_columnar:
        return chunk  # all columns are copied together
    return Chunk.of_rows(_unpinned_row_list(chunk), chunk.states, chunk.metadata)


def unpinned(row: Any) -> Any:
    """Return a row, copied if it would keep much more memory alive."""
    return map_leaves(_unpinned_leaf, row) if _pins_memory(row) else row


def _pins_memory(row: Any) -> bool:
    # Fast path for the most common structures: this is called for each drawn row.
    cls = type(row)
    if cls in OWN_MEMORY:
        return False
    if cls is np.ndarray:
        return row.base is not None and _unpinned_leaf(row) is not row
    if cls is dict or cls is tuple:
        for part in row.values() if cls is dict else row:
            if type(part) not in OWN_MEMORY and _pins_memory(part):
                return True
        return False
    return any(_unpinned_leaf(leaf) is not leaf for leaf in flatten(row)[0])


OWN_MEMORY = frozenset({bytes, str, *np.sctypeDict.values()}) - {np.void}
"""Scalar types, except structured ones, which may be views of an array."""


def _unpinned_leaf(leaf: Any) -> Any:
    base = getattr(leaf, "base", None)
    if base is None:
        return leaf
    size = base.nbytes if hasattr(base, "nbytes") else len(base)
    return leaf.copy() if size > _MAX_PINNED_RATIO * leaf.nbytes else leaf
