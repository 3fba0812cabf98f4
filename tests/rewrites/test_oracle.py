"""Execution yields the elements of a simple interpreter of the plan as written."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.execution.build import build_iterator
from headrace.plan.traverse import merged_options
from headrace.sources.memory import RangeSource
from tests.rewrites.oracle import elements, equal
from tests.rewrites.plans import pipelines

Dataset = hr.Dataset

MOST = 200


def executed(plan, *, seed, sizes, most=MOST):
    """Read up to `most` elements, in chunks of these sizes in turn."""
    iterator = build_iterator(plan, seed=seed)
    rows = []
    for size in itertools.cycle(sizes):
        if len(rows) >= most or (chunk := iterator.next_chunk(size)) is None:
            break
        assert 0 < chunk.size <= size
        rows += chunk.rows()
    iterator.close()
    return rows[:most]


@given(
    dataset=pipelines(),
    seed=st.integers(0, 3),
    sizes=st.lists(st.sampled_from([1, 2, 3, 7, 50]), min_size=1, max_size=4),
)
def test_a_plan_yields_the_elements_of_the_oracle(dataset, seed, sizes):
    expected = list(itertools.islice(elements(dataset.plan, seed=seed_of(dataset, seed)), MOST))
    found = executed(dataset.plan, seed=seed_of(dataset, seed), sizes=sizes)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert equal(one, other), (one, other)


WORKED_OUT = {
    "batches beside rows": Dataset.zip(Dataset.range(7).batch(3), Dataset.range(9).shuffle(4)),
    "batches of unequal length beside each other": (
        Dataset.zip({"a": Dataset.range(7).batch(3), "b": Dataset.range(7).batch(4).shuffle(2)})
        .shuffle(2).repeat(3)
    ),
    "rows beside rows, in batches": (
        Dataset.zip(Dataset.from_tensor_slices(np.ones((20, 2))), Dataset.range(30).shuffle(3))
        .enumerate(4).shuffle(5).repeat(2).batch(3)
    ),
    "numbers without end": (
        Dataset.from_source(RangeSource(3, None, 2)).shuffle(4).enumerate().batch(2).take(20)
    ),
    "an infinite epoch": Dataset.range(5).shuffle(2).repeat().map(lambda x: x * 2).take(44),
    "one cache in three places": (
        (kept := Dataset.range(9).shuffle(3).filter(lambda x: x != 4).cache())
        .concatenate(kept.take(3)).concatenate(kept).shuffle(2)
    ),
    "nested plans in turn": (
        Dataset.range(4).interleave(lambda x: Dataset.range(x + 3).repeat(2), 3, 2)
    ),
    "rows end to end": (
        Dataset.range(7).shuffle(3).concatenate(Dataset.range(20, 25).repeat(2))
        .concatenate(Dataset.range(40, 42)).shuffle(9).repeat(2).batch(4)
    ),
    "batches end to end": (
        Dataset.range(7).batch(3).concatenate(Dataset.range(9).batch(2)).shuffle(4)
    ),
    "files of one element": Dataset.from_tensors((1, 2.5)).repeat(4).enumerate().batch(3),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKED_OUT)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_pipeline_yields_the_elements_of_the_oracle(name, size):
    plan = WORKED_OUT[name].plan
    expected = list(itertools.islice(elements(plan, seed=7), MOST))
    found = executed(plan, seed=7, sizes=[size])
    assert len(found) == len(expected) > 0
    assert all(map(equal, found, expected))


def seed_of(dataset, seed):
    """The seed of the iteration: that of the options wins."""
    own = merged_options(dataset.plan).seed
    return seed if own is None else own


def test_the_oracle_is_correct_for_known_results():
    def values(dataset, seed=1):
        return [np.asarray(x).tolist() for x in elements(dataset.plan, seed=seed)]

    assert values(Dataset.range(7).batch(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert values(Dataset.range(7).batch(3, drop_remainder=True).unbatch()) == list(range(6))
    assert values(Dataset.range(9).skip(1).shard(3, 1).take(2)) == [2, 5]
    assert values(Dataset.range(2).repeat(2).concatenate(Dataset.range(1))) == [0, 1, 0, 1, 0]
    assert values(Dataset.range(9).map(lambda x: x * x).filter(lambda x: x % 2)) == [1, 9, 25, 49]
    both = Dataset.zip({"a": Dataset.range(3), "b": Dataset.range(2).enumerate(5)})
    assert list(elements(both.plan, seed=1)) == [{"a": 0, "b": (5, 0)}, {"a": 1, "b": (6, 1)}]
    # The example of tf.data's documentation.
    turns = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4
    )
    assert values(turns) == (
        [1] * 4 + [2] * 4 + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 4 + [3] * 2 + [4] * 2
        + [5] * 6
    )  # fmt: skip
    shuffled = Dataset.range(50).shuffle(10, seed=3)
    assert sorted(values(shuffled)) == list(range(50)) != values(shuffled)
    assert values(shuffled) == values(shuffled, seed=2)
    unseeded = Dataset.range(50).shuffle(10)
    assert values(unseeded) != values(unseeded, seed=2)
