"""`scan` and `take_while`, and values of the user's in states."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

import headrace as hr
from headrace.element.structure import flatten
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.scanning import decode_value, encode_value

from .battery import assert_restores_everywhere

# --- A value that goes from element to element, and an end by a predicate -------------------------

Dataset = hr.Dataset


def summed(total, x):
    return total + x, (total, x)


def outcomes(dataset):
    """Return the elements as Python values, and errors as (type, position)."""
    got = []
    with iter(dataset) as iterator:
        while True:
            try:
                got.append(np.asarray(next(iterator)).tolist())
            except StopIteration:
                return got
            except UserFunctionError as error:
                got.append((error.original_type, error.position))
            except InvalidElementError as error:
                got.append(str(error))


# --- scan ---------------------------------------------------------------------------------------


def test_a_scan_hands_its_value_from_element_to_element():
    totals = Dataset.range(1, 6).scan(10, lambda total, x: (total + x, total * x))
    assert outcomes(totals) == [10, 22, 39, 64, 100]
    nested = (
        Dataset.range(3)
        .enumerate()
        .scan(
            {"n": 0, "last": (0, 0)},
            lambda s, pair: ({"n": s["n"] + 1, "last": pair}, s["last"][0]),
        )
    )
    assert outcomes(nested) == [0, 0, 1]


def test_each_iteration_begins_with_the_first_value_whatever_became_of_it():
    first = np.zeros(1, np.int64)

    def count(value, x):
        value += 1
        return value, value

    dataset = Dataset.range(3).scan(first, count)
    first += 50
    assert outcomes(dataset) == outcomes(dataset) == [[1], [2], [3]]
    assert outcomes(dataset.repeat(2)) == [[1], [2], [3], [1], [2], [3]]


def test_the_function_owns_what_it_is_given_and_a_state_is_a_snapshot():
    kept = []

    def note(value, x):
        kept.append(value)
        for one in kept:
            one += 1  # whatever it held on to
        return value, {"x": value, "y": value}

    def run():
        kept.clear()
        return iter(Dataset.range(6).scan(np.zeros(2, np.int64), note))

    states, elements = [], []
    with run() as iterator:
        for _ in range(6):
            states.append(iterator.get_state())
            elements.append({key: part.copy() for key, part in next(iterator).items()})
        texts = [json.dumps(state["at"]["stream"]) for state in states]
    assert [element["x"].tolist() for element in elements] == [[n, n] for n in range(1, 7)]
    with run() as iterator:
        for number, element in enumerate(iterator):
            assert element["x"].tolist() == element["y"].tolist() == [number + 1] * 2
            element["x"] += 100  # what was yielded is its consumer's
            if number < 5:
                after = iterator.get_state()["at"]["stream"]
                assert json.dumps(after) == texts[number + 1]


def test_a_function_that_fails_costs_one_element_and_leaves_the_value():
    def odd(total, x):
        if x % 2:
            raise KeyError(int(x))
        return total + x, total

    assert outcomes(Dataset.range(6).scan(0, odd)) == [
        0, ("KeyError", 1), 0, ("KeyError", 3), 2, ("KeyError", 5),
    ]  # fmt: skip
    batches = Dataset.range(6).scan(0, odd).batch(2)
    assert [one for one in outcomes(batches) if isinstance(one, list)] == [[0, 0], [2]]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1, 2], r"scan \(test_scanning.py:\d+\): `scan_func` must return a tuple"),
        ((1, 2, 3), "returned tuple of 3"),
        ((1, None), "None is not an element"),
        (None, "did the function forget `return`"),
        ((object(), 1), "not an element"),
    ],
)
def test_what_a_scan_cannot_use_is_named_with_its_step(returned, said):
    dataset = Dataset.range(3).scan(0, lambda value, x: returned)
    with pytest.raises(InvalidElementError, match=said):
        list(dataset)


def test_a_scan_is_called_once_for_each_element_that_was_asked_for():
    calls = []

    def note(value, x):
        calls.append(int(x))
        return value + 1, x

    with iter(Dataset.range(5000).scan(0, note).take(1000)) as iterator:
        for count in range(1, 501):
            next(iterator)
            assert len(calls) == count


def test_a_state_of_a_scan_goes_on_without_calls_for_what_was_before():
    calls = []

    def note(value, x):
        calls.append(int(x))
        return value + x, value

    dataset = Dataset.range(100).map(lambda x: x).scan(np.int32(0), note)
    with iter(dataset) as iterator:
        for _ in range(50):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
    calls.clear()
    with iter(dataset) as iterator:
        iterator.set_state(state)
        element = next(iterator)
    assert (element.dtype, int(element), calls) == (np.int64, sum(range(50)), [50])


@pytest.mark.parametrize("first", [b"a", "ü", (np.zeros((2, 0)), {"k": np.float16(1)}), None])
def test_any_element_may_be_the_value_of_a_scan(first):
    assert_restores_everywhere(lambda: Dataset.range(7).scan(first, lambda value, x: (value, x)))


def test_a_scan_knows_its_number_of_elements_and_finds_its_spec():
    dataset = Dataset.range(7).scan(np.float32(0), lambda value, x: (value, (value, x)))
    assert dataset.cardinality() == 7
    assert dataset.element_spec == (hr.ArraySpec((), np.float32), hr.ArraySpec((), np.int64))
    with pytest.raises(TypeError, match="`scan_func` must be a function"):
        Dataset.range(3).scan(0, 5)


# --- take_while -----------------------------------------------------------------------------------


def plain_below_five(x):
    return bool(x < 5)


@pytest.mark.parametrize("predicate", [plain_below_five, lambda x: x < 5])
def test_elements_come_up_to_the_first_that_is_refused(predicate):
    numbers = [0, 3, 5, 1, 9, 2]
    dataset = Dataset.from_tensor_slices(np.array(numbers)).take_while(predicate)
    assert outcomes(dataset) == [0, 3]
    assert outcomes(dataset.repeat(2)) == [0, 3, 0, 3]
    assert outcomes(Dataset.range(5000).take_while(lambda x: x < 3000)) == list(range(3000))
    assert outcomes(Dataset.range(0).take_while(predicate)) == []
    assert dataset.cardinality() == hr.UNKNOWN_CARDINALITY
    assert dataset.element_spec == hr.ArraySpec((), np.int64)


def test_after_the_end_there_is_nothing_though_the_predicate_would_allow_it():
    asked = []

    def is_small(x):
        asked.append(int(x))
        return len(asked) != 3

    with iter(Dataset.range(9).take_while(is_small)) as iterator:
        assert [int(x) for x in iterator] == [0, 1]
        assert list(iterator) == []
        assert asked == [0, 1, 2]


def test_a_predicate_that_fails_costs_one_element():
    def is_small(x):
        if x == 2:
            raise KeyError
        return x < 4

    assert outcomes(Dataset.range(9).take_while(is_small)) == [0, 1, ("KeyError", 2), 3]


# --- Values in states: equal bit for bit, in memory of their own ----------------------------------

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
