"""Which server is asked for which store, where each store is on two of them.

Rule 1. Store k is on servers k and k + 1. The first that answers for it is asked on; when it is
        gone, or says that it does not lead, the other one is.
Rule 2. The other one hears when the first was found gone or empty: only then may it take over.
Rule 3. Where both are found empty, the store begins empty, or is restored.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from headrace.parameter_server.acknowledged import START, Position
from headrace.parameter_server.messages import CarryOut, Lead, RestoreShards, SaveShards

__all__ = ["Leaders", "Placed"]

A = TypeVar("A", CarryOut, SaveShards | RestoreShards)


class Placed(NamedTuple):
    """Where a store is looked for.

    Attributes:
        place: 0 for the first server that may have it, 1 for the second.
        gone: Whether each of the two was found gone or empty, since one has answered.
        vacant: Whether each of the two was found empty.
    """

    place: int = 0
    gone: tuple[bool, bool] = (False, False)
    vacant: tuple[bool, bool] = (False, False)


class Leaders:
    """Where each store is looked for; without replicas, store k is on server k alone.

    Args:
        addresses: Of the servers.
        replication: How many servers have each store.
    """

    def __init__(self, addresses: tuple[str, ...], replication: int) -> None:
        self._addresses = addresses
        self.are_two = replication == 2
        #: A record is replaced whole: threads that find the same out do no harm to each other.
        self._placed = [Placed()] * len(addresses)

    def server_of(self, store: int) -> int:
        """Return which server is to be asked for a store."""
        return (store + self._placed[store].place) % len(self._addresses)

    def to_store(self, message: A, store: int, seen: Position = START) -> A:
        """Return a message as the server that is asked for the store is to get it.

        Args:
            message: What is asked.
            store: Its number.
            seen: Up to where operations on the contents that it is meant for are acknowledged.
        """
        if not self.are_two:
            return message
        place, gone, _ = self._placed[store]
        return msgspec.structs.replace(message, store=store, insists=gone[1 - place], seen=seen)

    def answered(self, store: int, server: int) -> None:
        """Take note that a server has answered for a store."""
        if self.are_two:
            self._placed[store] = Placed(place=int(server != store))

    def is_gone(self, store: int, server: int) -> None:
        """Take note that a server could not be reached; the other one is asked next."""
        self._not_here(store, server, is_gone=True, is_vacant=False)

    def is_elsewhere(self, store: int, server: int, *, is_vacant: bool) -> None:
        """Take note that a server does not lead a store; the other one is asked next."""
        self._not_here(store, server, is_gone=is_vacant, is_vacant=is_vacant)

    def _not_here(self, store: int, server: int, *, is_gone: bool, is_vacant: bool) -> None:
        if self.are_two:
            place = int(server != store)
            _, gone, vacant = self._placed[store]
            self._placed[store] = Placed(
                1 - place, _with(gone, place, is_gone), _with(vacant, place, is_vacant)
            )

    def beginning(self, store: int) -> Lead | None:
        """Return what has a store begin empty, for its first server, where both have nothing."""
        placed = self._placed[store]
        if placed.vacant != (True, True):
            return None
        self._placed[store] = Placed()
        second = (store + 1) % len(self._addresses)
        return Lead(store=store, seats=(self._addresses[store], self._addresses[second]))


def _with(of_both: tuple[bool, bool], place: int, value: bool) -> tuple[bool, bool]:
    return (value, of_both[1]) if place == 0 else (of_both[0], value)
