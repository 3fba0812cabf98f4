"""Values in states: what is read back is equal bit for bit, and shares no memory with anything."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

from headrace.element.structure import flatten
from headrace.execution.values import decode_value, encode_value

Pair = namedtuple("Pair", "a b")
FIELDS = np.dtype([("id", "<i8"), ("x", ">f4", (2,))])


@dataclass
class Example:
    x: np.ndarray
    name: str


VALUES = {
    "int": np.int64(-3),
    "unsigned": np.uint8(250),
    "nan": np.float32("nan"),
    "negative zero": np.float64(-0.0),
    "bool": np.bool_(True),
    "complex": np.complex64(1 - 2j),
    "date": np.datetime64("2024-02-03", "D"),
    "span": np.timedelta64(7, "ms"),
    "bytes": b"\x00\xff",
    "text": "grün \U0001f40d \ud800",
    "nothing": None,
    "array": np.arange(6.0).reshape(2, 3),
    "empty array": np.zeros((0, 4), np.int16),
    "big endian": np.arange(3, dtype=">u2"),
    "order of Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "fields": np.array([(1, (2, 3)), (4, (5, 6))], FIELDS),
    "one with fields": np.array([(1, (2, 3))], FIELDS)[0],
    "array of bytes": np.array([[b"a", b""], [b"\x00", b"bc"]], object),
    "array of text": np.array(["ä", ""], object),
    "array of no text": np.empty((0,), object),
    "nested": {"a": (np.int64(1), {3: np.arange(2)}), "b": Pair("x", None), "c": ()},
    "dataclass": Example(np.arange(2), "n"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_read_back_bit_for_bit(name):
    value = VALUES[name]
    made = decode_value(json.loads(json.dumps(encode_value(value))))
    wanted, structure = flatten(value)
    found, other = flatten(made)
    assert other == structure
    for one, want in zip(found, wanted, strict=True):
        assert type(one) is type(want)
        if isinstance(want, np.ndarray | np.generic):
            assert (one.dtype, one.shape) == (want.dtype, want.shape)
            assert (
                one.tolist() == want.tolist()
                if one.dtype.kind == "O"
                else (one.tobytes() == want.tobytes())
            )
        else:
            assert one == want


def test_an_array_that_is_read_back_can_be_written_to():
    saved = encode_value({"x": np.zeros(3)})
    one, other = decode_value(saved), decode_value(saved)
    one["x"] += 1
    assert other["x"].tolist() == [0, 0, 0]


def test_a_number_takes_some_bytes_and_an_array_a_third_more_than_it_has():
    assert len(json.dumps(encode_value(np.int64(7)))) < 50
    assert len(json.dumps(encode_value(np.zeros(3000, np.uint8)))) < 4100
