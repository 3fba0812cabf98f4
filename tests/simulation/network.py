"""Connections between processes: requests and answers, in order, until the connection breaks.

Rule 1. Each end hears what the other sent in the order in which it was sent, late or not at all.
Rule 2. A connection that breaks takes with it what is in flight: answers always, requests perhaps.
        The caller hears of the loss once, if it waits for anything.
Rule 3. A dead process refuses at once; a paused one, or one that the network does not reach, is
        only silent, and is given up after `PATIENCE`.
Rule 4. A request to one that takes repeats may be delivered twice; the second answer is dropped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from headrace.errors import UnavailableError
from headrace.transport.envelope import decode_error, encode_error
from tests.simulation.world import Process, World

__all__ = ["PATIENCE", "Link", "Network", "Peer", "Request", "Weather"]

PATIENCE = 12.0
"""Seconds for which a peer may be silent, as in `transport.zeromq`."""
_HANDSHAKE = 5.0

OnAnswer: TypeAlias = Callable[[int, Any, Any], None]
OnLost: TypeAlias = Callable[[UnavailableError], None]


@dataclass
class Weather:
    """How the network is just now."""

    latency: float = 0.001
    late: float = 0.0
    """The chance that a message is late."""
    lateness: float = 1.0
    """Seconds that it is late at most."""
    twice: float = 0.0
    """The chance that a request is delivered twice, if its server takes repeats."""


class Request:
    """A request as the server sees it."""

    def __init__(
        self, connection: _Connection | None, ticket: int, message: msgspec.Struct
    ) -> None:
        self._connection, self._ticket = connection, ticket
        self.message = message

    def reply(self, message: msgspec.Struct, content: Any = None) -> None:
        if self._connection is not None:
            self._connection.answer(self._ticket, message, content)

    def fail(self, error: Exception) -> None:
        self.reply(decode_error(encode_error(error)))  # type: ignore[arg-type]


class Peer(Process):
    """A process that others are connected with.

    Args:
        network: What connects it.
        name: What it is called in the story.
    """

    def __init__(self, network: Network, name: str) -> None:
        super().__init__(network.world, name)
        self.network = network

    def die(self, why: str = "dies") -> None:
        if self.is_up:
            super().die(why)
            self.network.died(self)

    def pause(self, seconds: float) -> None:
        if self.is_up and not self.is_paused:
            super().pause(seconds)
            self.network.paused(self, seconds)


class Network:
    """Who can be reached where.

    Args:
        world: Where it is.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self._listening: dict[str, tuple[Process, Callable[[Request], None], bool]] = {}
        #: By the name of each end, and by number, which grows: chance must not see in what order a
        #: set goes.
        self._of: defaultdict[str, dict[int, _Connection]] = defaultdict(dict)
        self._connected = 0
        #: Pairs of names -> until when nothing gets from one to the other.
        self._parted: dict[frozenset[str], float] = {}

    def listen(
        self,
        process: Process,
        address: str,
        take: Callable[[Request], None],
        *,
        repeats: bool = False,
    ) -> None:
        """Have requests to an address taken by a process while it lives."""
        self._listening[address] = process, take, repeats

    def find(self, address: str) -> tuple[Process, Callable[[Request], None], bool] | None:
        """Return who listens at an address."""
        found = self._listening.get(address)
        return None if found is None or not found[0].is_up else found

    def remember(self, connection: _Connection) -> int:
        """Keep a connection among those that may break; return its number."""
        self._connected += 1
        self._of[connection.client.name][self._connected] = connection
        return self._connected

    def reached(self, connection: _Connection, server: Process) -> None:
        """Take note of who is at the other end."""
        self._of[server.name][connection.number] = connection

    def forget(self, connection: _Connection) -> None:
        for end in (connection.client, connection.server):
            if end is not None:
                self._of[end.name].pop(connection.number, None)

    def _connections_of(self, process: Process) -> list[_Connection]:
        """Return the connections that a process is an end of, the oldest first."""
        return list(self._of[process.name].values())

    def died(self, process: Process) -> None:
        """Break the connections of a process that is no more."""
        for each in self._connections_of(process):
            each.lose(refused=True, why=f"{process.name} is gone")

    def paused(self, process: Process, seconds: float) -> None:
        """Let those give a process up that waits too long."""
        life = process.life

        def give_up() -> None:
            if process.life == life and process.is_paused:
                for each in self._connections_of(process):
                    each.lose(refused=False, why=f"{process.name} is silent")

        if seconds > PATIENCE:
            self.world.at(PATIENCE, give_up)

    def part(self, one: Process, other: Process, seconds: float) -> None:
        """Let nothing get from one to the other for a while."""
        pair = frozenset((one.name, other.name))
        until = self.world.now + seconds
        self._parted[pair] = max(until, self._parted.get(pair, 0.0))

        def give_up() -> None:
            if self._parted.get(pair, 0.0) > self.world.now:
                for each in self._connections_of(one):
                    if {each.client, each.server} == {one, other}:
                        each.lose(refused=False, why="nothing gets through")

        if seconds > PATIENCE:
            self.world.at(PATIENCE, give_up)

    def reset(self, process: Process) -> None:
        """Break one connection of a process, or none if it has none."""
        mine = [each for each in self._connections_of(process) if each.server is not None]
        if mine:
            self.world.chance.choice(mine).lose(refused=True, why="reset")

    def clear_up(self) -> None:
        """End all disturbances that are in force."""
        self.weather = Weather()
        self._parted.clear()

    def delay(self, one: Process, other: Process) -> float:
        """Return how long a message takes that is sent now."""
        chance, weather = self.world.chance, self.weather
        delay = weather.latency * (0.5 + chance.random())
        if weather.late and chance.random() < weather.late:
            delay += chance.random() * weather.lateness
        if self._parted:
            until = self._parted.get(frozenset((one.name, other.name)), 0.0)
            delay = max(delay, until - self.world.now)
        return delay


