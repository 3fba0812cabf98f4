"""Row access by index: documented results, and errors."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import get_replica_context, row_access
from headrace.distribute.bag_combiner import combine_bags
from headrace.errors import InvalidArgumentError
from tests.distribute.replicas import mirrored

HOW = ["add", "sub", "mul", "div", "min", "max", "update"]


def replica_id():
    return get_replica_context().replica_id_in_sync_group


def made(value, **kwargs):
    strategy = mirrored(2)
    with strategy.scope():
        return strategy, hr.Variable(value, **kwargs)


@pytest.mark.catalogue("3.34.16-19")
@pytest.mark.parametrize(
    ("how", "aggregation", "before", "ids", "values", "after"),
    [
        # Replica r changes the rows `ids(r)` by `values(r)`.
        ("sub", "MEAN", [0.0] * 3, lambda r: [r, r + 1], lambda r: [r, r + 1.0], [0, -1, -1]),
        ("add", "SUM", [0.0] * 3, lambda r: [r, r + 1], lambda r: [r, r + 1.0], [0, 2, 2]),
        ("div", "SUM", [1, 6, 1], lambda r: [r], lambda r: [r + 2], [0, 2, 1]),
        ("mul", "MEAN", [2.0, 1, 1], lambda r: [r], lambda r: [r + 2.0], [2, 1.5, 1]),
        ("min", "ONLY_FIRST_REPLICA", [0, 2, 0], lambda r: [r + 1], lambda r: [r + 1], [0, 1, 0]),
        ("max", "ONLY_FIRST_REPLICA", [0, 0, 0], lambda r: [r], lambda r: [r + 1], [1, 0, 0]),
        ("update", "ONLY_FIRST_REPLICA", [0] * 3, lambda r: [r + 1], lambda r: [r + 3], [0, 3, 0]),
    ],
)
def test_row_changes_of_all_replicas_are_combined_as_documented(
    how, aggregation, before, ids, values, after
):
    strategy, v = made(before, aggregation=aggregation)

    def step():
        rows = hr.IndexedSlices(np.array(values(replica_id())), ids(replica_id()))
        return getattr(v, f"scatter_{how}")(rows)

    returned = strategy.run(step)
    assert [copy.tolist() for copy in v.values] == [after, after]
    assert [copy.tolist() for copy in returned.values] == [after, after]


@pytest.mark.catalogue("3.34.23", "3.34.24")
@pytest.mark.parametrize(
    ("how", "expected"),
    [("sub", 2), ("add", 6), ("max", 4), ("min", 2), ("mul", 8), ("div", 2), ("update", 2)],
)
def test_without_an_aggregation_each_copy_is_changed_separately(how, expected):
    strategy, v = made([4.0])
    strategy.run(lambda: getattr(v, f"scatter_{how}")([0], 2.0))
    assert [copy.tolist() for copy in v.values] == [[expected]] * 2
    _, w = made([1.0, 1.0, 1.0], aggregation="SUM")
    assert w.scatter_add([0], [2.0]).tolist() == [3.0, 1.0, 1.0]
    assert w.scatter_min([0], 1.0).tolist() == [1.0, 1.0, 1.0]
    local = hr.Variable([4.0, 0.0])
    assert getattr(local, f"scatter_{how}")([0], 2.0).tolist() == [expected, 0.0]


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_each_bag_is_combined_into_one_row_in_every_framework(framework):
    with hr.distribute.MirroredStrategy(["cpu:0"], framework=framework).scope():
        v = hr.Variable(np.arange(8, dtype=np.float32).reshape(4, 2), name="v")
        counts = hr.Variable(np.arange(4), name="counts")
    bags = np.array([[2, 1, 2], [0, 0, 3]])
    assert np.asarray(v.gather(bags, combiner="sum")).tolist() == [[10, 13], [6, 9]]
    assert np.asarray(v.gather(bags[:, :2], combiner="mean")).tolist() == [[3, 4], [0, 1]]
    assert np.asarray(v.gather(bags[:, :0], combiner="mean")).tolist() == [[0, 0], [0, 0]]
    assert np.asarray(counts.gather(bags, combiner="sum")).tolist() == [5, 3]
    with pytest.raises(ValueError, match="'sqrtn' is not supported for Variable 'counts'"):
        counts.gather(bags, combiner="sqrtn")
    for bag in ([2, 1, 2], [2]):  # a single bag
        for combiner in ("sum", "mean", "sqrtn"):
            found = np.asarray(v.gather(bag, combiner=combiner))
            total = np.sum(np.arange(8).reshape(4, 2)[bag], axis=0)
            divisor = {"sum": 1, "mean": len(bag), "sqrtn": len(bag) ** 0.5}[combiner]
            assert np.allclose(found, total / divisor)
            assert np.asarray(counts.gather(bag, combiner="sum")) == sum(bag)
    assert np.asarray(v)[:, 0].tolist() == [0, 2, 4, 6], "the variable is unchanged"
    with hr.distribute.MirroredStrategy(["cpu:0"], framework=framework).scope():
        halves = hr.Variable(np.array([[2048], [1], [60_000]], np.float16), name="halves")
    found = halves.gather([0, 1, 1, 1, 1], combiner="sum")
    assert (np.asarray(found).tolist(), found.dtype) == ([2052], halves.dtype)
    assert np.asarray(halves.gather([[2, 2]], combiner="mean")).tolist() == [[60_000]]
    assert np.asarray(v.gather(bags[:, ::-1], combiner="sum")).tolist() == [[10, 13], [6, 9]]


@pytest.mark.parametrize("bags", [(1,), (1, 1), (3,), (200,), (40, 5)])
@pytest.mark.parametrize("row", [(), (1,), (2,), (3, 5), (700,)])
@pytest.mark.parametrize("size", [1, 2, 9, 300])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.complex64])
def test_the_rows_of_a_bag_are_added_one_after_the_other(bags, row, size, dtype):
    seed = np.random.default_rng().integers(2**32)
    print("seed", seed)
    chance = np.random.default_rng(seed)
    rows = (chance.normal(size=(20, *row)) * 100).astype(dtype)
    ids = chance.integers(0, 20, (*bags, size))
    working = np.dtype(np.float32) if dtype is np.float16 else np.dtype(dtype)
    total = np.zeros((*bags, *row), working)
    total += rows[ids[..., 0]]
    for place in range(1, size):
        total += rows[ids[..., place]]
    assert np.array_equal(combine_bags(rows, ids, "sum", working), total.astype(dtype))
    if dtype is not np.int8:
        mean = (total / working.type(size)).astype(dtype)
        assert np.array_equal(combine_bags(rows, ids, "mean", working), mean)


def test_a_repeated_id_changes_its_row_twice():
    v = hr.Variable(np.zeros((3, 2), np.float32))
    v.scatter_add([2, 0, 2], np.arange(6, dtype=np.float32).reshape(3, 2))
    assert v.read().tolist() == [[2, 3], [0, 0], [4, 6]]
    v.scatter_update([1], [7.0, 8.0])
    v.scatter_add([], np.zeros((0, 2)))
    assert v.read().tolist() == [[2, 3], [7, 8], [4, 6]]
    assert v.gather([[2], [1]]).tolist() == [[[4, 6]], [[7, 8]]]
    assert v.gather([[2, 1]], combiner="sum").tolist() == [[11, 14]]
    assert v.gather([[2, 1]], combiner="mean").tolist() == [[5.5, 7]]
    assert v.sparse_read([]).shape == (0, 2)


@pytest.mark.catalogue("2.1.12", "3.34.20-22")
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("how", ["min", "max", "update"])
def test_row_changes_that_cannot_be_summed_are_rejected_on_replicas(how, aggregation):
    strategy, v = made([0.0], aggregation=aggregation)
    with pytest.raises(NotImplementedError, match=f"scatter_{how}.*{aggregation}.*ONLY_FIRST"):
        strategy.run(lambda: getattr(v, f"scatter_{how}")([0], 1.0))
    assert getattr(v, f"scatter_{how}")([0], 0.0).tolist() == [0.0]


@pytest.mark.catalogue("2.1.12", "3.34.37")
@pytest.mark.parametrize("how", HOW)
def test_on_read_variables_reject_row_changes(how):
    for aggregation in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        strategy, v = made([0.0], aggregation=aggregation, synchronization="ON_READ")
        with pytest.raises(NotImplementedError, match=f"scatter_{how} .*ON_READ"):
            strategy.run(lambda v=v: getattr(v, f"scatter_{how}")([0], 1.0))


def test_mismatched_rows_and_values_are_rejected():
    v = hr.Variable([[1.0, 2.0]], name="w")
    for ids, values, error, words in (
        ([1], 0.0, InvalidArgumentError, r"ids\[0\] = 1 is not in \[0, 1\) of Variable 'w'"),
        ([-1], 0.0, InvalidArgumentError, r"ids\[0\] = -1 is not in"),
        (
            np.uint64([0, 2**63 + 5]),
            0.0,
            InvalidArgumentError,
            r"ids\[1\] = 9223372036854775813 is",
        ),
        ([2**70], 0.0, InvalidArgumentError, r"ids\[0\] = 1180591620717411303424 is not in"),
        ([0.0], 0.0, TypeError, "must be integers, but got dtype float64"),
        ([[0]], 0.0, ValueError, r"must be 1-D, but have shape \(1, 1\)"),
        ([0, 0], [[1.0, 2.0]], ValueError, r"must have shape \(2, 2\), but have shape \(1, 2\)"),
        ([0], 1j, TypeError, "values of dtype complex128 cannot be cast"),
    ):
        with pytest.raises(error, match=words):
            v.scatter_add(ids, values)
    with pytest.raises(InvalidArgumentError, match=r"= 3 is not in \[0, 1\) of Variable 'w'"):
        v.gather([0, 3])
    with pytest.raises(ValueError, match="is a scalar and has no rows"):
        hr.Variable(1.0).scatter_add([0], 1.0)
    other = mirrored(2)
    with other.scope(), pytest.raises(ValueError, match="write it in the scope of its strategy"):
        v.scatter_add([0], 1.0)
    assert v.read().tolist() == [[1.0, 2.0]]


def test_docstring_examples_return_the_shown_results():
    assert doctest.testmod(row_access).failed == 0
