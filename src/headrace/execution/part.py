"""A unit that is read for some of its elements: which of them are wanted, which passed over."""

from __future__ import annotations

import numpy as np

from headrace.element.chunk import Chunk
from headrace.execution.dealer import UnitPart
from headrace.execution.iterator import MOST_FAILURES, ElementIterator
from headrace.execution.origins import is_within
from headrace.execution.stage import chosen_states

__all__ = ["Part"]


class Part:
    """What is wanted of a unit, which is read from its start.

    Args:
        unit: The unit, and the ordinals.
    """

    def __init__(self, unit: UnitPart) -> None:
        self._wanted = unit.wanted
        self._has_failures = unit.has_failures
        self._failed = 0

    def pass_over(self, input_: ElementIterator) -> int:
        """Pass over the first elements, if none of them can fail; return how many there were.

        A step that is one-to-one calls nothing for them. Where some fail it cannot be said without
        a call which those are, so all are read.
        """
        first = self._wanted[0][0] if self._wanted else 0
        return 0 if self._has_failures or not first else input_.skip(first)

    def is_known_failure(self, ordinal: int) -> bool:
        """Say whether an error was raised before: the element after it is not wanted.

        One just before an element that is wanted is raised, perhaps once more.
        """
        self._failed += 1
        if self._failed > MOST_FAILURES + ordinal:
            return False
        return not is_within(np.array([ordinal]), self._wanted).any()

    def is_over(self, ordinal: int) -> bool:
        """Say whether nothing from this element on is wanted."""
        last = self._wanted[-1][1] if self._wanted else 0
        return last is not None and ordinal >= last

    def wanted_of(self, chunk: Chunk) -> Chunk | None:
        """Return the elements that are wanted; None: none of them."""
        assert chunk.places is not None
        keep = is_within(chunk.places["ordinal"], self._wanted)
        if keep.all():
            return chunk
        kept = np.flatnonzero(keep)
        if not len(kept):
            return None
        return chunk.take(kept).with_states(chosen_states(chunk.states, kept.tolist(), chunk.size))
