"""A store on two servers that crash, come back and are taken for gone; the seats are the real ones.

Stood in for are the messages between the two, which are carried out at once, or not at all. Crashes
come at any moment between what the leading seat does and its answer.
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


class GoneError(Exception):
    """Nobody knows whether it was carried out: ask again."""


class _Server:
    """One of the two."""

    def __init__(self) -> None:
        self.is_up = True
        self.seat = ReplicaState()
        self.contents: Any = None
        self.is_followed = False


class TwoServers:
    """The servers of one store.

    Args:
        simulation: Time and randomness.
        contents: What both begin with.
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
        self._mend(first, second)

    @property
    def contents(self) -> Any:
        """What the leading seat of the latest epoch has."""
        leading = [each for each in self._servers if each.seat.role is ReplicaRole.LEADER]
        if not leading:
            (leading,) = [[each] for each in self._servers if each.seat.is_complete]
        return max(leading, key=lambda each: each.seat.term).contents

    def carry_out(self, client: Any, do: Callable[[Any], None]) -> None:
        """Ask as a client does.

        Raises:
            GoneError: To be asked again; the other server is next.
            AbortedError: It is refused.
        """
        leaders = self._clients.setdefault(client, StoreLeaders(("0", "1"), 2))
        asked = leaders.find_server(0)
        insists = leaders.address_message(ExecuteOperations((), ()), 0).peer_unavailable
        server, other = self._servers[asked], self._servers[1 - asked]
        chance = self._simulation.random
        if not server.is_up or chance.random() < 0.02:
            self.mistakes += server.is_up
            leaders.record_unavailable(0, asked)
            raise GoneError
        admission = server.seat.decide(LIFE, peer_unavailable=insists)
        if admission in (RequestDecision.NOT_LEADER, RequestDecision.NO_STATE):
            leaders.record_not_leader(0, asked, is_empty=admission is RequestDecision.NO_STATE)
            if leaders.take_lead_request(0) is not None:
                self._begin_empty()
            raise GoneError
        assert admission in (RequestDecision.EXECUTE, RequestDecision.TAKE_OVER)
        if admission is RequestDecision.TAKE_OVER:
            server.is_followed = False
        error = _carried_out(do, server.contents)
        if chance.random() < 0.03 and self.crash(asked):
            raise GoneError
        if not self._forward(server, other, do):
            leaders.record_not_leader(0, asked, is_empty=True)
            raise GoneError
        if chance.random() < 0.03 and self.crash(asked):
            raise GoneError
        leaders.record_reply(0, asked)
        if error is not None:
            raise error

    def _begin_empty(self) -> None:
        """Have the first server begin empty, as who found both so, one after the other, wants it.

        By then one of them may have been filled: nothing is given up for that.
        """
        first, second = self._servers
        if first.is_up and not first.seat.is_complete:
            first.seat.discard_state()
            first.contents, first.is_followed = None, False
            assert not second.is_up or not second.seat.become_follower(1, "another life"), (
                "all is lost"
            )

    def _forward(self, server: _Server, other: _Server, do: Callable[[Any], None]) -> bool:
        """Have the other seat do the same; False: it leads, and this one has given up."""
        if not server.is_followed:
            return True
        if not other.is_up:
            server.is_followed = False
        elif other.seat.is_following(server.seat.term, LIFE):
            _carried_out(do, other.contents)
        else:
            self._mend(server, other)
        return server.seat.role is ReplicaRole.LEADER

    def _mend(self, server: _Server, other: _Server) -> None:
        """Have the other seat follow, and get what there is."""
        seat = server.seat
        if other.seat.outranks(seat.term, LIFE) or not other.seat.become_follower(seat.term, LIFE):
            seat.discard_state()
            server.contents, server.is_followed = None, False
            return
        other.contents = server.contents.copied(copy.deepcopy)
        other.seat.is_complete = server.is_followed = True
        other.is_followed = False

    def crash(self, place: int) -> bool:
        """End a server's process, if the other one has all; another begins after a while."""
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
            self._simulation.random.uniform(0.01, 1.0), lambda: self._come_back(server)
        )
        return True

    def _come_back(self, server: _Server) -> None:
        server.is_up = True
        self._simulation.call_later(0.1, self._look)

    def _look(self) -> None:
        """Have a leading seat see to the other one."""
        for server, other in (self._servers, self._servers[::-1]):
            if server.seat.role is ReplicaRole.LEADER and not server.is_followed and other.is_up:
                self._mend(server, other)
        if not any(each.is_followed for each in self._servers):
            self._simulation.call_later(0.1, self._look)


def _carried_out(do: Callable[[Any], None], contents: Any) -> AbortedError | None:
    try:
        do(contents)
    except AbortedError as error:
        return error
    return None
