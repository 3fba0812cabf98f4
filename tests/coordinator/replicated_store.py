"""A replicated store on two servers that crash, restart and count as lost.

The replica states are the real ones. Messages between the two servers are simulated: applied at
once or lost. Crashes happen at any point between an operation of the leader and its reply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from headrace.errors import AbortedError
from headrace.parameter_server.messages import ExecuteOperations
from headrace.parameter_server.replica_state import ReplicaRole, ReplicaState, RequestDecision
from headrace.parameter_server.server_states import StoreLeaders
from tests.simulation.kernel import Simulation

LIFE = "life"


class UnknownOutcomeError(Exception):
    """The outcome of the request is unknown; retry it."""


class _Server:
    """One of the two servers."""

    def __init__(self) -> None:
        self.is_up = True
        self.seat = ReplicaState()
        self.contents: Any = None
        self.is_followed = False


class TwoServers:
    """The servers of one store.

    Args:
        simulation: Time and randomness.
        contents: Initial contents of both.
    """

    def __init__(self, simulation: Simulation, contents: Any) -> None:
        self._simulation = simulation
        self._servers = (_Server(), _Server())
        self._clients: dict[Any, StoreLeaders] = {}
        self.losses = self.mistakes = 0
        first, second = self._servers
        assert second.seat.become_follower(1, LIFE)
        first.seat.become_leader(LIFE)
        first.contents = contents
        self._repair(first, second)

    @property
    def contents(self) -> Any:
        """Contents of the leader of the latest term."""
        leading = [each for each in self._servers if each.seat.role is ReplicaRole.LEADER]
        if not leading:
            (leading,) = [[each] for each in self._servers if each.seat.is_complete]
        return max(leading, key=lambda each: each.seat.term).contents

    def carry_out(self, client: Any, do: Callable[[Any], None]) -> None:
        """Apply an operation as for a client.

        Raises:
            UnknownOutcomeError: If the outcome is unknown; retry with the other server.
            AbortedError: If it is rejected.
        """
        leaders = self._clients.setdefault(client, StoreLeaders(("0", "1"), 2))
        asked = leaders.find_server(0)
        insists = leaders.address_message(ExecuteOperations((), ()), 0).peer_unavailable
        server, other = self._servers[asked], self._servers[1 - asked]
        chance = self._simulation.random
        if not server.is_up or chance.random() < 0.02:
            self.mistakes += server.is_up
            leaders.record_unavailable(0, asked)
            raise UnknownOutcomeError
        admission = server.seat.decide(LIFE, peer_unavailable=insists)
        if admission in (RequestDecision.NOT_LEADER, RequestDecision.NO_STATE):
            leaders.record_not_leader(0, asked, is_empty=admission is RequestDecision.NO_STATE)
            if leaders.take_lead_request(0) is not None:
                self._begin_empty()
            raise UnknownOutcomeError
        assert admission in (RequestDecision.EXECUTE, RequestDecision.TAKE_OVER)
        if admission is RequestDecision.TAKE_OVER:
            server.is_followed = False
        error = _applied(do, server.contents)
        if chance.random() < 0.03 and self.crash(asked):
            raise UnknownOutcomeError
        if not self._forward(server, other, do):
            leaders.record_not_leader(0, asked, is_empty=True)
            raise UnknownOutcomeError
        if chance.random() < 0.03 and self.crash(asked):
            raise UnknownOutcomeError
        leaders.record_reply(0, asked)
        if error is not None:
            raise error

    def _begin_empty(self) -> None:
        """Initialize the first server, for a client that found both uninitialized.

        One of them may have received contents in between; these must not be lost.
        """
        first, second = self._servers
        if first.is_up and not first.seat.is_complete:
            first.seat.discard_state()
            first.contents, first.is_followed = None, False
            assert not second.is_up or not second.seat.become_follower(1, "another life"), (
                "both servers have lost their contents"
            )

    def _forward(self, server: _Server, other: _Server, do: Callable[[Any], None]) -> bool:
        """Replicate to the other server; False: it is the leader, and this one has stepped down."""
        if not server.is_followed:
            return True
        if not other.is_up:
            server.is_followed = False
        elif other.seat.is_following(server.seat.term, LIFE):
            _applied(do, other.contents)
        else:
            self._repair(server, other)
        return server.seat.role is ReplicaRole.LEADER

    def _repair(self, server: _Server, other: _Server) -> None:
        """Make the other server a follower, and copy the contents to it."""
        seat = server.seat
        if other.seat.outranks(seat.term, LIFE) or not other.seat.become_follower(seat.term, LIFE):
            seat.discard_state()
            server.contents, server.is_followed = None, False
            return
        other.contents = server.contents.copied(copy.deepcopy)
        other.seat.is_complete = server.is_followed = True
        other.is_followed = False

    def crash(self, place: int) -> bool:
        """Crash a server if the other has all contents; it restarts after a while."""
        server, other = self._servers[place], self._servers[1 - place]
        is_safe = other.is_up and (
            other.seat.role is ReplicaRole.LEADER
            or (server.is_followed and other.seat.is_following(server.seat.term, LIFE))
        )
        if not (server.is_up and is_safe and other.seat.is_complete):
            return False
        both_lead = server.seat.role is other.seat.role is ReplicaRole.LEADER
        if both_lead and server.seat.term > other.seat.term:
            return False
        self.losses += 1
        server.is_up = False
        server.seat, server.contents, server.is_followed = ReplicaState(), None, False
        self._simulation.call_later(
            self._simulation.random.uniform(0.01, 1.0), lambda: self._restart(server)
        )
        return True

    def _restart(self, server: _Server) -> None:
        server.is_up = True
        self._simulation.call_later(0.1, self._check_follower)

    def _check_follower(self) -> None:
        """Let a leader repair its follower."""
        for server, other in (self._servers, self._servers[::-1]):
            if server.seat.role is ReplicaRole.LEADER and not server.is_followed and other.is_up:
                self._repair(server, other)
        if not any(each.is_followed for each in self._servers):
            self._simulation.call_later(0.1, self._check_follower)


def _applied(do: Callable[[Any], None], contents: Any) -> AbortedError | None:
    try:
        do(contents)
    except AbortedError as error:
        return error
    return None
