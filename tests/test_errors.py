"""Tests of the error classes: their documented tree, builtin bases and pickling."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re
import sys

import pytest

import headrace as hr
from headrace import errors
from headrace.cluster.resolver import import_package
from headrace.element import description
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    MissingDependencyError,
    OutOfRangeError,
    UserFunctionError,
    describe_error,
)
from headrace.saved.arrow import pyarrow

DRAWN = re.findall(r"[├└]── (\w+) +\((\w+)\)", errors.__doc__ or "")


def test_error_tree_shows_every_class_with_its_builtin():
    found = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if cls is not HeadraceError and cls.__module__ == errors.__name__
    }
    assert sorted(found) == sorted(name for name, _ in DRAWN)
    for name, builtin in DRAWN:
        assert issubclass(found[name], HeadraceError)
        assert next(cls for cls in found[name].__mro__ if cls.__module__ == "builtins") is getattr(
            builtins, builtin
        )
    assert {name for name, _ in DRAWN} | {"HeadraceError", "describe_error"} == set(errors.__all__)


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("pyarrow", lambda: pyarrow()),
        ("lance", lambda: hr.LanceDataset("x.lance")),
        ("ml_dtypes", lambda: description.decode_dtype("int4")),
        ("ray", lambda: import_package("ray", needed_by="it")),
    ],
)
def test_a_missing_package_is_one_error_of_both_kinds(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    description._named_dtype.cache_clear()
    with pytest.raises(MissingDependencyError, match=f"{package}.* is not installed") as caught:
        call()
    assert isinstance(caught.value, FailedPreconditionError)
    assert isinstance(caught.value, ImportError)


def test_out_of_range_error_ends_a_loop():
    def one_and_the_end():
        yield 1
        yield 2

    numbers = one_and_the_end()

    class Reader:
        def __iter__(self):
            return self

        def __next__(self):
            number = next(numbers)
            if number == 2:
                raise OutOfRangeError("nothing is left")
            return number

    assert list(Reader()) == [1]


@pytest.mark.parametrize("name", [name for name, _ in DRAWN])
def test_errors_can_be_pickled(name):
    error = getattr(errors, name)("what was found; what would do")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_user_function_error_keeps_its_attributes():
    error = UserFunctionError(
        "f raised", position=7, original_type="KeyError", original_traceback="line 3"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.position, again.original_type, again.original_traceback) == (
        "f raised",
        7,
        "KeyError",
        "line 3",
    )


class MuteError(Exception):
    def __init__(self, instead: BaseException) -> None:
        self.instead = instead

    def __str__(self) -> str:
        raise self.instead


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("too small"), "ValueError: too small"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "SystemExit: 3"),
        (
            MuteError(RuntimeError("no")),
            "MuteError: (no message: __str__ raised RuntimeError)",
        ),
        (
            MuteError(SystemExit(1)),
            "MuteError: (no message: __str__ raised SystemExit)",
        ),
    ],
)
def test_any_error_has_a_description(error, words):
    assert describe_error(error) == words


def test_interrupt_during_description_is_raised():
    with pytest.raises(KeyboardInterrupt):
        describe_error(MuteError(KeyboardInterrupt()))
