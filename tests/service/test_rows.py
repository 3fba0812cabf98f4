"""Sets of elements by their origins."""

from __future__ import annotations

import random

from headrace.service.rows import (
    END,
    EVERYTHING,
    Rows,
    count_rows,
    first_rows,
    outside,
)


def rows_of(*origins: tuple[int, int, int, int]) -> Rows:
    rows = Rows()
    rows.add(origins)
    return rows


def test_a_unit_is_whole_with_its_last_element_and_its_end() -> None:
    rows = rows_of((7, 1, 0, 64))
    assert (rows.whole, rows.parts) == ((), ((7, ((0, 64),)),))
    rows.add([(7, 1, 100, END - 100)])
    assert rows.parts == ((7, ((0, 64), (100, END))),)
    rows.add([(7, 1, 64, 36)])
    assert (rows.whole, rows.parts) == (((7, 8),), ())


def test_units_of_one_element_each_are_whole_together() -> None:
    rows = rows_of((10, 40, 0, 1), (10, 40, 1, END - 1))
    assert (rows.whole, rows.parts) == (((10, 50),), ())


def test_what_is_done_is_forgotten() -> None:
    rows = rows_of((3, 1, 0, 5), (8, 1, 0, 5), (1, 2, 0, END))
    rows.forget(8)
    assert (rows.whole, rows.parts) == ((), ((8, ((0, 5),)),))


def test_units_are_named_one_by_one_but_for_some() -> None:
    rows = rows_of((1, 3, 0, END), (5, 1, 2, 2))
    assert rows.but(((2, 3), (9, 10))) == ((1, EVERYTHING), (3, EVERYTHING), (5, ((2, 4),)))
    assert outside(rows.parts, ((5, 6),)) == ()


def test_the_first_elements_of_runs_are_those_that_were_used() -> None:
    runs = [(4, 3, 0, 2), (9, 1, 5, 4), (4, 3, 2, END - 2)]
    assert count_rows(runs) == 10
    assert first_rows(runs, 0) == []
    assert first_rows(runs, 3) == [(4, 1, 0, 2), (5, 1, 0, 1)]
    assert first_rows(runs, 8) == [(4, 3, 0, 2), (9, 1, 5, 2)]


def test_elements_may_come_in_any_order() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(100):
        sizes = {unit: chance.randrange(6) for unit in range(8)}
        runs = [(unit, 1, k, 1) for unit, size in sizes.items() for k in range(size)]
        runs += [(unit, 1, size, END - size) for unit, size in sizes.items()]
        chance.shuffle(runs)
        left = runs[: chance.randrange(len(runs))]
        rows = rows_of(*left)
        for unit, size in sizes.items():
            mine = {run[2] for run in left if run[0] == unit}
            is_whole = len(mine) == size + 1
            assert any(start <= unit < stop for start, stop in rows.whole) == is_whole
            known = dict(rows.parts).get(unit, ())
            found = {k for start, stop in known for k in range(start, min(stop, size + 1))}
            assert is_whole or found == mine


def test_many_ranges_of_a_unit_are_the_same_set_as_when_they_come_one_by_one() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(50):
        runs = [
            (chance.randrange(3), 1, chance.randrange(6, 200), chance.randrange(1, 4))
            for _ in range(chance.randrange(1, 200))
        ]
        runs += [(unit, 1, 190, END - 190) for unit in range(3)]
        runs += [
            (unit, 1, first, 1) for unit in (0, 4) for first in range(6, chance.randrange(7, 200))
        ]
        chance.shuffle(runs)
        at_once, one_by_one = rows_of(*runs), Rows()
        for run in runs:
            one_by_one.add([run])
        assert (at_once.whole, at_once.parts) == (one_by_one.whole, one_by_one.parts)
        # Each element once, whichever way it came.
        for unit, ranges in at_once.parts:
            mine = [run for run in runs if run[0] == unit]
            held = {k for start, stop in ranges for k in range(start, min(stop, 250))}
            assert held == {k for _, _, a, n in mine for k in range(a, min(a + n, 250))}
            assert all(type(bound) is int for pair in ranges for bound in pair)


def test_many_units_are_whole_at_once() -> None:
    elements = [(unit, 1, 0, 1) for unit in range(0, 100, 2)]
    rows = rows_of((0, 100, 1, END - 1))
    rows.add(elements)
    assert rows.whole == tuple((unit, unit + 1) for unit in range(0, 100, 2))
    assert rows.parts == tuple((unit, ((1, END),)) for unit in range(1, 100, 2))


def test_elements_of_units_that_are_whole_are_the_same_set_with_those_units() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    plain, short = Rows(), Rows()
    done = 0
    for _ in range(300):
        start, stop = done, done + chance.randrange(4)
        origins = [
            (unit, chance.randrange(1, 3), chance.randrange(3), chance.choice([1, 2, END - 3]))
            for unit in (chance.randrange(done, done + 6) for _ in range(3))
        ]
        done = stop + chance.choice([0, 0, 0, 2])
        plain.add(origins)
        plain.add([(start, stop - start, 0, END)] * (start < stop))
        short.add_with_whole(origins, start, stop)
    assert (short.whole, short.parts) == (plain.whole, plain.parts)
