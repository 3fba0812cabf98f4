"""Variables of the environment that a launcher sets for each process that it starts."""

from __future__ import annotations

import os

from headrace.errors import FailedPreconditionError, InvalidArgumentError

__all__ = ["read", "read_whole"]


def read(*names: str, launcher: str) -> str:
    """Return the first of some variables that is there.

    Args:
        *names: Of the variables.
        launcher: Who sets them, in words.

    Raises:
        FailedPreconditionError: None is there.
    """
    for name in names:
        if name in os.environ:
            return os.environ[name]
    raise FailedPreconditionError(
        f"{names[0]} is not in the environment: was this process started by {launcher}? Elsewhere "
        "use TFConfigClusterResolver or SimpleClusterResolver"
    )


def read_whole(*names: str, launcher: str) -> int:
    """Return the first of some variables that is there, as a number of 0 or more.

    Raises:
        FailedPreconditionError: None is there.
        InvalidArgumentError: It is no such number.
    """
    text = read(*names, launcher=launcher)
    if not text.isascii() or not text.strip().isdigit():
        raise InvalidArgumentError(f"{names[0]} must be an integer, but is {text!r}")
    return int(text)
