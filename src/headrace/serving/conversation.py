"""Conversation: numbered requests and what answers them, whatever becomes of the connection.

At the asking end, a `Window`:

Rule 1. Requests are numbered 0, 1, 2, ...; one without an answer is repeated under its own number.
Rule 2. Answers are taken in the order of their numbers, each once.
Rule 3. A number is acknowledged when what came under it, and under all before it, is used up. Each
        request says below which number all are.

At the answering end, a `Delivery`:

Rule 4. A portion is given to one client under one number, once; asked again, the same one returns.
Rule 5. A portion is forgotten when the client acknowledges its number, or is silent for too long.
Rule 6. A number that was acknowledged is never answered again, nor is one whose portion was
        forgotten because of silence.

So nothing is lost or doubled by a connection that breaks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Delivery", "Window"]

A = TypeVar("A")
P = TypeVar("P")

_RUNS = 64
"""Runs of elements that are told apart; far more than requests are under way at once. What lies
below them all counts as seen."""


class Window(Generic[A]):
    """The asking end: numbers out, answers in, in order."""

    def __init__(self) -> None:
        self._next = 0
        #: Sent, and no answer yet.
        self._unanswered: set[int] = set()
        #: Came before an answer with a lower number.
        self._early: dict[int, A] = {}
        #: The number whose answer is taken next.
        self._due = 0
        #: Taken, and not used up.
        self._in_use: set[int] = set()
        #: Runs of elements that were seen, in order; the gaps are others', or are yet to come.
        self._seen: list[tuple[int, int]] = []

    def awaits(self, number: int) -> bool:
        """Whether an answer to this request would be the first."""
        return number in self._unanswered

    @property
    def unanswered(self) -> int:
        """Requests without an answer."""
        return len(self._unanswered)

    @property
    def outstanding(self) -> int:
        """Requests without an answer, and answers not used up."""
        return self._next - self._due + len(self._in_use)

    @property
    def acknowledged(self) -> int:
        """All numbers below this one are done with."""
        return min(self._in_use, default=self._due)

    def ask(self) -> int:
        """Return the number for a new request."""
        number = self._next
        self._next += 1
        self._unanswered.add(number)
        return number

    def to_repeat(self) -> list[int]:
        """Return the numbers to send again after the connection was lost, in order."""
        return sorted(self._unanswered)

    def take(self, number: int, answer: A) -> list[tuple[int, A]]:
        """Return the answers whose turn has come with this one, in order; none for a repeat."""
        if number not in self._unanswered:
            return []
        self._unanswered.discard(number)
        self._early[number] = answer
        due: list[tuple[int, A]] = []
        while self._due in self._early:
            due.append((self._due, self._early.pop(self._due)))
            self._in_use.add(self._due)
            self._due += 1
        return due

    def is_new(self, first: int, count: int) -> bool:
        """Whether none of elements `first` to `first + count` - 1 was seen before; they are now.

        They ascend as they are handed out, and mostly as they are taken; not where a request was
        refused, and is asked again after later ones were answered.
        """
        if not count:
            return True
        last = first + count
        place = bisect_left(self._seen, (first, first))
        if place and self._seen[place - 1][1] > first:
            return False
        if place < len(self._seen) and self._seen[place][0] < last:
            return False
        self._seen.insert(place, (first, last))
        self._join(place)
        return True

    def _join(self, place: int) -> None:
        """Join a run with those that it touches, and the lowest two where there are too many."""
        seen = self._seen
        if place + 1 < len(seen) and seen[place][1] == seen[place + 1][0]:
            seen[place : place + 2] = [(seen[place][0], seen[place + 1][1])]
        if place and seen[place - 1][1] == seen[place][0]:
            seen[place - 1 : place + 1] = [(seen[place - 1][0], seen[place][1])]
        if len(seen) > _RUNS:
            seen[:2] = [(seen[0][0], seen[1][1])]

    def use_up(self, number: int) -> None:
        """Take note that nothing of the answer to this number is left. May be said twice."""
        self._in_use.discard(number)


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
    """The answering end: portions that clients were given and have not acknowledged."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client[P]] = {}
        #: The sum of the clients' sizes.
        self._size = 0

    @property
    def clients_ever(self) -> int:
        """Number of clients that have asked so far."""
        return len(self._clients)

    @property
    def clients(self) -> Set[str]:
        """Those that have asked so far."""
        return self._clients.keys()

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

    def hear(self, client_id: str, acknowledged: int, now: float) -> list[P]:
        """Take note of a request: all numbers below `acknowledged` have arrived.

        Returns:
            The portions that are forgotten by it.
        """
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(last_heard=now)
        client.last_heard = now
        used: list[P] = []
        if acknowledged > client.acknowledged:
            client.acknowledged = acknowledged
            for number in [n for n in client.given if n < acknowledged]:
                portion, size = client.given.pop(number)
                used.append(portion)
                client.size -= size
                self._size -= size
            client.forgotten = {n for n in client.forgotten if n >= acknowledged}
        return used

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

    def given_to(self, client_id: str) -> list[P]:
        """Return the portions that a client was given and has not acknowledged."""
        client = self._clients.get(client_id)
        return [] if client is None else [portion for portion, _ in client.given.values()]

    def forget(self, client_id: str) -> None:
        """Forget the portions of a client that is gone."""
        client = self._clients.get(client_id)
        if client is not None:
            client.given.clear()
            self._size -= client.size
            client.size = 0

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
