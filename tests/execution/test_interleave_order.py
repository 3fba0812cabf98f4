"""The arithmetic of an interleave, against the cycle walked element by element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.execution.interleave_order import (
    VACANT,
    Fill,
    Strip,
    Turn,
    next_strip,
    taken_of,
    turn_after,
)


def walk(in_hand, turn, block, limit):
    """Return the slots in the order in which they give elements, and the turn after each."""
    held, (current, taken) = list(in_hand), turn
    given_by, turns = [], []
    while len(given_by) < limit and any(count != VACANT for count in held):
        if held[current] == VACANT:
            current, taken = (current + 1) % len(held), 0
            continue
        if held[current] == 0:
            break
        held[current] -= 1
        given_by.append(current)
        taken += 1
        if taken == block:
            current, taken = (current + 1) % len(held), 0
        turns.append(Turn(current, taken))
    return given_by, turns


def order_of(strip: Strip) -> list[int]:
    return [slot for _ in range(strip.rounds) for slot in strip.slots for _ in range(strip.each)]


CYCLES = st.lists(st.integers(VACANT, 12), min_size=1, max_size=6)


@given(in_hand=CYCLES, block=st.integers(1, 4), limit=st.integers(1, 60), data=st.data())
def test_strips_give_what_single_turns_give(in_hand, block, limit, data):
    current = data.draw(st.integers(0, len(in_hand) - 1))
    turn = Turn(current, data.draw(st.integers(0, block - 1)) if in_hand[current] != VACANT else 0)
    expected, turns = walk(in_hand, turn, block, limit)
    held, found = list(in_hand), []
    while len(found) < limit:
        strip = next_strip(held, turn, block, limit - len(found))
        if strip is None:
            assert all(count == VACANT for count in held)
            break
        if isinstance(strip, Fill):
            assert held[strip.slot] == 0
            break
        order = order_of(strip)
        assert strip.size == len(order) <= limit - len(found)
        for count in range(1, strip.size + 1):
            after = turn_after(strip, count, turn, block, len(held))
            assert after == turns[len(found) + count - 1]
            for place, slot in enumerate(strip.slots):
                assert taken_of(strip, place, count) == order[:count].count(slot)
        assert turn_after(strip, 0, turn, block, len(held)) == turn
        turn = turns[len(found) + strip.size - 1]
        for slot in order:
            held[slot] -= 1
        found += order
    assert found == expected


def test_whole_rounds_are_one_strip():
    assert next_strip([8, 8, VACANT, 8], Turn(1, 0), 2, 100) == Strip((1, 3, 0), 2, 4)


def test_a_block_that_was_begun_is_finished_first():
    assert next_strip([8, 8], Turn(0, 1), 3, 100) == Strip((0,), 2, 1)
