"""Network of a simulation: connections with delays, partitions and losses."""

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
    """Current transmission conditions."""

    latency: float = 0.001
    late: float = 0.0
    """Probability that a message is delayed."""
    lateness: float = 1.0
    """Maximum delay in seconds."""
    twice: float = 0.0
    """Probability that a request is delivered twice to a server that accepts repeats."""


class _Listener(NamedTuple):
    process: Process
    handle: OnRequest
    accepts_repeats: bool
    on_client_lost: OnClientLost | None


class Network:
    """Listeners, connections and partitions.

    Args:
        simulation: The simulation.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.conditions = Conditions()
        self.connection_count = 0
        self._listeners: dict[str, _Listener] = {}
        #: End of each partition by pair of process names.
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
        """Register a process as the listener at an address while it is up.

        Args:
            process: The listening process.
            address: Address to listen at.
            handle: Called with each request.
            accepts_repeats: Whether requests may be delivered twice.
            on_client_lost: Called with a connection that was lost, after its last request.
        """
        self._listeners[address] = _Listener(process, handle, accepts_repeats, on_client_lost)

    def find(self, address: str) -> _Listener | None:
        """Return the listener at an address, or None."""
        found = self._listeners.get(address)
        return None if found is None or not found.process.is_up else found

    def partition(self, one: Process, other: Process, seconds: float) -> None:
        """Block messages between two processes for a while."""
        pair = frozenset((one.name, other.name))
        until = self.simulation.now + seconds
        self._partitions[pair] = max(until, self._partitions.get(pair, 0.0))

        def give_up() -> None:
            if self._partitions.get(pair, 0.0) > self.simulation.now:
                for each in list(one.connections.values()):
                    if {each.client, each.server} == {one, other}:
                        each.lose(refused=False, why="partitioned")

        if seconds > SILENCE_TIMEOUT:
            self.simulation.call_later(SILENCE_TIMEOUT, give_up)

    def reset(self, process: Process) -> None:
        """Break one connection of a process, if it has any."""
        connections = [each for each in process.connections.values() if each.server is not None]
        if connections:
            self.simulation.random.choice(connections).lose(refused=True, why="reset")

    def heal(self) -> None:
        """End all partitions and delays."""
        self.conditions = Conditions()
        self._partitions.clear()

    def delay(self, one: Process, other: Process) -> float:
        """Return the transmission time of a message sent now."""
        random, conditions = self.simulation.random, self.conditions
        delay = conditions.latency * (0.5 + random.random())
        if conditions.late and random.random() < conditions.late:
            delay += random.random() * conditions.lateness
        if self._partitions:
            until = self._partitions.get(frozenset((one.name, other.name)), 0.0)
            delay = max(delay, until - self.simulation.now)
        return delay


class Request:
    """Request as received by the server.

    Attributes:
        connection: Connection that delivered it.
        message: Message of the request.
        is_repeat: Whether it was delivered before; its reply is dropped.
    """

    def __init__(
        self, connection: Connection, number: int, message: Any, *, is_repeat: bool = False
    ) -> None:
        self.connection, self.message, self.is_repeat = connection, message, is_repeat
        self._number = number

    def reply(self, message: Any, content: Any = None) -> None:
        if not self.is_repeat:
            self.connection.answer(self._number, message, content)

    def fail(self, error: Exception) -> None:
        self.reply(decode_error(encode_error(error)))

    def drop(self) -> None:
        """Break the connection instead of replying."""
        if not self.is_repeat:
            self.connection.lose(refused=True, why="reset before an answer")


class Link:
    """Client side of connections to one address; connects when a request is sent.

    Args:
        network: Network of the address.
        client: Sending process.
        address: Address of the server.
        answered: Called with a request number, the reply and its content.
        lost: Called once when a connection with unanswered requests breaks.
    """

    def __init__(
        self, network: Network, client: Process, address: str, answered: OnAnswer, lost: OnLost
    ) -> None:
        self.network, self.client, self.address = network, client, address
        self.answered, self.lost = answered, lost
        self.unanswered: set[int] = set()
        self.connection: Connection | None = None
        self._last_number = 0

    def send(self, message: Any) -> int:
        """Send a request; return its number."""
        if self.connection is None or (self.connection.is_lost and not self.unanswered):
            self.connection = Connection(self)
        self._last_number += 1
        self.unanswered.add(self._last_number)
        self.connection.send(self._last_number, message)
        return self._last_number

    def close(self) -> None:
        """Drop the connection; requests that were sent still arrive."""
        if self.connection is not None:
            self.connection.forget()
        self.connection = None
        self.unanswered.clear()


class Connection:
    """Connection of a link, from its first message to its loss.

    A crashed server refuses it at once. A paused or partitioned server is silent, and
    the connection is lost after `SILENCE_TIMEOUT`. Replies in transit are lost with it; requests
    may be lost or arrive.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.client, self._network = link, link.client, link.network
        self._simulation = self._network.simulation
        self._network.connection_count += 1
        self.number = self._network.connection_count
        self.client.connections[self.number] = self
        self._lost_at = math.inf
        self._requests_survive = self._is_established = False
        #: Arrival times of the last request and the last reply.
        self._request_at = self._answer_at = 0.0
        self._listener = self._network.find(link.address)
        self.server = None if self._listener is None else self._listener.process
        if self.server is None:
            self.lose(refused=True, why=f"no listener at {link.address}")
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

    def send(self, number: int, message: Any) -> None:
        """Send a request, sometimes twice."""
        if self.is_lost or self.server is None or self._listener is None:
            return  # the client will be notified of the loss
        network, simulation, listener = self._network, self._simulation, self._listener
        delay = network.delay(self.client, self.server)
        arrival = self._request_at = max(self._request_at, simulation.now + delay)
        request = Request(self, number, message)

        def deliver() -> None:
            if arrival <= self._lost_at or self._requests_survive:
                self._is_established = True
                listener.handle(request)

        simulation.call_later(arrival - simulation.now, deliver, self.server)
        twice = network.conditions.twice
        if listener.accepts_repeats and twice and simulation.random.random() < twice:
            repeat = Request(self, number, message, is_repeat=True)
            later = arrival - simulation.now + network.delay(self.client, self.server)
            simulation.call_later(later, lambda: listener.handle(repeat), self.server)

    def answer(self, number: int, message: Any, content: Any) -> None:
        """Send a reply."""
        if self.is_lost or self.server is None:
            return
        simulation, link = self._simulation, self._link
        delay = self._network.delay(self.server, self.client)
        arrival = self._answer_at = max(self._answer_at, simulation.now + delay)

        def deliver() -> None:
            if link.connection is self and arrival <= self._lost_at and number in link.unanswered:
                link.unanswered.discard(number)
                link.answered(number, message, content)

        simulation.call_later(arrival - simulation.now, deliver, self.client)

    def lose(self, *, refused: bool, why: str) -> None:
        """Break the connection and notify both ends."""
        if self.is_lost:
            return
        simulation, link, listener = self._simulation, self._link, self._listener
        self.forget()
        self._lost_at = simulation.now
        self._requests_survive = self._is_established and simulation.random.random() < 0.5
        error = UnavailableError(f"the connection to {link.address} was lost: {why}")
        error.refused = refused

        def notify_client() -> None:
            if link.connection is self and link.unanswered:
                link.unanswered.clear()
                link.lost(error)

        simulation.log(self.client.name, "loses", link.address, why)
        latency = simulation.random.random() * self._network.conditions.latency
        simulation.call_later(latency, notify_client, self.client)
        if listener is not None and (on_client_lost := listener.on_client_lost) is not None:
            last = self._request_at - simulation.now if self._requests_survive else 0.0
            simulation.call_later(max(0.0, last), lambda: on_client_lost(self), listener.process)

    def forget(self) -> None:
        """Remove the connection from both ends."""
        for end in (self.client, self.server):
            if end is not None:
                end.connections.pop(self.number, None)
