"""Ranges say what sets of numbers say."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.service.ranges import (
    drop_below,
    drop_first,
    intersect,
    locate_in_stream,
    subtract,
    to_assignment_order,
    total_length,
    union,
)

PAIRS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda each: (each[0], sum(each))),
    max_size=8,
)


def numbers(ranges: object) -> set[int]:
    return {number for start, stop in ranges for number in range(start, stop)}  # type: ignore[attr-defined]


@given(pairs=PAIRS)
def test_a_union_has_all_numbers_in_disjoint_ranges(pairs: list[tuple[int, int]]) -> None:
    found = union(pairs)
    assert numbers(found) == numbers(pairs)
    assert total_length(found) == len(numbers(pairs))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


@given(whole=PAIRS, part=PAIRS, least=st.integers(0, 40))
def test_a_difference_excludes_the_second_set(
    whole: list[tuple[int, int]], part: list[tuple[int, int]], least: int
) -> None:
    left = subtract(union(whole), union(part))
    assert numbers(left) == numbers(whole) - numbers(part)
    assert left == union(left)
    both = intersect(union(whole), union(part))
    assert numbers(both) == numbers(whole) & numbers(part)
    assert both == union(both)
    assert numbers(drop_below(union(whole), least)) == {n for n in numbers(whole) if n >= least}


@given(runs=PAIRS, dealt=PAIRS, data=st.data())
def test_splits_in_assignment_order_are_located_in_the_stream(
    runs: list[tuple[int, int]], dealt: list[tuple[int, int]], data: st.DataObject
) -> None:
    stream = [unit for start, stop in runs for unit in range(start, stop)]
    first = data.draw(st.integers(0, len(stream)))
    kept = list(runs)
    drop_first(kept, first)
    assert [unit for start, stop in kept for unit in range(start, stop)] == stream[first:]
    asked = drop_below(union(dealt), first)
    expected = {stream[number] for number in numbers(asked) if number < len(stream)}
    assert numbers(locate_in_stream(kept, first, asked)) == expected


@given(runs=PAIRS, units=PAIRS, first=st.integers(0, 9))
def test_splits_of_the_stream_are_converted_to_assignment_order(
    runs: list[tuple[int, int]], units: list[tuple[int, int]], first: int
) -> None:
    stream = [unit for start, stop in runs for unit in range(start, stop)]
    expected = {first + place for place, unit in enumerate(stream) if unit in numbers(units)}
    assert numbers(to_assignment_order(runs, first, union(units))) == expected
