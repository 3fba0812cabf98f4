"""Random plans keep the iterator contract, with errors, for any chunk sizes and states."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.execution.build import build_iterator

from .contract import assert_keeps_contract

Dataset = hr.Dataset


def odd_or_half(x):
    return x * 2 if x % 2 else x // 2


def fails_at_three(x):
    if x % 5 == 3:
        raise ValueError(int(x))
    return x + 1


def total(x):
    return x.sum() if len(x) > 1 else x.flat[0] if x.size else np.int64(0)


def total_of_row(row):
    return row["tokens"].sum()


def grown(value, x):
    value += fails_at_three(x)
    return value, value


def ragged(x):
    return np.full(abs(int(x)) % 4, x)


def reduced(key, window):
    return window.map(fails_at_three).shuffle(2).take(5 - int(key))


def width(key):
    return int(key) + 1


def numbers():
    yield from range(13)


def with_gaps():
    for number in range(13):
        yield number if number % 6 != 4 else None  # None is no element: an error


def shuffled(x):
    return Dataset.range(int(x) % 7).shuffle(4)


def generated(x):
    if x % 3 == 1:
        return Dataset.range(int(x) % 5)
    return Dataset.from_generator(with_gaps).take(int(x) % 7)


def failing(x):
    if x % 4 == 1:
        raise KeyError(int(x))
    return Dataset.range(int(x) % 5).map(fails_at_three)


BEGIN = st.sampled_from(
    [
        lambda size: Dataset.range(size),
        lambda size: Dataset.range(size).map(odd_or_half),
        lambda size: Dataset.from_generator(numbers),
        lambda size: Dataset.from_generator(with_gaps),
    ]
)
STEP = st.sampled_from(
    [
        lambda ds: ds.map(odd_or_half),
        lambda ds: ds.map(lambda x: x + 1),
        lambda ds: ds.map(fails_at_three),
        lambda ds: ds.map(odd_or_half, num_parallel_calls=2),
        lambda ds: ds.map(fails_at_three, num_parallel_calls=3),
        lambda ds: ds.filter(lambda x: x % 3 != 0),
        lambda ds: ds.filter(lambda x: fails_at_three(x) % 3 != 0),
        lambda ds: ds.shuffle(4),
        lambda ds: ds.shuffle(50, seed=9),
        lambda ds: ds.shuffle(3, reshuffle_each_iteration=False),
        lambda ds: ds.repeat(2),
        lambda ds: ds.take(19),
        lambda ds: ds.skip(3),
        lambda ds: ds.shard(2, 1),
        lambda ds: ds.prefetch(2),
        lambda ds: ds.prefetch(hr.AUTOTUNE),
        lambda ds: ds.cache(),
        lambda ds: ds.cache().repeat(2),
        lambda ds: ds.flat_map(shuffled),
        lambda ds: ds.interleave(lambda x: Dataset.range(int(x) % 6), cycle_length=2),
        lambda ds: ds.interleave(shuffled, cycle_length=3, block_length=2),
        lambda ds: ds.interleave(failing, cycle_length=3),
        lambda ds: ds.interleave(shuffled, cycle_length=3, block_length=2, num_parallel_calls=2),
        lambda ds: ds.interleave(failing, cycle_length=2, num_parallel_calls=2),
        lambda ds: ds.concatenate(Dataset.range(4)),
        lambda ds: Dataset.zip(ds, Dataset.range(30)).map(lambda a, b: a + b),
        lambda ds: Dataset.zip(ds, Dataset.from_generator(with_gaps)).map(lambda a, b: a + b),
        lambda ds: ds.interleave(generated, cycle_length=3, block_length=2),
        lambda ds: ds.enumerate().map(lambda number, x: number + x),
        lambda ds: ds.scan(0, lambda total, x: (total + x, fails_at_three(total + x))),
        lambda ds: ds.scan(np.zeros(1, np.int64), grown).map(total),
        lambda ds: ds.take_while(lambda x: x < 30),
        lambda ds: ds.take_while(lambda x: fails_at_three(x) < 30),
        lambda ds: ds.map(ragged).padded_batch(3).map(total),
        lambda ds: ds.group_by_window(lambda x: x % 2, lambda key, w: w.shuffle(2), 3),
        lambda ds: ds.group_by_window(lambda x: fails_at_three(x) % 3, reduced, None, width),
        lambda ds: ds.bucket_by_sequence_length(
            lambda x: x % 7, [2, 5], [2, 1, 3], no_padding=True
        ).map(total),
        lambda ds: (
            ds.map(ragged)
            .bucket_by_sequence_length(lambda x: fails_at_three(len(x)), [2], [2, 3])
            .map(total)
        ),
        lambda ds: ds.map(ragged).pack_sequences(3, num_bins=2).map(total_of_row),
        lambda ds: ds.map(ragged).pack_sequences(2, "concat_then_split").map(total_of_row),
        lambda ds: ds.batch_by_cost(9, lambda x: fails_at_three(x) % 9).map(total),
        lambda ds: Dataset.sample_from_datasets([ds, Dataset.range(7)], [0.6, 0.4], seed=3),
        lambda ds: Dataset.sample_from_datasets(
            [ds, ds.map(fails_at_three), Dataset.range(5)], stop_on_empty_dataset=True
        ),
        lambda ds: Dataset.choose_from_datasets(
            [ds, Dataset.range(9).map(fails_at_three)],
            Dataset.range(30).map(lambda x: fails_at_three(x) % 2),
            stop_on_empty_dataset=False,
        ),
        lambda ds: Dataset.choose_from_datasets([ds, ds], ds.map(lambda x: x % 2)),
        lambda ds: Dataset.zip(ds, Dataset.random()).map(lambda x, y: x + y % 5),
        lambda ds: ds.batch(3).unbatch(),
        lambda ds: ds.map(fails_at_three).batch(3).unbatch(),
        lambda ds: ds.map(fails_at_three).batch(2, drop_remainder=True).batch(3).map(total),
        lambda ds: ds.batch(2).map(lambda x: fails_at_three(x[0]) + len(x)),
    ]
)


@settings(max_examples=120)
@given(
    begin=BEGIN,
    steps=st.lists(STEP, min_size=1, max_size=4),
    size=st.integers(0, 25),
    largest=st.sampled_from([1, 3, 9, 40]),
    seed=st.integers(0, 2**32),
)
def test_any_plan_continues_from_any_state(begin, steps, size, largest, seed):
    dataset = begin(size)
    for step in steps:
        dataset = step(dataset)
    assert_keeps_contract(
        lambda: build_iterator(dataset.plan, seed=7), seed, restores=6, largest=largest
    )
