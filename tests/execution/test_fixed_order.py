"""A shuffle with reshuffle_each_iteration=False has one order in all derived datasets."""

from __future__ import annotations

import json
import pickle

import pytest

import headrace as hr
from headrace.execution.build import build_iterator
from headrace.plan.fingerprint import fingerprint
from headrace.plan.identity import identity

Dataset = hr.Dataset


def fixed(count=100, **how):
    return Dataset.range(count).shuffle(count, reshuffle_each_iteration=False, **how)


def numbers(dataset):
    return [int(x) for x in dataset]


def is_positive(x):
    return bool(x >= 0)


OVER = {
    "index part": lambda ds: ds,
    "values": lambda ds: ds.filter(is_positive),
}


def test_every_iteration_has_the_same_order():
    dataset = fixed()
    assert numbers(dataset) == numbers(dataset) == numbers(dataset.repeat(1))
    assert numbers(dataset.repeat(2)) == numbers(dataset) * 2


@pytest.mark.parametrize("over", OVER)
def test_a_dataset_can_be_split_by_skip_and_take(over):
    dataset = OVER[over](Dataset.range(100)).shuffle(100, reshuffle_each_iteration=False)
    first, rest = numbers(dataset.take(80)), numbers(dataset.skip(80))
    assert sorted(first + rest) == list(range(100))


def test_other_random_steps_do_not_change_the_order():
    dataset = fixed(20)
    beside = Dataset.zip(Dataset.range(20).shuffle(20), dataset)
    assert [int(b) for _, b in beside] == numbers(dataset)


def test_two_fixed_shuffles_have_different_orders():
    assert numbers(fixed()) != numbers(fixed())
    seeded = hr.Options(seed=1)
    both = list(Dataset.zip(fixed(), fixed()).with_options(seeded))
    assert [int(a) for a, _ in both] != [int(b) for _, b in both]


def test_the_seed_of_the_options_fixes_the_order_in_each_run():
    seeded = hr.Options(seed=1)
    assert numbers(fixed().with_options(seeded)) == numbers(fixed().with_options(seeded))


def test_a_copy_in_another_process_has_the_same_order():
    dataset = fixed().batch(10).unbatch()
    assert numbers(pickle.loads(pickle.dumps(dataset))) == numbers(dataset)


def test_a_plan_with_assigned_splits_has_the_same_order():
    dataset = fixed(10)
    splits = iter([(3, 5), (0, 3), (5, 10)])
    iterator = build_iterator(dataset.plan, seed=5, next_splits=lambda: next(splits, None))
    found = []
    while (chunk := iterator.next_chunk(4)) is not None:
        found += [int(x) for x in chunk.rows()]
    order = numbers(dataset)
    assert found == order[3:5] + order[:3] + order[5:]


def test_the_drawn_seed_is_not_part_of_the_identity():
    assert fingerprint(fixed().plan) == fingerprint(fixed().plan)
    assert identity(fixed().plan) == identity(fixed().plan)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("seed", [None, 4])
def test_a_state_continues_in_a_newly_created_plan(over, seed):
    def dataset(options):
        made = OVER[over](Dataset.range(30)).shuffle(30, reshuffle_each_iteration=False)
        return made.repeat(2).with_options(options)

    iterator = iter(dataset(hr.Options(seed=seed)))
    for _ in range(12):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    other = iter(dataset(hr.Options()))
    other.set_state(state)
    assert other.get_state() == state
    assert numbers(other) == numbers(iterator)


def test_a_state_contains_fixed_seeds_only_if_there_are_any():
    assert "fixed_seeds" not in iter(Dataset.range(3).shuffle(3)).get_state()
    assert "fixed_seeds" not in iter(fixed(3, seed=1)).get_state()
    assert len(iter(fixed(3)).get_state()["fixed_seeds"]) == 1


def test_nested_fixed_shuffles_have_one_order_per_outer_element():
    dataset = Dataset.range(4).flat_map(lambda x: fixed(6)).with_options(hr.Options(seed=2))
    first, second = numbers(dataset), numbers(dataset)
    assert first == second
    assert len({tuple(first[at : at + 6]) for at in range(0, 24, 6)}) == 4
