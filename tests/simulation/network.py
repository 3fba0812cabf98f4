"""The network of a simulation: connections that are late, cut off for a while, or lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import UnavailableError
from headrace.transport.envelope import decode_error, encode_error
from tests.simulation.kernel import SILENCE_TIMEOUT, Process, Simulation

__all__ = ["Conditions", "Connection", "Link", "Network", "Request"]

_HANDSHAKE_TIMEOUT = 5.0

OnRequest: TypeAlias = Callable[["Request"], None]
OnAnswer: TypeAlias = Callable[[int, Any, Any], None]
OnLost: TypeAlias = Callable[[UnavailableError], None]
OnClientLost: TypeAlias = Callable[["Connection"], None]


@dataclass
class Conditions:
    """How messages travel at present."""

    latency: float = 0.001
    late: float = 0.0
    """The probability that a message is late."""
    lateness: float = 1.0
    """Seconds that it is late at most."""
    twice: float = 0.0
    """The probability that a request is delivered twice, to a server that accepts repeats."""


class _Listener(NamedTuple):
    process: Process
    handle: OnRequest
    accepts_repeats: bool
    on_client_lost: OnClientLost | None


class Network:
    """Who listens where, and what gets through.

    Args:
        simulation: Where it is.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.conditions = Conditions()
        self.connection_count = 0
        self._listeners: dict[str, _Listener] = {}
        #: Pairs of names -> until when nothing gets from one to the other.
        self._partitions: dict[frozenset[str], float] = {}

    def listen(
        self,
        process: Process,
        address: str,
        handle: OnRequest,
        *,
        accepts_repeats: bool = False,
        on_client_lost: OnClientLost | None = None,
    ) -> None:
        """Have a process handle requests to an address while it is up.

        Args:
            process: Which.
            address: Where.
            handle: Called with each request.
            accepts_repeats: Whether requests may be delivered twice.
            on_client_lost: Called with a connection that was lost, after its last request.
        """
        self._listeners[address] = _Listener(process, handle, accepts_repeats, on_client_lost)

    def find(self, address: str) -> _Listener | None:
        """Return who listens at an address."""
        found = self._listeners.get(address)
        return None if found is None or not found.process.is_up else found

    def partition(self, one: Process, other: Process, seconds: float) -> None:
        """Let nothing get from one to the other for a while."""
        pair = frozenset((one.name, other.name))
        until = self.simulation.now + seconds
        self._partitions[pair] = max(until, self._partitions.get(pair, 0.0))

        def give_up() -> None:
            if self._partitions.get(pair, 0.0) > self.simulation.now:
                for each in list(one.connections.values()):
                    if {each.client, each.server} == {one, other}:
                        each.lose(refused=False, why="nothing gets through")

        if seconds > SILENCE_TIMEOUT:
            self.simulation.call_later(SILENCE_TIMEOUT, give_up)

    def reset(self, process: Process) -> None:
        """Break one connection of a process, or none if it has none."""
        connections = [each for each in process.connections.values() if each.server is not None]
        if connections:
            self.simulation.random.choice(connections).lose(refused=True, why="reset")

    def heal(self) -> None:
        """End all partitions, and whatever makes messages late."""
        self.conditions = Conditions()
        self._partitions.clear()

    def delay(self, one: Process, other: Process) -> float:
        """Return how long a message takes that is sent now."""
        random, conditions = self.simulation.random, self.conditions
        delay = conditions.latency * (0.5 + random.random())
        if conditions.late and random.random() < conditions.late:
            delay += random.random() * conditions.lateness
        if self._partitions:
            until = self._partitions.get(frozenset((one.name, other.name)), 0.0)
            delay = max(delay, until - self.simulation.now)
        return delay


class Request:
    """A request as the server sees it.

    Attributes:
        connection: Through which it came.
        message: What is asked.
        is_repeat: Whether it was delivered before; nobody hears the answer.
    """

    def __init__(
        self, connection: Connection, ticket: int, message: Any, *, is_repeat: bool = False
    ) -> None:
        self.connection, self.message, self.is_repeat = connection, message, is_repeat
        self._ticket = ticket

    def reply(self, message: Any, content: Any = None) -> None:
        if not self.is_repeat:
            self.connection.answer(self._ticket, message, content)

    def fail(self, error: Exception) -> None:
        self.reply(decode_error(encode_error(error)))

    def drop(self) -> None:
        """Break the connection in place of an answer."""
        if not self.is_repeat:
            self.connection.lose(refused=True, why="reset before an answer")


