"""A scope in which a variable on parameter servers is read once, and keeps that value."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from numpy.typing import NDArray

__all__ = ["cache_variable_reads", "cached_reads"]

_reads: ContextVar[dict[Any, NDArray[Any]] | None] = ContextVar("headrace_reads", default=None)


@contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Read each variable on parameter servers once; later reads in the scope give that value.

    >>> import headrace as hr
    >>> with hr.distribute.cache_variable_reads():
    ...     pass  # here v.read() is the same after v.assign, by whomever

    A variable is asked for when it is read first, all of it. Rows are taken of what was read, if
    all was. It holds for the thread, and for replicas that `run` starts in it.

    Raises:
        ValueError: Scopes are nested.
    """
    if _reads.get() is not None:
        raise ValueError("cache_variable_reads scope cannot be nested")
    token = _reads.set({})
    try:
        yield
    finally:
        _reads.reset(token)


def cached_reads() -> MutableMapping[Any, NDArray[Any]] | None:
    """Return what was read in this scope, by variable; None: it is read each time."""
    return _reads.get()
