"""Addresses and settings that a coordinator takes from a strategy."""

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
from headrace.coordinator.messages import StartSession, WorkerReply
from headrace.coordinator.worker import MAX_CLOSURE_BYTES, process_name
from headrace.parameter_server.optimizer_steps import ClosureServers
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Channel
from headrace.transport.security import Security, check_security

__all__ = ["CoordinatorCluster", "Workers", "check_address", "check_strategy", "resolve_cluster"]

_log = logging.getLogger(__name__)


class Workers:
    """Workers without parameter servers: for functions that write to no variable.

    Args:
        addresses: Addresses at which they listen, as "host:port".
        staleness: Maximum number of unfinished earlier functions when a function starts; None
            disables the limit.
        security: Client keys.
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
        self.addresses: tuple[str, ...] = tuple(addresses)
        self.staleness = staleness
        self.security = security


@dataclass(frozen=True, kw_only=True, eq=False)
class CoordinatorCluster:
    """Participants and settings of a coordinator.

    Attributes:
        session_request: Template of `StartSession`, without worker, session and threads.
        workers: Worker addresses by number.
        servers: Parameter servers as closures use them; None without servers.
        staleness: Staleness bound of the queue.
        round_size: Number of closures in a gradient round; None disables rounds.
        security: Client keys.
    """

    session_request: StartSession
    workers: dict[int, str]
    servers: ClosureServers | None = None
    staleness: int | None = None
    round_size: int | None = None
    security: Security | None = None

    def open_channel(self, address: str) -> Channel:
        """Open a channel to a worker."""
        return zeromq.connect(
            address,
            reply_type=WorkerReply,
            security=None if self.security is None else self.security.as_client(),
            request_bytes=MAX_CLOSURE_BYTES,
        )


def check_strategy(strategy: object) -> None:
    """Raise ValueError unless `strategy` can have a coordinator."""
    if not isinstance(strategy, ParameterServerStrategy | Workers):
        raise ValueError(
            "Only a ParameterServerStrategy is supported by ClusterCoordinator, but got "
            f"{strategy!r:.80} of type {type(strategy).__name__}"
        )


def check_address(address: object, owner: str) -> None:
    """Check the address of a worker.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is not of the form "host:port".
    """
    check_string(owner, address)
    try:
        addresses.split(str(address))
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None


def resolve_cluster(strategy: object) -> CoordinatorCluster:
    """Return the participants and settings of a strategy.

    Raises:
        ValueError: If the strategy cannot have a coordinator.
    """
    check_strategy(strategy)
    assert isinstance(strategy, ParameterServerStrategy | Workers)
    workers = strategy.addresses if isinstance(strategy, Workers) else strategy.worker_addresses
    for number, address in enumerate(workers):
        check_address(address, f"worker {number}")
    term = _next_term()
    if isinstance(strategy, Workers):
        return CoordinatorCluster(
            session_request=_build_session_request(uuid.uuid4().hex, term),
            workers=dict(enumerate(workers)),
            staleness=strategy.staleness,
            security=strategy.security,
        )
    if strategy.cluster_resolver is None:
        raise ValueError("a ClusterCoordinator cannot be created on a worker")
    task = strategy.cluster_resolver.task_type
    if task in (PS, WORKER):
        _log.warning(
            "this process is a %s task of its cluster and creates a coordinator, which takes "
            "the workers from any other coordinator; such a task should run "
            "hr.distribute.Server(cluster_spec, task_type, task_id).join(), or `headrace server`",
            task,
        )
    servers = strategy.cluster.servers
    return CoordinatorCluster(
        session_request=_build_session_request(
            strategy.cluster.cluster_id,
            term,
            servers=servers.addresses,
            server_timeout=servers.timeout,
            replication=servers.replication,
            collects_steps=strategy.round_size is not None,
        ),
        workers=dict(enumerate(workers)),
        servers=ClosureServers(servers, term),
        staleness=strategy.staleness,
        round_size=strategy.round_size,
        security=strategy.security,
    )


def _build_session_request(cluster_id: str, term: int, **servers: Any) -> StartSession:
    return StartSession(
        cluster_id=cluster_id,
        term=term,
        session=0,
        worker=0,
        process=process_name(),
        **servers,
    )


def _next_term() -> int:
    """Return a term larger than those of all earlier coordinators."""
    global _last_term
    with _lock:
        _last_term = max(time.time_ns() // 1_000_000, _last_term + 1)
        return _last_term


_lock = threading.Lock()
_last_term = 0
