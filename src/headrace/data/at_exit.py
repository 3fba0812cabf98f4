"""What becomes of open iterators when the program ends, and in a forked child.

At the end they are closed while all that they use still works, so that nobody waits for a reader
that left without notice. Python calls at exit what was registered last first, and
`weakref.finalize` was registered by whoever used it first in this process: perhaps long before the
network's library, whose own end would then come before ours.

A forked child has the memory of its parent's iterators and none of their threads. It goes on by
itself at the place where an iterator stood at the fork. What ran for the parent is left alone: to
close it would close the parent's files.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.forks import in_each_child

__all__ = [
    "close_at_exit",
    "close_iterators",
    "close_iterators_first",
    "leave_in_children",
    "unless_left",
]


_open: weakref.WeakKeyDictionary[Any, Callable[[], object]] = weakref.WeakKeyDictionary()


def close_at_exit(iterator: Any, close: Callable[[], object]) -> None:
    """Have `close` called at the program's end, if the iterator is alive then.

    Args:
        iterator: Whoever holds it may drop it before.
        close: Raises nothing, and may be called twice.
    """
    _open[iterator] = close


def close_iterators() -> None:
    """Close all that are open, the last one first."""
    for _, close in reversed(list(_open.items())):
        close()


def close_iterators_first() -> None:
    """Have iterators closed, at the program's end, before all that was registered until now."""
    atexit.register(close_iterators)


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
