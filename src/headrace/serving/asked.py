"""Asked: what was asked on one channel, until it is answered or nobody waits for it any more.

Whoever asks repeats a request that is not answered for long; an answer to an old one comes no more,
or does not matter.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Asked"]

Q = TypeVar("Q")

_FORGET_SECONDS = 30.0


class Asked(Generic[Q]):
    """Requests that wait for their answers, by the tickets of their channel."""

    def __init__(self) -> None:
        #: By ticket, the oldest first: when it was sent, and what.
        self._open: dict[int, tuple[float, Q]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def sent(self, ticket: int, request: Q, now: float) -> None:
        """Take note of a request; those that were sent long ago are forgotten."""
        for old, (at, _) in list(self._open.items()):
            if now - at <= _FORGET_SECONDS:
                break
            del self._open[old]
        self._open[ticket] = now, request

    def answered(self, ticket: int) -> Q | None:
        """Return what an answer is about; None: nobody waits for it."""
        _, request = self._open.pop(ticket, (0.0, None))
        return request

    def lost(self) -> list[Q]:
        """Take note that the connection is lost; return what was lost with it, the oldest first."""
        requests = [request for _, request in self._open.values()]
        self._open.clear()
        return requests
