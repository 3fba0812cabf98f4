"""Counts the iterations over one source whose readers share a job."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["IterationCounter"]


class IterationCounter:
    """Counts the iterations that this process began over one source.

    A pickled copy begins again at 0: each process counts its own, so that processes which iterate
    equally often agree.
    """

    def __init__(self) -> None:
        self._next = 0
        #: Returns the number after those that other processes began on behalf of this one.
        self.elsewhere: Callable[[], int] | None = None

    @property
    def next(self) -> int:
        """The number of the next iteration."""
        return self._next if self.elsewhere is None else max(self._next, self.elsewhere())

    def advance(self, number: int) -> None:
        """Count iteration `number`, and those before it, as begun. Idempotent."""
        self._next = max(self._next, number + 1)

    def __reduce__(self) -> tuple[type[IterationCounter], tuple[()]]:
        return IterationCounter, ()
