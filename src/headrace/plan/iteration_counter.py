"""Counts the iterations over one source whose readers share a job."""

from __future__ import annotations

from typing import Protocol

__all__ = ["IterationCounter", "OtherProcesses"]


class OtherProcesses(Protocol):
    """What processes that read on behalf of this one, or beside it, began."""

    def next(self) -> int:
        """Return the number after those that they began on behalf of this process."""

    def note_joined(self) -> None:
        """Note that this process joined an iteration which had elements left."""

    def has_joined(self) -> bool:
        """Whether one of them did."""


class IterationCounter:
    """Counts the iterations that this process began over one source.

    A pickled copy begins again at 0: each process counts its own, so that processes which iterate
    equally often agree.
    """

    def __init__(self) -> None:
        self._next = 0
        self._has_joined = False
        #: The iteration that an iterator was restored to, until it is opened.
        self._restored: int | None = None
        self.others: OtherProcesses | None = None

    @property
    def next(self) -> int:
        """The number of the next iteration."""
        return self._next if self.others is None else max(self._next, self.others.next())

    def advance(self, number: int) -> None:
        """Count iteration `number`, and those before it, as begun. Idempotent."""
        self._next = max(self._next, number + 1)

    def note_restored(self, number: int) -> None:
        """Note that an iterator was restored to a place in iteration `number`."""
        self._restored = number

    def take_restored(self, number: int) -> bool:
        """Return whether iteration `number` is opened for the first time since it was restored."""
        restored, self._restored = self._restored, None
        return restored == number

    @property
    def has_joined(self) -> bool:
        """Whether an iteration was joined from its start while it had elements left."""
        return self._has_joined or (self.others is not None and self.others.has_joined())

    def note_joined(self) -> None:
        """Note that an iteration was joined from its start while it had elements left."""
        if self.others is not None and not self._has_joined:
            self.others.note_joined()
        self._has_joined = True

    def __reduce__(self) -> tuple[type[IterationCounter], tuple[()]]:
        return IterationCounter, ()
