"""Errors of a task as reported to clients."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import DataLossError, HeadraceError, OutOfRangeError, UserFunctionError
from headrace.service.worker.client_errors import format_error, to_client_error


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def raised(error: BaseException) -> BaseException:
    """Return the error with a traceback through a user function."""

    def users_function() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        users_function()
    return caught.value


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()],
)
def test_an_error_that_is_no_exception_becomes_a_user_function_error(error: BaseException) -> None:
    converted = to_client_error(raised(error))
    assert isinstance(converted, UserFunctionError)
    assert converted.original_type == type(error).__name__
    assert "in users_function" in converted.original_traceback
    assert "in users_function" in str(converted)


@pytest.mark.parametrize("error", [StopIteration(5), OutOfRangeError("nothing left")])
def test_an_error_that_would_end_a_loop_becomes_a_user_function_error(error: Exception) -> None:
    converted = to_client_error(raised(error))
    assert isinstance(converted, UserFunctionError)
    assert not isinstance(converted, StopIteration)
    assert converted.original_type == type(error).__name__


def test_headrace_errors_are_unchanged_and_others_are_named_by_class() -> None:
    torn = DataLossError("torn")
    assert to_client_error(torn) is torn
    converted = to_client_error(MemoryError("3 GB"))
    assert type(converted) is HeadraceError
    assert str(converted) == "MemoryError: 3 GB"


def test_an_error_whose_str_fails_is_described_by_its_class() -> None:
    assert format_error(UnprintableError()) == (
        "UnprintableError: (no message: its __str__ raised RuntimeError)"
    )
    assert "UnprintableError" in str(to_client_error(UnprintableError()))
