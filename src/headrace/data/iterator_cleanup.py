"""Cleanup of open iterators at interpreter exit and in forked children.

At exit, iterators are closed while all their dependencies still work, so that no server waits for a
reader that left without notice. `atexit` runs callbacks in reverse order of registration, and
`weakref.finalize` registers its own on first use in the process. That may be long before the
network library registers its cleanup, which would then run before ours.

A forked child has the memory of its parent's iterators, but not their threads. It continues from
the position of each iterator at the fork. The parent's running iterators are left untouched,
because closing them would close the parent's files.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.forks import call_in_children

__all__ = [
    "close_at_exit",
    "close_iterators",
    "close_or_detach",
    "detach_in_forked_children",
    "register_close_iterators",
]


_close_callbacks: weakref.WeakKeyDictionary[Any, Callable[[], object]] = weakref.WeakKeyDictionary()


def close_at_exit(iterator: Any, close: Callable[[], object]) -> None:
    """Register `close` to be called at interpreter exit if the iterator is still alive.

    Args:
        iterator: Object whose life is tracked by a weak reference.
        close: Function that raises no error and is idempotent.
    """
    _close_callbacks[iterator] = close


def close_iterators() -> None:
    """Close all open iterators, the newest first."""
    for _, close in reversed(list(_close_callbacks.items())):
        close()


def register_close_iterators() -> None:
    """Register closing of iterators at exit, before all callbacks registered until now."""
    atexit.register(close_iterators)


T = TypeVar("T")


def detach_in_forked_children(iterator: T, detach: Callable[[T], object]) -> None:
    """Register `detach(iterator)` to be called in each child forked while the iterator is alive.

    Args:
        iterator: The object; each child has a copy of it.
        detach: Function that detaches from running iterators without closing them, and returns
            them.
    """
    _detach_callbacks[iterator] = detach


def close_or_detach(close: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Return a function that closes running iterators, or detaches from them in a forked child.

    Objects of other threads may be dropped in a child before any fork callback runs.
    """

    def close_or_leave(running: list[Any]) -> None:
        if os.getpid() == _owner_pid:
            close(running)
        else:
            _detached.extend(running)

    return close_or_leave


def _detach_after_fork() -> None:
    global _owner_pid
    _owner_pid = os.getpid()
    _detached.extend([leave(iterator) for iterator, leave in list(_detach_callbacks.items())])


_detach_callbacks: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = (
    weakref.WeakKeyDictionary()
)
_owner_pid = os.getpid()
"""Process that owns the running iterators."""
_detached: list[object] = []
"""The parent's running iterators. Never released, because that might close them."""

call_in_children(_detach_after_fork)
