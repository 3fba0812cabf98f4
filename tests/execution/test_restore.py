"""Every pipeline continues from every state, in a fresh iterator, with the same rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr

from .battery import assert_restores_everywhere

Dataset = hr.Dataset


def odd_or_half(x: np.int64) -> np.int64:
    """Branch, so that it is called element by element."""
    return x * 2 if x % 2 else x // 2


def numbers():
    yield from range(23)


def nested(x: np.int64) -> hr.Dataset:
    return Dataset.range(int(x) % 4).map(lambda y: y + 10)


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
    "column filter": lambda: Dataset.range(30).filter(lambda x: x % 3 == 0),
    "batch": lambda: Dataset.range(23).batch(4),
    "drop": lambda: Dataset.range(23).batch(4, drop_remainder=True),
    "batch of batches": lambda: Dataset.range(24).batch(2).batch(3),
    "mapped batch": lambda: Dataset.range(23).map(odd_or_half).batch(4),
    "unbatch": lambda: Dataset.range(23).map(odd_or_half).batch(5).unbatch(),
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
    "flat_map": lambda: Dataset.range(9).flat_map(nested),
    "interleave": lambda: Dataset.range(9).interleave(nested, cycle_length=3, block_length=2),
    "wide interleave": lambda: Dataset.range(5).interleave(
        lambda x: Dataset.range(9).map(lambda y: y + 1)
    ),
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
}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_state_continues_with_the_same_rest(name):
    assert_restores_everywhere(PIPELINES[name])


def test_an_unordered_map_loses_and_repeats_nothing_from_any_state():
    def make():
        return Dataset.range(60).map(odd_or_half, num_parallel_calls=3, deterministic=False)

    elements = assert_restores_everywhere(make, ordered=False)
    assert sorted(elements) == sorted(odd_or_half(x) for x in range(60))


def test_a_file_cache_is_read_from_every_state(tmp_path: Path):
    def make():
        return Dataset.range(9).map(odd_or_half).batch(2).cache(tmp_path / "cache").repeat(2)

    assert_restores_everywhere(make)
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_records_and_lines_are_restored_within_a_file(tmp_path: Path):
    for number in range(3):
        with hr.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord")) as writer:
            for record in range(7):
                writer.write(b"%d-%d" % (number, record))
        (tmp_path / f"{number}.txt").write_bytes(b"".join(b"%d\n" % n for n in range(5)))

    def records():
        files = Dataset.list_files(str(tmp_path / "*.tfrecord"), seed=1)
        return files.interleave(hr.TFRecordDataset, cycle_length=2).shuffle(4, seed=5)

    def lines():
        return hr.TextLineDataset([str(tmp_path / "0.txt"), str(tmp_path / "2.txt")])

    assert len(assert_restores_everywhere(records)) == 21
    assert len(assert_restores_everywhere(lines)) == 10


STEPS = st.sampled_from(
    [
        lambda ds: ds.map(odd_or_half),
        lambda ds: ds.map(lambda x: x + 1),
        lambda ds: ds.map(odd_or_half, num_parallel_calls=2),
        lambda ds: ds.filter(lambda x: x % 3 != 0),
        lambda ds: ds.shuffle(4),
        lambda ds: ds.shuffle(50, seed=9),
        lambda ds: ds.repeat(2),
        lambda ds: ds.take(19),
        lambda ds: ds.skip(3),
        lambda ds: ds.shard(2, 1),
        lambda ds: ds.batch(3).unbatch(),
        lambda ds: ds.prefetch(2),
        lambda ds: ds.cache(),
        lambda ds: ds.flat_map(lambda x: Dataset.range(int(x) % 3)),
        lambda ds: ds.interleave(lambda x: Dataset.range(int(x) % 5), cycle_length=2),
        lambda ds: ds.concatenate(Dataset.range(4)),
    ]
)


@settings(max_examples=60)
@given(steps=st.lists(STEPS, max_size=5), size=st.integers(0, 25), position=st.integers(0, 60))
def test_any_pipeline_restores_anywhere(steps, size, position):
    def make():
        dataset = Dataset.range(size)
        for step in steps:
            dataset = step(dataset)
        return dataset

    with iter(make()) as first:
        for _ in range(position):
            next(first, None)
        state = json.loads(json.dumps(first.get_state()))
        want = [next(first, None) for _ in range(100)]
    with iter(make()) as second:
        second.set_state(state)
        assert [next(second, None) for _ in range(100)] == want