class Link:
    """A client's way to one address; it connects when something is to be sent.

    Args:
        network: To which the address belongs.
        client: Who sends.
        address: To which.
        answered: Called with a ticket, the message that answers it, and its content.
        lost: Called once when a connection breaks on which requests are unanswered.
    """

    def __init__(
        self, network: Network, client: Process, address: str, answered: OnAnswer, lost: OnLost
    ) -> None:
        self.network, self.client, self.address = network, client, address
        self.answered, self.lost = answered, lost
        self.unanswered: set[int] = set()
        self.connection: Connection | None = None
        self._last_ticket = 0

    def send(self, message: Any) -> int:
        """Send a request; return its ticket."""
        if self.connection is None or (self.connection.is_lost and not self.unanswered):
            self.connection = Connection(self)
        self._last_ticket += 1
        self.unanswered.add(self._last_ticket)
        self.connection.send(self._last_ticket, message)
        return self._last_ticket

    def close(self) -> None:
        """Forget everything; requests that were sent arrive."""
        if self.connection is not None:
            self.connection.forget()
        self.connection = None
        self.unanswered.clear()


class Connection:
    """One connection of a link, from the first message to its loss.

    A crashed server refuses it at once. A server that is paused or cut off is only silent, and the
    connection is lost after `SILENCE_TIMEOUT`. Answers that are under way are lost with it;
    requests perhaps.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.client, self._network = link, link.client, link.network
        self._simulation = self._network.simulation
        self._network.connection_count += 1
        self.number = self._network.connection_count
        self.client.connections[self.number] = self
        self._lost_at = math.inf
        self._requests_survive = self._is_established = False
        #: When the last request arrives, and the last answer.
        self._request_at = self._answer_at = 0.0
        self._listener = self._network.find(link.address)
        self.server = None if self._listener is None else self._listener.process
        if self.server is None:
            self.lose(refused=True, why=f"nobody listens at {link.address}")
            return
        self.server.connections[self.number] = self
        if self.server.is_paused:
            self._simulation.call_later(_HANDSHAKE_TIMEOUT, self._give_up)

    @property
    def is_lost(self) -> bool:
        return self._lost_at < math.inf

    def _give_up(self) -> None:
        if not self._is_established and self.server is not None and self.server.is_paused:
            self.lose(refused=False, why=f"{self.server.name} does not answer")

    def send(self, ticket: int, message: Any) -> None:
        """Send a request, and perhaps once more."""
        if self.is_lost or self.server is None or self._listener is None:
            return  # the loss is on its way
        network, simulation, listener = self._network, self._simulation, self._listener
        delay = network.delay(self.client, self.server)
        arrival = self._request_at = max(self._request_at, simulation.now + delay)
        request = Request(self, ticket, message)

        def deliver() -> None:
            if arrival <= self._lost_at or self._requests_survive:
                self._is_established = True
                listener.handle(request)

        simulation.call_later(arrival - simulation.now, deliver, self.server)
        twice = network.conditions.twice
        if listener.accepts_repeats and twice and simulation.random.random() < twice:
            repeat = Request(self, ticket, message, is_repeat=True)
            later = arrival - simulation.now + network.delay(self.client, self.server)
            simulation.call_later(later, lambda: listener.handle(repeat), self.server)

    def answer(self, ticket: int, message: Any, content: Any) -> None:
        """Send an answer back."""
        if self.is_lost or self.server is None:
            return
        simulation, link = self._simulation, self._link
        delay = self._network.delay(self.server, self.client)
        arrival = self._answer_at = max(self._answer_at, simulation.now + delay)

        def deliver() -> None:
            if link.connection is self and arrival <= self._lost_at and ticket in link.unanswered:
                link.unanswered.discard(ticket)
                link.answered(ticket, message, content)

        simulation.call_later(arrival - simulation.now, deliver, self.client)

    def lose(self, *, refused: bool, why: str) -> None:
        """Break; each end hears of it."""
        if self.is_lost:
            return
        simulation, link, listener = self._simulation, self._link, self._listener
        self.forget()
        self._lost_at = simulation.now
        self._requests_survive = self._is_established and simulation.random.random() < 0.5
        error = UnavailableError(f"the connection to {link.address} was lost: {why}")
        error.refused = refused

        def tell_client() -> None:
            if link.connection is self and link.unanswered:
                link.unanswered.clear()
                link.lost(error)

        simulation.log(self.client.name, "loses", link.address, why)
        latency = simulation.random.random() * self._network.conditions.latency
        simulation.call_later(latency, tell_client, self.client)
        if listener is not None and (on_client_lost := listener.on_client_lost) is not None:
            last = self._request_at - simulation.now if self._requests_survive else 0.0
            simulation.call_later(max(0.0, last), lambda: on_client_lost(self), listener.process)

    def forget(self) -> None:
        """Let neither end look after this connection."""
        for end in (self.client, self.server):
            if end is not None:
                end.connections.pop(self.number, None)
