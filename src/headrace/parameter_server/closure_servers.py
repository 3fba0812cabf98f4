"""What servers are told about closures: which have settled, whose writes to refuse, their mean."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.parameter_server.acknowledged import Acknowledged
from headrace.parameter_server.connection import Servers
from headrace.parameter_server.operations import Fence, Settle
from headrace.parameter_server.pushing import TakenStep
from headrace.parameter_server.rounds import push_round

__all__ = ["ClosureServers"]


class ClosureServers:
    """The parameter servers, as far as the closures of one coordinator go.

    Making it fences all earlier coordinators; a server that comes back is told again.

    Args:
        servers: Those of the cluster.
        incarnation: Of the coordinator; a later one's is larger.

    Raises:
        UnavailableError: A server cannot be reached.
    """

    def __init__(self, servers: Servers, incarnation: int) -> None:
        self._servers = servers
        self._incarnation = incarnation
        servers.ask_each(Fence(incarnation))
        servers.on_return(lambda server: servers.ask(server, Fence(incarnation)))

    def acknowledged(self) -> tuple[Acknowledged, ...]:
        """Return what is known to be acknowledged, for workers."""
        return self._servers.acknowledged()

    def learn(self, acknowledged: Sequence[Acknowledged]) -> None:
        """Take note of what a worker knows to be acknowledged."""
        self._servers.lives.learn(acknowledged)

    def settle(self, closures: Sequence[int], below: int) -> None:
        """Have all servers forget the keys of closures that have ended.

        Args:
            closures: Their numbers.
            below: All below this one have, too.
        """
        self._servers.ask_each(Settle(self._incarnation, tuple(closures), below))

    def fence(self, worker: int) -> None:
        """Have all servers refuse what a life of a worker still writes."""
        self._servers.ask_each(Fence(self._incarnation, worker))

    def push_round(self, last: int, closures: Sequence[Sequence[TakenStep]]) -> None:
        """Push the mean of what the closures of a round took as steps.

        Args:
            last: Number of the last of them; none of them has been settled.
            closures: The steps of each.
        """
        push_round(self._incarnation, last, closures)
