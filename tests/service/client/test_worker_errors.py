"""An element's error names the worker that it came from."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.service.client.worker_errors import add_worker_address
from headrace.transport.envelope import decode_error, encode_error

CLASSES = [kind for name in hr.errors.__all__ if isinstance(kind := getattr(hr.errors, name), type)]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_of_any_class_names_its_worker(kind: type[Exception]) -> None:
    sent = decode_error(encode_error(kind("no use for 7")))
    error = add_worker_address("10.0.0.3:5051", sent)
    assert type(error) is kind
    assert str(error) == "on the worker at 10.0.0.3:5051: no use for 7"


def test_other_attributes_of_an_error_are_unchanged() -> None:
    made = hr.errors.UserFunctionError(
        "the function f raised ValueError for element 7: odd\n\nOriginal traceback:\nabc",
        position=7,
        original_type="ValueError",
        original_traceback="abc",
    )
    error = add_worker_address("a:1", made)
    assert isinstance(error, hr.errors.UserFunctionError)
    assert (error.position, error.original_type) == (7, "ValueError")
    assert error.original_traceback == "abc"
    assert str(error).splitlines()[0] == (
        "on the worker at a:1: the function f raised ValueError for element 7: odd"
    )


def test_a_worker_is_named_once_after_repeated_calls() -> None:
    error = add_worker_address("host:1", add_worker_address("host:1", ValueError("bad")))
    assert str(error) == "on the worker at host:1: bad"
