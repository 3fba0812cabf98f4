"""Specs and descriptions of elements: made, compared, relaxed, checked, sent, read again."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.element.chunk import Chunk
from headrace.element.description import decode_dtype, decode_structure, encode_structure
from headrace.element.spec import (
    ArraySpec,
    batch_spec,
    check_element,
    decode_spec,
    encode_spec,
    relax,
    relax_lengths,
    spec_of,
    unbatch_spec,
)
from headrace.element.stack import stack
from headrace.element.structure import Structure, flatten
from headrace.element.wire import decode, encode
from headrace.errors import DataLossError, InvalidElementError
from tests.element.strategies import Example, Pair, elements


def test_a_spec_shows_its_shape_and_dtype() -> None:
    assert repr(ArraySpec((None, 28, 28), np.uint8)) == (
        "ArraySpec(shape=(None, 28, 28), dtype=uint8)"
    )
    assert repr(ArraySpec((), bytes, "key")) == "ArraySpec(shape=(), dtype=bytes, name='key')"
    assert repr(ArraySpec((), str)) == "ArraySpec(shape=(), dtype=str)"


def test_specs_are_values() -> None:
    a, b = ArraySpec([2, None], "i4"), ArraySpec((np.int64(2), None), np.int32)
    assert a == b
    assert hash(a) == hash(b)
    assert a != ArraySpec((2, 3), "i4")
    assert a != ArraySpec((2, None), "i4", name="x")
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(AttributeError, match="immutable"):
        a.shape = (1,)


@pytest.mark.parametrize("dtype", [bytes, "S", "S7", np.dtype("S3")])
def test_all_dtypes_of_bytes_are_one(dtype: Any) -> None:
    assert ArraySpec((), dtype).dtype == np.dtype("S")


@pytest.mark.parametrize("dtype", [str, "U", "U7", np.dtypes.StringDType()])
def test_all_dtypes_of_str_are_one(dtype: Any) -> None:
    assert ArraySpec((), dtype).dtype == np.dtype("U")


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((-1,), "i4", "shape must hold lengths >= 0"),
        ((1.5,), "i4", "shape must hold"),
        (3, "i4", "shape must be a tuple"),
        ((), object, "must not hold Python objects"),
        ((), [("a", object)], "must not hold Python objects"),
        ((), "nonsense", "nonsense"),
    ],
)
def test_wrong_arguments_fail_at_once(shape: Any, dtype: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        ArraySpec(shape, dtype)


@given(elements)
def test_an_element_matches_its_own_spec(element: Any) -> None:
    check_element(spec_of(element), element)


@given(elements, st.integers(1, 3))
def test_a_stacked_element_has_the_batched_spec(element: Any, size: int) -> None:
    spec = spec_of(element)
    check_element(batch_spec(spec, size), stack([element] * size))
    assert unbatch_spec(batch_spec(spec, None)) == spec


@given(elements)
def test_a_spec_is_encoded_and_decoded(element: Any) -> None:
    spec = {"inner": batch_spec(spec_of(element), None), "named": ArraySpec((None,), "f4", "n")}
    assert decode_spec(encode_spec(spec)) == spec


def test_a_spec_without_axes_cannot_be_unbatched() -> None:
    with pytest.raises(ValueError, match=r"component \['b'\] has no axis"):
        unbatch_spec({"a": ArraySpec((2,), "i4"), "b": ArraySpec((), "i4")})


def test_relaxing_keeps_what_is_common() -> None:
    a = {"x": ArraySpec((2, 3), "i4", "n"), "y": ArraySpec((), bytes)}
    b = {"y": ArraySpec((), bytes), "x": ArraySpec((2, 5), "i4", "m")}
    assert relax(a, b) == {"x": ArraySpec((2, None), "i4"), "y": ArraySpec((), bytes)}
    assert relax(a, a) == a


@pytest.mark.parametrize(
    "other",
    [ArraySpec((2,), "i8"), ArraySpec((2, 2), "i4"), (ArraySpec((2,), "i4"),)],
)
def test_incompatible_specs_are_rejected(other: Any) -> None:
    with pytest.raises(InvalidElementError, match=r"\['x'\]"):
        relax({"x": ArraySpec((2,), "i4")}, {"x": other})


@pytest.mark.parametrize(
    ("element", "words"),
    [
        (np.zeros((2, 4), "f4"), r"component \.image has shape \(2, 4\), but the spec has shape"),
        (np.zeros(2, "f4"), r"component \.image has shape \(2,\)"),
        (np.zeros((2, 3)), r"component \.image has dtype float64"),
        (b"x", r"component \.image has dtype bytes"),
        ((1,), r"at \.image"),
    ],
)
def test_an_element_that_does_not_match_is_rejected(element: Any, words: str) -> None:
    spec = Pair(ArraySpec((None, 3), "f4"), ArraySpec((), str))
    check_element(spec, Pair(np.zeros((7, 3), "f4"), "x"))
    with pytest.raises(InvalidElementError, match=words):
        check_element(spec, Pair(element, "x"))


def test_an_empty_array_of_strings_matches_bytes_and_str() -> None:
    check_element(ArraySpec((0,), str), np.empty(0, object))
    check_element(ArraySpec((None,), bytes), np.empty(0, object))


@given(st.binary(max_size=60))
def test_invalid_encoded_specs_are_rejected(data: bytes) -> None:
    with pytest.raises(DataLossError):
        decode_spec(b"\x92" + data + b"\xc1")


def test_missing_classes_are_replaced() -> None:
    for cls in (Pair, Example):
        spec = cls(ArraySpec((), "i4"), ArraySpec((2,), "f4"))
        sent = encode_spec(spec)
        assert type(decode_spec(sent)) is cls
        # A module of this name, of equal length, is not imported: it must not be looked for.
        away = sent.replace(b"tests.element", b"tests.absent_")
        made = decode_spec(away)
        assert type(made) is not cls
        assert type(made).__name__ == cls.__name__
        assert type(decode_spec(encode_spec(made))) is type(made)
        assert decode_spec(encode_spec(made)) == made


def test_a_class_with_other_fields_is_not_used() -> None:
    sent = encode_spec(Pair(ArraySpec((), "i4"), ArraySpec((2,), "f4")))
    made = decode_spec(sent.replace(b"label", b"other"))
    assert type(made) is not Pair
    assert made.other == ArraySpec((2,), "f4")
    with pytest.raises(DataLossError, match="not a class of plain fields"):
        decode_spec(sent.replace(b"label", b"a b c"))


def test_a_spec_of_one_element_fixes_structure_dtypes_and_axes() -> None:
    spec = {"x": ArraySpec((3, 4), np.uint8, name="image"), "y": (ArraySpec((), bytes),)}

    assert relax_lengths(spec) == {
        "x": ArraySpec((None, None), np.uint8, name="image"),
        "y": (ArraySpec((), bytes),),
    }


# Structures as plain values: whatever can be described can be read, and the other way round.


def nested(depth: int) -> Any:
    element: Any = np.int64(1)
    for _ in range(depth):
        element = (element,)
    return element


def structure_of(element: Any) -> Structure:
    return flatten(element)[1]


def test_too_deep_structures_are_rejected_by_the_sender() -> None:
    described = [encode_structure(structure_of(nested(depth))) for depth in range(99, 102)]
    for depth, description in zip(range(99, 102), described, strict=True):
        assert decode_structure(description) == structure_of(nested(depth))
    with pytest.raises(InvalidElementError, match="nested more than 100 levels deep"):
        encode_structure(structure_of(nested(102)))
    with pytest.raises(InvalidElementError, match="fewer nested dicts and tuples"):
        encode(Chunk.of_rows([nested(200)]))


def test_fields_of_missing_classes_may_start_with_an_underscore() -> None:
    @dataclasses.dataclass
    class Point:  # a class in a function cannot be found by its name
        x: Any
        _weight: Any

    (row,) = decode(encode(Chunk.of_rows([Point(np.int64(1), np.int64(2))]))).rows()
    assert dataclasses.asdict(row) == {"x": 1, "_weight": 2}
    assert type(row).__qualname__ == Point.__qualname__


# --- what a peer may not say ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "described",
    [
        7,
        [3],
        [3, [], 5],
        [3, ["a"], [0]],  # a tuple has no keys
        [9, ["a"], [0]],
        [2, ["a", "a"], [0, 0]],
        [2, ["a"], [0, 0]],
        [2, [1.5], [0]],
        [2, [None], [0]],
        [4, ["x"], [0]],
        [4, ["x"], [0], "module", "Name", "more"],
        [5, ["x"], [0], "module", 3],
        [5, ["x"], [0], "m" * 2000, "Name"],
        [5, ["class"], [0], "module", "Name"],
        [5, ["no name"], [0], "module", "Name"],
        [5, ["__init__"], [0], "module", "Name"],
        [4, ["_x"], [0], "module", "Name"],
        [5, ["x"], [0], "module", "no name"],
    ],
)
def test_invalid_structure_descriptions_are_rejected(described: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_structure(described)


@pytest.mark.parametrize(
    "described",
    [
        3,
        None,
        "",
        "x8",
        "O",
        "|O",
        "float8_nothing",
        "<f8,<f8",
        ["<f8"],
        ["<f8", [-1]],
        ["<f8", ["2"]],
        [8, True, [["a", "<f8", -8]]],
        [8, True, [[3, "<f8", 0]]],
        [1 << 70, True, [["a", "<f8", 0]]],
    ],
)
def test_invalid_dtype_descriptions_are_rejected(described: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_dtype(described)


class Closing:
    """A class that acts when an instance goes away, with the fields of a dataclass."""

    deleted = 0

    def __del__(self) -> None:
        type(self).deleted += 1


@dataclasses.dataclass
class Acting(Closing):
    x: Any


@dataclasses.dataclass
class Other:
    y: Any


@pytest.mark.parametrize("name", ["Acting", "Other", "Closing.deleted", "Missing", "np.ndarray"])
def test_a_class_that_differs_from_its_description_is_replaced(name: str) -> None:
    structure = decode_structure([5, ["x"], [0], __name__, name])
    assert structure.root.cls is not None
    assert structure.root.cls not in (Acting, Other)
    assert structure.root.cls.__qualname__ == name
    assert [field.name for field in dataclasses.fields(structure.root.cls)] == ["x"]
    assert not hasattr(structure.root.cls, "__del__")


def test_the_class_of_that_name_and_these_fields_is_found() -> None:
    assert decode_structure([5, ["y"], [0], __name__, "Other"]).root.cls is Other
