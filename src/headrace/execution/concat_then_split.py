"""Iterator that packs sequences into rows without padding, and splits them where a row ends."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.element_numbers import nest_ids
from headrace.execution.held_input import HeldElement
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
from headrace.plan.packing import ConcatThenSplit

__all__ = ["ConcatThenSplitIterator"]


@make_iterator.register(ConcatThenSplit)
class ConcatThenSplitIterator(PackingIterator):
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

    def _add(self, sequences: Sequences) -> PackedRow | None:
        self._lengths_of(tuple(sequences))  # checks the names
        if self._held:
            check_layout(sequences, self._held[0].value)
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

    def _finish_row(self) -> PackedRow | None:
        return self._split_row() if self._num_tokens >= self._row_length else None

    def _finish_remaining(self) -> PackedRow | None:
        return self._split_row() if self._num_tokens else None

    def _split_row(self) -> PackedRow:
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
        return PackedRow(parts, metadata, self._make_state())

    def _make_state(self) -> MakeState:
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
            element.value = check_sequences(element.value)
            self._num_tokens += _num_tokens(element.value)
        self._held = [elements[ordinal] for ordinal in ordinals]
        self._offset = state["offset"]
        self._num_tokens -= self._offset

    def close(self) -> None:
        self._reset()
        super().close()


def _num_tokens(sequences: Sequences) -> int:
    return len(next(iter(sequences.values())))
