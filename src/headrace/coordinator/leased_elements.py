"""Elements of a shared dataset, as a function that `run_epoch` calls sees them on its worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

from headrace.coordinator.closure import Payload
from headrace.coordinator.packing import unpack
from headrace.data.optional import Optional
from headrace.errors import OutOfRangeError

__all__ = ["LeasedElements"]


class LeasedElements:
    """An iterator over what this closure was given, and is given while it reads.

    Args:
        elements: Those that came with it.
        has_ended: There are no more after these.

    Attributes:
        ask: Called where there is none left; returns when there is one, or the end is known.
        met_end: Whether `next` has said that there is none.
    """

    def __init__(self, elements: Iterable[Payload], *, has_ended: bool) -> None:
        self._elements = deque(elements)
        self.num_given = len(self._elements)
        self.has_ended = has_ended
        self.met_end = False
        self.ask: Callable[[], None] = _ask_nobody
        self._lock = threading.Lock()

    @property
    def num_left(self) -> int:
        """Elements that were not asked for."""
        return len(self._elements)

    def feed(self, elements: list[Payload]) -> None:
        """Take more elements."""
        self._elements += elements
        self.num_given += len(elements)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: There is none; a StopIteration, too.
        """
        with self._lock:
            if not self._elements and not self.has_ended:
                self.ask()
            if not self._elements:
                self.met_end = True
                raise OutOfRangeError("the shared dataset has no more elements in this epoch")
            payload = self._elements.popleft()
        return unpack(payload)

    get_next = __next__

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an `Optional` without a value at the end."""
        try:
            return Optional(self.get_next())
        except OutOfRangeError:
            return Optional()


def _ask_nobody() -> None:
    return