class Link:
    """A way to one address, for one process; it connects when something is to be sent."""

    def __init__(
        self, network: Network, client: Process, address: str, take: OnAnswer, lost: OnLost
    ) -> None:
        self.network, self.client, self.address = network, client, address
        self.take, self.lost = take, lost
        self.unanswered: set[int] = set()
        self._connection: _Connection | None = None
        self._tickets = 0

    def send(self, message: msgspec.Struct) -> int:
        """Send a request; return its ticket."""
        if self._connection is None or (self._connection.is_lost and not self.unanswered):
            self._connection = _Connection(self)
        self._tickets += 1
        self.unanswered.add(self._tickets)
        self._connection.send(self._tickets, message)
        return self._tickets

    def is_on(self, connection: _Connection) -> bool:
        return self._connection is connection

    def close(self) -> None:
        """Forget everything; requests that were sent arrive."""
        if self._connection is not None:
            self.network.forget(self._connection)
        self._connection = None
        self.unanswered.clear()


class _Connection:
    """One connection of a link, from the first message to the loss."""

    def __init__(self, link: Link) -> None:
        self._link, self.client, self._network = link, link.client, link.network
        self.number = self._network.remember(self)
        self._lost_at = math.inf
        self._requests_survive = self._is_established = False
        self._there = self._back = 0.0
        found = self._network.find(link.address)
        self.server: Process | None = None
        if found is None:
            self.lose(refused=True, why=f"nobody listens at {link.address}")
        else:
            self.server, self._serve, self._repeats = found
            self._network.reached(self, self.server)
            if self.server.is_paused:
                self._network.world.at(_HANDSHAKE, self._give_up)

    @property
    def is_lost(self) -> bool:
        return self._lost_at < math.inf

    def _give_up(self) -> None:
        if not self._is_established and self.server is not None and self.server.is_paused:
            self.lose(refused=False, why=f"{self.server.name} does not answer")

    def send(self, ticket: int, message: msgspec.Struct) -> None:
        if self.is_lost or self.server is None:
            return  # the loss is on its way
        network, world, server = self._network, self._network.world, self.server
        arrival = self._there = max(self._there, world.now + network.delay(self.client, server))
        request = Request(self, ticket, message)

        def deliver() -> None:
            if arrival <= self._lost_at or self._requests_survive:
                self._is_established = True
                self._serve(request)

        world.at(arrival - world.now, deliver, server)
        twice = network.weather.twice
        if self._repeats and twice and world.chance.random() < twice:
            again = Request(None, ticket, message)
            later = arrival - world.now + network.delay(self.client, server)
            world.at(later, lambda: self._serve(again), server)

    def answer(self, ticket: int, message: msgspec.Struct, content: Any) -> None:
        """Send an answer back."""
        if self.is_lost or self.server is None:
            return
        network, world, link = self._network, self._network.world, self._link
        arrival = self._back = max(self._back, world.now + network.delay(self.server, self.client))

        def deliver() -> None:
            if link.is_on(self) and arrival <= self._lost_at and ticket in link.unanswered:
                link.unanswered.discard(ticket)
                link.take(ticket, message, content)

        world.at(arrival - world.now, deliver, self.client)

    def lose(self, *, refused: bool, why: str) -> None:
        """Break."""
        if self.is_lost:
            return
        network, world, link = self._network, self._network.world, self._link
        network.forget(self)
        self._lost_at = world.now
        self._requests_survive = self._is_established and world.chance.random() < 0.5
        error = UnavailableError(f"the connection to {link.address} was lost: {why}")
        error.refused = refused

        def deliver() -> None:
            if link.is_on(self) and link.unanswered:
                link.unanswered.clear()
                link.lost(error)

        world.note(self.client.name, "loses", link.address, why)
        world.at(world.chance.random() * network.weather.latency, deliver, self.client)
