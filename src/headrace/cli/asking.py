"""Asking whatever listens at an address how it is: a dispatcher, a coordinator, a parameter server.

A coordinator says where its parameter servers are; these are asked, too, all at a time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from headrace.cli.commands import wrong_arguments
from headrace.coordinator.status import AskStatus, CoordinatorStatus
from headrace.errors import FailedPreconditionError, HeadraceError
from headrace.parameter_server.messages import GetServerStatus, ServerStatus
from headrace.service.config import parse_service
from headrace.service.messages import DispatcherStatus, GetStatus
from headrace.serving.call import Question, Stub
from headrace.transport import zeromq
from headrace.transport.security import Security

__all__ = ["Asking", "Look", "Seen", "SeenServer"]

_QUESTIONS: tuple[Question[Any], ...] = (GetStatus(), AskStatus(), GetServerStatus())
_MOST_AT_A_TIME = 16
_SERVER_SECONDS = 1.0
"""How long a parameter server is waited for while the coordinator answers."""

Seen: TypeAlias = DispatcherStatus | CoordinatorStatus | ServerStatus


@dataclass(frozen=True)
class SeenServer:
    """A parameter server of a coordinator.

    Attributes:
        address: Where it listens.
        status: What it said; None: nothing.
        problem: Why.
    """

    address: str
    status: ServerStatus | None
    problem: str = ""


@dataclass(frozen=True)
class Look:
    """What one look found.

    Attributes:
        status: What the one who was asked said.
        at: When, in seconds of some clock.
        servers: Of a coordinator.
    """

    status: Seen
    at: float
    servers: tuple[SeenServer, ...] = ()


class Asking:
    """A connection to whatever listens at an address; a context manager, for one thread.

    Args:
        address: "host:port", as a user wrote it.
        keys: A directory of keys; None: none are wanted.
        timeout: Seconds to wait for an answer.

    Raises:
        typer.BadParameter: What the user wrote makes no sense.
    """

    def __init__(self, address: str, keys: Path | None, timeout: float) -> None:
        with wrong_arguments({"service": "HOST:PORT", "address": "HOST:PORT"}):
            if not timeout > 0:
                raise ValueError(f"--timeout {timeout:g} must be above 0")
            self.address = parse_service(address)
            self._security = None if keys is None else Security.load(keys, "client")
        self._timeout = timeout
        self._stub = self._connect(self.address)
        #: What it may understand; one, once that was answered.
        self._questions = _QUESTIONS
        self._servers: dict[str, Stub] = {}
        self._threads = ThreadPoolExecutor(_MOST_AT_A_TIME, thread_name_prefix="headrace-asking")

    def look(self, timeout: float | None = None) -> Look:
        """Ask how it is.

        Raises:
            HeadraceError: It does not answer, or is none of those that can be asked.
        """
        timeout = self._timeout if timeout is None else timeout
        status = self._ask(timeout)
        at = time.monotonic()
        if not isinstance(status, CoordinatorStatus):
            return Look(status, at)
        for address in status.servers:
            if address not in self._servers:
                self._servers[address] = self._connect(address)
        patience = min(timeout, _SERVER_SECONDS)
        asked = self._threads.map(lambda each: self._ask_server(each, patience), status.servers)
        return Look(status, at, tuple(asked))

    def _ask(self, timeout: float) -> Seen:
        refused: HeadraceError | None = None
        for question in self._questions:
            try:
                found: Seen = self._stub.call(question, timeout=timeout)
            except FailedPreconditionError as error:
                refused = error  # it does not understand the question
            else:
                self._questions = (question,)
                return found
        raise FailedPreconditionError(
            f"what listens at {self.address} is no dispatcher, coordinator or parameter server of "
            "this version; a worker is shown by whom it works for"
        ) from refused

    def _ask_server(self, address: str, timeout: float) -> SeenServer:
        try:
            return SeenServer(
                address, self._servers[address].call(GetServerStatus(), timeout=timeout)
            )
        except HeadraceError as error:
            return SeenServer(address, None, str(error))

    def _connect(self, address: str) -> Stub:
        channel = zeromq.connect(
            address,
            reply_type=DispatcherStatus | CoordinatorStatus | ServerStatus,
            security=self._security,
            shared_memory=False,
        )
        return Stub(channel, "server")

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self._threads.shutdown()
        for stub in (self._stub, *self._servers.values()):
            stub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
