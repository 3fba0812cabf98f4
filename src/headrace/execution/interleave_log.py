"""Where an interleave stands before each element of a chunk that it made.

A chunk is made of strips, and in between slots are filled, emptied and given other datasets. That
is noted, and gone through again when somebody asks for the state before one of the elements.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from headrace.element.chunk import States
from headrace.execution.inner import Inner
from headrace.execution.interleave_order import Strip, Turn, taken_of, turn_after
from headrace.execution.iterator import State

__all__ = ["Log", "OuterPlace", "Standing", "state_of"]

SlotPlace: TypeAlias = tuple[Inner, States, int]
"""A dataset, and the place in it: that before element i of a chunk with these states."""
OuterPlace: TypeAlias = tuple[States, int, bool]
"""The place of the next outer element, its number, and whether the input has ended."""
Standing: TypeAlias = tuple[list[SlotPlace | None], OuterPlace]
"""Where an interleave stands: in each slot, and in the outer input."""


class Log:
    """What happens while a chunk is made.

    Args:
        standing: Where the slots and the input stand before it.
        turn: Whose turn it is then.
        block: Elements that a slot gives in its turn.
    """

    def __init__(self, standing: Standing, turn: Turn, block: int) -> None:
        self._before = standing
        self._turn = turn
        self._block = block
        self._events: list[tuple[str, Any]] = []

    def take(self, strip: Strip, count: int) -> None:
        """The first `count` elements of a strip are taken."""
        self._events.append(("take", (strip, count)))

    def turn(self, turn: Turn) -> None:
        """The turn passes on without an element."""
        self._events.append(("turn", turn))

    def place(self, slot: int, inner: Inner | None) -> None:
        """A slot has something else in it, or in hand."""
        place = None if inner is None else (inner, inner.states, inner.index)
        self._events.append(("place", (slot, place)))

    def outer(self, outer: OuterPlace) -> None:
        """The outer input goes on."""
        self._events.append(("outer", outer))

    def states(self) -> States:
        """Return the states before the chunk's elements; nothing is noted any more."""
        return lambda index: state_of(*self._after(index))

    def _after(self, count: int) -> tuple[Standing, Turn]:
        """Return where it stands, and the turn, after the first `count` elements."""
        before, outer = self._before
        slots, turn, block = list(before), self._turn, self._block
        for kind, what in self._events:
            if not count:
                break
            if kind == "take":
                strip, taken = what[0], min(count, what[1])
                for number, slot in enumerate(strip.slots):
                    entry = slots[slot]
                    assert entry is not None
                    inner, states, index = entry
                    slots[slot] = inner, states, index + taken_of(strip, number, taken)
                turn = turn_after(strip, taken, turn, block, len(slots))
                count -= taken
            elif kind == "turn":
                turn = what
            elif kind == "outer":
                outer = what
            else:
                slots[what[0]] = what[1]
        return (slots, outer), turn


def state_of(standing: Standing, turn: Turn) -> dict[str, State]:
    """Return the state of an interleave that stands there."""
    slots, (outer, number, has_ended) = standing
    return {
        "input": outer(0),
        "slots": [
            None
            if entry is None
            else {
                "origin": entry[0].origin(0),
                "number": entry[0].number,
                "inner": entry[1](entry[2]),
            }
            for entry in slots
        ],
        "numbers": number,
        "current": turn.current,
        "taken": turn.taken,
        "ended": has_ended,
    }
