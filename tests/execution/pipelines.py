"""Pipelines and steps for the tests of states."""

from __future__ import annotations

import numpy as np

import headrace as hr

Dataset = hr.Dataset


def odd_or_half(x):
    """Branch, so that it is called element by element."""
    return x * 2 if x % 2 else x // 2


def failing(x):
    """Fail for some elements."""
    if x % 7 == 3:
        raise KeyError(int(x))
    return x


def numbers():
    yield from range(23)


def many():
    yield from range(400)


def nested(x):
    return Dataset.range(int(x) % 4).map(lambda y: y + 10)


def drawn(x):
    """Open a dataset that is shuffled separately for each outer element."""
    return Dataset.range(int(x) % 5 + 1).shuffle(3)


def summed(total, x):
    """Write into the state of a scan, and return it as the element, too."""
    total += failing(x)
    return total, total


def odd_rows(batch):
    return {"x": batch[batch % 2 == 1]}


def ragged(x):
    return np.full(int(x) % 5, x)


def sequences(x):
    """Fail for some elements; others have up to 6 tokens, two are longer than rows."""
    return {"x": np.full(12 if failing(x) % 28 == 9 else int(x) % 7, x)}


def random_window(key, window):
    """Return a dataset of a window that draws, fails for some elements, and is read by batches."""
    return window.shuffle(3).map(lambda x: failing(x) + key).batch(2)


def noised(x, rng):
    """Add a random number to an element."""
    return x + int(rng.integers(100))


def failing_noise(x, rng):
    """Fail for random elements."""
    if rng.random() < 0.2:
        raise KeyError(int(x))
    return x * 100 + int(rng.integers(100))


def from_generator(x):
    return Dataset.from_generator(lambda: iter(range(int(x) % 3)))


