"""What a coordinator needs to know of a strategy: where workers and parameter servers are."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.arguments import check_int, check_string, check_strings
from headrace.cluster.spec import PS, WORKER
from headrace.coordinator.messages import Greet, WorkerReply
from headrace.coordinator.shell import Servers
from headrace.coordinator.worker import LARGEST_CLOSURE, this_process
from headrace.parameter_server.pushing import ClosureServers
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Channel
from headrace.transport.security import Security, check_security

__all__ = ["Cluster", "Workers", "check_address", "check_strategy", "cluster_of"]

_log = logging.getLogger(__name__)


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
        replication: How many servers have what one of them has.
        servers: The parameter servers, as far as closures go; None: there are none.
        staleness: Bound of the queue.
        round_size: How many closures make a round; None: there are no rounds.
        security: Keys of a client.
    """

    cluster_id: str
    incarnation: int
    workers: dict[int, str]
    addresses: tuple[str, ...] = ()
    server_timeout: float = 120.0
    replication: int = 1
    servers: Servers | None = None
    staleness: int | None = None
    round_size: int | None = None
    security: Security | None = None

    def greeting(self, threads: int) -> Greet:
        """Return what each worker is greeted with, but for its number and its session.

        Args:
            threads: How many closures a worker runs at a time.
        """
        return Greet(
            cluster_id=self.cluster_id,
            incarnation=self.incarnation,
            session=0,
            worker=0,
            servers=self.addresses,
            server_timeout=self.server_timeout,
            threads=threads,
            process=this_process(),
            gathers=self.round_size is not None,
            replication=self.replication,
        )

    def dial(self, address: str) -> Channel:
        """Open a channel to a worker."""
        return zeromq.connect(
            address,
            reply_type=WorkerReply,
            security=None if self.security is None else self.security.as_client(),
            request_bytes=LARGEST_CLOSURE,
        )


def check_strategy(strategy: object) -> None:
    """Raise ValueError for what is no strategy for a coordinator."""
    if not isinstance(strategy, ParameterServerStrategy | Workers):
        raise ValueError(
            "Only a ParameterServerStrategy is supported by ClusterCoordinator, but got "
            f"{strategy!r:.80} of type {type(strategy).__name__}"
        )


def check_address(address: object, whose: str) -> None:
    """Raise an error for what is no address of a worker.

    Raises:
        TypeError: It is no string.
        ValueError: It is not written "host:port".
    """
    check_string(whose, address)
    try:
        addresses.split(str(address))
    except ValueError as error:
        raise ValueError(f"{whose}: {error}") from None


def cluster_of(strategy: object) -> Cluster:
    """Return who takes part in a strategy.

    Raises:
        ValueError: It is no strategy for a coordinator.
    """
    check_strategy(strategy)
    assert isinstance(strategy, ParameterServerStrategy | Workers)
    workers = strategy.addresses if isinstance(strategy, Workers) else strategy.worker_addresses
    for number, address in enumerate(workers):
        check_address(address, f"worker {number}")
    incarnation = _next_incarnation()
    if isinstance(strategy, Workers):
        return Cluster(
            cluster_id=uuid.uuid4().hex,
            incarnation=incarnation,
            workers=dict(enumerate(workers)),
            staleness=strategy.staleness,
            security=strategy.security,
        )
    if strategy.cluster_resolver is None:
        raise ValueError("a ClusterCoordinator cannot be made on a worker")
    task = strategy.cluster_resolver.task_type
    if task in (PS, WORKER):
        _log.warning(
            "this program is a %s of its cluster, and makes the cluster's coordinator, which takes "
            "the workers from any other; such a task runs hr.distribute.Server(cluster_spec, "
            "task_type, task_id).join(), or `headrace server`",
            task,
        )
    servers = strategy.cluster.servers
    return Cluster(
        cluster_id=strategy.cluster.cluster_id,
        incarnation=incarnation,
        workers=dict(enumerate(workers)),
        addresses=servers.addresses,
        server_timeout=servers.timeout,
        replication=servers.replication,
        servers=ClosureServers(servers, incarnation),
        staleness=strategy.staleness,
        round_size=strategy.round_size,
        security=strategy.security,
    )


def _next_incarnation() -> int:
    """Return a number that is larger than that of any coordinator before."""
    global _last_incarnation
    with _lock:
        _last_incarnation = max(time.time_ns() // 1_000_000, _last_incarnation + 1)
        return _last_incarnation


_lock = threading.Lock()
_last_incarnation = 0
