"""Delivery: which portion each client got under which number; a repeated request gets it again.

Rule 1. A portion is given to one client under one number, once; asked again, the same one returns.
Rule 2. A portion is forgotten when the client acknowledges its number, or is silent for too long.
Rule 3. A number that was acknowledged is never answered again, nor is one whose portion was
        forgotten because of silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Delivery"]

P = TypeVar("P")


@dataclass
class _Client(Generic[P]):
    last_heard: float
    acknowledged: int = 0
    #: By number: the portion and its bytes.
    given: dict[int, tuple[P, int]] = field(default_factory=dict)
    #: The sum of the bytes in `given`.
    size: int = 0
    #: Numbers whose portions were forgotten because the client was silent.
    forgotten: set[int] = field(default_factory=set)


class Delivery(Generic[P]):
    """The portions of one task that clients were given and have not acknowledged."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client[P]] = {}
        #: The sum of the clients' sizes.
        self._size = 0

    @property
    def clients_ever(self) -> int:
        """Number of clients that have asked so far."""
        return len(self._clients)

    @property
    def unacknowledged(self) -> int:
        """Portions that were given and not acknowledged."""
        return sum(len(client.given) for client in self._clients.values())

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the portions that were given and not acknowledged."""
        return self._size

    def portions(self) -> list[P]:
        """Return the portions that were given and not acknowledged."""
        return [
            portion for client in self._clients.values() for portion, _ in client.given.values()
        ]

    def held_by(self, client_id: str) -> tuple[int, int]:
        """Return how many portions a client has not acknowledged, and how many bytes they are."""
        client = self._clients.get(client_id)
        return (0, 0) if client is None else (len(client.given), client.size)

    def hear(self, client_id: str, acknowledged: int, now: float) -> None:
        """Take note of a request: all numbers below `acknowledged` have arrived."""
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(last_heard=now)
        client.last_heard = now
        if acknowledged > client.acknowledged:
            client.acknowledged = acknowledged
            for number in [n for n in client.given if n < acknowledged]:
                _, size = client.given.pop(number)
                client.size -= size
                self._size -= size
            client.forgotten = {n for n in client.forgotten if n >= acknowledged}

    def is_over(self, client_id: str, number: int) -> bool:
        """Whether the client said that it has the answer to this number."""
        client = self._clients.get(client_id)
        return client is not None and number < client.acknowledged

    def is_forgotten(self, client_id: str, number: int) -> bool:
        """Whether the answer to this number was forgotten because the client was silent."""
        client = self._clients.get(client_id)
        return client is not None and number in client.forgotten

    def find(self, client_id: str, number: int) -> P | None:
        """Return the portion that was given under this number, or None."""
        client = self._clients.get(client_id)
        given = None if client is None else client.given.get(number)
        return None if given is None else given[0]

    def give(self, client_id: str, number: int, portion: P, size: int = 0) -> None:
        """Record that the client, heard of before, gets a portion of `size` bytes."""
        client = self._clients[client_id]
        assert number not in client.given, f"number {number} of {client_id} was answered already"
        client.given[number] = portion, size
        client.size += size
        self._size += size

    def forget_silent(self, now: float, silence: float) -> list[P]:
        """Forget the portions of clients that were not heard of for `silence` seconds.

        Returns:
            The portions that are forgotten by it.
        """
        lost: list[P] = []
        for client in self._clients.values():
            if client.given and now - client.last_heard > silence:
                lost.extend(portion for portion, _ in client.given.values())
                client.forgotten.update(client.given)
                client.given.clear()
                self._size -= client.size
                client.size = 0
        return lost
