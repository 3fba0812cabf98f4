"""What clients see of an error in a task."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import DataLossError, HeadraceError, OutOfRangeError, UserFunctionError
from headrace.service.worker.client_errors import format_error, to_client_error


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised(error: BaseException) -> BaseException:
    """Return the error as it comes out of a user's function."""

    def users_function() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        users_function()
    return caught.value


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()],
)
def test_what_is_no_exception_becomes_an_error_of_the_users_function(error: BaseException) -> None:
    said = to_client_error(raised(error))
    assert isinstance(said, UserFunctionError)
    assert said.original_type == type(error).__name__
    assert "in users_function" in said.original_traceback
    assert "in users_function" in str(said)


@pytest.mark.parametrize("error", [StopIteration(5), OutOfRangeError("nothing left")])
def test_what_would_end_a_loop_becomes_an_error_of_the_users_function(error: Exception) -> None:
    said = to_client_error(raised(error))
    assert isinstance(said, UserFunctionError)
    assert not isinstance(said, StopIteration)
    assert said.original_type == type(error).__name__


def test_errors_of_headrace_pass_as_they_are_and_others_keep_their_class_in_words() -> None:
    torn = DataLossError("torn")
    assert to_client_error(torn) is torn
    said = to_client_error(MemoryError("3 GB"))
    assert type(said) is HeadraceError
    assert str(said) == "MemoryError: 3 GB"


def test_an_error_that_cannot_say_its_words_is_described_all_the_same() -> None:
    assert format_error(WordlessError()) == (
        "WordlessError: (no message: its __str__ raised RuntimeError)"
    )
    assert "WordlessError" in str(to_client_error(WordlessError()))
