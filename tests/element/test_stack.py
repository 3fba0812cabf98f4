"""Batching arithmetic, and padding: elements of several shapes become one stacked element."""

from __future__ import annotations

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.element.pad import Padding, check_shapes, check_values, fill_unknown_lengths
from headrace.element.spec import ArraySpec
from headrace.element.stack import concatenate, num_rows, slice_rows, stack, take, unstack
from headrace.element.structure import flatten
from headrace.errors import InvalidElementError
from tests.element.strategies import Pair, elements, same


@given(elements, st.integers(1, 4))
def test_unstack_reverses_stack(element: Any, size: int) -> None:
    rows = unstack(stack([element] * size), size)
    assert len(rows) == size
    assert all(same(row, element) for row in rows)


@given(elements, st.integers(1, 3), st.integers(1, 3))
def test_batches_are_concatenated_sliced_and_indexed(element: Any, first: int, second: int) -> None:
    joined = concatenate([stack([element] * first), stack([element] * second)])
    assert same(joined, stack([element] * (first + second)))
    assert same(slice_rows(joined, 0, first), stack([element] * first))
    assert same(take(joined, [0, -1]), stack([element] * 2))


def test_rows_keep_their_order_and_dict_keys_are_matched() -> None:
    batch = stack([{"a": np.int32(1), "b": "x"}, {"b": "y", "a": np.int32(2)}])
    assert same(batch, {"a": np.array([1, 2], np.int32), "b": np.array(["x", "y"], object)})
    assert same(take(batch, np.array([1, 0]))["a"], np.array([2, 1], np.int32))
    assert num_rows(batch) == 2


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
        (
            np.zeros(4),
            r"shape \(3,\) and element 2 has shape \(4,\); pad or truncate them",
        ),
        (
            np.zeros((3, 1)),
            r"element 2 has shape \(3, 1\); convert all elements to the same number",
        ),
        (np.zeros(3, "f4"), "dtype float64 and element 2 has dtype float32"),
        (b"x", "element 0 has a ndarray and element 2 a bytes"),
        (np.float64(1), r"element 2 has shape \(\)"),
    ],
)
def test_ragged_elements_are_rejected(odd: Any, words: str) -> None:
    regular = Pair(np.zeros(3), 1)
    with pytest.raises(InvalidElementError, match=rf"component \.image: .*{words}"):
        stack([regular, regular, Pair(odd, 1)])


def test_scalars_of_different_dtype_are_rejected() -> None:
    with pytest.raises(InvalidElementError, match=r"the element: .*int64 and element 1 .*int32"):
        stack([np.int64(1), np.int32(1)])
    with pytest.raises(InvalidElementError, match="element 1 a str"):
        stack([b"a", "a"])
    with pytest.raises(InvalidElementError, match="dtype datetime64"):
        stack([np.datetime64("2020-01-01"), np.datetime64("2020-01-01T00:00")])


def test_other_objects_and_structures_are_rejected() -> None:
    with pytest.raises(InvalidElementError, match=r"component \['a'\] is a object"):
        stack([{"a": object()}] * 2)
    with pytest.raises(InvalidElementError, match="element 1 has a dict with keys"):
        stack([{"a": np.int8(1)}, {"b": np.int8(1)}])


def test_different_batches_are_not_concatenated() -> None:
    with pytest.raises(InvalidElementError, match=r"element 1 has shape \(3,\)"):
        concatenate([np.zeros((1, 2)), np.zeros((1, 3))])
    with pytest.raises(InvalidElementError, match="element 1 has dtype int64"):
        concatenate([np.zeros(1), np.zeros(1, np.int64)])


def test_an_empty_list_cannot_be_stacked() -> None:
    with pytest.raises(ValueError, match="elements is empty"):
        stack([])
    with pytest.raises(ValueError, match="stacked is empty"):
        concatenate([])


def test_leading_axes_must_agree() -> None:
    with pytest.raises(InvalidElementError, match=r"component \[1\] .*shape \(3,\), but 2"):
        unstack((np.zeros(2), np.zeros(3)), 2)
    with pytest.raises(InvalidElementError, match="no axes"):
        num_rows(np.float64(1))
    with pytest.raises(InvalidElementError, match="without arrays"):
        num_rows({"a": None})


def test_rows_of_scalars_are_numpy_scalars_bytes_and_str() -> None:
    batch = (np.arange(2, dtype="u1"), np.array([b"a", b"b"], object), np.array(["a", ""], object))
    assert [type(leaf) for leaf in flatten(unstack(batch, 2)[0])[0]] == [np.uint8, bytes, str]


