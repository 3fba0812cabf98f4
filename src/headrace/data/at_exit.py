"""What becomes of iterators that are open when the program ends.

They are closed while all that they use still works, so that nobody waits for a reader that left
without a word. Python calls at exit what was registered last first, and `weakref.finalize` was
registered by whoever used it first in this process: perhaps long before the network's library,
whose own end would then come before ours.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["close_at_exit", "close_iterators", "close_iterators_first"]

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
