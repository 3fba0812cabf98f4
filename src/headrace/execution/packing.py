"""Iterator that packs whole sequences into rows.

Assignment uses Python ints, because open rows are few.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter, ge, sub

from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.held_input import HeldElement, join_metadata
from headrace.execution.iterator import State, make_iterator
from headrace.execution.packed_rows import (
    MakeState,
    PackedRow,
    PackingIterator,
    Sequences,
    check_layout,
    check_sequences,
)
from headrace.execution.replayable_input import decode_gaps, encode_gaps
from headrace.plan.packing import PackSequences

__all__ = ["BinPackingIterator"]

_MAX_AGE = 8
"""The next bin to finish is the oldest if this many rows per bin were finished since it began."""


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
class BinPackingIterator(PackingIterator):
    """Adds each sequence to one of a number of bins in which it fits.

    If it fits in none, the fullest bin is finished, which leaves least padding. A bin that has been
    open for long is finished before, so that no element is held indefinitely.
    """

    def __init__(self, node: PackSequences, context: Context) -> None:
        super().__init__(node, context)
        self._num_bins = node.num_bins
        self._best_fit = node.best_fit
        self._bins: list[_Bin] = []  # oldest first
        self._names: tuple[str, ...] = ()  # of components, in the order of `_Bin.free`
        self._num_finished = 0  # rows

    def _held_ordinals(self) -> Iterable[int]:
        return (element.ordinal for bin_ in self._bins for element in bin_.elements)

    def _add(self, sequences: Sequences) -> PackedRow | None:
        if self._bins:
            check_layout(sequences, self._bins[0].elements[0].value)
        else:
            self._names = tuple(sequences)
        capacities = self._lengths_of(self._names)
        sizes = self._sizes_of(sequences)
        if not all(map(ge, capacities, sizes)):
            raise _too_long(self._names, sizes, capacities)
        bin_ = self._find_bin(sizes)
        if bin_ is None:
            if len(self._bins) >= self._num_bins:
                return self._finish(self._choose_bin())
            bin_ = _Bin(capacities, self._num_finished)
            self._bins.append(bin_)
        is_full = bin_.add(self._input.take(sequences), sizes)
        return self._finish(bin_) if is_full else None

    def _sizes_of(self, sequences: Sequences) -> list[int]:
        return [len(sequences[name]) for name in self._names]

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

    def _finish(self, bin_: _Bin) -> PackedRow:
        self._bins.remove(bin_)
        self._num_finished += 1
        parts = [element.value for element in bin_.elements]
        return PackedRow(parts, join_metadata(bin_.elements), self._make_state())

    def _finish_row(self) -> PackedRow | None:
        return None

    def _finish_remaining(self) -> PackedRow | None:
        return self._finish(self._bins[0]) if self._bins else None

    def _make_state(self) -> MakeState:
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
        contents = [(age, decode_gaps(gaps, state["first_ordinal"])) for age, gaps in state["bins"]]
        elements = self._input.restore(state, [o for _, ordinals in contents for o in ordinals])
        for element in elements.values():
            element.value = check_sequences(element.value)
        if contents:
            first = elements[contents[0][1][0]].value
            self._names = tuple(first)
            for element in elements.values():
                check_layout(element.value, first)
        for age, ordinals in contents:
            bin_ = _Bin(self._lengths_of(self._names), -age)
            for ordinal in ordinals:
                element = elements[ordinal]
                bin_.add(element, self._sizes_of(element.value))
            self._bins.append(bin_)

    def close(self) -> None:
        self._bins = []
        super().close()


def _too_long(
    names: Sequence[str], sizes: Sequence[int], lengths: Sequence[int]
) -> InvalidElementError:
    name, size, length = next(
        entry for entry in zip(names, sizes, lengths, strict=True) if entry[1] > entry[2]
    )
    return InvalidElementError(
        f"component [{name!r}] has {size} tokens, but a row has {length}; increase `length`, "
        "truncate or filter sequences before, or use strategy='concat_then_split'"
    )
