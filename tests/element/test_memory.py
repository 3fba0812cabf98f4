"""Fresh memory: large arrays begin where others can keep them, and hold what NumPy's own would."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.element.memory import allocate_array, copy_array, copy_rows
from headrace.element.stack import join

LARGE = 1 << 20
RECORD = np.dtype([("x", "<f4"), ("y", "S3")], align=True)


def begins_at(array: np.ndarray) -> int:
    return array.ctypes.data % 64


@pytest.mark.parametrize("dtype", ["?", "i1", ">i4", "f8", "c16", "S3", RECORD, "M8[s]"])
def test_a_large_array_is_aligned_to_64_bytes(dtype):
    dtype = np.dtype(dtype)
    rows = LARGE // dtype.itemsize // 7 + 1
    made = [allocate_array((rows, 7), dtype) for _ in range(3)]
    for each in made:
        assert (each.shape, each.dtype, begins_at(each)) == ((rows, 7), dtype, 0)
        assert each.flags.c_contiguous
        assert each.flags.writeable
    assert not np.shares_memory(made[0], made[1])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,)])
@pytest.mark.parametrize("dtype", ["f4", "O", "V0", RECORD])
def test_a_small_array_is_an_ordinary_array(shape, dtype):
    made = allocate_array(shape, np.dtype(dtype))
    assert (made.shape, made.dtype) == (shape, np.dtype(dtype))


def test_large_arrays_of_objects_hold_objects():
    words = np.array([f"word {n}" for n in range(LARGE // 8)], object)
    assert copy_array(words).tolist() == words.tolist()
    few = np.arange(LARGE // 8) % 5
    assert copy_rows(words, few).tolist() == [words[n] for n in few]


TABLES = {
    "floats": np.arange(40 * 8192, dtype=np.float32).reshape(40, 8192),
    "big endian": np.arange(40 * 8192, dtype=">i4").reshape(40, 8192),
    "in columns": np.asfortranarray(np.arange(40 * 8192.0).reshape(40, 8192)),
    "every other": np.arange(80 * 16384, dtype=np.int16).reshape(80, 16384)[::2, ::2],
    "numbers": np.arange(1 << 18),
    "records": np.array([(n, b"abc") for n in range(40)], RECORD).repeat(4096).reshape(40, -1),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("shape", [(0,), (3,), (64,), (8, 16)])
def test_gathered_rows_equal_those_of_take(name, shape):
    table = TABLES[name]
    chance = np.random.default_rng(0)
    indices = chance.integers(0, len(table), shape)
    made = copy_rows(table, indices)
    expected = table.take(indices, axis=0)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(made, expected)
    assert not np.shares_memory(made, table)
    if made.nbytes >= LARGE and name != "numbers":
        assert begins_at(made) == 0
    np.testing.assert_array_equal(copy_array(table), table)


@pytest.mark.parametrize("indices", [[0] * 63 + [40], [40] * 64, [0] * 63 + [-41]])
def test_an_index_without_a_row_is_an_error(indices):
    with pytest.raises(IndexError):
        copy_rows(TABLES["floats"], np.array(indices))


def test_a_negative_index_counts_from_the_end():
    indices = np.arange(-64, 0) % 40 - 40
    np.testing.assert_array_equal(copy_rows(TABLES["floats"], indices), TABLES["floats"][indices])


@pytest.mark.parametrize(
    "dataset",
    {
        "ordered": hr.Dataset.from_tensor_slices(TABLES["floats"]).batch(32),
        "shuffled": hr.Dataset.from_tensor_slices(TABLES["floats"]).shuffle(40, seed=1).batch(32),
        "mapped": hr.Dataset.from_tensor_slices(TABLES["floats"]).map(np.negative).batch(32),
        "generated": hr.Dataset.from_generator(lambda: iter(TABLES["floats"])).batch(32),
        "repeated": hr.Dataset.from_tensors(TABLES["floats"][0]).repeat(32).batch(32),
    }.items(),
    ids=lambda each: each[0],
)
def test_large_batches_are_aligned_to_64_bytes(dataset):
    batch = next(iter(dataset[1]))
    assert batch.nbytes == LARGE
    assert begins_at(batch) == 0


@pytest.mark.parametrize("kind", [np.void, np.record])
@pytest.mark.parametrize("rows", [100, LARGE // 8])
def test_padding_between_record_fields_is_zeroed(kind, rows):
    padded = np.dtype((kind, RECORD))
    zeros = np.zeros(rows, padded)
    for _ in range(3):
        written = np.full(2 * zeros.nbytes + 64, 0xAB, np.uint8)
        del written  # its memory is used next
        for made in (copy_array(zeros), copy_array(zeros[::2]), join([zeros, zeros], padded)):
            assert not made.view(np.uint8).any()
