"""Results of user functions belong to the receiver and are copied only if necessary."""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given

from headrace.element.normalize import normalize
from headrace.element.ownership import take_ownership
from headrace.element.structure import flatten
from headrace.errors import InvalidElementError
from headrace.testing.conformance import are_equal
from tests.element import strategies

#: Elsewhere everything is copied.
counts_references = sys.implementation.name == "cpython" and not sysconfig.get_config_var(
    "Py_GIL_DISABLED"
)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    x: Any


TABLE = np.arange(12.0).reshape(4, 3)
BUFFER = np.zeros(3)
HELD_TUPLE = (np.ones(3), np.int64(1))
HELD_DICT = {"x": np.ones(3)}
HELD_DEEP = {"x": (np.ones(3), {"y": np.ones(2)})}
HELD_PAIR = Pair(np.ones(3), np.ones(3))
HELD_RECORD = Record(np.ones(3))
READ_ONLY = np.ones(3)
READ_ONLY.flags.writeable = False
WORDS = np.array([b"a", b"bc"], object)
STRUCTURED = np.zeros(3, [("a", "i4"), ("b", "f8")])
WEAK: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def weakly_kept() -> Any:
    WEAK["x"] = array = np.ones(3)
    return array


def mapped() -> Any:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(64))
        file.flush()
        return np.memmap(file, np.float64, "r+")


def all_of(value: Any) -> list[Any]:
    return [leaf for leaf in flatten(normalize(value))[0] if isinstance(leaf, np.ndarray | np.void)]


SHARED: dict[str, Callable[[], Any]] = {
    "a buffer": lambda: BUFFER,
    "a row of a table": lambda: TABLE[1],
    "a part of a table, transposed": lambda: TABLE.T[1:],
    "in a new dict": lambda: {"x": BUFFER, "y": 1},
    "in a new tuple": lambda: (TABLE[0], TABLE[1]),
    "a tuple that is kept": lambda: HELD_TUPLE,
    "a kept tuple in a new one": lambda: (HELD_TUPLE, 1),
    "a dict that is kept": lambda: HELD_DICT,
    "a kept dict in a new one": lambda: {"a": HELD_DICT},
    "a kept nest": lambda: HELD_DEEP,
    "a kept namedtuple": lambda: HELD_PAIR,
    "a kept dataclass": lambda: HELD_RECORD,
    "an ordered dict": lambda: OrderedDict(HELD_DICT),
    "a read-only array": lambda: READ_ONLY,
    "object array": lambda: WORDS,
    "structured array": lambda: STRUCTURED,
    "structured scalar": lambda: STRUCTURED[1],
    "structured array without axes": lambda: STRUCTURED[1:2].reshape(()),
    "subclass": lambda: TABLE.view(np.matrix),
    "weakly kept": weakly_kept,
}


@pytest.mark.parametrize("name", list(SHARED))
def test_a_shared_object_is_copied(name: str) -> None:
    make = SHARED[name]
    theirs = all_of(make())
    before = [np.array(array) for array in theirs]

    element = take_ownership(make())

    for array in all_of(element):
        assert isinstance(array, np.void) or array.flags.writeable
        for other in (*theirs, *WEAK.values()):
            assert not np.shares_memory(array, other)
    assert are_equal(element, normalize(make()))
    for array, value in zip(theirs, before, strict=True):
        assert np.array_equal(array, value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.broadcast_to(np.ones(3), (4, 3)),
        lambda: np.broadcast_arrays(np.ones((1, 3)), np.ones((4, 1)))[0],
        lambda: np.lib.stride_tricks.sliding_window_view(np.arange(9.0), 3),
        lambda: np.lib.stride_tricks.as_strided(np.arange(9.0), (4, 3), (8, 8)),
        lambda: np.ndarray((4, 3), buffer=np.arange(9.0), strides=(8, 8)),
        lambda: np.ndarray((2, 4), np.float64, np.arange(9.0), strides=(0, 8)),
        lambda: np.frombuffer(bytes(24)),
        lambda: np.frombuffer(bytearray(24)),
        lambda: np.diagonal(np.ones((3, 3))),
        mapped,
    ],
)
def test_an_owned_array_is_writable(make: Callable[[], Any]) -> None:
    array = take_ownership(make())

    assert type(array) is np.ndarray
    array[...] = np.arange(array.size).reshape(array.shape)
    assert array.ravel().tolist() == list(range(array.size))


