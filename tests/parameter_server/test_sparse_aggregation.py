"""Ids of a batch: deduplication, sums, shards, and expansion to all ids."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from headrace.distribute.bag_combiner import check_row_indices
from headrace.errors import InvalidArgumentError
from headrace.parameter_server import gradients as sums
from headrace.parameter_server.arrays import IndexedSlices
from headrace.parameter_server.gradients import (
    IdBatch,
    assign_shards,
    check_ids,
    split_by_hash,
    sum_rows,
    sum_shared_rows,
    unique_ids,
)

IDS = {
    "none": [],
    "one": [7],
    "all equal": [3] * 9,
    "some repeated": [5, 1, 5, 9, 1, 1, 0],
    "negative": [-4, 2, -4],
    "far apart": [2**63 - 1, -(2**63), 0, 2**63 - 1, 5],
    "large and near": [2**62 + 5, 2**62, 2**62 + 5],
}


@pytest.fixture(params=["with SciPy", "without SciPy"])
def sum_implementation(request, monkeypatch):
    if request.param == "without SciPy":
        monkeypatch.setattr(sums, "_sparse_product", lambda: None)
    else:
        assert sums._sparse_product() is not None


@pytest.mark.parametrize("bits", [1, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41, 63])
def test_ids_of_any_bit_width_are_sorted(bits):
    ids = np.random.default_rng(bits).integers(0, 2**bits - 1, 3000, endpoint=True)
    ids[:2] = 0, 2**bits - 1
    distinct, inverse = unique_ids(ids)
    expected, positions = np.unique(ids, return_inverse=True)
    assert np.array_equal(distinct, expected)
    assert np.array_equal(inverse, positions)


@pytest.mark.usefixtures("sum_implementation")
@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32"])
@pytest.mark.parametrize("row", [(), (3,), (2, 2), (0,)])
def test_rows_of_equal_ids_are_summed(name, dtype, row):
    ids = np.array(IDS[name], np.int64)
    values = np.arange(len(ids) * int(np.prod(row)), dtype="int64").reshape(len(ids), *row)
    once, summed = sum_rows(ids, values.astype(getattr(ml_dtypes, dtype, dtype)))
    expected = np.unique(ids)
    assert once.tolist() == expected.tolist()
    assert summed.dtype == np.dtype("float32" if dtype == "bfloat16" else dtype)
    assert summed.shape == (len(expected), *row)
    for one, got in zip(expected, summed, strict=True):
        assert got.tolist() == values[ids == one].sum(axis=0).tolist()


def test_both_sum_implementations_agree(monkeypatch):
    rng = np.random.default_rng(5)
    ids, values = rng.zipf(1.4, 3000) % 500, rng.standard_normal((3000, 7)).astype(np.float32)
    fast = sum_rows(ids, values)
    monkeypatch.setattr(sums, "_sparse_product", lambda: None)
    slow = sum_rows(ids, values)
    np.testing.assert_allclose(fast[1], slow[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", IDS)
def test_unique_ids_and_inverse_reproduce_the_ids(name):
    ids = np.array(IDS[name], np.int64)
    once, inverse = unique_ids(ids)
    assert once.tolist() == sorted(set(IDS[name]))
    assert once[inverse].tolist() == ids.tolist()


@pytest.mark.usefixtures("sum_implementation")
@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_rows_are_summed_like_separate_rows(name, dtype):
    ids = np.array(IDS[name], np.int64)
    rng = np.random.default_rng(3)
    shared = rng.standard_normal((4, 3)).astype(getattr(ml_dtypes, dtype, dtype))
    which = rng.integers(0, 4, len(ids))
    once, values, found = sum_shared_rows(ids, shared, which)
    expected = sum_rows(ids, shared[which])
    assert once.tolist() == expected[0].tolist()
    assert values[found].tobytes() == expected[1].tobytes()
    assert len(values) <= 4 + len(ids) // 2


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("row", [(), (3,), (2, 0)])
def test_values_of_distinct_ids_are_expanded_to_all_ids(name, row):
    ids = np.array(IDS[name], np.int64)
    batch = IdBatch(ids)
    values = np.arange(len(batch.unique) * int(np.prod(row)), dtype="uint16")
    values = values.reshape(len(batch.unique), *row).astype("bool" if row == () else "uint16")
    expected = values[np.searchsorted(batch.unique, ids)]
    for parts in ([values], [values[:1], values[1:]]):
        found = batch.expand(parts, row, values.dtype)
        assert (found.dtype, found.tolist()) == (values.dtype, expected.tolist())


def test_expanded_values_have_the_shape_of_the_ids():
    values = np.arange(3.0)
    batch = IdBatch(np.array([[4, 2], [2, 9]]))
    assert batch.expand([values], (), values.dtype).tolist() == [[1, 0], [0, 2]]
    assert IdBatch(np.array([2, 4, 9])).expand([values], (), values.dtype) is values
    assert IdBatch(np.array(7)).expand([values[:1]], (), values.dtype).shape == ()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 9], r"ids\[2\] = 9 is not in \[0, 9\) of the variable w"),
        ([[0, 1], [-1, 12]], r"ids\[1, 0\] = -1 is not in \[0, 9\)"),
        (np.uint64([2**64 - 1]), r"ids\[0\] = 18446744073709551615 is not in"),
        (9, r"ids\[\] = 9 is not in"),
    ],
)
def test_an_id_out_of_range_is_named_with_its_index(ids, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check_row_indices(ids, 9, "the variable w")


def test_non_integer_ids_are_rejected():
    assert check_row_indices([], 0, "w").dtype == np.int64
    assert check_row_indices(np.uint8([3]), 4, "w").dtype == np.int64
    with pytest.raises(TypeError, match="ids of w must be integers, but got dtype float64"):
        check_row_indices([0.0], 4, "w")
    with pytest.raises(TypeError, match="dtype bool"):
        check_row_indices(np.array([True]), 4, "w")


@pytest.mark.parametrize("ids", [np.arange(30_000), np.arange(30_000) * 64, -np.arange(30_000)])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_ids_of_any_stride_are_spread_evenly(ids, shards):
    owner = assign_shards(ids, shards)
    counts = np.bincount(owner, minlength=shards)
    assert counts.min() > 0.9 * len(ids) / shards
    assert counts.max() < 1.1 * len(ids) / shards
    for shard, positions in enumerate(split_by_hash(ids, shards)):
        assert (owner[positions] == shard).all()


def test_integers_beyond_64_bits_are_rejected_by_value():
    with pytest.raises(InvalidArgumentError, match=r"ids\[1\] = 1180591620717411303424 is not in"):
        check_row_indices([1, 2**70], 4, "Variable 'v'")
    with pytest.raises(InvalidArgumentError, match=r"64 bits, but one is -1180591620717411303424"):
        check_ids(np.array([3, -(2**70)]), "EmbeddingTable 't'")
    with pytest.raises(InvalidArgumentError, match="64 bits"):
        IndexedSlices(np.ones((1, 2)), [2**70])
    with pytest.raises(TypeError, match="dtype object"):
        check_row_indices([1, None], 4, "Variable 'v'")


def test_modified_ids_are_sorted_again():
    ids = np.array([5, 1, 5, 9, 2], np.int64)
    distinct, inverse = unique_ids(ids)
    assert distinct.tolist() == [1, 2, 5, 9]
    assert distinct[inverse].tolist() == ids.tolist()
    ids[1] = 7  # the first id is unchanged
    distinct, inverse = unique_ids(ids)
    assert distinct.tolist() == [2, 5, 7, 9]
    assert distinct[inverse].tolist() == ids.tolist()


def test_writing_into_a_result_changes_no_later_result():
    ids = np.array([5, 1, 5, 9, 2], np.int64)
    values = np.ones((5, 2), np.float32)
    for _ in range(2):
        distinct, inverse = unique_ids(ids)
        rows, summed = sum_rows(ids, values)
        shared, _, which = sum_shared_rows(ids, values, np.arange(5))
        assert distinct.tolist() == rows.tolist() == shared.tolist() == [1, 2, 5, 9]
        assert summed[:, 0].tolist() == [1, 1, 2, 1]
        assert inverse.tolist() == [2, 0, 2, 3, 1]
        for each in (distinct, inverse, rows, summed, shared, which):
            each[:] = 0


def test_the_number_of_cached_ids_is_bounded(monkeypatch):
    monkeypatch.setattr(sums, "_MAX_CACHED_IDS", 100)
    monkeypatch.setattr(sums, "_sort_cache", sums._SortCache())
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10):
        unique_ids(np.arange(count))
    assert [len(each.ids) for each in sums._sort_cache.batches] == [10, 9, 8, 7, 6, 5, 4, 3]
    unique_ids(np.arange(90))
    assert [len(each.ids) for each in sums._sort_cache.batches] == [90, 10]
    unique_ids(np.arange(101))
    assert len(sums._sort_cache.batches) == 2
