"""What a coordinator needs to know of a strategy: where workers and parameter servers are."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.arguments import check_int, check_strings
from headrace.cluster.roles import WORKER
from headrace.coordinator.server_talk import Servers
from headrace.parameter_server import connection
from headrace.parameter_server.connection import Ask
from headrace.parameter_server.operations import Fence, Operation, Settle
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.transport.security import Security, check_security

__all__ = ["Cluster", "Workers", "check_strategy", "cluster_of"]

_AT_ONCE = 10_000


class Workers:
    """Workers alone, without parameter servers: for functions that write to no variable.

    Args:
        addresses: Where they listen, as "host:port".
        staleness: A function begins only when all but so many before it are done; None: no bound.
        security: Keys of a client.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        staleness: int | None = None,
        security: Security | None = None,
    ) -> None:
        check_strings("addresses", addresses)
        if staleness is not None:
            check_int("staleness", staleness, minimum=0)
        check_security(security)
        self.addresses = tuple(addresses)
        self.staleness = staleness
        self.security = security


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Who takes part.

    Attributes:
        cluster_id: Names it in handles.
        incarnation: Of this coordinator; a later one's is larger.
        workers: Where they listen, by number.
        addresses: Of the parameter servers.
        server_timeout: Seconds for which one that cannot be reached is waited for.
        servers: The parameter servers, as far as closures go; None: there are none.
        staleness: Bound of the queue.
        security: Keys of a client.
    """

    cluster_id: str
    incarnation: int
    workers: dict[int, str]
    addresses: tuple[str, ...] = ()
    server_timeout: float = 120.0
    servers: Servers | None = None
    staleness: int | None = None
    security: Security | None = None


def check_strategy(strategy: object) -> None:
    """Raise ValueError for what is no strategy for a coordinator."""
    if not isinstance(strategy, ParameterServerStrategy | Workers):
        raise ValueError(
            "Only a ParameterServerStrategy is supported by ClusterCoordinator, but got "
            f"{strategy!r:.80} of type {type(strategy).__name__}"
        )


def cluster_of(strategy: object) -> Cluster:
    """Return who takes part in a strategy.

    Raises:
        ValueError: It is no strategy for a coordinator.
    """
    check_strategy(strategy)
    incarnation = time.time_ns()
    if isinstance(strategy, Workers):
        return Cluster(
            cluster_id=uuid.uuid4().hex,
            incarnation=incarnation,
            workers=dict(enumerate(strategy.addresses)),
            staleness=strategy.staleness,
            security=strategy.security,
        )
    assert isinstance(strategy, ParameterServerStrategy)
    resolver, servers = strategy.cluster_resolver, strategy.cluster.servers
    if resolver is None:
        raise ValueError("a ClusterCoordinator cannot be made on a worker")
    spec = resolver.cluster_spec()
    return Cluster(
        cluster_id=strategy.cluster.cluster_id,
        incarnation=incarnation,
        workers={
            # "grpc://host:port" is what some resolvers write.
            number: spec.task_address(WORKER, number).rpartition("://")[2]
            for number in spec.task_indices(WORKER)
        },
        addresses=servers.addresses,
        server_timeout=servers.timeout,
        servers=_ParameterServers(servers, incarnation),
        staleness=strategy.staleness,
        security=strategy.security,
    )


class _ParameterServers:
    """Tells all parameter servers of closures that have ended, and of workers that are lost."""

    def __init__(self, servers: connection.Servers, incarnation: int) -> None:
        self._servers = servers
        self._incarnation = incarnation

    def begin(self) -> None:
        self._tell(Fence(incarnation=self._incarnation))

    def settle(self, closures: Sequence[int], below: int) -> None:
        for start in range(0, len(closures), _AT_ONCE):
            part = tuple(closures[start : start + _AT_ONCE])
            self._tell(Settle(incarnation=self._incarnation, closures=part, below=below))

    def fence(self, worker: int) -> None:
        self._tell(Fence(incarnation=self._incarnation, worker=worker))

    def _tell(self, operation: Operation) -> None:
        self._servers.ask_all([Ask(server, operation) for server in range(len(self._servers))])