# --- padding: elements of several shapes become one stacked element -------------------------------


Couple = namedtuple("Pair", "a b")


@dataclass
class Example:
    x: np.ndarray
    n: int


def padded(elements, shapes=None, values=None):
    return Padding(check_shapes(shapes), check_values(values)).stack(elements)


def rows_of(*lengths, dtype=np.int64):
    return [np.full(length, length, dtype) for length in lengths]


def naively_padded(arrays, lengths, value):
    """Return the same as nested loops would."""
    out = np.full((len(arrays), *lengths), value, arrays[0].dtype)
    for number, array in enumerate(arrays):
        for index in np.ndindex(array.shape):
            out[(number, *index)] = array[index]
    return out


def test_rows_are_as_long_as_the_longest_and_end_with_zeros():
    made = padded(rows_of(1, 3, 0))
    assert made.tolist() == [[1, 0, 0], [3, 3, 3], [0, 0, 0]]
    assert made.dtype == np.int64
    assert padded([np.zeros((1, 2)), np.zeros((3, 1))]).shape == (2, 3, 2)


@pytest.mark.parametrize("seed", range(8))
def test_padding_equals_nested_loops_for_any_number_of_axes(seed):
    chance = random.Random(seed)
    axes = chance.randint(1, 3)
    dtype = chance.choice([np.float32, np.int8, np.bool_, np.complex128, ">i4"])
    arrays = [
        np.ones([chance.randint(0, 4) for _ in range(axes)], dtype)
        for _ in range(chance.randint(1, 5))
    ]
    longest = [max(array.shape[axis] for array in arrays) for axis in range(axes)]
    shape = [chance.choice([None, -1, length, length + 2]) for length in longest]
    lengths = [
        have if want in (None, -1) else want for have, want in zip(longest, shape, strict=True)
    ]
    made = padded(arrays, shape, 1)
    assert made.dtype == arrays[0].dtype, f"{seed=}"
    assert np.array_equal(made, naively_padded(arrays, lengths, 1)), f"{seed=}"


def test_elements_of_one_shape_are_stacked_without_padding():
    elements = [{"x": np.arange(3) + n, "n": np.int32(n), "s": "a" * n} for n in range(4)]
    made, want = padded(elements), stack(elements)
    assert {k: v.tolist() for k, v in made.items()} == {k: v.tolist() for k, v in want.items()}
    assert made["n"].dtype == np.int32


def test_text_is_padded_with_empty_strings():
    words = [np.array(["a", "b"], object), np.array([], object)]
    assert padded(words).tolist() == [["a", "b"], ["", ""]]
    assert padded([w.astype("S").astype(object) for w in words]).tolist() == [
        [b"a", b"b"], [b"", b""],
    ]  # fmt: skip
    assert padded(words, values="-").tolist() == [["a", "b"], ["-", "-"]]
    assert padded([np.array([], object)], [2]).tolist() == [[b"", b""]]
    with pytest.raises(InvalidElementError, match="contains str, but its padding value is b'-'"):
        padded(words, values=b"-")


@pytest.mark.parametrize(
    ("shapes", "values"),
    [
        (([4], {"n": [], "m": [None, 3]}), (7, {"n": 0, "m": 0.5})),
        (((4,), {"n": (), "m": (-1, 3)}), (np.int8(7), {"n": None, "m": np.float64(0.5)})),
        ((np.array([4]), {"n": ArraySpec((), int), "m": [-1, 3]}), (7, {"n": None, "m": 0.5})),
    ],
)
def test_shapes_and_values_are_nested_as_the_elements_are(shapes, values):
    elements = [
        (np.full(n, n), {"n": np.int64(n), "m": np.ones((n, 2), np.float32)}) for n in (1, 2)
    ]
    x, rest = padded(elements, shapes, values)
    assert x.tolist() == [[1, 7, 7, 7], [2, 2, 7, 7]]
    assert rest["n"].tolist() == [1, 2]
    assert rest["m"].tolist() == [
        [[1, 1, 0.5], [0.5, 0.5, 0.5]], [[1, 1, 0.5], [1, 1, 0.5]],
    ]  # fmt: skip
    assert rest["m"].dtype == np.float32


