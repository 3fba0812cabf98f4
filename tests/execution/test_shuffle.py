"""Shuffles of indices and of values, compared with a simulated buffer; blocks of shards."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.data.dataset import Dataset
from headrace.errors import DataLossError
from headrace.execution.build import build_iterator
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, make_iterator
from headrace.execution.shuffle import IndexShuffleIterator, ShuffleIterator
from headrace.execution.shuffle_buffer import SlotDraws, SlotExchange, slot_ordinals
from headrace.plan.ordering import ShardBlocks, Shuffle
from headrace.plan.traverse import cardinality
from headrace.rewrites.canonicalize import canonicalize

from .contract import ListIterator, assert_keeps_contract, read, with_input

CONTEXT = Context(seed=11, build=lambda plan, context: None)


def indices_of(dataset: hr.Dataset, epochs: tuple[int, ...] = (0,)) -> ElementIterator:
    """Return an iterator over the index plan below the dataset's last shuffle, inclusive."""
    node = canonicalize(dataset.plan).plan
    while not isinstance(node, Shuffle):
        (node,) = node.inputs
    context = Context(seed=11, epochs=epochs, build=lambda plan, context: None)
    return make_iterator(node, context)


def all_of(iterator: ElementIterator, limit: int = 7) -> list[int]:
    found: list[int] = []
    while (chunk := iterator.next_chunk(limit)) is not None:
        found += [int(row) for row in chunk.rows()]
    return found


def numbers(count: int, **how) -> ListIterator:
    return ListIterator([np.int64(n) for n in range(count)], **how)


def values_of(input_: ListIterator, size: int, seed: int | None = None) -> ShuffleIterator:
    """Return a shuffle of the values of an iterator."""
    node = Shuffle(input=Dataset.range(1).plan, buffer_size=size, seed=seed)
    return ShuffleIterator(node, with_input(node, input_, CONTEXT))


SHUFFLES = {
    "short": lambda: Dataset.range(5).shuffle(9),
    "small buffer": lambda: Dataset.range(200).shuffle(7),
    "whole": lambda: Dataset.range(50).shuffle(50, seed=4),
    "one slot": lambda: Dataset.range(20).shuffle(1),
    "nothing": lambda: Dataset.range(0).shuffle(3),
    "of passes": lambda: Dataset.range(20).shuffle(6).repeat(4).shuffle(9),
    "of batches": lambda: Dataset.range(23).batch(4).shuffle(3),
    "twice": lambda: Dataset.range(60).shuffle(10).shuffle(10),
    "endless": lambda: Dataset.range(9).repeat().shuffle(20),
}


