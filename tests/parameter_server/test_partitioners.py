"""Partitioning of variables: numbers of shards, rows of each shard, and placement."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.parameter_server.partitioners import (
    Partitioner,
    count_shards,
    make_placement,
    split_rows,
)

Fixed = hr.distribute.partitioners.FixedShardsPartitioner
Min = hr.distribute.partitioners.MinSizePartitioner
Max = hr.distribute.partitioners.MaxSizePartitioner


@pytest.mark.catalogue("1.7.2", "2.6.10", "3.9.1")
@pytest.mark.parametrize(
    ("partitioner", "shape", "parts"),
    [
        (Fixed(2), [10, 3], [2, 1]),
        (Fixed(4), [3], [3]),
        (Fixed(4), (0, 3), [1, 1]),
        (Min(4, 2), [6, 1], [2, 1]),
        (Min(4, 10), [6, 1], [6, 1]),
        (Min(256 << 10, 16), [1024, 1024], [16, 1]),
        (Min(256 << 10, 100), [1024, 1024], [16, 1]),
        (Min(), [1024, 1024], [1, 1]),
        (Min(4, 10), [0, 3], [1, 1]),
        (Min(4, 10), [5, 0], [1, 1]),
        (Max(4), [6, 1], [6, 1]),
        (Max(4, 2), [6, 1], [2, 1]),
        (Max(1024), [6, 1], [1, 1]),
        (Max(10), [6, 1], [3, 1]),
        (Max(100), [10, 8], [4, 1]),
        (Max(3), [6, 1], [6, 1]),
        (Max(3), [6, 0], [1, 1]),
        (Fixed(np.int64(2)), np.array([4, 4]), [2, 1]),
    ],
)
def test_partitioners_return_the_expected_numbers(partitioner, shape, parts):
    assert partitioner(shape, np.float32) == parts
    assert partitioner(tuple(shape), "float32", axis=0) == parts


def test_partitioners_accept_any_dtype_name():
    for dtype in ("bfloat16", "<f2", np.int16, np.dtype("u2")):
        assert Max(8)([16, 2], dtype) == [8, 1]
    with pytest.raises(TypeError, match="`dtype` must be the name of a dtype, but got 'float33'"):
        Max(8)([16, 2], "float33")


@pytest.mark.catalogue("2.6.10")
def test_partitioners_can_split_another_axis():
    assert Fixed(2)([4, 6], np.float32, axis=1) == [1, 2]
    assert Max(16)([4, 6], np.float32, axis=1) == [1, 6]


@pytest.mark.catalogue("2.6.11", "4.3.12")
@pytest.mark.parametrize("rows", range(1, 40))
def test_shard_sizes_are_within_the_limits(rows):
    for size in range(1, 30):
        for width in (1, 3):
            shape, row = (rows, width), width * 4
            small, large = size * 3, max(size * 3, row)
            few = split_rows(rows, Min(small, 99)(shape, np.float32)[0])
            assert min(map(len, few)) * row >= min(small, rows * row)
            many = split_rows(rows, Max(large)(shape, np.float32)[0])
            assert max(map(len, many)) * row <= large


@pytest.mark.catalogue("1.7.1")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Fixed(0), ValueError, "`num_shards` must be at least 1, but got 0"),
        (lambda: Fixed("2"), TypeError, "`num_shards` must be an integer"),
        (lambda: Min(0), ValueError, "Argument `min_shard_bytes` must be positive. Received: 0"),
        (lambda: Min(1, 0), ValueError, "Argument `max_shards` must be positive. Received: 0"),
        (lambda: Max(0), ValueError, "Argument `max_shard_bytes` must be positive. Received: 0"),
        (lambda: Max(1, -1), ValueError, "Argument `max_shards` must be positive. Received: -1"),
        (lambda: Max(1, 0), ValueError, "Argument `max_shards` must be positive. Received: 0"),
        (lambda: Max(True), TypeError, "`max_shard_bytes` must be an integer"),
        (lambda: Fixed(2)((None, 1), "float32"), ValueError, "shape is not fully defined: "),
        (lambda: Fixed(2)((2, 1), "float32", axis=2), ValueError, "`axis` must be less than"),
        (lambda: Fixed(2)((), "float32"), ValueError, "`axis` must be less than"),
        (lambda: Partitioner()((2,), "float32"), NotImplementedError, "Partitioner must implement"),
    ],
)
def test_invalid_arguments_are_rejected(make, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(")):
        make()


@pytest.mark.catalogue("1.6.5")
@pytest.mark.parametrize(
    "answer",
    [None, [], [0, 1, 1], [0, 1], [2, 2], [2, 2, 1], [2], "21", [2.0, 1], [True, 1], [-1, 1], 2],
)
def test_invalid_results_of_custom_partitioners_are_rejected(answer):
    with pytest.raises(ValueError, match=r"variable_partitioner must return a list/tuple whose"):
        count_shards(answer, (5, 2))


@pytest.mark.catalogue("2.6.5", "3.7.15")
def test_there_are_at_most_as_many_shards_as_rows():
    assert count_shards([4, 1], (3, 2)) == 3
    assert count_shards((4,), (9,)) == 4
    assert count_shards([np.int64(2), 1], (0, 2)) == 1


@pytest.mark.catalogue("2.6.6")
@pytest.mark.parametrize(
    ("rows", "shards", "sizes"),
    [(13, 5, [3, 3, 3, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 3, [1, 1, 1]), (0, 1, [0]), (7, 1, [7])],
)
def test_rows_are_split_in_order_and_evenly(rows, shards, sizes):
    ranges = split_rows(rows, shards)
    assert [len(part) for part in ranges] == sizes
    assert [row for part in ranges for row in part] == list(range(rows))


def test_placement_by_bytes_chooses_the_least_loaded_server():
    placement = make_placement("bytes", 3)
    assert [placement.place(size) for size in (100, 10, 10, 10, 200, 1)] == [0, 1, 2, 1, 2, 1]
    assert [make_placement("bytes", 2).place(0)] == [0]
    idle = make_placement("bytes", 2)
    assert [idle.place(0) for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.catalogue("4.3.13")
@pytest.mark.parametrize("seed", range(20))
def test_placement_by_bytes_balances_the_servers(seed):
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(1, 9))
    sizes = rng.integers(0, 10 ** int(rng.integers(1, 7)), 200)
    placement, loads = make_placement("bytes", servers), np.zeros(servers)
    for size in sizes.tolist():
        loads[placement.place(size)] += size
    assert loads.max() <= loads.mean() + sizes.max(), seed
    if sizes.max() <= 0.05 * loads.mean():
        assert loads.max() <= 1.1 * loads.mean(), seed


def test_an_unknown_placement_is_rejected():
    with pytest.raises(ValueError, match="`placement` must be one of round_robin, bytes, but got"):
        make_placement("size", 2)
