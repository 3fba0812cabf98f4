"""What a coordinator needs to know of a strategy: where workers and parameter servers are."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.arguments import check_int, check_string, check_strings
from headrace.cluster.spec import PS, WORKER
from headrace.coordinator.messages import Greet, WorkerReply
from headrace.coordinator.worker import LARGEST_CLOSURE, this_process
from headrace.parameter_server.optimizer_steps import ClosureServers
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
        greeting: What each worker is greeted with, but for its number, its session and its threads.
        workers: Where they listen, by number.
        servers: The parameter servers, as far as closures go; None: there are none.
        staleness: Bound of the queue.
        round_size: How many closures make a round; None: there are no rounds.
        security: Keys of a client.
    """

    greeting: Greet
    workers: dict[int, str]
    servers: ClosureServers | None = None
    staleness: int | None = None
    round_size: int | None = None
    security: Security | None = None

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
            greeting=_greeting(uuid.uuid4().hex, incarnation),
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
        greeting=_greeting(
            strategy.cluster.cluster_id,
            incarnation,
            servers=servers.addresses,
            server_timeout=servers.timeout,
            replication=servers.replication,
            gathers=strategy.round_size is not None,
        ),
        workers=dict(enumerate(workers)),
        servers=ClosureServers(servers, incarnation),
        staleness=strategy.staleness,
        round_size=strategy.round_size,
        security=strategy.security,
    )


def _greeting(cluster_id: str, incarnation: int, **servers: Any) -> Greet:
    return Greet(
        cluster_id=cluster_id,
        incarnation=incarnation,
        session=0,
        worker=0,
        process=this_process(),
        **servers,
    )


def _next_incarnation() -> int:
    """Return a number that is larger than that of any coordinator before."""
    global _last_incarnation
    with _lock:
        _last_incarnation = max(time.time_ns() // 1_000_000, _last_incarnation + 1)
        return _last_incarnation


_lock = threading.Lock()
_last_incarnation = 0
