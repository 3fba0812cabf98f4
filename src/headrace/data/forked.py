"""What becomes of iterators in a forked child: it has their memory, and none of their threads.

A child goes on by itself at the place where the iterator stood when it was forked. What ran for the
parent stays as it is: to close it would close the parent's files.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.forks import in_each_child

__all__ = ["leave_in_children", "unless_left"]

T = TypeVar("T")


def leave_in_children(iterator: T, leave: Callable[[T], object]) -> None:
    """Have `leave(iterator)` called in each child that is forked while the iterator is alive.

    Args:
        iterator: What a child has a copy of.
        leave: Lets go of what runs, without closing it, and returns it.
    """
    _alive[iterator] = leave


def unless_left(close: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Return what closes what runs, or lets go of it in a child that has not left it yet.

    What other threads kept for themselves is dropped in a child before any call of a fork's.
    """

    def close_or_leave(running: list[Any]) -> None:
        if os.getpid() == _process:
            close(running)
        else:
            _left.extend(running)

    return close_or_leave


def _after_fork() -> None:
    global _process
    _process = os.getpid()
    _left.extend([leave(iterator) for iterator, leave in list(_alive.items())])


_alive: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
_process = os.getpid()
"""Whose iterators those are."""
_left: list[object] = []
"""What the parent runs. Never let go of: that, too, may close it."""

in_each_child(_after_fork)
