"""Checks of arguments with uniform messages, from `batch` to a server's port.

A message reads: `name` must be X, but got Y.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from headrace.errors import FailedPreconditionError

__all__ = [
    "check_callable",
    "check_flag",
    "check_instance",
    "check_int",
    "check_metrics",
    "check_path",
    "check_seconds",
    "check_state_version",
    "check_string",
    "check_strings",
]


def check_int(
    name: str,
    value: object,
    *,
    minimum: int,
    maximum: int | None = None,
    or_one_of: Sequence[int] = (),
) -> int:
    """Return `value` as an int of at least `minimum` (or one of `or_one_of`).

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is less than `minimum` or greater than `maximum`.
    """
    if type(value) is int and value >= minimum and maximum is None:
        return value  # nearly always
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, but got {_format_value(value)}")
    if value < minimum and value not in or_one_of:
        allowed = "".join(f" or {other}" for other in or_one_of)
        raise ValueError(f"`{name}` must be at least {minimum}{allowed}, but got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"`{name}` must be at most {maximum}, but got {value}")
    return int(value)


def check_flag(name: str, value: object, *, or_none: bool = True) -> None:
    """Raise TypeError unless `value` is a bool, or None where that is allowed."""
    if isinstance(value, bool | np.bool_) or (or_none and value is None):
        return
    raise TypeError(
        f"`{name}` must be a bool{' or None' if or_none else ''}, but got {_format_value(value)}"
    )


def check_string(name: str, value: object, *, empty: bool = True) -> None:
    """Check that `value` is a string.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        empty: Whether it may be empty.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is empty and may not be.
    """
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, but got {_format_value(value)}")
    if not value and not empty:
        raise ValueError(f"`{name}` must not be empty, but got ''")


def check_metrics(port: object, host: object) -> None:
    """Check the address of metrics: `metrics_port`, which may be None, and `metrics_host`.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If the port is invalid, or the host is empty.
    """
    if port is not None:
        check_int("metrics_port", port, minimum=0, maximum=65535)
    check_string("metrics_host", host, empty=False)


def check_strings(name: str, values: object) -> None:
    """Check that `values` is a sequence of strings, none of them empty.

    Raises:
        TypeError: If it is not a sequence, is a single string, or holds other values.
        ValueError: If one of them is empty.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"`{name}` must be a list of strings, but got {_format_value(values)}")
    for position, value in enumerate(values):
        check_string(f"{name}[{position}]", value, empty=False)


def check_path(name: str, value: object) -> None:
    """Check that `value` is a path, as a string or a path object.

    Raises:
        TypeError: If it is not.
        ValueError: If it is empty.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"`{name}` must be a path, but got {_format_value(value)}")
    if not os.fspath(value):
        raise ValueError(f"`{name}` must not be empty, but got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Check that `value` is a positive number of seconds.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is 0, negative or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"`{name}` must be a number of seconds, but got {_format_value(value)}")
    if not value > 0:
        raise ValueError(f"`{name}` must be more than 0 seconds, but got {value}")


def check_state_version(found: object, version: int) -> None:
    """Check that a state has the supported version.

    Raises:
        FailedPreconditionError: If it has another version.
    """
    if found != version:
        raise FailedPreconditionError(
            f"the state has version {found!r}, but this version of Headrace reads "
            f"version {version}; start the epoch again, or restore it with the version "
            "of Headrace that saved it"
        )


def check_instance(name: str, value: object, kind: type, *, fix: str = "") -> None:
    """Raise TypeError unless `value` is a `kind`; `fix` says how to get one."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"`{name}` must be {article} {kind.__name__}, but got {_format_value(value)}"
            f"{f'; {fix}' if fix else ''}"
        )


def check_callable(name: str, value: object) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, but got {_format_value(value)}")


def _format_value(value: object) -> str:
    """Return a value and its type, shortened to fit on a line."""
    kind = type(value).__name__
    text = repr(value)
    if "\n" in text or len(text) > _MAX_REPR_LENGTH:
        return f"a value of type {kind}"
    return text if value is None or isinstance(value, bool) else f"{text} of type {kind}"


_MAX_REPR_LENGTH = 120
