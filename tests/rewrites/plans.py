"""Random pipelines of every kind of step, over small numbers, with pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

import headrace as hr
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.plan.source import INFINITE
from headrace.plan.traverse import element_spec

Dataset = hr.Dataset

SMALL = st.integers(0, 9)
COUNT = st.integers(1, 5)
SEED = st.none() | st.integers(0, 3)

#: Steps that any elements go through; the first argument is the dataset.
STEPS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "shuffle": lambda ds, draw: ds.shuffle(draw(st.integers(1, 7)), seed=draw(SEED)),
    "shuffle alike": lambda ds, draw: ds.shuffle(3, reshuffle_each_iteration=False),
    "repeat": lambda ds, draw: ds.repeat(draw(st.sampled_from([2, 3, 1, 0]))),
    "take": lambda ds, draw: ds.take(draw(st.sampled_from([9, 5, -1, 1, 0]))),
    "skip": lambda ds, draw: ds.skip(draw(st.sampled_from([2, 3, 1, 0, -1]))),
    "shard": lambda ds, draw: ds.shard(3, draw(st.integers(0, 2))),
    "double": lambda ds, draw: ds.map(double),
    "describe": lambda ds, draw: ds.map(total),
    "some": lambda ds, draw: ds.filter(lambda *x: int(total(*x)) % 3 != 1),
    "small": lambda ds, draw: ds.filter(lambda *x: total(*x) < 40),
    "enumerate": lambda ds, draw: ds.enumerate(draw(SMALL)),
    "cache": lambda ds, draw: ds.cache(),
    "prefetch": lambda ds, draw: ds.prefetch(draw(COUNT)),
    "threads": lambda ds, draw: ds.map(double, num_parallel_calls=2),
    "options": lambda ds, draw: ds.with_options(hr.Options(seed=draw(SEED))),
    "twice": lambda ds, draw: ds.concatenate(ds),
    "zip": lambda ds, draw: Dataset.zip(
        ds, Dataset.range(draw(st.sampled_from([30, 9, 3, 0]))).shuffle(2)
    ),
    "with itself": lambda ds, draw: Dataset.zip({"a": ds, "b": ds}),
    "scan": lambda ds, draw: ds.scan(draw(SMALL), lambda s, x: (s + total(x), (s, x))),
    "take_while": lambda ds, draw: ds.take_while(lambda *x: total(*x) < 60),
    "windows": lambda ds, draw: ds.group_by_window(
        lambda *x: total(*x) % 3,
        lambda key, window: window.shuffle(2, 1, False).concatenate(window.skip(2)),
        window_size=draw(COUNT),
    ),
    "buckets": lambda ds, draw: ds.bucket_by_sequence_length(
        lambda *x: total(*x), [4, 20], [2, 1, 3], no_padding=True, drop_remainder=True
    ).unbatch(),
    "sample": lambda ds, draw: Dataset.sample_from_datasets(
        [ds, ds.take(3)],
        draw(st.sampled_from([None, [0.2, 0.8], [1, 0]])),
        draw(SEED),
        draw(st.booleans()),
        draw(st.sampled_from([None, False, True])),
    ),
    "choose": lambda ds, draw: Dataset.choose_from_datasets(
        [ds, ds.skip(2)],
        Dataset.random(draw(SEED)).take(30).map(lambda x: x % 2),
        draw(st.booleans()),
    ),
    "random": lambda ds, draw: Dataset.zip(ds, Dataset.random(draw(SEED))),
    "flat_map": lambda ds, draw: ds.flat_map(lambda *x: Dataset.range(int(total(*x)) % 3)),
    "interleave": lambda ds, draw: ds.interleave(
        lambda *x: Dataset.range(int(total(*x)) % 4).map(lambda y: y + 1),
        cycle_length=draw(COUNT),
        block_length=draw(COUNT),
    ),
}
#: Steps that make elements of another shape: right only for some.
BATCHES = {
    "batch": lambda ds, draw: ds.batch(draw(COUNT), drop_remainder=True),
    "padded_batch": lambda ds, draw: ds.padded_batch(draw(COUNT), drop_remainder=True),
    "batch and unbatch": lambda ds, draw: ds.batch(draw(COUNT)).unbatch(),
}


def double(*x: Any) -> Any:
    return map_leaves(lambda leaf: leaf + leaf, x if len(x) > 1 else x[0])


def total(*x: Any) -> Any:
    """The sum of all numbers of an element, a small one."""
    leaves, _ = flatten(x)
    return np.int64(sum(int(np.sum(leaf)) for leaf in leaves) % 1000)


def slices(size: int) -> Any:
    return Dataset.from_tensor_slices(np.arange(size) * 3)


@st.composite
def pipelines(draw: Any, *, most_steps: int = 6, leave_out: tuple[str, ...] = ()) -> Any:
    """A finite dataset of few elements."""
    begin = draw(st.sampled_from([Dataset.range, slices]))
    dataset = begin(draw(st.sampled_from([12, 25, 40, 7, 3, 1, 0])))
    steps = {**STEPS, **BATCHES}
    names = sorted(set(steps) - set(leave_out))
    for name in draw(st.lists(st.sampled_from(names), max_size=most_steps)):
        size = dataset.cardinality()
        if size == INFINITE or size > 60:
            dataset = dataset.take(20)
        if name in BATCHES and _has_uneven_elements(dataset):
            continue
        dataset = steps[name](dataset, draw)
    return dataset


def _has_uneven_elements(dataset: Any) -> bool:
    leaves, _ = flatten(element_spec(dataset.plan))
    return not leaves or any(None in leaf.shape for leaf in leaves)
