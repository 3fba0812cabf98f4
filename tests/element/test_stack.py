"""Batching arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.element.stack import concatenate, count, slice_rows, stack, take, unstack
from headrace.element.structure import flatten
from headrace.errors import InvalidElementError
from tests.element.strategies import Pair, elements, same


@given(elements, st.integers(1, 4))
def test_what_is_stacked_comes_apart_as_it_was(element: Any, size: int) -> None:
    rows = unstack(stack([element] * size), size)
    assert len(rows) == size
    assert all(same(row, element) for row in rows)


@given(elements, st.integers(1, 3), st.integers(1, 3))
def test_batches_are_joined_cut_and_picked(element: Any, first: int, second: int) -> None:
    joined = concatenate([stack([element] * first), stack([element] * second)])
    assert same(joined, stack([element] * (first + second)))
    assert same(slice_rows(joined, 0, first), stack([element] * first))
    assert same(take(joined, [0, -1]), stack([element] * 2))


def test_rows_keep_their_order_and_dict_keys_meet() -> None:
    batch = stack([{"a": np.int32(1), "b": "x"}, {"b": "y", "a": np.int32(2)}])
    assert same(batch, {"a": np.array([1, 2], np.int32), "b": np.array(["x", "y"], object)})
    assert same(take(batch, np.array([1, 0]))["a"], np.array([2, 1], np.int32))
    assert count(batch) == 2


def test_stacked_arrays_are_fresh_and_rows_are_views() -> None:
    source = np.zeros((1, 3))
    batch = stack([source])
    assert not np.shares_memory(batch, source)
    assert batch.flags.owndata or batch.base.flags.owndata
    assert batch.flags.writeable
    assert np.shares_memory(unstack(batch, 1)[0], batch)
    assert np.shares_memory(slice_rows(batch, 0, 1), batch)
    assert not np.shares_memory(take(batch, [0]), batch)
    assert not np.shares_memory(concatenate([batch]), batch)


def test_strided_rows_are_stacked_in_c_order() -> None:
    rows = [np.arange(6).reshape(2, 3).T, np.asfortranarray(np.ones((3, 2), int))]
    batch = stack(rows)
    assert batch.flags.c_contiguous
    assert same(batch, np.array([rows[0].tolist(), rows[1].tolist()]))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (np.zeros(4), r"shape \(3,\) and element 2 has shape \(4,\); pad or cut them in map"),
        (np.zeros((3, 1)), r"element 2 has shape \(3, 1\); bring all elements to one number"),
        (np.zeros(3, "f4"), "dtype float64 and element 2 has dtype float32"),
        (b"x", "element 0 has a ndarray and element 2 a bytes"),
        (np.float64(1), r"element 2 has shape \(\)"),
    ],
)
def test_ragged_elements_are_refused(odd: Any, words: str) -> None:
    regular = Pair(np.zeros(3), 1)
    with pytest.raises(InvalidElementError, match=rf"component \.image: .*{words}"):
        stack([regular, regular, Pair(odd, 1)])


def test_scalars_of_different_dtype_are_refused() -> None:
    with pytest.raises(InvalidElementError, match=r"the element: .*int64 and element 1 .*int32"):
        stack([np.int64(1), np.int32(1)])
    with pytest.raises(InvalidElementError, match="element 1 a str"):
        stack([b"a", "a"])
    with pytest.raises(InvalidElementError, match="dtype datetime64"):
        stack([np.datetime64("2020-01-01"), np.datetime64("2020-01-01T00:00")])


def test_other_objects_and_other_structures_are_refused() -> None:
    with pytest.raises(InvalidElementError, match=r"component \['a'\] is a object"):
        stack([{"a": object()}] * 2)
    with pytest.raises(InvalidElementError, match="element 1 has a dict with keys"):
        stack([{"a": np.int8(1)}, {"b": np.int8(1)}])


def test_batches_that_differ_are_not_joined() -> None:
    with pytest.raises(InvalidElementError, match=r"element 1 has shape \(3,\)"):
        concatenate([np.zeros((1, 2)), np.zeros((1, 3))])
    with pytest.raises(InvalidElementError, match="element 1 has dtype int64"):
        concatenate([np.zeros(1), np.zeros(1, np.int64)])


def test_nothing_cannot_be_stacked() -> None:
    with pytest.raises(ValueError, match="elements is empty"):
        stack([])
    with pytest.raises(ValueError, match="stacked is empty"):
        concatenate([])


def test_leading_axes_must_agree() -> None:
    with pytest.raises(InvalidElementError, match=r"component \[1\] apart: .*shape \(3,\), and 2"):
        unstack((np.zeros(2), np.zeros(3)), 2)
    with pytest.raises(InvalidElementError, match="no axis"):
        count(np.float64(1))
    with pytest.raises(InvalidElementError, match="without any array"):
        count({"a": None})


def test_rows_of_scalars_are_numpy_scalars_bytes_and_str() -> None:
    batch = (np.arange(2, dtype="u1"), np.array([b"a", b"b"], object), np.array(["a", ""], object))
    assert [type(leaf) for leaf in flatten(unstack(batch, 2)[0])[0]] == [np.uint8, bytes, str]
