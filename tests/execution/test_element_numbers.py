"""Draws of nested datasets depend on the element numbers of the outer elements only."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import headrace as hr
from headrace.errors import UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.element_numbers import nest_ids, number_positions
from headrace.rewrites.optimize import prepare
from headrace.rewrites.split_space import compute_split_space

from .pipelines import failing, odd_or_half

Dataset = hr.Dataset


def drawn(x):
    """Return a dataset of one element: `x`, and a number drawn for its element number."""
    name = int(np.sum(x))
    order = Dataset.range(1 << 16).shuffle(1 << 9).take(1)
    return order.map(lambda y: (name, y))


def several(x):
    """Return an interleave of datasets that themselves draw."""
    return Dataset.range(int(np.sum(x)) % 4).shuffle(3).flat_map(drawn)


def kept(x):
    """Branch, so that it is called element by element."""
    return x % 3 != 1 if x < 1000 else False


OUTER = {
    "a filter": lambda ds: ds.filter(kept),
    "a shuffle of values": lambda ds: ds.filter(kept).shuffle(5),
    "two shuffles of values": lambda ds: ds.filter(kept).shuffle(5).shuffle(3),
    "a shuffle of rows of several kinds": lambda ds: (
        ds.filter(kept).map(lambda x: np.full(int(x) % 3 + 1, x)).shuffle(6)
    ),
    "a flat_map": lambda ds: ds.flat_map(lambda x: Dataset.range(int(x) % 4)),
    "an interleave": lambda ds: ds.interleave(
        lambda x: Dataset.range(int(x) % 5).shuffle(4), cycle_length=3, block_length=2
    ),
    "an interleave with threads": lambda ds: ds.interleave(
        lambda x: Dataset.range(int(x) % 5), cycle_length=3, num_parallel_calls=2
    ),
    "a shuffle of an interleave": lambda ds: ds.interleave(
        lambda x: Dataset.range(int(x) % 5), cycle_length=2
    ).shuffle(7),
    "an interleave of batches": lambda ds: ds.interleave(
        lambda x: Dataset.range(int(x) % 9).batch(2), cycle_length=4
    ),
    "nested datasets that draw": lambda ds: ds.flat_map(several).map(lambda x, y: x),
    "a generator": lambda ds: ds.flat_map(
        lambda x: Dataset.from_generator(lambda: iter(range(int(x) % 4)))
    ).shuffle(4),
    "repeat": lambda ds: ds.filter(kept).repeat(2).shuffle(5),
    "concatenate": lambda ds: (
        ds.filter(kept).concatenate(ds.shuffle(3).map(odd_or_half).filter(kept)).shuffle(4)
    ),
    "scan": lambda ds: ds.filter(kept).scan(0, lambda s, x: (s + x, x)).shuffle(4),
    "take_while": lambda ds: ds.filter(kept).take_while(lambda x: bool(x < 900)).shuffle(4),
    "padded batches": lambda ds: ds.filter(kept).padded_batch(1).shuffle(4),
    "windows": lambda ds: ds.filter(kept).group_by_window(
        lambda x: x % 2, lambda key, window: window.shuffle(2), window_size=1
    ),
    "buckets": lambda ds: (
        ds.filter(kept)
        .bucket_by_sequence_length(lambda x: x, [5], [1, 1], no_padding=True)
        .shuffle(4)
    ),
    "a map": lambda ds: ds.filter(kept).shuffle(4).map(odd_or_half),
    "a map of columns": lambda ds: ds.filter(lambda x: x % 3 != 1).shuffle(4).map(lambda x: x + 1),
    "a map with threads": lambda ds: (
        ds.filter(kept).shuffle(4).map(odd_or_half, num_parallel_calls=2)
    ),
    "a map in free order": lambda ds: ds.filter(kept).map(
        odd_or_half, num_parallel_calls=3, deterministic=False
    ),
    "elements that fail": lambda ds: ds.filter(kept).map(failing).shuffle(4),
    "prefetch": lambda ds: ds.filter(kept).shuffle(4).prefetch(3),
    "enumerate": lambda ds: ds.filter(kept).enumerate().map(lambda n, x: x).shuffle(4),
    "unbatch": lambda ds: ds.batch(3).map(lambda x: x).unbatch().filter(kept).shuffle(4),
    "a cache": lambda ds: ds.filter(kept).cache().shuffle(4),
    "a cache of a shuffle": lambda ds: ds.filter(kept).shuffle(4, seed=5).cache().map(odd_or_half),
    "a cache of positions": lambda ds: ds.map(odd_or_half).cache().filter(kept).shuffle(4),
}
"""Steps over `range`, none of which depends on how the work is split."""


def rows_of(iterator, limit=5):
    rows = []
    try:
        while True:
            try:
                chunk = iterator.next_chunk(limit)
            except UserFunctionError:
                continue
            if chunk is None:
                return rows
            rows += [tuple(int(part) for part in row) for row in chunk.rows()]
    finally:
        iterator.close()


def plan_of(name):
    return OUTER[name](Dataset.range(30)).flat_map(drawn).plan


@pytest.mark.parametrize("name", OUTER)
def test_draws_per_element_do_not_depend_on_how_work_is_divided(name):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    plan = plan_of(name)
    want = Counter(rows_of(build_iterator(plan, seed=7)))
    assert Counter(rows_of(build_iterator(plan, seed=7))) == want  # from the cache, if there is one
    assert len(set(want)) > 8
    splits = compute_split_space(prepare(plan).plan).size
    for _ in range(4):
        cuts = sorted({0, splits, *(chance.randrange(splits) for _ in range(chance.randrange(8)))})
        ranges = list(pairwise(cuts))
        chance.shuffle(ranges)
        got = Counter()
        for worker in range(3):
            mine = iter(ranges[worker::3])
            limit = chance.choice([1, 4, 50])
            # A separate plan, because each worker has its own cache.
            got.update(
                rows_of(
                    build_iterator(plan_of(name), seed=7, next_splits=lambda i=mine: next(i, None)),
                    limit,
                )
            )
        assert got == want


@pytest.mark.parametrize("name", [name for name in OUTER if name != "a map in free order"])
def test_a_restored_iterator_draws_the_same_at_every_position(name):
    dataset = OUTER[name](Dataset.range(18)).flat_map(drawn)
    dataset = dataset.with_options(hr.Options(seed=3))

    def rest(iterator):
        got, states = [], []
        while True:
            states.append(iterator.get_state())
            try:
                got.append(tuple(int(part) for part in next(iterator)))
            except UserFunctionError:
                got.append("failed")
            except StopIteration:
                return got, states

    with iter(dataset) as iterator:
        want, states = rest(iterator)
    used = iter(dataset)
    for position, state in reversed(list(enumerate(states))):
        used.set_state(state)
        assert used.get_state() == state
        assert rest(used)[0] == want[position:]
    fresh = iter(OUTER[name](Dataset.range(18)).flat_map(drawn).with_options(hr.Options(seed=3)))
    for position in (len(states) // 2, 1):
        fresh.set_state(states[position])
        assert rest(fresh)[0] == want[position:]
    used.close()
    fresh.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda ds: ds.shuffle(2), lambda ds: ds.shuffle(40)),
        (
            lambda ds: ds.interleave(several, cycle_length=2),
            lambda ds: ds.interleave(several, cycle_length=5, num_parallel_calls=3),
        ),
        (
            lambda ds: ds.map(odd_or_half),
            lambda ds: ds.map(odd_or_half, num_parallel_calls=2, deterministic=False),
        ),
    ],
    ids=["buffer", "cycle", "threads"],
)
def test_draws_per_element_do_not_depend_on_element_order(one, other):
    rows = Dataset.range(40).filter(kept)
    first, second = (
        rows_of(build_iterator(step(rows).flat_map(lambda *x: drawn(x[0])).plan, seed=1))
        for step in (one, other)
    )
    assert Counter(first) == Counter(second)


def test_a_cache_file_returns_the_element_numbers_of_its_input(tmp_path):
    def cached():
        return Dataset.range(20).filter(kept).cache(str(tmp_path / "cache"))

    want = rows_of(build_iterator(Dataset.range(20).filter(kept).flat_map(drawn).plan, seed=1))
    list(cached())  # filled by who wants no places
    assert rows_of(build_iterator(cached().flat_map(drawn).plan, seed=1)) == want


def test_each_epoch_of_a_repeat_draws_different_numbers():
    rows = rows_of(
        build_iterator(Dataset.range(5).filter(kept).repeat(2).flat_map(drawn).plan, seed=1)
    )
    assert len(set(rows)) == len(rows) == 6


def test_equal_inputs_of_concatenate_or_zip_have_different_element_numbers():
    rows = Dataset.range(5).filter(kept)
    joined = rows_of(build_iterator(rows.concatenate(rows).flat_map(drawn).plan, seed=1))
    assert len(set(joined)) == len(joined) == 6
    mapped = Dataset.range(5).map(odd_or_half)
    zips = [
        rows_of(build_iterator(Dataset.zip(*pair).flat_map(lambda x, y: drawn(y)).plan, seed=1))
        for pair in ((mapped, rows), (rows, rows))
    ]
    assert {x for x, _ in zips[0]} == {x for x, _ in zips[1]}
    assert zips[0][0] == zips[1][0]  # both are made of the first elements
    assert set(zips[0][1:]).isdisjoint(zips[1][1:])


def test_chunks_carry_element_numbers_only_below_a_step_that_opens_datasets():
    rows = Dataset.range(9).filter(kept).shuffle(3).repeat(2)
    for dataset in (rows, rows.batch(2), rows.flat_map(drawn), rows.cache()):
        with_none = build_iterator(dataset.plan, seed=1)
        assert with_none.next_chunk(4).metadata is None
        with_none.close()


def test_a_shuffle_mixes_cached_and_uncached_element_numbers():
    kept_rows = Dataset.range(9).filter(kept).cache()
    dataset = kept_rows.concatenate(Dataset.range(9).map(odd_or_half)).shuffle(3)
    want = [int(x) for x in Dataset.range(9) if kept(x)] + [0, 1, 2, 2, 3, 4, 6, 10, 14]
    for _ in range(2):  # filled, then read
        assert sorted(int(x) for x in dataset) == sorted(want)


def test_element_numbers_are_a_stable_format():
    assert number_positions(0, 3).tolist() == [
        16294208416658607535,
        10451216379200822465,
        10905525725756348110,
    ]
    assert number_positions(2, 1).tolist() == number_positions(0, 3)[2:].tolist()
    assert nest_ids(number_positions(0, 1), np.arange(2, dtype=np.uint64)).tolist() == [
        int(nest_ids(number_positions(0, 1), 0)[0]),
        int(nest_ids(number_positions(0, 1), 1)[0]),
    ]


def test_nested_element_numbers_are_all_different():
    outer = np.repeat(number_positions(0, 300), 300)
    inner = np.tile(number_positions(0, 300), 300)
    assert len(set(nest_ids(outer, inner).tolist())) == 300 * 300
    assert nest_ids(outer, inner)[1] != nest_ids(inner, outer)[1]
