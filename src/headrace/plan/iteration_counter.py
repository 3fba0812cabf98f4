"""Counter of the iterations over one source whose readers share a job."""

from __future__ import annotations

from typing import Protocol

__all__ = ["IterationCounter", "PeerIterations"]


class PeerIterations(Protocol):
    """Iterations begun by other processes on behalf of this one, or together with it."""

    def next(self) -> int:
        """Return the number after the iterations that they began on behalf of this process."""

    def note_joined(self) -> None:
        """Record that this process joined an iteration that had elements left."""

    def has_joined(self) -> bool:
        """Return whether one of them joined such an iteration."""


class IterationCounter:
    """Counter of the iterations that this process began over one source.

    A pickled copy starts at 0: each process counts its own iterations, so that processes which
    iterate equally often agree.
    """

    def __init__(self) -> None:
        self._next = 0
        self._has_joined = False
        #: Iteration that an iterator was restored to, until it is opened.
        self._restored: int | None = None
        self.peers: PeerIterations | None = None

    @property
    def next(self) -> int:
        """Number of the next iteration."""
        return self._next if self.peers is None else max(self._next, self.peers.next())

    def advance(self, number: int) -> None:
        """Record that iteration `number` and all before it have begun. Idempotent."""
        self._next = max(self._next, number + 1)

    def note_restored(self, number: int) -> None:
        """Record that an iterator was restored to a position in iteration `number`."""
        self._restored = number

    def take_restored(self, number: int) -> bool:
        """Return whether iteration `number` is opened for the first time since its restore."""
        restored, self._restored = self._restored, None
        return restored == number

    @property
    def has_joined(self) -> bool:
        """Whether an iteration was joined from its start while it had elements left."""
        return self._has_joined or (self.peers is not None and self.peers.has_joined())

    def note_joined(self) -> None:
        """Record that an iteration was joined from its start while it had elements left."""
        if self.peers is not None and not self._has_joined:
            self.peers.note_joined()
        self._has_joined = True

    def __reduce__(self) -> tuple[type[IterationCounter], tuple[()]]:
        return IterationCounter, ()