PIPELINES = {
    "range": lambda: Dataset.range(17),
    "slices": lambda: Dataset.from_tensor_slices(
        {"a": np.arange(20).reshape(10, 2), "b": [b"x"] * 10}
    ),
    "tensors": lambda: Dataset.from_tensors((np.arange(3), "s")),
    "generator": lambda: Dataset.from_generator(numbers),
    "map": lambda: Dataset.range(30).map(odd_or_half),
    "columns": lambda: Dataset.range(30).map(lambda x: x * x),
    "filter": lambda: Dataset.range(30).filter(lambda x: bool(x % 3)),
    "rare filter": lambda: Dataset.range(300).filter(lambda x: bool(x % 50 == 7)),
    "column filter": lambda: Dataset.range(30).filter(lambda x: x % 3 == 0),
    "batch": lambda: Dataset.range(23).batch(4),
    "drop": lambda: Dataset.range(23).batch(4, drop_remainder=True),
    "batch of batches": lambda: Dataset.range(24).batch(2).batch(3),
    "mapped batch": lambda: Dataset.range(23).map(odd_or_half).batch(4),
    "unbatch": lambda: Dataset.range(23).map(odd_or_half).batch(5).unbatch(),
    "generated batches, mapped": lambda: (
        Dataset.from_generator(many).batch(32).map(lambda b: b if b[0] >= 0 else -b)
    ),
    "generated batches, filtered and batched": lambda: (
        Dataset.from_generator(many).batch(8).filter(lambda b: bool(b[0] % 3)).batch(2)
    ),
    "generated batches, zipped": lambda: Dataset.zip(
        Dataset.from_generator(many).batch(4), Dataset.range(90)
    ),
    "take skip": lambda: Dataset.range(30).skip(5).take(11),
    "shard": lambda: Dataset.range(31).map(odd_or_half).shard(4, 2),
    "index shard": lambda: Dataset.range(31).shard(4, 3),
    "enumerate": lambda: Dataset.range(9).map(odd_or_half).enumerate(5),
    "repeat": lambda: Dataset.range(5).repeat(4),
    "endless": lambda: Dataset.range(5).shuffle(3, seed=1).repeat(),
    "shuffle": lambda: Dataset.range(60).shuffle(7),
    "full shuffle": lambda: Dataset.range(20).shuffle(100, seed=4),
    "row shuffle": lambda: Dataset.range(60).map(odd_or_half).shuffle(7),
    "full row shuffle": lambda: Dataset.range(20).map(odd_or_half).shuffle(100),
    "generator shuffle": lambda: Dataset.from_generator(numbers).shuffle(5, seed=2),
    "shuffled epochs": lambda: Dataset.range(20).shuffle(6, seed=3).repeat(3).batch(7),
    "zip": lambda: Dataset.zip(Dataset.range(20).shuffle(5), Dataset.range(13).map(odd_or_half)),
    "concatenate": lambda: Dataset.range(5).concatenate(Dataset.range(7).map(odd_or_half)),
    "concatenate, interleave": lambda: (
        Dataset.range(1).concatenate(Dataset.range(9)).interleave(nested, cycle_length=4)
    ),
    "concatenate, shuffle, flat_map": lambda: (
        Dataset.range(2)
        .concatenate(Dataset.range(5).filter(lambda x: x != 2))
        .shuffle(3)
        .flat_map(nested)
    ),
    "concatenate, repeat": lambda: (
        Dataset.range(3)
        .filter(lambda x: bool(x >= 0))
        .concatenate(Dataset.from_generator(lambda: iter(range(2))))
        .repeat(3)
    ),
    "flat_map": lambda: Dataset.range(9).flat_map(nested),
    "drawn flat_map": lambda: Dataset.range(9).flat_map(drawn),
    "flat_map after filter": lambda: (
        Dataset.range(30).filter(lambda x: bool(x % 3 == 0)).flat_map(drawn)
    ),
    "interleave": lambda: Dataset.range(9).interleave(nested, cycle_length=3, block_length=2),
    "wide interleave": lambda: Dataset.range(5).interleave(
        lambda x: Dataset.range(9).map(lambda y: y + 1)
    ),
    "interleaved generators": lambda: Dataset.range(9).interleave(from_generator, cycle_length=3),
    "threaded interleave": lambda: Dataset.range(9).interleave(
        nested, cycle_length=3, num_parallel_calls=2
    ),
    "prefetch": lambda: Dataset.range(20).map(odd_or_half).prefetch(3),
    "autotuned prefetch": lambda: Dataset.range(20).map(odd_or_half).prefetch(hr.AUTOTUNE),
    "threaded map": lambda: Dataset.range(40).map(odd_or_half, num_parallel_calls=3),
    "cache": lambda: Dataset.range(9).map(odd_or_half).cache().repeat(3),
    "shuffled cache": lambda: Dataset.range(9).shuffle(9).cache().repeat(3),
    "training": lambda: (
        Dataset.range(40)
        .shuffle(16)
        .map(odd_or_half, num_parallel_calls=2)
        .repeat(2)
        .batch(6)
        .prefetch(2)
    ),
    "counter": lambda: Dataset.counter(5, 3).take(20),
    "random": lambda: Dataset.random().take(20).shuffle(5).repeat(2),
    "random beside numbers": lambda: Dataset.zip(Dataset.range(20), Dataset.random()).batch(3),
    "scan": lambda: Dataset.range(30).scan(0, lambda total, x: (total + x, (total, x))),
    "scan of what was filtered": lambda: (
        Dataset.range(30).filter(lambda x: bool(x % 3)).scan({"a": (1.5, "s")}, lambda s, x: (s, x))
    ),
    "scan of arrays": lambda: Dataset.range(30).scan(np.zeros(2, np.int64), summed),
    "take_while": lambda: Dataset.range(30).take_while(lambda x: bool(x < 17)),
    "column take_while": lambda: Dataset.range(30).take_while(lambda x: x < 17),
    "failing take_while": lambda: Dataset.range(30).take_while(lambda x: failing(x) < 17),
    "repeated take_while": lambda: Dataset.range(9).take_while(lambda x: x != 4).repeat(3),
    "padded_batch": lambda: Dataset.range(23).map(ragged).padded_batch(4, [7], -1),
    "failing map, padded": lambda: Dataset.range(23).map(failing).map(ragged).padded_batch(4),
    "ragged_batch": lambda: (
        Dataset.range(23).map(failing).map(lambda x: (ragged(x), x)).ragged_batch(4)
    ),
    "whole ragged batches": lambda: Dataset.range(23).map(ragged).ragged_batch(4, True),
    "unique": lambda: Dataset.range(40).map(lambda x: x // 2 % 9).unique().repeat(2),
    "unique rows of a shuffle": lambda: (
        Dataset.range(60)
        .map(failing)
        .filter(lambda x: bool(x % 4))
        .shuffle(5)
        .map(lambda x: {"a": np.full(3, x % 20), "b": str(x % 10)})
        .unique()
    ),
    "unique columns": lambda: Dataset.from_tensor_slices(np.arange(40) % 13).unique(),
    "rebatch": lambda: Dataset.range(40).batch(7).map(odd_rows).rebatch(3),
    "group_by_window": lambda: Dataset.range(40).group_by_window(
        lambda x: x % 3, lambda key, window: window.batch(4), window_size=4
    ),
    "group_by_window of a filter": lambda: (
        Dataset.range(60)
        .filter(lambda x: bool(x % 4))
        .group_by_window(lambda x: x % 5 * (x < 50), random_window, None, lambda key: int(key) + 2)
    ),
    "failing group_by_window": lambda: (
        Dataset.range(60)
        .map(failing)
        .group_by_window(lambda x: failing(x + 1) % 4, random_window, window_size=5)
    ),
    "group_by_window, failing to reduce": lambda: Dataset.range(40).group_by_window(
        lambda x: x % 3, lambda key, window: window.take(failing(key + 2)), window_size=2
    ),
    "group_by_window of a shuffle": lambda: (
        Dataset.range(40)
        .map(odd_or_half)
        .filter(lambda x: bool(x % 9))
        .shuffle(5)
        .group_by_window(lambda x: x % 2, lambda key, window: window.repeat(2), window_size=3)
    ),
    "buckets": lambda: (
        Dataset.range(50)
        .map(failing)
        .map(ragged)
        .bucket_by_sequence_length(len, [2, 4], [3, 5, 2], padding_values=-1)
    ),
    "whole buckets": lambda: Dataset.range(50).bucket_by_sequence_length(
        lambda x: failing(x) % 7, [2, 4], [3, 5, 2], no_padding=True, drop_remainder=True
    ),
    "packed": lambda: Dataset.range(60).map(sequences).pack_sequences(9, num_bins=3),
    "packed, best fit": lambda: (
        Dataset.range(60)
        .map(failing, num_parallel_calls=2)
        .map(lambda x: {"x": ragged(x), "y": ragged(x + 1)})
        .pack_sequences({"x": 7, "y": 9}, "best_fit", 2)
    ),
    "packed rows of one array": lambda: Dataset.from_tensor_slices(
        np.arange(40).reshape(20, 2)
    ).pack_sequences(5, num_bins=3),
    "concatenated and split": lambda: (
        Dataset.range(60).map(sequences).pack_sequences(3, "concat_then_split")
    ),
    "batches by cost": lambda: (
        Dataset.range(50)
        .map(failing)
        .map(ragged)
        .batch_by_cost(9, lambda x: failing(len(x) * 2) if len(x) < 4 else 10 * len(x) % 39)
    ),
    "batches by padded cost": lambda: (
        Dataset.range(50)
        .map(ragged)
        .batch_by_cost(7.5, len, drop_remainder=True, count_padding=True)
    ),
    "batched windows": lambda: (
        Dataset.range(23).window(4, shift=1).flat_map(lambda w: w.batch(4, drop_remainder=True))
    ),
    "batched windows, failing": lambda: (
        Dataset.range(30)
        .map(failing)
        .window(4, shift=3, stride=2)
        .flat_map(lambda window: window.batch(9))
    ),
    "batched windows of pairs": lambda: (
        Dataset.range(20)
        .map(lambda x: (x, str(x)))
        .window(3, shift=5)
        .flat_map(lambda a, b: hr.Dataset.zip((a.batch(3), b.batch(4))))
    ),
    "batched windows of different shapes": lambda: (
        Dataset.range(23).map(lambda x: ragged(x // 2)).window(2).flat_map(lambda w: w.batch(2))
    ),
    "windows": lambda: (
        Dataset.range(23).window(4, shift=2).flat_map(lambda w: w.shuffle(3).map(odd_or_half))
    ),
    "windows, failing": lambda: (
        Dataset.range(40)
        .map(failing)
        .window(3, shift=5, stride=2)
        .filter(lambda w: len(list(w)) < 4)
        .interleave(lambda w: w.map(lambda x: failing(x + 1)), cycle_length=2, block_length=2)
    ),
    "windows in windows": lambda: (
        Dataset.range(12)
        .window(3, shift=2)
        .window(2, shift=1)
        .flat_map(lambda w: w)
        .shuffle(2)
        .flat_map(lambda w: w.batch(2))
    ),
    "sample": lambda: Dataset.sample_from_datasets(
        [Dataset.range(9), Dataset.range(20, 32).map(odd_or_half), Dataset.range(50, 53)],
        [0.2, 0.5, 0.3],
    ),
    "sample that stops": lambda: Dataset.sample_from_datasets(
        [Dataset.range(9).map(failing), Dataset.range(40)], stop_on_empty_dataset=True
    ).repeat(3),
    "sample with weights that change": lambda: Dataset.sample_from_datasets(
        [Dataset.range(9).map(failing), Dataset.range(40)],
        Dataset.range(30).map(lambda n: [n, 30 - n]),
        seed=3,
    ),
    "choose": lambda: Dataset.choose_from_datasets(
        [Dataset.range(9).map(failing), Dataset.range(20, 29), Dataset.range(30, 35).shuffle(5)],
        Dataset.random(seed=4).map(lambda x: x % 3),
        stop_on_empty_dataset=False,
    ),
    "choose by what is computed": lambda: Dataset.choose_from_datasets(
        [Dataset.range(9).map(failing), Dataset.range(20, 99).map(odd_or_half)],
        Dataset.range(40).map(lambda n: failing(n) % 2),
    ),
    "failing map": lambda: Dataset.range(30).map(failing),
    "failing map, filtered": lambda: Dataset.range(30).map(failing).filter(lambda x: bool(x % 2)),
    "failing filter": lambda: Dataset.range(30).filter(lambda x: failing(x) % 2 == 0),
    "failing map, batched": lambda: Dataset.range(30).map(failing).batch(4),
    "failing map, zipped": lambda: Dataset.zip(
        Dataset.range(30).map(failing), Dataset.range(30).map(lambda x: failing(x + 1))
    ),
    "failing map, shuffled": lambda: (
        Dataset.range(30).map(failing).filter(lambda x: bool(x >= 0)).shuffle(5)
    ),
    "failing map, prefetched": lambda: Dataset.range(30).map(failing).prefetch(4),
    "failing threaded map": lambda: Dataset.range(30).map(failing, num_parallel_calls=2),
    "random_map": lambda: Dataset.range(30).random_map(noised),
    "threaded random_map": lambda: Dataset.range(30).random_map(noised, 2).repeat(2),
    "random_map, shuffled": lambda: Dataset.range(30).shuffle(9).random_map(noised).batch(4),
    "random_map of a generator": lambda: (
        Dataset.from_generator(numbers).shuffle(5).random_map(noised, seed=3).repeat(2)
    ),
    "random_map of an interleave": lambda: (
        Dataset.range(9)
        .interleave(lambda x: nested(x).random_map(noised), cycle_length=3)
        .random_map(failing_noise)
    ),
    "unordered random_map": lambda: Dataset.range(9).random_map(noised, deterministic=False),
    "ignore_errors": lambda: Dataset.range(30).map(failing).ignore_errors(),
    "ignore_errors of a batch": lambda: (
        Dataset.range(30).map(failing).batch(4).ignore_errors().repeat(2)
    ),
    "ignore_errors of threads": lambda: (
        Dataset.range(30).random_map(failing_noise, 2).ignore_errors().shuffle(4)
    ),
    "ignore_errors of an interleave": lambda: (
        Dataset.range(9)
        .interleave(lambda x: nested(failing(x)).map(failing), cycle_length=2)
        .ignore_errors()
        .prefetch(3)
    ),
    "failing interleave": lambda: Dataset.range(9).interleave(
        lambda x: nested(failing(x)), cycle_length=2
    ),
}

#: Steps that any dataset of numbers can take.
STEPS = {
    "map": lambda ds: ds.map(odd_or_half),
    "failing map": lambda ds: ds.map(failing),
    "columns": lambda ds: ds.map(lambda x: x + 1),
    "random_map": lambda ds: ds.random_map(noised),
    "ignored errors": lambda ds: ds.map(failing).ignore_errors(),
    "threaded map": lambda ds: ds.map(odd_or_half, num_parallel_calls=2),
    "filter": lambda ds: ds.filter(lambda x: bool(x % 3 != 0)),
    "column filter": lambda ds: ds.filter(lambda x: x % 4 != 0),
    "shuffle": lambda ds: ds.shuffle(4),
    "full shuffle": lambda ds: ds.shuffle(50, seed=9),
    "repeat": lambda ds: ds.repeat(2),
    "take": lambda ds: ds.take(19),
    "skip": lambda ds: ds.skip(3),
    "shard": lambda ds: ds.shard(2, 1),
    "enumerate": lambda ds: ds.enumerate().map(lambda number, x: x + 2 * number),
    "scan": lambda ds: ds.scan(0, lambda total, x: (total + x, x + total % 3)),
    "group_by_window": lambda ds: ds.group_by_window(
        lambda x: x % 3, lambda key, window: window.shuffle(2), window_size=3
    ),
    "packed": lambda ds: (
        ds.map(lambda x: np.full(int(x) % 3 + 1, x))
        .pack_sequences(4, num_bins=2)
        .map(lambda row: row["tokens"].sum())
    ),
    "batch by cost": lambda ds: ds.batch_by_cost(4, lambda x: int(x) % 3 + 1).map(
        lambda batch: batch.sum() if len(batch) > 1 else batch[0]
    ),
    "windows": lambda ds: ds.window(3, 2).flat_map(lambda w: w.map(odd_or_half)),
    "batched windows": lambda ds: (
        ds.window(2, shift=3).flat_map(lambda w: w.batch(2)).map(lambda batch: batch[-1])
    ),
    "sample": lambda ds: Dataset.sample_from_datasets([ds, Dataset.range(5)], [0.7, 0.3]),
    "batch": lambda ds: ds.batch(3).map(lambda batch: batch.sum() if len(batch) > 1 else batch[0]),
    "unbatch": lambda ds: ds.batch(3).unbatch(),
    "unique": lambda ds: ds.map(lambda x: x // 2).unique(),
    "ragged_batch": lambda ds: ds.ragged_batch(3).map(np.sum),
    "zip": lambda ds: Dataset.zip(ds, Dataset.range(12).shuffle(3)).map(lambda x, y: x + 3 * y),
    "concatenate": lambda ds: ds.concatenate(Dataset.range(4)),
    "concatenated": lambda ds: Dataset.range(4).concatenate(ds),
    "prefetch": lambda ds: ds.prefetch(2),
    "cache": lambda ds: ds.cache(),
    "flat_map": lambda ds: ds.flat_map(lambda x: Dataset.range(int(x) % 3)),
    "drawn flat_map": lambda ds: ds.flat_map(lambda x: Dataset.range(int(x) % 4).shuffle(4)),
    "interleave": lambda ds: ds.interleave(lambda x: Dataset.range(int(x) % 5), cycle_length=2),
    "threaded interleave": lambda ds: ds.interleave(
        nested, cycle_length=3, block_length=2, num_parallel_calls=2
    ),
}

#: Sources of numbers.
SOURCES = {
    "range": lambda: Dataset.range(14),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(14))),
}
