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


def walk(num_buffered, turn, block, limit):
    """Return the slot of each element, and the cursor after it."""
    held, (current, taken) = list(num_buffered), turn
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


def order_of(block_of_rows: RoundRobinBlock) -> list[int]:
    return [
        slot
        for _ in range(block_of_rows.rounds)
        for slot in block_of_rows.slots
        for _ in range(block_of_rows.per_slot)
    ]


CYCLES = st.lists(st.integers(CLOSED_SLOT, 12), min_size=1, max_size=6)


@given(num_buffered=CYCLES, block=st.integers(1, 4), limit=st.integers(1, 60), data=st.data())
def test_blocks_yield_the_same_elements_as_single_turns(num_buffered, block, limit, data):
    current = data.draw(st.integers(0, len(num_buffered) - 1))
    turn = CycleCursor(
        current, data.draw(st.integers(0, block - 1)) if num_buffered[current] != CLOSED_SLOT else 0
    )
    expected, turns = walk(num_buffered, turn, block, limit)
    held, found = list(num_buffered), []
    while len(found) < limit:
        block_of_rows = next_block(held, turn, block, limit - len(found))
        if block_of_rows is None:
            assert all(count == CLOSED_SLOT for count in held)
            break
        if isinstance(block_of_rows, EmptySlot):
            assert held[block_of_rows.slot] == 0
            break
        order = order_of(block_of_rows)
        assert block_of_rows.size == len(order) <= limit - len(found)
        for count in range(1, block_of_rows.size + 1):
            after = advance_cursor(block_of_rows, count, turn, block, len(held))
            assert after == turns[len(found) + count - 1]
            for position, slot in enumerate(block_of_rows.slots):
                assert count_taken(block_of_rows, position, count) == order[:count].count(slot)
        assert advance_cursor(block_of_rows, 0, turn, block, len(held)) == turn
        turn = turns[len(found) + block_of_rows.size - 1]
        for slot in order:
            held[slot] -= 1
        found += order
    assert found == expected


def test_complete_rounds_form_one_block():
    assert next_block([8, 8, CLOSED_SLOT, 8], CycleCursor(1, 0), 2, 100) == RoundRobinBlock(
        (1, 3, 0), 2, 4
    )


def test_a_started_block_is_finished_first():
    assert next_block([8, 8], CycleCursor(0, 1), 3, 100) == RoundRobinBlock((0,), 2, 1)
