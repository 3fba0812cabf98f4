"""The arithmetic of an interleave, against the cycle walked element by element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.execution.interleave_order import (
    CLOSED_SLOT,
    CycleCursor,
    EmptySlot,
    RoundRobinBlock,
    advance_cursor,
    count_taken,
    next_block,
)


def walk(in_hand, turn, block, limit):
    """Return the slots in the order in which they give elements, and the turn after each."""
    held, (current, taken) = list(in_hand), turn
    given_by, turns = [], []
    while len(given_by) < limit and any(count != CLOSED_SLOT for count in held):
        if held[current] == CLOSED_SLOT:
            current, taken = (current + 1) % len(held), 0
            continue
        if held[current] == 0:
            break
        held[current] -= 1
        given_by.append(current)
        taken += 1
        if taken == block:
            current, taken = (current + 1) % len(held), 0
        turns.append(CycleCursor(current, taken))
    return given_by, turns


def order_of(strip: RoundRobinBlock) -> list[int]:
    return [
        slot for _ in range(strip.rounds) for slot in strip.slots for _ in range(strip.per_slot)
    ]


CYCLES = st.lists(st.integers(CLOSED_SLOT, 12), min_size=1, max_size=6)


@given(in_hand=CYCLES, block=st.integers(1, 4), limit=st.integers(1, 60), data=st.data())
def test_strips_give_what_single_turns_give(in_hand, block, limit, data):
    current = data.draw(st.integers(0, len(in_hand) - 1))
    turn = CycleCursor(
        current, data.draw(st.integers(0, block - 1)) if in_hand[current] != CLOSED_SLOT else 0
    )
    expected, turns = walk(in_hand, turn, block, limit)
    held, found = list(in_hand), []
    while len(found) < limit:
        strip = next_block(held, turn, block, limit - len(found))
        if strip is None:
            assert all(count == CLOSED_SLOT for count in held)
            break
        if isinstance(strip, EmptySlot):
            assert held[strip.slot] == 0
            break
        order = order_of(strip)
        assert strip.size == len(order) <= limit - len(found)
        for count in range(1, strip.size + 1):
            after = advance_cursor(strip, count, turn, block, len(held))
            assert after == turns[len(found) + count - 1]
            for place, slot in enumerate(strip.slots):
                assert count_taken(strip, place, count) == order[:count].count(slot)
        assert advance_cursor(strip, 0, turn, block, len(held)) == turn
        turn = turns[len(found) + strip.size - 1]
        for slot in order:
            held[slot] -= 1
        found += order
    assert found == expected


def test_whole_rounds_are_one_strip():
    assert next_block([8, 8, CLOSED_SLOT, 8], CycleCursor(1, 0), 2, 100) == RoundRobinBlock(
        (1, 3, 0), 2, 4
    )


def test_a_block_that_was_begun_is_finished_first():
    assert next_block([8, 8], CycleCursor(0, 1), 3, 100) == RoundRobinBlock((0,), 2, 1)
