"""Normalization, flattening and unflattening of elements."""

from __future__ import annotations

import enum
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from headrace.element.normalize import normalize
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves, transpose
from headrace.errors import InvalidElementError
from tests.element.strategies import Example, Pair, elements, same


@given(elements)
def test_unflatten_reverses_flatten(element: Any) -> None:
    leaves, structure = flatten(element)
    assert structure.size == len(leaves) == len(structure.paths)
    assert same(unflatten(structure, leaves), element)


@given(elements)
def test_a_normalized_element_is_returned_unchanged(element: Any) -> None:
    assert normalize(element) is element


@given(elements)
def test_structures_compare_and_hash_by_value(element: Any) -> None:
    first, second = flatten(element)[1], Structure(flatten(element)[1].root)
    assert first == second
    assert hash(first) == hash(second)
    assert first != flatten((element,))[1]


def test_paths_name_the_leaves() -> None:
    element = ({"image": np.zeros(2), 3: b"x"}, Pair("a", Example(np.int8(1), None)))
    structure = flatten(element)[1]
    assert structure.paths == ["[0]['image']", "[0][3]", "[1].image", "[1].label.features"]
    assert flatten(np.zeros(2))[1].paths == [""]
    shown = "({'image': *, 3: *}, Pair(image=*, label=Example(features=*, weight=None)))"
    assert repr(structure) == f"Structure({shown})"


def test_too_few_leaves_are_rejected() -> None:
    with pytest.raises(ValueError, match="1 entries, but the structure has 2"):
        unflatten(flatten((1, 2))[1], [1])


def test_leaves_of_several_elements_are_matched_by_key() -> None:
    made = map_leaves(lambda a, b: a + b, {"x": 1, "y": 2}, {"y": 20, "x": 10})
    assert made == {"x": 11, "y": 22}
    assert list(made) == ["x", "y"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"x": (1, 2)}, r"at \['x'\], a leaf was expected, and element 0 has a tuple of 2"),
        ({"z": 1}, r"at the top level, a dict with keys \['x'\].*a dict with keys \['z'\]"),
        ((1,), "a tuple of 1"),
        (Pair(1, 2), "a Pair"),
        (None, "has None"),
    ],
)
def test_elements_of_different_structure_are_rejected(other: Any, words: str) -> None:
    with pytest.raises(InvalidElementError, match=words):
        map_leaves(lambda a, b: a, {"x": 1}, other)


def test_the_odd_one_among_many_is_named_by_position() -> None:
    with pytest.raises(InvalidElementError, match=r"at \[1\].*element 2 has a tuple of 2"):
        transpose([(1, (1,)), (1, (1,)), (1, (1, 2))])


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        (3, np.int64(3)),
        (2**63, np.uint64(2**63)),
        (1.5, np.float64(1.5)),
        (True, np.bool_(True)),
        (1j, np.complex128(1j)),
        ([1, 2], np.array([1, 2], np.int64)),
        ([[1.0], [2.0]], np.array([[1.0], [2.0]])),
        (np.array(3, np.int8), np.int8(3)),
        (np.array(b"x", object), b"x"),
        (np.str_("x"), "x"),
        (np.bytes_(b"x"), b"x"),
        (bytearray(b"x"), b"x"),
        (np.array(["a", "bc"]), np.array(["a", "bc"], object)),
        (np.array([b"a", b"bc"]), np.array([b"a", b"bc"], object)),
        (np.array([np.str_("a")], object), np.array(["a"], object)),
        (["a", "b\0"], np.array(["a", "b\0"], object)),
        ([b"a\0", b""], np.array([b"a\0", b""], object)),
        ({"a": 1, "b": (2, None)}, {"a": np.int64(1), "b": (np.int64(2), None)}),
        (Pair(1, "x"), Pair(np.int64(1), "x")),
        (Example(1, [2]), Example(np.int64(1), np.array([2]))),
        (enum.IntEnum("Colour", "RED").RED, np.int64(1)),  # type: ignore[attr-defined]
        (enum.StrEnum("Name", "ANNA").ANNA, "anna"),  # type: ignore[attr-defined]
        (np.arange(3).view(np.recarray), np.arange(3)),
    ],
)
def test_python_values_become_elements(given_value: Any, expected: Any) -> None:
    made = normalize(given_value)
    assert same(made, expected)
    assert normalize(made) is made


def test_objects_with_an_array_interface_become_arrays() -> None:
    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            return np.arange(3, dtype=np.float32)

    class Broken:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            raise RuntimeError("on another device")

    assert same(normalize({"x": Tensor()}), {"x": np.arange(3, dtype=np.float32)})
    with pytest.raises(InvalidElementError, match=r"component \['x'\].*on another device"):
        normalize({"x": Broken()})


def test_unchanged_parts_of_a_changed_element_keep_their_identity() -> None:
    array, part = np.zeros(3), {"a": np.zeros(2)}
    made = normalize((array, part, 1))
    assert made[0] is array
    assert made[1] is part


@pytest.mark.parametrize(
    "wrong",
    [
        {1, 2},
        (i for i in range(3)),
        object(),
        int,
        Pair,
        Example,
        [[1], [1, 2]],
        [{"a": 1}],
        ["a", 1],
        ["a", b"b"],
        [None],
        2**64,
        -(2**63) - 1,
        np.array([1, "a"], object),
        np.array(["a", b"b"], object),
        np.zeros(2, [("x", object)]),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_are_rejected_with_their_component(wrong: Any) -> None:
    with pytest.raises(InvalidElementError, match=r"component \['deep'\]\[1\] "):
        normalize({"deep": (np.int64(1), wrong)})
    with pytest.raises(InvalidElementError, match="the element is"):
        normalize(wrong) if not isinstance(wrong, np.ndarray) else normalize([wrong, {"a"}])


def test_keys_are_str_or_int() -> None:
    assert normalize({1: b"a"}) == {1: b"a"}
    with pytest.raises(InvalidElementError, match=r"key \(1, 2\) of type tuple; keys must be"):
        normalize({(1, 2): b"a"})


def test_a_dataclass_is_rebuilt_without_running_its_checks() -> None:
    @dataclass(frozen=True, slots=True)
    class Checked:
        scale: Any
        twice: Any = field(init=False)

        def __post_init__(self) -> None:
            if not isinstance(self.scale, int):
                raise TypeError("scale must be an int")
            object.__setattr__(self, "twice", 2 * self.scale)

    made = normalize(Checked(3))
    assert type(made) is Checked
    assert same((made.scale, made.twice), (np.int64(3), np.int64(6)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, r"is a set, which is not an element; sort it"),
        ((n for n in (1, 2)), "is a generator, .* convert its items to a list or an array"),
        (
            io.StringIO("text"),
            r"is an? _?io\.StringIO, .* read the file, and return its contents",
        ),
        (object(), "is an object, which is not an element; use arrays, numbers, bytes or str"),
    ],
    ids=["set", "generator", "file", "object"],
)
def test_an_invalid_element_is_rejected_with_a_fix(value: Any, words: str) -> None:
    with pytest.raises(InvalidElementError, match=words):
        normalize(value)
