"""The buffer of a shuffle: which slot is drawn when, and what the slots hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.chunk import concatenate as concatenate_chunks
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.execution.places import Places

__all__ = ["OWN_MEMORY", "Draws", "Exchange", "Slots", "slot_ordinals", "unpinned", "unpinned_rows"]

# --- Arithmetic: which slot is drawn when, and what a slot holds then -----------------------------
#
# A buffer of `size` slots is filled with the first inputs. Draw number t empties one slot at random
# and refills it with input `size + t`; when the input ends, what is left comes out in random order.
#
# The draws come from Philox, a counter-based generator, so draw t is known without the draws before
# it. What a slot holds at time t is the last draw before t that chose it; looking backwards finds
# all slots after about `size * ln(size)` draws. So a buffer is restored at any position in a time
# that depends on its size alone.

_WORDS_PER_COUNT = 4  # Philox 4x64 makes four words each time that its counter is advanced by one.


class Draws:
    """The slots that are drawn, in order.

    Args:
        entropy: Non-negative integers that name this sequence.
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
        """Return draws `start` to `stop` - 1 without moving on."""
        stream = np.random.Philox(key=self._key)
        stream.advance(start // _WORDS_PER_COUNT)
        lead = start % _WORDS_PER_COUNT
        return self._bounded(stream.random_raw(lead + stop - start)[lead:])

    def last_order(self, count: int) -> NDArray[np.int64]:
        """Return the order in which `count` slots are emptied once the input has ended."""
        # A key of its own: the words of the draws are not used twice.
        rng = np.random.Generator(np.random.Philox(key=self._key ^ np.uint64(1)))
        return rng.permutation(count)

    def _bounded(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        # Multiply and shift instead of a remainder: the bias is below size / 2**32.
        return (((words >> np.uint64(32)) * self._size) >> np.uint64(32)).astype(np.int64)


class Exchange:
    """What a number of draws yields and leaves, apart from what the slots hold.

    Args:
        slots: The slots drawn, in order.
    """

    __slots__ = ("_draws", "_filled", "_later", "_source", "slots")

    def __init__(self, slots: NDArray[np.int64]) -> None:
        self.slots = slots
        count = len(slots)
        # Draw t yields what the latest earlier draw of the same slot put there. Sorting by
        # (slot, t) brings these pairs side by side.
        bits = (count - 1).bit_length()
        order = np.sort(slots << bits | np.arange(count))
        slot_of, draw = order >> bits, order & (1 << bits) - 1
        again = slot_of[1:] == slot_of[:-1]
        #: Draws that yield what an earlier one of these put in, and which draw that was.
        self._later, self._source = draw[1:][again], draw[:-1][again]
        last = np.append(~again, True)
        #: The slots that were drawn, each once, and the draw that filled it last.
        self._filled, self._draws = slot_of[last], draw[last]

    def apply(self, held: NDArray[Any], incoming: NDArray[Any]) -> NDArray[Any]:
        """Return what comes out, and leave in `held` what stays.

        Args:
            held: What each slot holds, one row a slot; changed in place.
            incoming: What each draw puts into the slot that it emptied.
        """
        out = held[self.slots]
        out[self._later] = incoming[self._source]
        held[self._filled] = incoming[self._draws]
        return out


def slot_ordinals(draws: Draws, drawn: int, filled: int) -> NDArray[np.int64]:
    """Return the ordinal of the input that each slot holds after `drawn` draws.

    Args:
        draws: The sequence of draws.
        drawn: How many were made.
        filled: Slots in use: fewer than `draws.size` when the input is shorter than the buffer.
    """
    ordinals = np.full(filled, -1, np.int64)
    window = max(4 * draws.size, 4096)
    stop, missing = drawn, filled
    while stop > 0 and missing:
        start = max(0, stop - window)
        latest = np.full(filled, -1, np.int64)
        latest[draws.between(start, stop)] = np.arange(start, stop)  # the last of equals stays
        found = (ordinals < 0) & (latest >= 0)
        ordinals[found] = latest[found] + draws.size
        missing -= int(found.sum())
        stop = start
    untouched = ordinals < 0
    ordinals[untouched] = np.flatnonzero(untouched)
    return ordinals


# --- What the slots hold: columns while all elements are alike, rows else -------------------------
#
# Columns are memory of the buffer's own, one row a slot, so that nothing else is kept alive. A row
# that is a small view of a large array is copied: held for long, it would keep the whole array.

_MOST_PINNED = 4
"""Times its own size that a row may keep alive before it is copied."""


class Slots:
    """The elements in the slots.

    Args:
        chunks: The elements, in any number of pieces.
        order: Which of them each slot holds; None: slot i holds element i.
    """

    def __init__(self, chunks: Sequence[Chunk], order: NDArray[np.int64] | None = None) -> None:
        whole = concatenate_chunks(chunks) if chunks else Chunk.of_rows([])
        self.size = whole.size
        self._leaves: list[NDArray[Any]] | None = None
        self._structure: Structure | None = None
        self.rows: list[Any] = []
        """What each slot holds, if `are_rows`; what is put in is to be `unpinned`."""
        #: One more column, the places of the elements, where they are asked for; else none.
        self._places: list[Places] = []
        if whole.places is not None:
            self._places = [whole.places.copy() if order is None else whole.places[order]]
        if whole.is_columnar:
            leaves, self._structure = flatten(whole.columns())
            if order is not None:
                leaves = [leaf[order] for leaf in leaves]
            elif len(chunks) == 1:  # of several, `whole` is a copy already
                leaves = [leaf.copy() for leaf in leaves]
            self._leaves = leaves
        else:
            rows = _unpinned(whole)
            self.rows = rows if order is None else [rows[index] for index in order.tolist()]

    @property
    def bytes_each(self) -> int:
        """How much memory a slot takes, about; 0 if that is not known."""
        if not self._leaves or not self.size:
            return 0
        return sum([leaf.nbytes for leaf in self._leaves]) // self.size

    def exchange(self, slots: NDArray[np.int64], incoming: Chunk) -> Chunk:
        """Take out what each draw yields, in order, and put in the element that it read.

        Args:
            slots: The slots drawn, as many as there are incoming elements.
            incoming: The elements that fill them.
        """
        held, new = self._places, [] if incoming.places is None else [incoming.places]
        if self._leaves is not None:
            leaves = self._like(incoming)
            if leaves is not None:
                out = _exchanged(slots, [*self._leaves, *held], [*leaves, *new])
                places = out.pop() if held else None
                return self._chunk(out, len(slots), places)
            self._become_rows()
        rows, yielded = self.rows, []
        for slot, row in zip(slots.tolist(), _unpinned(incoming), strict=True):
            yielded.append(rows[slot])
            rows[slot] = row
        places = _exchanged(slots, held, new)[0] if held else None
        return Chunk.of_rows(yielded, None, places)

    @property
    def are_rows(self) -> bool:
        """Whether elements are held in `rows`, and nothing besides."""
        return self._leaves is None and not self._places

    def at(self, slots: NDArray[np.int64]) -> Chunk:
        """Return what these slots hold."""
        places = self._places[0][slots] if self._places else None
        if self._leaves is not None:
            return self._chunk([leaf[slots] for leaf in self._leaves], len(slots), places)
        return Chunk.of_rows([self.rows[slot] for slot in slots.tolist()], None, places)

    def _chunk(self, leaves: list[NDArray[Any]], size: int, places: Places | None = None) -> Chunk:
        assert self._structure is not None
        return Chunk.of_columns(unflatten(self._structure, leaves), size, None, places)

    def _like(self, chunk: Chunk) -> list[NDArray[Any]] | None:
        """Return the columns of a chunk if its elements are like those held."""
        if not chunk.is_columnar:
            return None
        assert self._leaves is not None
        leaves, structure = flatten(chunk.columns())
        if structure != self._structure:
            return None
        for held, new in zip(self._leaves, leaves, strict=True):
            if held.dtype != new.dtype or held.shape[1:] != new.shape[1:]:
                return None
        return leaves

    def _become_rows(self) -> None:
        assert self._leaves is not None
        self.rows = _unpinned(self._chunk(self._leaves, self.size))
        self._leaves = None


def _exchanged(
    slots: NDArray[np.int64], held: Sequence[NDArray[Any]], incoming: Sequence[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return what comes out of columns of the slots, and leave in them what is drawn in."""
    if len(slots) == 1:  # nothing can be drawn twice
        out = [column[slots] for column in held]
        for column, new in zip(held, incoming, strict=True):
            column[slots] = new
        return out
    exchange = Exchange(slots)
    return [exchange.apply(column, new) for column, new in zip(held, incoming, strict=True)]


def _unpinned(chunk: Chunk) -> list[Any]:
    """Return the rows of a chunk, those copied that would keep much more memory alive."""
    rows = chunk.rows()
    # Rows of one chunk were made in one way: the first shows whether the others need a look.
    if rows and (_pins(rows[0]) or (len(rows) > 1 and _pins(rows[-1]))):
        return [map_leaves(_unpinned_leaf, row) for row in rows]
    return list(rows)


def unpinned_rows(chunk: Chunk) -> Chunk:
    """Return a chunk that is to be held beside others, rows that would keep much more copied.

    Each chunk for itself: rows of several were made in several ways.
    """
    if chunk.is_columnar:
        return chunk  # the columns of all are copied together
    return Chunk.of_rows(_unpinned(chunk), chunk.states, chunk.places)


def unpinned(row: Any) -> Any:
    """Return a row, copied if it would keep much more memory alive."""
    return map_leaves(_unpinned_leaf, row) if _pins(row) else row


def _pins(row: Any) -> bool:
    # The commonest structures, without the general walk: this is asked for each row that is drawn.
    cls = type(row)
    if cls in OWN_MEMORY:
        return False
    if cls is np.ndarray:
        return row.base is not None and _unpinned_leaf(row) is not row
    if cls is dict or cls is tuple:
        for part in row.values() if cls is dict else row:
            if type(part) not in OWN_MEMORY and _pins(part):
                return True
        return False
    return any(_unpinned_leaf(leaf) is not leaf for leaf in flatten(row)[0])


OWN_MEMORY = frozenset({bytes, str, *np.sctypeDict.values()}) - {np.void}
"""Types of scalars, but for those of a structured dtype, which may show a row of an array."""


def _unpinned_leaf(leaf: Any) -> Any:
    base = getattr(leaf, "base", None)
    if base is None:
        return leaf
    size = base.nbytes if hasattr(base, "nbytes") else len(base)
    return leaf.copy() if size > _MOST_PINNED * leaf.nbytes else leaf