@pytest.mark.parametrize("name", SHUFFLES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_an_index_shuffle_continues_from_any_position(name, seed):
    iterator = indices_of(SHUFFLES[name]())
    assert isinstance(iterator, IndexShuffleIterator)
    assert_keeps_contract(lambda: indices_of(SHUFFLES[name]()), seed, most=90, restores=5)


def test_the_state_of_an_index_shuffle_is_the_number_of_elements_before_it():
    iterator = indices_of(Dataset.range(100).shuffle(10))
    chunk = iterator.next_chunk(13)
    assert [chunk.state_at(index) for index in (0, 5, 13)] == [0, 5, 13]
    assert iterator.get_state() == 13


@given(seed=st.integers(0, 2**32))
def test_an_index_shuffle_can_seek_from_any_to_any_position(seed):
    chance = random.Random(seed)
    dataset = Dataset.range(chance.randint(1, 60)).repeat(2).shuffle(chance.randint(1, 20))
    whole = all_of(indices_of(dataset))
    iterator = indices_of(dataset)
    for _ in range(10):
        position = chance.randint(0, len(whole))
        iterator.seek(position)
        want = whole[position : position + chance.randint(1, 9)]
        assert [x for x, _ in zip(all_of_some(iterator, len(want)), want, strict=True)] == want
        passed = iterator.skip(5)
        assert passed == min(5, len(whole) - position - len(want))


def all_of_some(iterator: ElementIterator, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count and (chunk := iterator.next_chunk(count - len(found))) is not None:
        found += [int(row) for row in chunk.rows()]
    return found


@settings(max_examples=50)
@given(
    count=st.integers(0, 60),
    size=st.integers(1, 25),
    failing=st.sets(st.integers(0, 59)),
    free=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_shuffle_of_values_continues_from_any_state(count, size, failing, free, seed):
    entries = [ValueError() if n in failing else np.int64(n) for n in range(count)]

    def make():
        return values_of(ListIterator(entries, reads_ahead_freely=free), size)

    outcomes = assert_keeps_contract(make, seed, most=200)
    assert outcomes.count("ValueError") == len([n for n in failing if n < count])
    assert len(outcomes) == count


@given(size=st.integers(1, 30), count=st.integers(0, 80), seed=st.integers(0, 1000))
def test_both_shuffles_have_the_same_order(size, count, seed):
    index = all_of(indices_of(Dataset.range(count).shuffle(size, seed=seed)))
    values = all_of(values_of(numbers(count), size, seed))
    assert values == index


def test_an_unseeded_order_differs_by_epoch_and_a_fixed_one_does_not():
    def orders(**how):
        dataset = Dataset.range(30).shuffle(30, **how)
        return [all_of(indices_of(dataset, epochs)) for epochs in ((0,), (1,))]

    for seed in (None, 3):
        first, second = orders(seed=seed)
        assert first != second
        first, second = orders(seed=seed, reshuffle_each_iteration=False)
        assert first == second


def test_a_draw_reads_one_element():
    input_ = numbers(40, reads_ahead_freely=False)
    shuffle = values_of(input_, 10)
    shuffle.next_chunk(1)
    assert input_.at == 11
    shuffle.next_chunk(3)
    assert input_.at == 14


def test_restoring_reads_each_held_element_once_and_skips_the_rest():
    shuffle = values_of(numbers(2000, reads_ahead_freely=False), 50)
    read(shuffle, random.Random(1), 1000)
    state = shuffle.get_state()
    input_ = numbers(2000, reads_ahead_freely=False)
    again = values_of(input_, 50)
    again.set_state(state)
    assert input_.at - state["first_ordinal"] - input_.passed_over == 50
    assert input_.passed_over > 50
    assert all_of(again) == all_of(shuffle)


def test_functions_below_a_shuffle_are_called_at_most_once_per_slot():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    def make():
        nested = Dataset.range(20).interleave(
            lambda i: Dataset.range(100).map(note), cycle_length=4
        )
        return build_iterator(nested.shuffle(40).plan, seed=5)

    first = make()
    for _ in range(60):
        first.next_chunk(10)
    state = first.get_state()
    rest = all_of(first)
    calls.clear()
    second = make()
    second.set_state(state)
    assert len(calls) <= 40
    assert all_of(second) == rest


def test_a_shorter_input_than_before_is_named():
    shuffle = values_of(numbers(100), 10)
    read(shuffle, random.Random(2), 60)
    shorter = values_of(numbers(20), 10)
    with pytest.raises(DataLossError, match="has fewer elements"):
        shorter.set_state(shuffle.get_state())


def test_rows_of_mixed_kinds_are_shuffled():
    entries = [np.arange(n % 3 + 1) if n % 2 else (np.int64(n), b"x") for n in range(40)]
    seen = []
    shuffle = values_of(ListIterator(entries), 7)
    while (chunk := shuffle.next_chunk(4)) is not None:
        seen += [repr(row) for row in chunk.rows()]
    assert sorted(seen) == sorted(map(repr, entries))


def test_held_rows_do_not_keep_their_chunks_alive():
    rows, width = 4000, 256  # 1 KiB each, 4 MiB in all; 1 in 16 is kept

    def chunks():
        for _ in range(rows // 16):
            yield np.zeros((16, width), np.float32)

    def first_row(block):
        return block[0]

    dataset = (
        Dataset.from_generator(chunks).map(first_row).filter(lambda row: row.size > 0).shuffle(rows)
    )
    iterator = build_iterator(dataset.plan, seed=1)
    tracemalloc.start()
    iterator.next_chunk(1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    iterator.close()
    assert held < 2 * rows // 16 * width * 4


def test_held_rows_of_mixed_chunks_do_not_keep_chunks_alive():
    """The first and the last row own their memory; the others are views of large arrays."""
    width, chunk = 64, 1024
    own = [np.zeros(width, np.uint8) for _ in range(2 * chunk)]
    parts = [np.zeros((16, width), np.uint8)[5] for _ in range(chunk)]
    shuffle = values_of(ListIterator([*own[:chunk], *parts, *own[chunk:]]), 4 * chunk)
    rows = [row for _ in range(3) for row in shuffle.next_chunk(chunk).rows()]
    assert len(rows) == 3 * chunk
    assert all(row.base is None or row.base.nbytes <= 4 * width for row in rows)


# --- the arithmetic of the shuffle buffer, against the buffer simulated slot by slot --------------


def simulate(slots, held, incoming):
    out = []
    for slot, new in zip(slots, incoming, strict=True):
        out.append(held[slot])
        held[slot] = new
    return out


@given(size=st.integers(1, 40), count=st.integers(1, 200), seed=st.integers(0, 2**64 - 1))
def test_a_block_of_draws_equals_single_draws(size, count, seed):
    slots = SlotDraws([seed], size).take(count)
    held, incoming = np.arange(size), np.arange(size, size + count)
    expected_held = held.tolist()
    expected = simulate(slots.tolist(), expected_held, incoming.tolist())
    assert SlotExchange(slots).apply(held, incoming).tolist() == expected
    assert held.tolist() == expected_held


@given(size=st.integers(1, 40), drawn=st.integers(0, 2000), seed=st.integers(0, 2**64 - 1))
def test_slot_contents_are_known_without_the_earlier_draws(size, drawn, seed):
    held = list(range(size))
    simulate(SlotDraws([seed], size).take(drawn).tolist(), held, range(size, size + drawn))
    assert slot_ordinals(SlotDraws([seed], size), drawn, size).tolist() == held


@given(start=st.integers(0, 50), count=st.integers(0, 50), seed=st.integers(0, 1000))
def test_draws_do_not_depend_on_how_they_are_read(start, count, seed):
    whole = SlotDraws([seed], 17).take(start + count)
    assert SlotDraws([seed], 17).between(start, start + count).tolist() == whole[start:].tolist()
    sought = SlotDraws([seed], 17)
    sought.seek(start)
    assert sought.take(count).tolist() == whole[start:].tolist()


def test_draws_are_uniform():
    drawn = np.bincount(SlotDraws([5], 100).take(100_000), minlength=100)
    # Each slot is drawn 1000 times, give or take five standard deviations (31.5 each).
    assert drawn.min() > 840
    assert drawn.max() < 1160


def test_an_exchange_moves_the_columns_of_an_element_together():
    slots = SlotDraws([3], 4).take(30)
    numbers, names = np.arange(4), np.array([b"%d" % n for n in range(4)], object)
    incoming = np.arange(4, 34)
    exchange = SlotExchange(slots)
    out = exchange.apply(numbers, incoming)
    out_names = exchange.apply(names, np.array([b"%d" % n for n in incoming], object))
    assert [b"%d" % n for n in out] == out_names.tolist()
    assert [b"%d" % n for n in numbers] == names.tolist()


# --- every n-th block of elements, from any position ----------------------------------------------


def plan_of(size: int, index: int, **terms: int) -> ShardBlocks:
    return ShardBlocks(input=Dataset.range(size).plan, num_shards=3, index=index, **terms)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 11, 12, 13, 40])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_third_block_is_yielded_and_counted(size: int, index: int) -> None:
    expected = [x for x in range(size) if x // 4 % 3 == index]
    plan = plan_of(size, index, block_size=4)
    assert [int(x) for x in Dataset(plan)] == expected
    assert cardinality(plan) == len(expected)


def test_a_shard_of_batches_equals_a_batch_of_blocks_from_any_position() -> None:
    batches = [batch.tolist() for batch in Dataset.range(100).shuffle(9, seed=2).batch(4)]
    shuffled = Dataset.range(100).shuffle(9, seed=2).plan
    blocks = Dataset(ShardBlocks(input=shuffled, num_shards=3, index=1, block_size=4))
    dataset = blocks.map(lambda x: x).batch(4)
    iterator = iter(dataset)
    states, got = [iterator.get_state()], []
    for batch in iterator:
        got.append(batch.tolist())
        states.append(iterator.get_state())
    assert got == batches[1::3]
    for number, state in enumerate(states):
        again = iter(dataset)
        again.set_state(state)
        assert [batch.tolist() for batch in again] == got[number:]


def test_shard_blocks_above_other_steps_count_the_elements_read() -> None:
    filtered = Dataset.range(60).filter(lambda x: x % 2 == 0).plan
    plan = ShardBlocks(input=filtered, num_shards=2, index=0, block_size=3)
    iterator = build_iterator(plan, seed=1)
    found: list[int] = []
    while (chunk := iterator.next_chunk(2)) is not None:
        found += [int(row) for row in chunk.rows()]
    iterator.close()
    assert found == [x for x in range(0, 60, 2) if x // 2 // 3 % 2 == 0]
