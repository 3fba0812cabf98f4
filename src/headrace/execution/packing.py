"""Iterators that pack sequences into rows: whole sequences in bins, or split where a row ends.

The sequences of open rows are held in memory and are not saved (`held_input`). Assignment uses
Python ints, because bins are few; tokens are only copied, as slices.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, ge, sub
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.metadata import concatenate_metadata
from headrace.element.structure import Element
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.element_numbers import IdColumn, nest_ids
from headrace.execution.held_input import HeldElement, HeldInput, joined_metadata
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.window_collector import decode_gaps, encode_gaps
from headrace.plan.packing import (
    PACKED_KINDS,
    ConcatThenSplit,
    PackSequences,
    component_lengths,
    packed_names,
)
from headrace.plan.user_function import step_name

__all__ = ["BinPackingIterator", "ConcatThenSplitIterator"]

Sequences: TypeAlias = dict[str, NDArray[Any]]
"""One array per component."""
_MakeState: TypeAlias = Callable[[], State]

_MAX_ROWS_AT_ONCE = 64
_MAX_AGE = 8
"""Rows per bin that may be finished while a bin is open."""


class _PackedRow:
    """The contents of a finished row."""

    __slots__ = ("metadata", "parts", "state_after")

    def __init__(
        self, parts: list[Sequences], metadata: IdColumn | None, state_after: _MakeState
    ) -> None:
        self.parts = parts
        self.metadata = metadata
        self.state_after = state_after


class _PackingIterator(ElementIterator):
    """Reads sequences and yields rows; subclasses decide which sequences share a row."""

    def __init__(self, node: PackSequences | ConcatThenSplit, context: Context) -> None:
        self._length = node.length
        self._step = step_name(node)
        self._lengths: dict[tuple[str, ...], list[int]] = {}  # of rows, by names of components
        self._input = HeldInput(
            make_iterator(node.input, context), context, self._step, self._held_ordinals
        )

    @property
    def can_read_ahead(self) -> bool:
        return self._input.input.can_read_ahead

    @abstractmethod
    def _held_ordinals(self) -> Iterable[int]:
        """Return the ordinals of all held elements."""

    @abstractmethod
    def _add(self, sequences: Sequences) -> _PackedRow | None:
        """Take the next element, or not yet; return a row if that finishes one.

        Raises:
            InvalidElementError: If the element cannot be packed. It was not taken.
        """

    @abstractmethod
    def _finish_row(self) -> _PackedRow | None:
        """Return a row that is ready without another element, or None."""

    @abstractmethod
    def _finish_remaining(self) -> _PackedRow | None:
        """Return the next of the incomplete rows at the end of the input, or None."""

    @abstractmethod
    def _make_state(self) -> _MakeState:
        """Return a function that makes the state of the current contents, now or later."""

    def next_chunk(self, limit: int) -> Chunk | None:
        before = self._make_state()
        rows: list[_PackedRow] = []
        limit = min(limit, _MAX_ROWS_AT_ONCE)
        while len(rows) < limit:
            row = self._finish_row()
            if row is None:
                if rows and not self._input.is_buffered:
                    break
                if self._input.read():
                    try:
                        row = self._add_next()
                    except InvalidElementError as error:
                        if rows:
                            break  # raised by the next call
                        raise self._drop_failed(error) from error
                    if row is None:
                        continue
                else:
                    row = self._finish_remaining()
                    if row is None:
                        break
            rows.append(row)
        if not rows:
            return None
        after = [row.state_after for row in rows]
        columns = [row.metadata for row in rows if row.metadata is not None]
        chunk = self._build_chunk(rows)
        if columns:
            chunk = chunk.with_metadata(concatenate_metadata(columns))
        return chunk.with_states(lambda index: after[index - 1]() if index else before())

    def _add_next(self) -> _PackedRow | None:
        sequences = _check_sequences(self._input.row)
        if any(map(len, sequences.values())):
            return self._add(sequences)
        self._input.drop()
        return None

    def _drop_failed(self, error: InvalidElementError) -> InvalidElementError:
        """Drop the next element; return its error."""
        position = self._input.error_position
        self._input.drop()
        return InvalidElementError(f"element {position} of {self._step}: {error}")

    def _lengths_of(self, sequences: Sequences) -> list[int]:
        """Return the length of a row for each component."""
        names = tuple(sequences)
        lengths = self._lengths.get(names)
        if lengths is None:
            self._lengths[names] = lengths = component_lengths(names, self._length)
        return lengths

    def _build_chunk(self, rows: Sequence[_PackedRow]) -> Chunk:
        layout = _layout(rows[0].parts[0])
        if len(rows) > 1 and all(_layout(row.parts[0]) == layout for row in rows):
            return Chunk.of_columns(self._build_columns([row.parts for row in rows]), len(rows))
        elements = [self._build_columns([row.parts]) for row in rows]
        return Chunk.of_rows([{n: v[0] for n, v in element.items()} for element in elements])

    def _build_columns(self, rows: Sequence[list[Sequences]]) -> Sequences:
        """Return stacked rows, each made of sequences."""
        columns: Sequences = {}
        first = rows[0][0]
        for (name, array), length in zip(first.items(), self._lengths_of(first), strict=True):
            shape = (len(rows), length)
            values = np.zeros(shape, array.dtype)
            segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            counting = np.arange(length + 1, dtype=np.int32)
            for index, parts in enumerate(rows):
                arrays = [part[name] for part in parts]
                sizes = list(map(len, arrays))
                used = sum(sizes)
                np.concatenate(arrays, out=values[index, :used])
                # There may be more sequences than tokens, as one component of some may be empty.
                numbers = np.arange(1, len(sizes) + 1, dtype=np.int32)
                segment_ids[index, :used] = np.repeat(numbers, sizes)
                np.concatenate([counting[:size] for size in sizes], out=positions[index, :used])
            columns.update(zip(packed_names(name), (values, segment_ids, positions), strict=True))
        return columns

    def get_state(self) -> State:
        return self._make_state()()

    def close(self) -> None:
        self._input.close()


def _check_sequences(row: Element) -> Sequences:
    """Return the components of an element.

    Raises:
        InvalidElementError: If a component is not a one-dimensional array of numbers.
    """
    if type(row) is not dict:
        row = {"tokens": row}
    for name, array in row.items():
        if (
            type(array) is not np.ndarray
            or array.ndim != 1
            or array.dtype.kind not in PACKED_KINDS
            or type(name) is not str
        ):
            found = (
                f"an array of shape {array.shape} and dtype {array.dtype}"
                if isinstance(array, np.ndarray)
                else f"a {type(array).__name__}"
            )
            raise InvalidElementError(
                f"packing takes one-dimensional arrays of numbers, but component [{name!r}] is "
                f"{found}; drop or convert it in map()"
            )
    return row  # type: ignore[no-any-return]


def _layout(sequences: Sequences) -> list[tuple[str, np.dtype[Any]]]:
    return [(name, array.dtype) for name, array in sequences.items()]


def _match_layout(sequences: Sequences, held: Sequences) -> Sequences:
    """Return a sequence with its components in the order of one that is held.

    Raises:
        InvalidElementError: If components or dtypes differ.
    """
    if len(held) == len(sequences) == 1:
        (name,) = sequences
        if name in held and sequences[name].dtype == held[name].dtype:
            return sequences
    if _layout(sequences) != _layout(held):
        if sequences.keys() == held.keys():
            sequences = {name: sequences[name] for name in held}
            if _layout(sequences) == _layout(held):
                return sequences
        raise InvalidElementError(
            f"the element has {_describe(sequences)}, but an element before it has "
            f"{_describe(held)}; convert all elements to the same components and dtypes with map()"
        )
    return sequences


def _describe(sequences: Sequences) -> str:
    return ", ".join(f"{name}: {array.dtype}" for name, array in sequences.items())


# --- Whole sequences ------------------------------------------------------------------------------


class _Bin:
    """An open row."""

    __slots__ = ("elements", "free", "opened", "total_free")

    def __init__(self, capacities: list[int], opened: int) -> None:
        #: Free length of each component.
        self.free = capacities
        self.total_free = sum(capacities)
        #: Number of rows that were finished before it was opened.
        self.opened = opened
        #: Sequences in it. Append-only.
        self.elements: list[HeldElement] = []

    def add(self, element: HeldElement, sizes: list[int]) -> bool:
        """Add an element with these numbers of tokens; return whether the bin is full."""
        self.elements.append(element)
        self.total_free -= sum(sizes)
        self.free = list(map(sub, self.free, sizes))
        return not all(self.free)


_total_free = attrgetter("total_free")


@make_iterator.register(PackSequences)
class BinPackingIterator(_PackingIterator):
    """Adds each sequence to one of a number of bins in which it fits.

    If it fits in none, the fullest bin is finished, which leaves least padding. A bin that has been
    open for long is finished before, so that no element is held indefinitely.
    """

    def __init__(self, node: PackSequences, context: Context) -> None:
        super().__init__(node, context)
        self._num_bins = node.num_bins
        self._best_fit = node.best_fit
        self._bins: list[_Bin] = []  # oldest first
        self._num_finished = 0  # rows

    def _held_ordinals(self) -> Iterable[int]:
        return (element.ordinal for bin_ in self._bins for element in bin_.elements)

    def _add(self, sequences: Sequences) -> _PackedRow | None:
        if self._bins:
            sequences = _match_layout(sequences, self._bins[0].elements[0].value)
        capacities = self._lengths_of(sequences)
        sizes = list(map(len, sequences.values()))
        if not all(map(ge, capacities, sizes)):
            raise _too_long(sequences, capacities)
        bin_ = self._find_bin(sizes)
        if bin_ is None:
            if len(self._bins) >= self._num_bins:
                return self._finish(self._choose_bin())
            bin_ = _Bin(capacities, self._num_finished)
            self._bins.append(bin_)
        is_full = bin_.add(self._input.take(sequences), sizes)
        return self._finish(bin_) if is_full else None

    def _find_bin(self, sizes: list[int]) -> _Bin | None:
        """Return the bin for a sequence, or None if it fits in none."""
        if len(sizes) == 1:
            size = sizes[0]
            if not self._best_fit:
                for bin_ in self._bins:
                    if bin_.total_free >= size:
                        return bin_
                return None
            fitting = [bin_ for bin_ in self._bins if bin_.total_free >= size]
        else:
            fitting = [bin_ for bin_ in self._bins if all(map(ge, bin_.free, sizes))]
        if self._best_fit:
            return min(fitting, key=_total_free, default=None)
        return fitting[0] if fitting else None

    def _choose_bin(self) -> _Bin:
        """Return the bin to finish."""
        oldest = self._bins[0]
        if self._num_finished - oldest.opened >= _MAX_AGE * self._num_bins:
            return oldest
        return min(self._bins, key=_total_free)

    def _finish(self, bin_: _Bin) -> _PackedRow:
        self._bins.remove(bin_)
        self._num_finished += 1
        parts = [element.value for element in bin_.elements]
        return _PackedRow(parts, joined_metadata(bin_.elements), self._make_state())

    def _finish_row(self) -> _PackedRow | None:
        return None

    def _finish_remaining(self) -> _PackedRow | None:
        return self._finish(self._bins[0]) if self._bins else None

    def _make_state(self) -> _MakeState:
        bins, position, num_finished = self._bins.copy(), self._input.position(), self._num_finished

        def state() -> State:
            contents = []
            for bin_ in bins:
                ordinals = [element.ordinal for element in bin_.elements]
                ordinals = ordinals[: bisect_left(ordinals, position.num_taken)]
                contents.append([num_finished - bin_.opened, encode_gaps(ordinals, position.first)])
            return {"bins": contents, **position.to_json()}

        return state

    def set_state(self, state: State) -> None:
        self._bins, self._num_finished = [], 0
        first = state["first_ordinal"]
        contents = [(age, decode_gaps(gaps, first)) for age, gaps in state["bins"]]
        elements = self._input.restore(state, [o for _, ordinals in contents for o in ordinals])
        if contents:
            first_bin = _check_sequences(elements[contents[0][1][0]].value)
            for element in elements.values():
                element.value = _match_layout(_check_sequences(element.value), first_bin)
        for age, ordinals in contents:
            held = [elements[ordinal] for ordinal in ordinals]
            bin_ = _Bin(self._lengths_of(held[0].value), -age)
            for element in held:
                bin_.add(element, list(map(len, element.value.values())))
            self._bins.append(bin_)

    def close(self) -> None:
        self._bins = []
        super().close()


def _too_long(sequences: Sequences, lengths: Sequence[int]) -> InvalidElementError:
    name, size, length = next(
        (name, len(array), length)
        for (name, array), length in zip(sequences.items(), lengths, strict=True)
        if len(array) > length
    )
    return InvalidElementError(
        f"component [{name!r}] has {size} tokens, but a row has {length}; increase `length`, "
        "truncate or filter sequences before, or use strategy='concat_then_split'"
    )


# --- Split sequences ------------------------------------------------------------------------------


@make_iterator.register(ConcatThenSplit)
class ConcatThenSplitIterator(_PackingIterator):
    """Fills each row completely; a sequence that does not fit continues in the next rows."""

    def __init__(self, node: ConcatThenSplit, context: Context) -> None:
        super().__init__(node, context)
        self._row_length = node.length
        self._reset()

    def _reset(self) -> None:
        self._held: list[HeldElement] = []
        self._offset = 0  # tokens of the first held sequence that are in earlier rows
        self._num_tokens = 0  # other tokens of held sequences

    def _held_ordinals(self) -> Iterable[int]:
        return [element.ordinal for element in self._held]

    def _add(self, sequences: Sequences) -> _PackedRow | None:
        self._lengths_of(sequences)  # checks the names
        if self._held:
            sequences = _match_layout(sequences, self._held[0].value)
        sizes = set(map(len, sequences.values()))
        if len(sizes) > 1:
            found = ", ".join(f"{name}: {len(array)}" for name, array in sequences.items())
            raise InvalidElementError(
                f"all components must have the same length to be split, but have {found}; use "
                "strategy='first_fit'"
            )
        self._held.append(self._input.take(sequences))
        self._num_tokens += sizes.pop()
        return None

    def _finish_row(self) -> _PackedRow | None:
        return self._split_row() if self._num_tokens >= self._row_length else None

    def _finish_remaining(self) -> _PackedRow | None:
        return self._split_row() if self._num_tokens else None

    def _split_row(self) -> _PackedRow:
        """Return a row of the first tokens that are held."""
        remaining = min(self._row_length, self._num_tokens)
        metadata = self._held[0].metadata
        if metadata is not None:
            metadata = nest_ids(metadata, self._offset)
        self._num_tokens -= remaining
        parts: list[Sequences] = []
        num_used = 0
        while remaining:
            sequences = self._held[num_used].value
            start = self._offset
            size = _num_tokens(sequences)
            stop = min(size, start + remaining)
            parts.append({name: array[start:stop] for name, array in sequences.items()})
            remaining -= stop - start
            if stop == size:
                num_used, self._offset = num_used + 1, 0
            else:
                self._offset = stop
        del self._held[:num_used]
        return _PackedRow(parts, metadata, self._make_state())

    def _make_state(self) -> _MakeState:
        ordinals, offset = [element.ordinal for element in self._held], self._offset
        position = self._input.position()
        return lambda: {
            "offset": offset,
            "held": encode_gaps(ordinals, position.first),
            **position.to_json(),
        }

    def set_state(self, state: State) -> None:
        self._reset()
        ordinals = decode_gaps(state["held"], state["first_ordinal"])
        elements = self._input.restore(state, ordinals)
        for element in elements.values():
            element.value = _check_sequences(element.value)
            self._num_tokens += _num_tokens(element.value)
        self._held = [elements[ordinal] for ordinal in ordinals]
        self._offset = state["offset"]
        self._num_tokens -= self._offset

    def close(self) -> None:
        self._reset()
        super().close()


def _num_tokens(sequences: Sequences) -> int:
    return len(next(iter(sequences.values())))
