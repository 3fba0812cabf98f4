"""Checks of arguments: one wording for all that users pass, from `batch` to a server's port.

A message reads: `name` must be this, but got that.
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
    also: Sequence[int] = (),
) -> int:
    """Return `value` as an int of at least `minimum` (or one of `also`).

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small, or larger than `maximum`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, but got {_shown(value)}")
    if value < minimum and value not in also:
        allowed = "".join(f" or {other}" for other in also)
        raise ValueError(f"`{name}` must be at least {minimum}{allowed}, but got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"`{name}` must be at most {maximum}, but got {value}")
    return int(value)


def check_flag(name: str, value: object, *, or_none: bool = True) -> None:
    """Raise TypeError unless `value` is a bool, or None where that is allowed."""
    if isinstance(value, bool | np.bool_) or (or_none and value is None):
        return
    raise TypeError(
        f"`{name}` must be a bool{' or None' if or_none else ''}, but got {_shown(value)}"
    )


def check_string(name: str, value: object, *, empty: bool = True) -> None:
    """Check that `value` is a string.

    Args:
        name: Of the argument.
        value: What was passed.
        empty: Whether it may be empty.

    Raises:
        TypeError: It is none.
        ValueError: It is empty and may not be.
    """
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, but got {_shown(value)}")
    if not value and not empty:
        raise ValueError(f"`{name}` must not be empty, but got ''")


def check_metrics(port: object, host: object) -> None:
    """Check where metrics are served: `metrics_port`, which may be None, and `metrics_host`.

    Raises:
        TypeError: One is of another type.
        ValueError: It is no port, or the host is empty.
    """
    if port is not None:
        check_int("metrics_port", port, minimum=0, maximum=65535)
    check_string("metrics_host", host, empty=False)


def check_strings(name: str, values: object) -> None:
    """Check that `values` is a sequence of strings, none of them empty.

    Raises:
        TypeError: It is no sequence, a string by itself, or holds something else.
        ValueError: One of them is empty.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"`{name}` must be a list of strings, but got {_shown(values)}")
    for position, value in enumerate(values):
        check_string(f"{name}[{position}]", value, empty=False)


def check_path(name: str, value: object) -> None:
    """Check that `value` is a path, as a string or an object.

    Raises:
        TypeError: It is none.
        ValueError: It is empty.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"`{name}` must be a path, but got {_shown(value)}")
    if not os.fspath(value):
        raise ValueError(f"`{name}` must not be empty, but got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Refuse what is no number of seconds above 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is 0, negative, or not a number (NaN).
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"`{name}` must be a number of seconds, but got {_shown(value)}")
    if not value > 0:
        raise ValueError(f"`{name}` must be more than 0 seconds, but got {value}")


def check_state_version(found: object, version: int) -> None:
    """Refuse a `state` of another version than the one that is read.

    Raises:
        FailedPreconditionError: It is of another.
    """
    if found != version:
        raise FailedPreconditionError(
            f"the state has version {found!r}, and this Headrace reads version {version}; begin "
            "the pass again, or restore it with the Headrace that saved it"
        )


def check_instance(name: str, value: object, kind: type, *, cure: str = "") -> None:
    """Raise TypeError unless `value` is a `kind`; `cure` says how to get one."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"`{name}` must be {article} {kind.__name__}, but got {_shown(value)}"
            f"{f'; {cure}' if cure else ''}"
        )


def check_callable(name: str, value: object) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, but got {_shown(value)}")


def _shown(value: object) -> str:
    """Return a value and its type, short enough for a line."""
    kind = type(value).__name__
    text = repr(value)
    if "\n" in text or len(text) > _LONGEST_REPR:
        return f"a value of type {kind}"
    return text if value is None or isinstance(value, bool) else f"{text} of type {kind}"


_LONGEST_REPR = 120
