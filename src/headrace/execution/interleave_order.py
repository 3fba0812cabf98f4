"""Cycle order of an interleave, and the state before each of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from headrace.element.chunk import States
from headrace.execution.iterator import State
from headrace.execution.nested_dataset import NestedDataset

__all__ = [
    "CLOSED_SLOT",
    "CycleCursor",
    "EmptySlot",
    "InterleaveLog",
    "InterleavePosition",
    "OuterPosition",
    "RoundRobinBlock",
    "advance_cursor",
    "count_taken",
    "make_state",
    "next_block",
]

# --- Cycle order: which slot is next, and how many elements it yields -----------------------------
#
# Slots form a cycle. In its turn a slot yields up to `block_length` elements; then the next slot
# follows. Elements that can be taken without opening or reading anything are taken as a
# `RoundRobinBlock`: its slots yield `per_slot` elements in turn, `rounds` times.

CLOSED_SLOT = -1
"""Marks a closed slot, which is skipped; used in place of its number of buffered elements."""


class CycleCursor(NamedTuple):
    """The current slot, and how many elements of its block were taken."""

    slot: int
    num_taken: int


class RoundRobinBlock(NamedTuple):
    """Buffered elements that come next."""

    slots: tuple[int, ...]
    per_slot: int
    rounds: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.slots) * self.per_slot * self.rounds


class EmptySlot(NamedTuple):
    """The current slot has no buffered elements, so nothing can be taken."""

    slot: int


def next_block(
    num_buffered: Sequence[int], cursor: CycleCursor, block_length: int, limit: int
) -> RoundRobinBlock | EmptySlot | None:
    """Return the block that comes next, an empty slot, or None if all slots are closed.

    Args:
        num_buffered: Number of buffered elements of each slot, or CLOSED_SLOT.
        cursor: Current position in the cycle.
        block_length: Number of elements that a slot yields in its turn.
        limit: Maximum number of elements to take.
    """
    cycle_length = len(num_buffered)
    first, taken = cursor
    if num_buffered[first] == CLOSED_SLOT:
        taken = 0
        for distance in range(1, cycle_length):
            slot = (first + distance) % cycle_length
            if num_buffered[slot] != CLOSED_SLOT:
                first = slot
                break
        else:
            return None
    buffered = num_buffered[first]
    if buffered == 0:
        return EmptySlot(first)
    if taken or buffered < block_length or limit < 2 * block_length:
        return RoundRobinBlock((first,), min(block_length - taken, buffered, limit), 1)
    # Take consecutive slots that have a full block each: all of them, or up to the first that has
    # not.
    slots, rounds, is_whole = [first], buffered // block_length, True
    for distance in range(1, cycle_length):
        slot = (first + distance) % cycle_length
        buffered = num_buffered[slot]
        if buffered == CLOSED_SLOT:
            continue
        if buffered < block_length:
            is_whole = False
            break
        slots.append(slot)
        rounds = min(rounds, buffered // block_length)
    turns = limit // block_length
    rounds = min(rounds, turns // len(slots)) if is_whole else 1
    if not rounds or len(slots) > turns:
        return RoundRobinBlock(tuple(slots[:turns]), block_length, 1)
    return RoundRobinBlock(tuple(slots), block_length, rounds)


def count_taken(taken_block: RoundRobinBlock, slot_index: int, count: int) -> int:
    """Return how many of the first `count` elements of a block its slot `slot_index` yields."""
    turns, remainder = divmod(count, taken_block.per_slot)
    rounds, last = divmod(turns, len(taken_block.slots))
    return rounds * taken_block.per_slot + (
        taken_block.per_slot if slot_index < last else remainder if slot_index == last else 0
    )


def advance_cursor(
    taken_block: RoundRobinBlock,
    count: int,
    cursor: CycleCursor,
    block_length: int,
    cycle_length: int,
) -> CycleCursor:
    """Return the position in the cycle after the first `count` elements of a block.

    Args:
        taken_block: Block that `next_block` returned.
        count: Number of elements taken, from 0 to the block's size.
        cursor: Position before the block.
        block_length: As for `next_block`.
        cycle_length: Number of slots.
    """
    if not count:
        return cursor
    num_before = cursor.num_taken if cursor.slot == taken_block.slots[0] else 0
    turns, num_taken = divmod(num_before + count, block_length)
    if not num_taken:
        return CycleCursor(
            (taken_block.slots[(turns - 1) % len(taken_block.slots)] + 1) % cycle_length, 0
        )
    return CycleCursor(taken_block.slots[turns % len(taken_block.slots)], num_taken)


# --- States before the elements of a chunk --------------------------------------------------------
#
# A chunk is made of several blocks; between them slots are filled, emptied and given other
# datasets. These events are logged, and replayed when the state before an element is requested.

SlotPosition: TypeAlias = tuple[NestedDataset, States, int]
"""An open dataset and a position in it: before element i of a chunk with these states."""
OuterPosition: TypeAlias = tuple[States, int, bool]
"""State before the next outer element, its number, and whether the outer input has ended."""
InterleavePosition: TypeAlias = tuple[list[SlotPosition | None], OuterPosition]
"""Position of an interleave: of each slot, and of the outer input."""


class InterleaveLog:
    """Log of the events while a chunk is made.

    Args:
        position: Position of the slots and the outer input before the chunk.
        cursor: Position in the cycle before the chunk.
        block_length: Number of elements that a slot yields in its turn.
    """

    def __init__(
        self, position: InterleavePosition, cursor: CycleCursor, block_length: int
    ) -> None:
        self._start = position
        self._cursor = cursor
        self._block_length = block_length
        self._events: list[tuple[str, Any]] = []

    def record_taken(self, taken_block: RoundRobinBlock, count: int) -> None:
        """Record that the first `count` elements of a block were taken."""
        self._events.append(("take", (taken_block, count)))

    def record_cursor(self, cursor: CycleCursor) -> None:
        """Record that the cycle advances without an element."""
        self._events.append(("turn", cursor))

    def record_slot(self, slot: int, dataset: NestedDataset | None) -> None:
        """Record that a slot's dataset or buffered chunk changed."""
        position = None if dataset is None else (dataset, dataset.states, dataset.index)
        self._events.append(("slot", (slot, position)))

    def record_outer(self, outer: OuterPosition) -> None:
        """Record the new position of the outer input."""
        self._events.append(("outer", outer))

    def states(self) -> States:
        """Return the states before the chunk's elements; the log is complete."""
        return lambda index: make_state(*self._replay(index))

    def _replay(self, count: int) -> tuple[InterleavePosition, CycleCursor]:
        """Return the position and the cursor after the first `count` elements."""
        slot_positions, outer = self._start
        slots, cursor, block_length = list(slot_positions), self._cursor, self._block_length
        for kind, payload in self._events:
            if not count:
                break
            if kind == "take":
                taken_block, taken = payload[0], min(count, payload[1])
                for slot_index, slot in enumerate(taken_block.slots):
                    slot_position = slots[slot]
                    assert slot_position is not None
                    dataset, states, index = slot_position
                    slots[slot] = (
                        dataset,
                        states,
                        index + count_taken(taken_block, slot_index, taken),
                    )
                cursor = advance_cursor(taken_block, taken, cursor, block_length, len(slots))
                count -= taken
            elif kind == "turn":
                cursor = payload
            elif kind == "outer":
                outer = payload
            else:
                slots[payload[0]] = payload[1]
        return (slots, outer), cursor


def make_state(position: InterleavePosition, cursor: CycleCursor) -> dict[str, State]:
    """Return the state of an interleave at a position."""
    slot_positions, (outer_states, number, has_ended) = position
    return {
        "input": outer_states(0),
        "slots": [
            None
            if slot_position is None
            else {
                "outer": slot_position[0].outer_states(0),
                "number": slot_position[0].number,
                "dataset": slot_position[1](slot_position[2]),
            }
            for slot_position in slot_positions
        ],
        "next_number": number,
        "current": cursor.slot,
        "taken": cursor.num_taken,
        "ended": has_ended,
    }
