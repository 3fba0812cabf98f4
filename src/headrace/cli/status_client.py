"""Status requests to a server of any kind: a dispatcher, a coordinator or a parameter server.

A coordinator reports its parameter servers, which are queried, too, all at the same time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from headrace.cli.commands import convert_argument_errors, load_client_keys
from headrace.coordinator.status import CoordinatorStatus, GetCoordinatorStatus
from headrace.errors import FailedPreconditionError, HeadraceError
from headrace.parameter_server.messages import GetServerStatus, ServerStatus
from headrace.service.config import parse_service
from headrace.service.messages import (
    DatasetDescription,
    DispatcherStatus,
    GetDataset,
    GetStatus,
    PlanStep,
)
from headrace.serving.rpc import Stub, TypedRequest
from headrace.transport import zeromq

__all__ = ["PeerStatus", "ServerSnapshot", "StatusClient", "StatusSnapshot"]

_STATUS_REQUESTS: tuple[TypedRequest[Any], ...] = (
    GetStatus(),
    GetCoordinatorStatus(),
    GetServerStatus(),
)
_MAX_CONCURRENT = 16
_SERVER_SECONDS = 1.0
"""Seconds to wait for a parameter server once the coordinator has answered."""

PeerStatus: TypeAlias = DispatcherStatus | CoordinatorStatus | ServerStatus


@dataclass(frozen=True)
class ServerSnapshot:
    """Parameter server of a coordinator.

    Attributes:
        address: Address at which it listens.
        status: Status that it reported; None if it did not answer.
        problem: Reason for a missing status.
    """

    address: str
    status: ServerStatus | None
    problem: str = ""


@dataclass(frozen=True)
class StatusSnapshot:
    """One observation of a server.

    Attributes:
        status: Status that the server reported.
        taken_at: Time of the observation in seconds.
        servers: Parameter servers of a coordinator.
    """

    status: PeerStatus
    taken_at: float
    servers: tuple[ServerSnapshot, ...] = ()


class StatusClient:
    """Connection to a server of any kind; a context manager, for one thread.

    Args:
        address: Address as the user wrote it: "host:port".
        keys: Directory of keys; None without keys.
        timeout: Seconds to wait for a reply.

    Raises:
        typer.BadParameter: If an argument is invalid.
    """

    def __init__(self, address: str, keys: Path | None, timeout: float) -> None:
        with convert_argument_errors({"service": "HOST:PORT", "address": "HOST:PORT"}):
            if not timeout > 0:
                raise ValueError(f"--timeout {timeout:g} must be greater than 0")
            self.address: str = parse_service(address)
            self._security = load_client_keys(keys)
        self._timeout = timeout
        self._stub = self._connect(self.address)
        #: Requests that the server may support; reduced to one once the server has replied.
        self._candidate_requests = _STATUS_REQUESTS
        self._servers: dict[str, Stub] = {}
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT, thread_name_prefix="headrace-status")

    def fetch(self, timeout: float | None = None) -> StatusSnapshot:
        """Request the status.

        Raises:
            HeadraceError: If there is no reply, or the server supports no status request.
        """
        timeout = self._timeout if timeout is None else timeout
        status = self._fetch_status(timeout)
        taken_at = time.monotonic()
        if not isinstance(status, CoordinatorStatus):
            return StatusSnapshot(status, taken_at)
        for address in status.servers:
            if address not in self._servers:
                self._servers[address] = self._connect(address)
        server_timeout = min(timeout, _SERVER_SECONDS)
        servers = self._threads.map(
            lambda each: self._fetch_server(each, server_timeout), status.servers
        )
        return StatusSnapshot(status, taken_at, tuple(servers))

    def fetch_plan_steps(self, dataset_id: str) -> tuple[PlanStep, ...]:
        """Request the steps of a dataset's plan from a dispatcher; empty if they are unknown.

        Raises:
            HeadraceError: If there is no reply, or the dispatcher has no such dataset.
        """
        return self._stub.call(GetDataset(dataset_id=dataset_id), timeout=self._timeout).plan_steps

    def _fetch_status(self, timeout: float) -> PeerStatus:
        refused: HeadraceError | None = None
        for request in self._candidate_requests:
            try:
                status: PeerStatus = self._stub.call(request, timeout=timeout)
            except FailedPreconditionError as error:
                refused = error  # the server does not support the request
            else:
                self._candidate_requests = (request,)
                return status
        raise FailedPreconditionError(
            f"the server at {self.address} is not a dispatcher, coordinator or parameter server of "
            "this version; for a worker, give the address of its dispatcher or coordinator"
        ) from refused

    def _fetch_server(self, address: str, timeout: float) -> ServerSnapshot:
        try:
            return ServerSnapshot(
                address, self._servers[address].call(GetServerStatus(), timeout=timeout)
            )
        except HeadraceError as error:
            return ServerSnapshot(address, None, str(error))

    def _connect(self, address: str) -> Stub:
        channel = zeromq.connect(
            address,
            reply_type=DispatcherStatus | CoordinatorStatus | ServerStatus | DatasetDescription,
            security=self._security,
            shared_memory=False,
        )
        return Stub(channel, "server")

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._threads.shutdown()
        for stub in (self._stub, *self._servers.values()):
            stub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
