"""The arithmetic of the shuffle buffer, against the buffer simulated slot by slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.execution.shuffle_buffer import Draws, Exchange, slot_ordinals


def simulate(slots, held, incoming):
    out = []
    for slot, new in zip(slots, incoming, strict=True):
        out.append(held[slot])
        held[slot] = new
    return out


@given(size=st.integers(1, 40), count=st.integers(1, 200), seed=st.integers(0, 2**64 - 1))
def test_a_block_of_draws_gives_what_single_draws_give(size, count, seed):
    slots = Draws([seed], size).take(count)
    held, incoming = np.arange(size), np.arange(size, size + count)
    expected_held = held.tolist()
    expected = simulate(slots.tolist(), expected_held, incoming.tolist())
    assert Exchange(slots).apply(held, incoming).tolist() == expected
    assert held.tolist() == expected_held


@given(size=st.integers(1, 40), drawn=st.integers(0, 2000), seed=st.integers(0, 2**64 - 1))
def test_what_a_slot_holds_is_known_without_the_draws_before(size, drawn, seed):
    held = list(range(size))
    simulate(Draws([seed], size).take(drawn).tolist(), held, range(size, size + drawn))
    assert slot_ordinals(Draws([seed], size), drawn, size).tolist() == held


@given(start=st.integers(0, 50), count=st.integers(0, 50), seed=st.integers(0, 1000))
def test_draws_are_the_same_read_in_any_way(start, count, seed):
    whole = Draws([seed], 17).take(start + count)
    assert Draws([seed], 17).between(start, start + count).tolist() == whole[start:].tolist()
    sought = Draws([seed], 17)
    sought.seek(start)
    assert sought.take(count).tolist() == whole[start:].tolist()


def test_draws_are_uniform():
    drawn = np.bincount(Draws([5], 100).take(100_000), minlength=100)
    # Each slot is drawn 1000 times, give or take five standard deviations (31.5 each).
    assert drawn.min() > 840
    assert drawn.max() < 1160


def test_an_exchange_moves_the_columns_of_an_element_together():
    slots = Draws([3], 4).take(30)
    numbers, names = np.arange(4), np.array([b"%d" % n for n in range(4)], object)
    incoming = np.arange(4, 34)
    exchange = Exchange(slots)
    out = exchange.apply(numbers, incoming)
    out_names = exchange.apply(names, np.array([b"%d" % n for n in incoming], object))
    assert [b"%d" % n for n in out] == out_names.tolist()
    assert [b"%d" % n for n in numbers] == names.tolist()