def test_one_value_applies_to_all_components_below():
    elements = [Couple(np.full(n, n), (np.full(n, n), np.int64(n))) for n in (0, 2)]
    made = padded(elements, None, -1)
    assert type(made) is Couple
    assert made.a.tolist() == made.b[0].tolist() == [[-1, -1], [2, 2]]
    partly = padded(elements, Couple([3], None), (None, -1))
    assert partly.a.tolist() == [[0, 0, 0], [2, 2, 0]]
    assert partly.b[0].tolist() == [[-1, -1], [2, 2]]
    objects = padded([Example(np.ones(n), np.int64(n)) for n in (0, 1)], Example([2], None))
    assert objects.x.tolist() == [[0, 0], [1, 0]]


def test_columns_are_padded_as_rows_are():
    blocks = [np.ones((2, 3)), np.ones((1, 2)), np.ones((3, 0))]
    padding = Padding(check_shapes([5]), 2)
    rows = [row for block in blocks for row in block]
    assert np.array_equal(padding.join(blocks), padding.stack(rows))
    assert Padding(None).needs_no_padding(blocks[0])
    assert Padding((3,)).needs_no_padding(blocks[0])
    assert not padding.needs_no_padding(blocks[0])


@pytest.mark.parametrize(
    ("elements", "shapes", "values", "message"),
    [
        (rows_of(3), [2], None, "length 3, which exceeds the padded shape"),
        (rows_of(3), [2, 2], None, r"shape \(3,\), but the padded shape \(2, 2\) has 2 axes"),
        (rows_of(3), {"x": [2]}, None, "`padded_shapes` contains .* different nesting"),
        ([{"x": r} for r in rows_of(3)], {"y": [2]}, None, "`padded_shapes` contains"),
        ([{"x": r} for r in rows_of(3)], {"x": {"y": [2]}}, None, r"component \['x'\]"),
        (rows_of(1, 3), None, 0.5, "dtype int64, which cannot represent the padding value 0.5"),
        (rows_of(1, 3, dtype=np.uint8), None, 300, "dtype uint8"),
        (rows_of(1, 3), None, "a", "cannot represent the padding value 'a'"),
        (rows_of(1, 3), None, (1, 2), "`padding_values` contains"),
        ([np.zeros(2), np.zeros(2, int)], None, None, "element 0 has dtype float64 .* element 1"),
        ([np.zeros(2), np.zeros((2, 2))], None, None, "1 axes and element 1 .* 2 axes"),
        ([np.zeros(2), np.float64(0)], None, None, "element 1 has dtype float64 and 0 axes"),
        ([np.int64(1), np.int64(2)], [3], None, r"shape \(\), but the padded shape"),
    ],
)
def test_incompatible_shapes_and_values_are_named(elements, shapes, values, message):
    with pytest.raises(InvalidElementError, match=message):
        padded(elements, shapes, values)


def test_invalid_shapes_and_values_are_rejected_immediately():
    with pytest.raises(TypeError, match="`padded_shapes` contains 'a'"):
        check_shapes({"x": "a"})
    with pytest.raises(TypeError, match=r"contains 1\.5 in place of a length"):
        check_shapes([1.5])
    with pytest.raises(ValueError, match="the length -2"):
        check_shapes(([-2],))
    with pytest.raises(TypeError, match="`padding_values` contains"):
        check_values(np.zeros(2))


def test_the_spec_of_a_padded_batch_has_the_lengths_that_are_known():
    spec = {"x": ArraySpec((None, 3), np.int8), "n": ArraySpec((), np.int64)}
    assert Padding().spec(spec, None) == {
        "x": ArraySpec((None, None, 3), np.int8), "n": ArraySpec((None,), np.int64),
    }  # fmt: skip
    assert Padding({"x": (4, None), "n": ()}).spec(spec, 2)["x"] == ArraySpec((2, 4, None), np.int8)
    with pytest.raises(InvalidElementError, match="2 axes"):
        Padding((4, None)).spec(ArraySpec((None,), np.int8), None)


def test_axes_of_unknown_length_get_one():
    spec = (ArraySpec((None, 3), np.int8), ArraySpec((), np.int64), ArraySpec((2, None), np.int8))
    assert fill_unknown_lengths(None, spec, 9, is_proven=True) == ((9, 3), (), (2, 9))
    assert fill_unknown_lengths(None, spec, 9, is_proven=False) == ((9, None), (), (9, None))
    given = check_shapes(([-1, 4], [], None))
    assert fill_unknown_lengths(given, spec, 9, is_proven=False) == ((9, 4), (), (9, None))
