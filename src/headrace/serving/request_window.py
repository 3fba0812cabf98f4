"""Numbered requests and replies that survive lost connections.

On the client side, a `RequestWindow`:

Rule 1. Requests are numbered 0, 1, 2, ...; an unanswered one is resent under its number.
Rule 2. Replies are taken in the order of their numbers, each once.
Rule 3. A number is acknowledged once its reply, and all before it, were consumed. Each request
        carries the number below which all are acknowledged.

On the server side, an `UnacknowledgedReplies`:

Rule 4. A result batch is assigned to one client under one number; a repeated request gets the same.
Rule 5. A result batch is dropped when the client acknowledges its number, or expires.
Rule 6. A number that was acknowledged is never answered again, nor is one whose result batch was
        dropped because its client expired.

So a broken connection neither loses nor duplicates elements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["RequestWindow", "UnacknowledgedReplies"]

A = TypeVar("A")
P = TypeVar("P")

_MAX_RANGES = 64
"""Separate ranges of seen elements; far more than requests in flight. Elements below the lowest
range's end all count as seen."""


class RequestWindow(Generic[A]):
    """Client side: allocates request numbers, and orders replies."""

    def __init__(self) -> None:
        self._next_number = 0
        #: Requests sent and not answered.
        self._unanswered: set[int] = set()
        #: Replies received before a reply with a lower number.
        self._out_of_order: dict[int, A] = {}
        #: Number of the next reply to take.
        self._next_expected = 0
        #: Replies taken and not consumed.
        self._unconsumed: set[int] = set()
        #: Ascending ranges of seen elements; gaps belong to other clients or have not arrived.
        self._seen_ranges: list[tuple[int, int]] = []

    def is_unanswered(self, number: int) -> bool:
        """Return whether a reply to this request would be the first one."""
        return number in self._unanswered

    @property
    def num_unanswered(self) -> int:
        """Number of unanswered requests."""
        return len(self._unanswered)

    @property
    def num_outstanding(self) -> int:
        """Number of unanswered requests and unconsumed replies."""
        return self._next_number - self._next_expected + len(self._unconsumed)

    @property
    def acknowledged(self) -> int:
        """Number below which all replies were consumed."""
        return min(self._unconsumed, default=self._next_expected)

    def allocate(self) -> int:
        """Return the number of a new request."""
        number = self._next_number
        self._next_number += 1
        self._unanswered.add(number)
        return number

    def numbers_to_resend(self) -> list[int]:
        """Return the numbers to resend after the connection was lost, in order."""
        return sorted(self._unanswered)

    def accept(self, number: int, reply: A) -> list[tuple[int, A]]:
        """Accept a reply; return the replies that are now in order, none for a duplicate."""
        if number not in self._unanswered:
            return []
        self._unanswered.discard(number)
        self._out_of_order[number] = reply
        in_order: list[tuple[int, A]] = []
        while self._next_expected in self._out_of_order:
            in_order.append((self._next_expected, self._out_of_order.pop(self._next_expected)))
            self._unconsumed.add(self._next_expected)
            self._next_expected += 1
        return in_order

    def record_elements(self, first: int, count: int) -> bool:
        """Record elements `first` to `first + count` - 1; return whether none was seen before.

        Numbers ascend as the server assigns them, and usually as replies are taken; not if a
        request was refused, and is resent after later ones were answered.
        """
        if not count:
            return True
        last = first + count
        index = bisect_left(self._seen_ranges, (first, first))
        if index and self._seen_ranges[index - 1][1] > first:
            return False
        if index < len(self._seen_ranges) and self._seen_ranges[index][0] < last:
            return False
        self._seen_ranges.insert(index, (first, last))
        self._merge_ranges(index)
        return True

    def _merge_ranges(self, index: int) -> None:
        """Merge a range with adjacent ones, and the lowest two if there are too many."""
        seen = self._seen_ranges
        if index + 1 < len(seen) and seen[index][1] == seen[index + 1][0]:
            seen[index : index + 2] = [(seen[index][0], seen[index + 1][1])]
        if index and seen[index - 1][1] == seen[index][0]:
            seen[index - 1 : index + 1] = [(seen[index - 1][0], seen[index][1])]
        if len(seen) > _MAX_RANGES:
            seen[:2] = [(seen[0][0], seen[1][1])]

    def mark_consumed(self, number: int) -> None:
        """Mark the reply to this request as consumed. Idempotent."""
        self._unconsumed.discard(number)


