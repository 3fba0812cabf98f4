"""Counters and random numbers: infinite sources that can be read at any index."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.execution.build import build_iterator
from headrace.plan.random_words import derive_key, random_words
from headrace.plan.source import INFINITE
from headrace.plan.traverse import find_leaves
from headrace.rewrites.canonicalize import canonicalize
from headrace.rewrites.split_space import compute_split_space
from headrace.sources.memory import RandomSource

Dataset = hr.Dataset

WORDS = [11667362002292521484, 271747555425766956, 17273651904697830340]
NUMBERS = [2086300823, 4141330198, 1181318453]
"""The numbers are stable: states and other machines rely on them."""


def first(dataset, count=10):
    return [int(x) for x in dataset.take(count)]


def test_a_counter_is_infinite():
    assert first(Dataset.counter(), 3) == [0, 1, 2]
    assert first(Dataset.counter(7, -3).skip(10**12), 2) == [7 - 3 * 10**12, 4 - 3 * 10**12]
    assert Dataset.counter().cardinality() == hr.INFINITE_CARDINALITY
    with pytest.raises(ValueError, match="step must not be 0"):
        Dataset.counter(0, 0)
    with pytest.raises(TypeError, match="`start` must be an integer"):
        Dataset.counter(0.5)


def test_random_numbers_fill_their_range_evenly():
    numbers = np.array([int(x) for x in Dataset.random(seed=1).take(40_000)])
    assert numbers.dtype == np.int64
    assert 0 <= numbers.min() < 2**20
    assert 2**32 - 2**20 < numbers.max() < 2**32
    counts = np.bincount(numbers >> 28, minlength=16)  # 2500 each
    assert np.abs(counts - 2500).max() < 5 * 2500**0.5
    pairs = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(pairs) < 5 / 200


def test_the_numbers_of_a_seed_are_stable():
    words = random_words(derive_key([1, 2]), np.array([0, 1, 10**15]))
    assert words.tolist() == WORDS
    assert first(Dataset.random(seed=0), 3) == NUMBERS


def test_number_i_is_a_function_of_the_seed_and_i():
    numbers = first(Dataset.random(seed=5), 1000)
    assert first(Dataset.random(seed=5).skip(900), 100) == numbers[900:]
    assert first(Dataset.random(seed=5).shard(10, 3), 100) == numbers[3::10]
    assert sorted(first(Dataset.random(seed=5).take(50).shuffle(50), 50)) == sorted(numbers[:50])
    assert [int(x) for x in Dataset.random(seed=5).batch(1000).take(1).unbatch()] == numbers
    assert first(Dataset.random(seed=6), 1000) != numbers
    source = RandomSource(seed=5)
    assert source.gather(np.array([[3, 3], [7, 0]])).tolist() == [
        [numbers[3]] * 2, [numbers[7], numbers[0]],
    ]  # fmt: skip


def test_without_a_seed_each_iteration_has_different_numbers():
    dataset = Dataset.random()
    one, other = first(dataset), first(dataset)
    assert one != other
    assert len(set(one)) == 10
    seeded = dataset.take(10).with_options(hr.Options(seed=3))
    again = dataset.take(10).with_options(hr.Options(seed=3))
    assert [first(seeded), first(seeded)] == [first(again), first(again)]
    assert first(seeded) != first(dataset)
    two = first(Dataset.zip(dataset, dataset).map(lambda a, b: a - b))
    assert 0 not in two  # each place in a plan draws for itself


def kept(x):
    return bool(x >= 0)


@pytest.mark.parametrize("step", [lambda ds: ds, lambda ds: ds.filter(kept)])
def test_all_epochs_of_an_iteration_have_the_same_numbers(step):
    numbers = first(step(Dataset.random()).take(5).repeat(2), 10)
    assert numbers[:5] == numbers[5:]


def test_nested_datasets_draw_by_element_number():
    dataset = Dataset.range(4).flat_map(lambda x: Dataset.random().take(2))
    numbers = first(dataset, 8)
    assert len(set(numbers)) == 8


def test_a_state_continues_the_drawn_numbers():
    dataset = Dataset.zip(Dataset.range(9), Dataset.random())
    with iter(dataset) as iterator:
        for _ in range(4):
            next(iterator)
        state = iterator.get_state()
        rest = [int(x) for _, x in iterator]
    assert state["position"] == {"stream": 4}
    with iter(dataset) as iterator:
        iterator.set_state(state)
        assert [int(x) for _, x in iterator] == rest


def test_a_cache_of_random_numbers_keeps_those_of_one_iteration():
    dataset = Dataset.random().take(4).cache()
    assert first(dataset) == first(dataset)


def test_random_numbers_zipped_with_data_are_split_with_it():
    plan = canonicalize(
        Dataset.zip(Dataset.range(20), Dataset.random()).shuffle(5).batch(3).plan
    ).plan
    assert compute_split_space(plan).size == 7
    assert len(find_leaves(plan)) == 1
    splits = iter([(2, 5), (0, 2), (5, 7), None])
    assigned = build_iterator(plan, seed=8, next_splits=lambda: next(splits))
    whole = build_iterator(plan, seed=8)
    want = [row[1].tolist() for c in iter(lambda: whole.next_chunk(1), None) for row in c.rows()]
    got = [row[1].tolist() for c in iter(lambda: assigned.next_chunk(1), None) for row in c.rows()]
    assert got == want[2:5] + want[:2] + want[5:]
    assert compute_split_space(canonicalize(Dataset.random().map(abs).plan).plan).size == INFINITE


def test_unseeded_numbers_require_a_dataset():
    with pytest.raises(FailedPreconditionError, match="have no seed"):
        RandomSource().gather(np.arange(3))
    with pytest.raises(TypeError, match="`seed` must be an integer"):
        Dataset.random(seed=0.5)
