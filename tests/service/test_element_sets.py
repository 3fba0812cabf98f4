"""Sets of elements by their origins."""

from __future__ import annotations

import random

from headrace.service.element_sets import (
    ALL_ORDINALS,
    END_ORDINAL,
    ElementSet,
    count_elements,
    exclude_splits,
    first_elements,
)


def rows_of(*origins: tuple[int, int, int, int]) -> ElementSet:
    rows = ElementSet()
    rows.add(origins)
    return rows


def test_a_split_is_complete_with_its_last_element_and_end() -> None:
    rows = rows_of((7, 1, 0, 64))
    assert (rows.complete_splits, rows.partial_splits) == ((), ((7, ((0, 64),)),))
    rows.add([(7, 1, 100, END_ORDINAL - 100)])
    assert rows.partial_splits == ((7, ((0, 64), (100, END_ORDINAL))),)
    rows.add([(7, 1, 64, 36)])
    assert (rows.complete_splits, rows.partial_splits) == (((7, 8),), ())


def test_splits_of_one_element_are_complete_together() -> None:
    rows = rows_of((10, 40, 0, 1), (10, 40, 1, END_ORDINAL - 1))
    assert (rows.complete_splits, rows.partial_splits) == (((10, 50),), ())


def test_forgotten_splits_are_removed() -> None:
    rows = rows_of((3, 1, 0, 5), (8, 1, 0, 5), (1, 2, 0, END_ORDINAL))
    rows.forget(8)
    assert (rows.complete_splits, rows.partial_splits) == ((), ((8, ((0, 5),)),))


def test_excluding_returns_splits_one_by_one() -> None:
    rows = rows_of((1, 3, 0, END_ORDINAL), (5, 1, 2, 2))
    assert rows.excluding(((2, 3), (9, 10))) == (
        (1, ALL_ORDINALS),
        (3, ALL_ORDINALS),
        (5, ((2, 4),)),
    )
    assert exclude_splits(rows.partial_splits, ((5, 6),)) == ()


def test_first_elements_are_taken_in_element_order() -> None:
    runs = [(4, 3, 0, 2), (9, 1, 5, 4), (4, 3, 2, END_ORDINAL - 2)]
    assert count_elements(runs) == 10
    assert first_elements(runs, 0) == []
    assert first_elements(runs, 3) == [(4, 1, 0, 2), (5, 1, 0, 1)]
    assert first_elements(runs, 8) == [(4, 3, 0, 2), (9, 1, 5, 2)]


def test_elements_may_be_added_in_any_order() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(100):
        sizes = {unit: chance.randrange(6) for unit in range(8)}
        runs = [(unit, 1, k, 1) for unit, size in sizes.items() for k in range(size)]
        runs += [(unit, 1, size, END_ORDINAL - size) for unit, size in sizes.items()]
        chance.shuffle(runs)
        left = runs[: chance.randrange(len(runs))]
        rows = rows_of(*left)
        for unit, size in sizes.items():
            mine = {run[2] for run in left if run[0] == unit}
            is_whole = len(mine) == size + 1
            assert any(start <= unit < stop for start, stop in rows.complete_splits) == is_whole
            known = dict(rows.partial_splits).get(unit, ())
            found = {k for start, stop in known for k in range(start, min(stop, size + 1))}
            assert is_whole or found == mine


def test_many_ranges_of_a_split_equal_single_additions() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(50):
        runs = [
            (chance.randrange(3), 1, chance.randrange(6, 200), chance.randrange(1, 4))
            for _ in range(chance.randrange(1, 200))
        ]
        runs += [(unit, 1, 190, END_ORDINAL - 190) for unit in range(3)]
        runs += [
            (unit, 1, first, 1) for unit in (0, 4) for first in range(6, chance.randrange(7, 200))
        ]
        chance.shuffle(runs)
        at_once, one_by_one = rows_of(*runs), ElementSet()
        for run in runs:
            one_by_one.add([run])
        assert (at_once.complete_splits, at_once.partial_splits) == (
            one_by_one.complete_splits,
            one_by_one.partial_splits,
        )
        # Each element once, whichever way it came.
        for unit, ranges in at_once.partial_splits:
            mine = [run for run in runs if run[0] == unit]
            held = {k for start, stop in ranges for k in range(start, min(stop, 250))}
            assert held == {k for _, _, a, n in mine for k in range(a, min(a + n, 250))}
            assert all(type(bound) is int for pair in ranges for bound in pair)


def test_many_splits_are_completed_at_once() -> None:
    elements = [(unit, 1, 0, 1) for unit in range(0, 100, 2)]
    rows = rows_of((0, 100, 1, END_ORDINAL - 1))
    rows.add(elements)
    assert rows.complete_splits == tuple((unit, unit + 1) for unit in range(0, 100, 2))
    assert rows.partial_splits == tuple((unit, ((1, END_ORDINAL),)) for unit in range(1, 100, 2))


def test_elements_of_complete_splits_do_not_change_the_set() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    plain, short = ElementSet(), ElementSet()
    done = 0
    for _ in range(300):
        start, stop = done, done + chance.randrange(4)
        origins = [
            (
                unit,
                chance.randrange(1, 3),
                chance.randrange(3),
                chance.choice([1, 2, END_ORDINAL - 3]),
            )
            for unit in (chance.randrange(done, done + 6) for _ in range(3))
        ]
        done = stop + chance.choice([0, 0, 0, 2])
        plain.add(origins)
        plain.add([(start, stop - start, 0, END_ORDINAL)] * (start < stop))
        short.add_with_complete(origins, start, stop)
    assert (short.complete_splits, short.partial_splits) == (
        plain.complete_splits,
        plain.partial_splits,
    )
