"""Sums of arrays in chunks, and arrays as messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.distribute.collective_server import chunked_sums
from headrace.distribute.collective_server import messages as coding
from headrace.distribute.collective_server.state import CollectiveValue, combine
from headrace.errors import FailedPreconditionError, InvalidArgumentError


class Twin:
    """A client whose only other worker contributes the same arrays."""

    def __init__(self):
        self.results, self.most, self.numbers = {}, 0, itertools.count()

    def start(self, what, kind, flag=False, arrays=()):
        number, value = next(self.numbers), CollectiveValue(flag, arrays)
        self.results[number] = combine(kind, [value, value])
        self.most = max(self.most, len(self.results))
        return number

    def wait(self, number):
        return self.results.pop(number)

    def run(self, what, kind, flag=False, arrays=()):
        return self.wait(self.start(what, kind, flag, arrays))


@pytest.mark.parametrize("size", [16, 100, 1 << 20])
def test_chunked_sums_equal_direct_sums_for_any_chunk_size(size, monkeypatch):
    monkeypatch.setattr(chunked_sums, "_CHUNK_BYTES", size)
    rng = np.random.default_rng(7)
    for _ in range(100):
        given = [
            rng.integers(0, 9, tuple(rng.integers(0, 7, rng.integers(0, 3)))).astype(
                rng.choice(["i1", "f4", "f8", "c16"])
            )
            for _ in range(rng.integers(1, 8))
        ]
        twin = Twin()
        found = chunked_sums.sum_arrays(twin, given, "a reduction")
        assert not twin.results
        assert twin.most <= 8
        for before, after in zip(given, found, strict=True):
            assert after.dtype == before.dtype
            assert np.array_equal(after, before + before)
            assert after.shape == before.shape


def test_mismatched_arrays_are_rejected():
    two = [CollectiveValue(arrays=[np.ones(2)]), CollectiveValue(arrays=[np.ones(2)] * 2)]
    for kind in ("sum", "all"):
        with pytest.raises(InvalidArgumentError, match="different numbers of values \\(1, 2"):
            combine(kind, two)
    with pytest.raises(InvalidArgumentError, match=r"\(2,\), \(3,\)"):
        combine("sum", [two[0], CollectiveValue(arrays=[np.ones(3)])])
    with pytest.raises(FailedPreconditionError, match="unknown kind of collective 'product'"):
        combine("product", two)


def test_results_never_share_memory_with_a_workers_array():
    kept = np.ones(2)
    kept.flags.writeable = False
    (found,) = combine("first", [CollectiveValue(arrays=[kept]), CollectiveValue()]).arrays
    assert found is not kept
    assert found.tolist() == [1, 1]


def test_any_is_true_if_one_flag_is_true():
    assert combine("any", [CollectiveValue(False), CollectiveValue(True)]).flag
    assert not combine("any", [CollectiveValue(False), CollectiveValue(False)]).flag


@pytest.mark.parametrize("dtype", ["u1", "f2", "c16", "U3", "S2", "M8[s]", "?", "O"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (70, 90)])
def test_arrays_round_trip(dtype, shape):
    given = np.full(shape, "ab" if dtype in "OU3" else 1, "U2" if dtype == "O" else dtype)
    given = given.astype(dtype)
    heads, buffers = coding.encode_arrays([given, given.copy(order="F")])
    for found in coding.decode_arrays(heads, [bytearray(buffer) for buffer in buffers]):
        assert found.dtype == given.dtype
        assert found.shape == given.shape
        assert np.array_equal(found, given)
        assert found.flags.writeable


def test_arrays_of_other_objects_are_rejected():
    with pytest.raises(InvalidArgumentError, match="an object array with"):
        coding.encode_arrays([np.array([{}], object)])
    heads, buffers = coding.encode_arrays([np.ones(10_000)])
    with pytest.raises(ValueError, match="has no buffer"):
        coding.decode_arrays(heads, [])
    with pytest.raises(ValueError, match="reshape"):
        coding.decode_arrays(heads, [buffers[0][:80]])
