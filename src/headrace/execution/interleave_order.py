"""Where an interleave stands: whose turn it is, and the state before each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from headrace.element.chunk import States
from headrace.execution.inner import Inner
from headrace.execution.iterator import State

__all__ = [
    "VACANT",
    "Fill",
    "Log",
    "OuterPlace",
    "Standing",
    "Strip",
    "Turn",
    "next_strip",
    "state_of",
    "taken_of",
    "turn_after",
]

# --- The arithmetic of an interleave: whose turn it is, and what is taken in it -------------------
#
# Slots stand in a cycle. In its turn a slot gives up to `block` elements; then it is the next one's
# turn. What can be taken without opening or reading anything is taken in *strips*: the slots of a
# strip give `each` elements in turn, `rounds` times over.

VACANT = -1
"""In place of the number of elements in hand: the slot stays empty, and is passed over."""


class Turn(NamedTuple):
    """Whose turn it is, and how much of its block was taken."""

    current: int
    taken: int


class Strip(NamedTuple):
    """Elements in hand that come next."""

    slots: tuple[int, ...]
    each: int
    rounds: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.slots) * self.each * self.rounds


class Fill(NamedTuple):
    """Nothing can be taken: this slot, whose turn it is, has nothing in hand."""

    slot: int


def next_strip(in_hand: Sequence[int], turn: Turn, block: int, limit: int) -> Strip | Fill | None:
    """Return what comes next; None: all slots stay empty.

    Args:
        in_hand: Elements in hand of each slot, or VACANT.
        turn: Where the cycle stands.
        block: Elements that a slot gives in its turn.
        limit: The most elements to take.
    """
    cycle = len(in_hand)
    first, taken = turn
    if in_hand[first] == VACANT:
        taken = 0
        for ahead in range(1, cycle):
            slot = (first + ahead) % cycle
            if in_hand[slot] != VACANT:
                first = slot
                break
        else:
            return None
    held = in_hand[first]
    if held == 0:
        return Fill(first)
    if taken or held < block or limit < 2 * block:
        return Strip((first,), min(block - taken, held, limit), 1)
    # As many slots in turn as have a block each: all of them, or up to the first that has not.
    slots, rounds, is_whole = [first], held // block, True
    for ahead in range(1, cycle):
        slot = (first + ahead) % cycle
        held = in_hand[slot]
        if held == VACANT:
            continue
        if held < block:
            is_whole = False
            break
        slots.append(slot)
        rounds = min(rounds, held // block)
    turns = limit // block
    rounds = min(rounds, turns // len(slots)) if is_whole else 1
    if not rounds or len(slots) > turns:
        return Strip(tuple(slots[:turns]), block, 1)
    return Strip(tuple(slots), block, rounds)


def taken_of(strip: Strip, number: int, count: int) -> int:
    """Return how many of the first `count` elements of a strip are of its slot `number`."""
    turns, rest = divmod(count, strip.each)
    rounds, last = divmod(turns, len(strip.slots))
    return rounds * strip.each + (strip.each if number < last else rest if number == last else 0)


def turn_after(strip: Strip, count: int, turn: Turn, block: int, cycle: int) -> Turn:
    """Return the turn after the first `count` elements of a strip.

    Args:
        strip: What `next_strip` returned.
        count: From 0 to its size.
        turn: The turn before it.
        block: As for `next_strip`.
        cycle: Number of slots.
    """
    if not count:
        return turn
    before = turn.taken if turn.current == strip.slots[0] else 0
    turns, rest = divmod(before + count, block)
    if not rest:
        return Turn((strip.slots[(turns - 1) % len(strip.slots)] + 1) % cycle, 0)
    return Turn(strip.slots[turns % len(strip.slots)], rest)


# --- Where an interleave stands before each element of a chunk that it made -----------------------
#
# A chunk is made of strips, and in between slots are filled, emptied and given other datasets. That
# is noted, and gone through again when somebody asks for the state before one of the elements.

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
