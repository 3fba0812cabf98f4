"""Structures as plain values: whatever can be described can be read, and the other way round."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.element.description import decode_dtype, decode_structure, encode_structure
from headrace.element.structure import Structure, flatten
from headrace.element.wire import decode, encode
from headrace.errors import InvalidElementError


def nested(depth: int) -> Any:
    element: Any = np.int64(1)
    for _ in range(depth):
        element = (element,)
    return element


def structure_of(element: Any) -> Structure:
    return flatten(element)[1]


def test_what_is_too_deep_to_be_read_is_refused_where_it_is_sent() -> None:
    described = [encode_structure(structure_of(nested(depth))) for depth in range(99, 102)]
    for depth, description in zip(range(99, 102), described, strict=True):
        assert decode_structure(description) == structure_of(nested(depth))
    with pytest.raises(InvalidElementError, match="nested more than 100 deep"):
        encode_structure(structure_of(nested(102)))
    with pytest.raises(InvalidElementError, match="fewer dicts and tuples"):
        encode(Chunk.of_rows([nested(200)]))


def test_a_field_may_begin_with_an_underscore_where_the_class_is_not_known() -> None:
    @dataclasses.dataclass
    class Point:  # a class in a function is found by nobody else
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
def test_what_describes_no_structure_is_refused(described: Any) -> None:
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
def test_what_describes_no_dtype_is_refused(described: Any) -> None:
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
def test_a_class_that_is_not_what_was_described_is_stood_in_for(name: str) -> None:
    structure = decode_structure([5, ["x"], [0], __name__, name])
    assert structure.root.cls is not None
    assert structure.root.cls not in (Acting, Other)
    assert structure.root.cls.__qualname__ == name
    assert [field.name for field in dataclasses.fields(structure.root.cls)] == ["x"]
    assert not hasattr(structure.root.cls, "__del__")


def test_the_class_of_that_name_and_these_fields_is_found() -> None:
    assert decode_structure([5, ["y"], [0], __name__, "Other"]).root.cls is Other
