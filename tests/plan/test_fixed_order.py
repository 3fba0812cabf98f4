"""Seeds of shuffles that keep one order, found in a plan and given to it again."""

from __future__ import annotations

import headrace as hr
from headrace.plan.fixed_order import fixed_seeds, with_fixed_seeds

Dataset = hr.Dataset


def shuffled() -> hr.Dataset:
    return (
        Dataset.range(9)
        .shuffle(9, reshuffle_each_iteration=False)
        .shuffle(3)
        .shuffle(9, reshuffle_each_iteration=False)
        .shuffle(9, seed=4, reshuffle_each_iteration=False)
    )


def test_each_shuffle_of_one_order_without_a_seed_has_one_that_was_drawn_when_it_was_made() -> None:
    one, other = shuffled(), shuffled()
    assert len(fixed_seeds(one.plan)) == 2
    assert len({*fixed_seeds(one.plan), *fixed_seeds(other.plan)}) == 4
    assert fixed_seeds(one.plan) == fixed_seeds(one.plan)
    assert fixed_seeds(Dataset.range(9).shuffle(9).plan) == []


def test_the_seed_of_the_options_decides_all_of_them_each_apart() -> None:
    one, other, third = (
        fixed_seeds(shuffled().with_options(hr.Options(seed=seed)).plan) for seed in (1, 1, 2)
    )
    assert one == other
    assert len({*one, *third}) == 4


def test_a_seed_is_small_enough_for_any_reader_of_json() -> None:
    for seed in range(50):
        found = fixed_seeds(shuffled().with_options(hr.Options(seed=seed)).plan)
        assert all(0 <= value < 1 << 53 for value in found)


def test_a_plan_that_was_given_the_seeds_of_another_has_its_order() -> None:
    one, other = shuffled().plan, shuffled().plan
    given = with_fixed_seeds(other, fixed_seeds(one))
    assert fixed_seeds(given) == fixed_seeds(one)
    assert fixed_seeds(other) != fixed_seeds(one)


def test_a_plan_that_has_these_seeds_is_left_alone() -> None:
    plan = shuffled().plan
    assert with_fixed_seeds(plan, fixed_seeds(plan)) is plan