@dataclass
class _ClientReplies(Generic[P]):
    last_heard: float
    acknowledged: int = 0
    #: Result batch and its bytes, by number.
    unacknowledged: dict[int, tuple[P, int]] = field(default_factory=dict)
    #: Total bytes of `unacknowledged`.
    size: int = 0
    #: Numbers whose result batches were dropped because the client expired.
    expired: set[int] = field(default_factory=set)


class UnacknowledgedReplies(Generic[P]):
    """Server side: result batches sent to clients and not acknowledged."""

    def __init__(self) -> None:
        self._clients: dict[str, _ClientReplies[P]] = {}
        #: Total bytes of all clients.
        self._size = 0

    @property
    def num_clients_seen(self) -> int:
        """Number of clients that have sent requests so far."""
        return len(self._clients)

    @property
    def clients(self) -> Set[str]:
        """Clients that have sent requests so far."""
        return self._clients.keys()

    @property
    def num_unacknowledged(self) -> int:
        """Number of result batches sent and not acknowledged."""
        return sum(len(client.unacknowledged) for client in self._clients.values())

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of the result batches sent and not acknowledged."""
        return self._size

    def batches(self) -> list[P]:
        """Return the result batches sent and not acknowledged."""
        return [
            result_batch
            for client in self._clients.values()
            for result_batch, _ in client.unacknowledged.values()
        ]

    def count_unacknowledged(self, client_id: str) -> tuple[int, int]:
        """Return number and bytes of the result batches that a client has not acknowledged."""
        client = self._clients.get(client_id)
        return (0, 0) if client is None else (len(client.unacknowledged), client.size)

    def acknowledge(self, client_id: str, acknowledged: int, now: float) -> list[P]:
        """Record a request, which acknowledges all numbers below `acknowledged`.

        Returns:
            The result batches that are dropped.
        """
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _ClientReplies(last_heard=now)
        client.last_heard = now
        dropped: list[P] = []
        if acknowledged > client.acknowledged:
            client.acknowledged = acknowledged
            for number in [n for n in client.unacknowledged if n < acknowledged]:
                result_batch, size = client.unacknowledged.pop(number)
                dropped.append(result_batch)
                client.size -= size
                self._size -= size
            client.expired = {n for n in client.expired if n >= acknowledged}
        return dropped

    def is_acknowledged(self, client_id: str, number: int) -> bool:
        """Return whether the client has acknowledged this number."""
        client = self._clients.get(client_id)
        return client is not None and number < client.acknowledged

    def is_expired(self, client_id: str, number: int) -> bool:
        """Return whether the reply to this number was dropped because the client expired."""
        client = self._clients.get(client_id)
        return client is not None and number in client.expired

    def find(self, client_id: str, number: int) -> P | None:
        """Return the result batch sent under this number, or None."""
        client = self._clients.get(client_id)
        sent = None if client is None else client.unacknowledged.get(number)
        return None if sent is None else sent[0]

    def record(self, client_id: str, number: int, batch: P, size: int = 0) -> None:
        """Record that a known client gets a result batch of `size` bytes."""
        client = self._clients[client_id]
        assert number not in client.unacknowledged, (
            f"request {number} of {client_id} was already answered"
        )
        client.unacknowledged[number] = batch, size
        client.size += size
        self._size += size

    def unacknowledged_by(self, client_id: str) -> list[P]:
        """Return the result batches that a client has not acknowledged."""
        client = self._clients.get(client_id)
        return (
            []
            if client is None
            else [result_batch for result_batch, _ in client.unacknowledged.values()]
        )

    def drop_client(self, client_id: str) -> None:
        """Drop the result batches of a lost client."""
        client = self._clients.get(client_id)
        if client is not None:
            client.unacknowledged.clear()
            self._size -= client.size
            client.size = 0

    def expire_clients(self, now: float, timeout: float) -> list[P]:
        """Drop the result batches of clients that were silent for `timeout` seconds.

        Returns:
            The result batches that are dropped.
        """
        lost: list[P] = []
        for client in self._clients.values():
            if client.unacknowledged and now - client.last_heard > timeout:
                lost.extend(result_batch for result_batch, _ in client.unacknowledged.values())
                client.expired.update(client.unacknowledged)
                client.unacknowledged.clear()
                self._size -= client.size
                client.size = 0
        return lost
