"""Division of rows: documented tables, and properties for all numbers."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.distribute import rebatch
from headrace.distribute.rebatch import (
    ceil_split,
    ceil_steps,
    piece_size,
    rotated_batch_sizes,
)


def sizes_of_worker(size, workers, here, worker):
    """Return the sizes of the pieces of one worker with `here` replicas."""
    return rotated_batch_sizes(size, workers * here, worker * here)


@pytest.mark.catalogue("2.2.8", "2.2.9", "3.13.6-9")
@pytest.mark.parametrize(
    ("rows", "replicas", "sizes"),
    [
        (32, 4, [8, 8, 8, 8]),
        (34 - 32, 4, [1, 1, 0, 0]),
        (32, 5, [7, 7, 7, 7, 4]),
        (16, 5, [4, 4, 4, 4, 0]),
        (4, 3, [2, 2, 0]),
        (1, 2, [1, 0]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_the_ceil_split_equals_the_documented_tables(rows, replicas, sizes):
    assert [stop - start for start, stop in ceil_split(rows, replicas)] == sizes


@pytest.mark.catalogue("2.2.3", "2.2.4", "3.13.1-5")
@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((7, 2, 2, 0), [2, 2, 2, 1]),
        ((7, 2, 2, 1), [2, 1, 2, 2]),
        ((4, 3, 1, 0), [2, 1, 1]),
        ((4, 3, 1, 1), [1, 1, 2]),
        ((4, 3, 1, 2), [1, 2, 1]),
        ((8, 2, 2, 0), [2, 2, 2, 2]),
        ((8, 2, 2, 1), [2, 2, 2, 2]),
        ((4, 1, 5, 0), [1, 1, 1, 1, 0]),
        ((4, 2, 5, 0), [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]),
        ((4, 2, 5, 1), [0, 0, 0, 0, 0, 1, 1, 1, 1, 0]),
        ((10, 2, 3, 0), [2, 2, 2, 2, 1, 1]),
        ((10, 2, 3, 1), [2, 1, 1, 2, 2, 2]),
    ],
)
def test_the_balanced_sizes_equal_the_documented_tables(arguments, sizes):
    assert sizes_of_worker(*arguments) == sizes


@pytest.mark.catalogue("2.2.3", "2.2.4", "3.13.1-5")
@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
def test_balanced_sizes_sum_to_the_global_batch_in_each_worker_and_in_each_step(
    size, workers, here
):
    sizes = [sizes_of_worker(size, workers, here, worker) for worker in range(workers)]
    for own in sizes:
        assert len(own) == workers * here
        assert sum(own) == size
        assert max(own) - min(own) <= 1
    for step in range(workers):
        pieces = [own[step * here : (step + 1) * here] for own in sizes]
        assert sum(map(sum, pieces)) == size


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.data())
def test_steps_of_a_batch_contain_each_row_once_from_any_start(rows, workers, here, data):
    done = data.draw(st.integers(0, rows - 1))
    steps = ceil_steps(rows, workers * here, here, done)
    assert all(len(step) == here for step in steps)
    assert [row for step in steps for piece in step for row in range(*piece)] == [
        *range(done, rows)
    ]
    assert all(any(start < stop for start, stop in step) for step in steps)


@pytest.mark.catalogue("4.3.1")
@given(st.integers(1, 12), st.integers(1, 12))
def test_no_replica_is_permanently_idle(size, replicas):
    sizes = sizes_of_worker(size, 1, replicas, 0)
    steps = range(replicas)
    rows = [
        sum(piece_size(sizes, step * replicas + replica) for step in steps)
        for replica in range(replicas)
    ]
    assert min(rows) > 0
    assert sum(rows) == size * replicas


def test_docstring_examples_return_the_shown_results():
    assert doctest.testmod(rebatch).failed == 0
