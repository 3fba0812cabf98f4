"""Delivery: which frame each client got under which number; a repeated request gets it again.

Rule 1. A frame is given to one client under one number, once; asked again, the same frame returns.
Rule 2. A frame is forgotten when the client acknowledges its number, or is silent for too long.
Rule 3. A number that was acknowledged is never answered again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Delivery"]

F = TypeVar("F")


@dataclass
class _Client(Generic[F]):
    last_heard: float
    acknowledged: int = 0
    given: dict[int, F] = field(default_factory=dict)


class Delivery(Generic[F]):
    """The frames of one task that clients were given and have not acknowledged."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client[F]] = {}
        self._ever: set[str] = set()

    @property
    def clients_ever(self) -> int:
        """Number of clients that have asked so far."""
        return len(self._ever)

    @property
    def unacknowledged(self) -> int:
        """Frames that were given and not acknowledged."""
        return sum(len(client.given) for client in self._clients.values())

    def hear(self, client_id: str, acknowledged: int, now: float) -> None:
        """Take note of a request: all numbers below `acknowledged` have arrived."""
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(last_heard=now)
            self._ever.add(client_id)
        client.last_heard = now
        if acknowledged > client.acknowledged:
            client.acknowledged = acknowledged
            for number in [n for n in client.given if n < acknowledged]:
                del client.given[number]

    def is_over(self, client_id: str, number: int) -> bool:
        """Whether the client said that it has the answer to this number."""
        client = self._clients.get(client_id)
        return client is not None and number < client.acknowledged

    def find(self, client_id: str, number: int) -> F | None:
        """Return the frame that was given under this number, or None."""
        client = self._clients.get(client_id)
        return None if client is None else client.given.get(number)

    def give(self, client_id: str, number: int, frame: F) -> None:
        """Record that the client, heard of before, gets `frame` under this number."""
        given = self._clients[client_id].given
        assert number not in given, f"number {number} of {client_id} was answered already"
        given[number] = frame

    def forget_silent(self, now: float, silence: float) -> None:
        """Forget the frames of clients that were not heard of for `silence` seconds."""
        for client_id in [c for c, s in self._clients.items() if now - s.last_heard > silence]:
            del self._clients[client_id]
