"""What a plan keeps or leaves free: seeds of one order, free order, and what is lent."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.plan.determinism import (
    collect_fixed_seeds,
    find_overruled_steps,
    find_unordered_steps,
    with_fixed_seeds,
)
from headrace.plan.elements import GatherIndices
from headrace.plan.node import distinct_nodes
from headrace.plan.traverse import find_borrowing_steps
from headrace.rewrites.canonicalize import canonicalize

Dataset = hr.Dataset


def shuffled() -> hr.Dataset:
    return (
        Dataset.range(9)
        .shuffle(9, reshuffle_each_iteration=False)
        .shuffle(3)
        .shuffle(9, reshuffle_each_iteration=False)
        .shuffle(9, seed=4, reshuffle_each_iteration=False)
    )


def test_an_unseeded_fixed_shuffle_draws_its_seed_when_created() -> None:
    one, other = shuffled(), shuffled()
    assert len(collect_fixed_seeds(one.plan)) == 2
    assert len({*collect_fixed_seeds(one.plan), *collect_fixed_seeds(other.plan)}) == 4
    assert collect_fixed_seeds(one.plan) == collect_fixed_seeds(one.plan)
    assert collect_fixed_seeds(Dataset.range(9).shuffle(9).plan) == []


def test_the_seed_of_the_options_gives_each_step_its_own_seed() -> None:
    one, other, third = (
        collect_fixed_seeds(shuffled().with_options(hr.Options(seed=seed)).plan)
        for seed in (1, 1, 2)
    )
    assert one == other
    assert len({*one, *third}) == 4


def test_a_seed_is_small_enough_for_any_json_reader() -> None:
    for seed in range(50):
        found = collect_fixed_seeds(shuffled().with_options(hr.Options(seed=seed)).plan)
        assert all(0 <= value < 1 << 53 for value in found)


def test_a_plan_with_the_seeds_of_another_has_its_order() -> None:
    one, other = shuffled().plan, shuffled().plan
    given = with_fixed_seeds(other, collect_fixed_seeds(one))
    assert collect_fixed_seeds(given) == collect_fixed_seeds(one)
    assert collect_fixed_seeds(other) != collect_fixed_seeds(one)


def test_a_plan_that_has_these_seeds_is_not_changed() -> None:
    plan = shuffled().plan
    assert with_fixed_seeds(plan, collect_fixed_seeds(plan)) is plan


# --- free order counts where nothing above would have to read the same elements again -------------


def nested(x):
    return Dataset.range(int(x))


def mapped(dataset=None, **how):
    dataset = Dataset.range(9) if dataset is None else dataset
    return dataset.map(lambda x: x + 1, num_parallel_calls=2, deterministic=False, **how)


def free_count(dataset) -> int:
    normal = canonicalize(dataset.plan)
    return len(find_unordered_steps(normal.plan, normal.options.deterministic))


KEEPS = {
    "nothing": lambda ds: ds,
    "batch": lambda ds: ds.batch(2),
    "filter": lambda ds: ds.filter(lambda x: x > 3),
    "a shuffle, which moves below": lambda ds: ds.shuffle(3),
    "take": lambda ds: ds.take(3),
    "repeat": lambda ds: ds.repeat(2),
    "concatenate": lambda ds: ds.concatenate(Dataset.range(3)),
    "prefetch": lambda ds: ds.prefetch(2),
}
FIXES = {
    "a shuffle of values": lambda ds: ds.filter(lambda x: x > 3).shuffle(3),
    "cache": lambda ds: ds.cache(),
    "flat_map": lambda ds: ds.flat_map(nested),
    "zip": lambda ds: Dataset.zip(ds, Dataset.range(3)),
    "unbatch": lambda ds: ds.batch(2).unbatch(),
}


@pytest.mark.parametrize("name", KEEPS)
def test_a_step_below_stays_unordered(name):
    assert free_count(KEEPS[name](mapped())) == 1


def test_the_last_setting_decides_whether_a_step_is_unordered():
    def step(**how):
        return Dataset.range(9).map(lambda x: x + 1, num_parallel_calls=2, **how)

    free, kept = hr.Options(deterministic=False), hr.Options(deterministic=True)
    assert free_count(step()) == 0
    assert free_count(step().with_options(free).batch(2)) == 1
    assert free_count(Dataset.range(9).with_options(free).map(lambda x: x + 1)) == 1
    assert free_count(step().with_options(free).with_options(kept)) == 0
    assert free_count(step(deterministic=False).with_options(kept)) == 1
    assert free_count(step(deterministic=True).with_options(free)) == 0
    assert free_count(Dataset.range(9).interleave(nested)) == 0
    assert free_count(Dataset.range(9).interleave(nested).with_options(free)) == 1


@pytest.mark.parametrize("name", FIXES)
def test_a_step_below_stays_ordered(name):
    assert free_count(FIXES[name](mapped())) == 0


def test_of_two_steps_the_upper_one_is_unordered():
    dataset = mapped(mapped())
    normal = canonicalize(dataset.plan)
    assert find_unordered_steps(normal.plan, None) == frozenset([id(normal.plan)])
    assert find_overruled_steps(normal.plan, None) == {id(normal.plan.inputs[0]): normal.plan}


def test_an_interleave_is_ordered_only_below_an_unordered_map():
    def read(**how):
        rows = Dataset.range(9).interleave(nested, num_parallel_calls=2, deterministic=False)
        return canonicalize(rows.map(lambda x: x + 1, **how).plan).plan

    free, kept = read(num_parallel_calls=2, deterministic=False), read(num_parallel_calls=2)
    assert find_unordered_steps(free, None) == {id(free)}
    assert list(find_overruled_steps(free, None).values()) == [free]
    assert find_unordered_steps(kept, None) == {id(kept.inputs[0])}
    assert find_overruled_steps(kept, None) == {}


def test_the_option_applies_to_steps_without_a_setting():
    options = hr.Options()
    options.deterministic = False
    dataset = Dataset.range(9).map(lambda x: x + 1, num_parallel_calls=2)
    assert free_count(dataset) == 0
    assert free_count(dataset.with_options(options)) == 1


# Buffers are borrowed if no user function is between them and a read-only consumer.


def rows():
    return Dataset.from_tensor_slices(np.arange(8.0).reshape(4, 2))


def lent(dataset) -> list[bool]:
    """Return for each place where elements are fetched whether they may be lent there."""
    plan = canonicalize(dataset.plan).plan
    lending = find_borrowing_steps(plan)
    return [
        id(node) in lending for node in distinct_nodes([plan]) if isinstance(node, GatherIndices)
    ]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds,
        lambda ds: ds.shuffle(2).repeat(2).batch(2),
        lambda ds: ds.prefetch(2),
        lambda ds: ds.cache(),
        lambda ds: ds.cache().shuffle(2).repeat().batch(2).unbatch().take(3).skip(1).shard(2, 0),
        lambda ds: ds.cache().enumerate(),
        lambda ds: ds.padded_batch(2).prefetch(2),
        lambda ds: Dataset.sample_from_datasets([ds.cache()]),
    ],
)
def test_elements_that_are_only_passed_on_are_borrowed(step):
    assert lent(step(rows())) == [True]


@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.map(lambda x: x),
        lambda ds: ds.batch(2).map(lambda x: x).prefetch(2),
        lambda ds: ds.filter(lambda x: True),
        lambda ds: ds.take_while(lambda x: True),
        lambda ds: ds.scan(0, lambda value, x: (value, x)),
        lambda ds: ds.bucket_by_sequence_length(len, [], [2]),
        lambda ds: ds.group_by_window(lambda x: 0, lambda key, w: w.batch(2), window_size=2),
        lambda ds: ds.flat_map(Dataset.from_tensors),
        lambda ds: ds.interleave(Dataset.from_tensors).batch(2),
    ],
)
def test_arguments_of_functions_are_not_borrowed(step):
    assert lent(step(rows())) == [False]


def test_two_inputs_borrow_independently():
    mapped = rows().map(lambda x: x)
    assert lent(Dataset.zip(rows().cache(), mapped)) == [True, False]
    assert lent(rows().cache().concatenate(mapped)) == [True, False]
    assert lent(Dataset.sample_from_datasets([rows(), mapped])) == [True, False]


def test_a_step_that_occurs_twice_borrows_only_if_both_may():
    shared = canonicalize(rows().plan).plan
    plain, mapped = hr.Dataset(shared), hr.Dataset(shared).map(lambda x: x)
    both = Dataset.zip(plain.cache(), mapped).plan
    assert id(shared) not in find_borrowing_steps(both)
    assert id(shared) in find_borrowing_steps(Dataset.zip(plain.cache(), plain).plan)
