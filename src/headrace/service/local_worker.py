"""One worker of a local cluster: a separate process, or a server in this one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

from headrace.errors import FailedPreconditionError
from headrace.process.child import ChildCommand, ChildProcess, build_command
from headrace.process.parent_link import large_copy_tunables
from headrace.process.supervisor import STOP_SECONDS, stop_children
from headrace.service.worker.server import DRAIN_SECONDS, WorkerServer

__all__ = [
    "LocalWorker",
    "ProcessWorker",
    "ThreadWorker",
    "worker_command",
]


class LocalWorker(Protocol):
    """One worker of a `LocalCluster`.

    Attributes:
        address: Address of the worker.
        exit_reason: Description of an unexpected end of its process; None otherwise.
    """

    address: str
    exit_reason: str | None

    @property
    def pid(self) -> int:
        """ID of its process, or of this process if the worker runs here."""

    @property
    def is_running(self) -> bool:
        """Whether the worker was neither stopped nor killed, and has not died."""

    def stop(self) -> None:
        """Stop the worker cleanly: it returns undelivered splits."""

    def kill(self) -> None:
        """Kill its process (SIGKILL), as a crash would."""


class ProcessWorker:
    """Worker in a separate process."""

    def __init__(self, child: ChildProcess) -> None:
        self.address: str = child.ready_message or ""
        self.exit_reason: str | None = None
        self.child = child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self.child.is_running

    def stop(self) -> None:
        stop_children([self.child], STOP_SECONDS)

    def kill(self) -> None:
        self.child.kill()


class ThreadWorker:
    """Worker in this process; `server` is None once it is stopped."""

    def __init__(self, server: WorkerServer) -> None:
        self.address: str = server.address
        self.exit_reason: str | None = None
        self.server: WorkerServer | None = server

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def is_running(self) -> bool:
        return self.server is not None

    def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.stop()

    def drain(self, timeout: float) -> None:
        """Deliver buffered output for at most `timeout` seconds, then stop."""
        server = self.server
        if server is not None:
            server.drain(timeout)
        self.server = None

    def kill(self) -> None:
        raise FailedPreconditionError(
            f"the worker at {self.address} runs in this process and cannot be killed separately; "
            "use LocalCluster(processes=True), or stop_worker()"
        )


def worker_command(
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    drain_seconds: float = DRAIN_SECONDS,
) -> ChildCommand:
    """Return the command of a worker process.

    Args:
        options: Arguments of `WorkerConfig`.
        environment: Variables in addition to those of this process.
        drain_seconds: Seconds that the worker has to deliver its output after SIGTERM.
    """
    return build_command(
        "headrace.service.worker",
        json.dumps(options),
        str(drain_seconds),
        environment={**large_copy_tunables({**os.environ, **environment}), **environment},
    )
