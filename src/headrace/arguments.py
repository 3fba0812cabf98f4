"""Checks of arguments: one wording for all that take numbers, flags and functions from users."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["check_callable", "check_flag", "check_int", "check_string"]


def check_int(name: str, value: object, *, minimum: int, also: Sequence[int] = ()) -> int:
    """Return `value` as an int of at least `minimum` (or one of `also`).

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, but got {_shown(value)}")
    if value < minimum and value not in also:
        allowed = "".join(f" or {other}" for other in also)
        raise ValueError(f"`{name}` must be at least {minimum}{allowed}, but got {value}")
    return int(value)


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool or None."""
    if value is not None and not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be a bool or None, but got {value!r}")


def check_string(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a string."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, but got {value!r}")


def check_callable(name: str, value: object) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, but got {_shown(value)}")


def _shown(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"