@pytest.mark.parametrize(
    "twice",
    [
        lambda x: (x, x),
        lambda x: {"a": x, "b": x},
        lambda x: (x, x[1:]),
        lambda x: (x[:2], x[1:]),
        lambda x: {"a": (x, 1), "b": {"c": x}},
        lambda x: Pair(x, x),
        lambda x: Record((x, x)),
    ],
)
def test_components_do_not_share_memory(twice: Callable[[Any], Any]) -> None:
    arrays = all_of(take_ownership(twice(np.arange(3.0))))

    assert not np.shares_memory(*arrays)


def test_retained_containers_are_not_returned() -> None:
    kept: dict[str, Any] = {"x": {"y": np.int64(1)}, "z": np.int64(2)}

    def give() -> Any:
        return kept

    element = take_ownership(give())
    element["x"]["y"] = 5
    element["new"] = 1

    assert kept == {"x": {"y": 1}, "z": 2}


def test_a_retained_record_is_not_returned() -> None:
    element = take_ownership(HELD_RECORD)

    assert element is not HELD_RECORD
    assert are_equal(element, HELD_RECORD)


@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (lambda x: x, lambda v: v),
        (lambda x: {"x": x, "y": np.int64(1)}, lambda v: v["x"]),
        (lambda x: {"y": 1, "x": x}, lambda v: v["x"]),
        (lambda x: (x, np.int64(1)), lambda v: v[0]),
        (lambda x: (1, x), lambda v: v[1]),
        (lambda x: {"a": {"b": x, "c": 1}, "d": ()}, lambda v: v["a"]["b"]),
        (lambda x: ({"b": (1, x)}, 1), lambda v: v[0]["b"][1]),
        (lambda x: Pair(1, x), lambda v: v.right),
        (lambda x: x[1:], lambda v: v),
        (lambda x: {"x": x.T[1:], "y": 1.5}, lambda v: v["x"]),
        (lambda x: (x[::2].reshape(-1), 1), lambda v: v[0]),
    ],
)
def test_an_unshared_object_is_not_copied(
    wrap: Callable[[Any], Any], get: Callable[[Any], Any]
) -> None:
    addresses = []

    def make() -> Any:
        value = wrap(np.ones((4, 4)))
        addresses.append(get(value).ctypes.data)
        return value

    for _ in range(3):  # the same once the interpreter has specialised its code
        element = take_ownership(make())
        assert (get(element).ctypes.data == addresses[-1]) == counts_references


@given(strategies.elements)
def test_owned_elements_are_normalized(element: Any) -> None:
    if element is not None:
        assert strategies.same(take_ownership(element), normalize(element))


@pytest.mark.parametrize(
    "value",
    [3, 2.5, True, 1j, 1 << 63, "a", b"b", [1, 2], ["a"], np.array(3), np.array(["a", "b"]),
     {"a": 1, 2: None}, (1, 2.5), ((), {}), np.zeros(0), bytearray(b"x"), np.str_("s"), {}],
)  # fmt: skip
def test_take_ownership_converts_values_like_normalize(value: Any) -> None:
    assert are_equal(take_ownership(value), normalize(value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "the element is an object"),
        ({"a": {"b": object()}}, r"component \['a'\]\['b'\]"),
        ((1, 1 << 70), r"component \[1\] is the integer"),
        ({1.5: 2}, "keys must be str or int"),
        ({"a": [1, [2]]}, r"component \['a'\] is a list"),
        (None, "forget `return`"),
    ],
)
def test_an_invalid_element_is_named(value: Any, message: str) -> None:
    with pytest.raises(InvalidElementError, match=message):
        take_ownership(value)


def test_a_container_whose_reading_fails_is_an_error_of_the_element() -> None:
    class Broken(dict[str, int]):
        def __iter__(self) -> Any:
            raise StopIteration

        def keys(self) -> Any:
            raise StopIteration

        items = values = keys  # type: ignore[assignment]

    with pytest.raises(InvalidElementError):
        take_ownership(Broken(a=1))
