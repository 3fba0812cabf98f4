"""The arithmetic of an interleave: whose turn it is, and what is taken in it.

Slots stand in a cycle. In its turn a slot gives up to `block` elements; then it is the next one's
turn. What can be taken without opening or reading anything is taken in *strips*: the slots of a
strip give `each` elements in turn, `rounds` times over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["VACANT", "Fill", "Strip", "Turn", "next_strip", "taken_of", "turn_after"]

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
