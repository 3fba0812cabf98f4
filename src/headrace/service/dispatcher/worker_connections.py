"""Tell from the connections of workers whether their processes run.

A heartbeat needs the interpreter's lock of the worker, a connection does not: ZeroMQ answers pings
on a thread of its own. So a worker whose heartbeats are late is

    alive     if its connection stands and data arrives on it: a function holds the lock
    silent    if its connection stands and nothing arrives: it is stopped, or unreachable
    exited    if its connection was closed: the system closes it when the process ends
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from headrace.service import messages
from headrace.transport.channel import Request, TransportServer

__all__ = ["WorkerConnections"]


class WorkerConnections:
    """The connections of workers to the dispatcher. Any thread may ask."""

    def __init__(self) -> None:
        self._server: TransportServer | None = None
        #: Worker -> `Request.peer`.
        self._peers: dict[str, str] = {}

    def attach(self, server: TransportServer) -> None:
        """Ask this server from now on."""
        self._server = server

    def record_requests(self, requests: Sequence[Request]) -> None:
        """Remember through which connections workers speak."""
        for request in requests:
            message = request.message
            if isinstance(message, messages.RegisterWorker | messages.WorkerHeartbeat):
                self._peers[message.worker_id] = request.peer

    def keep_only(self, workers: Container[str]) -> None:
        """Forget workers that are not among these."""
        for worker_id in [each for each in self._peers if each not in workers]:
            self._peers.pop(worker_id, None)

    def seconds_since_data(self, worker_id: str) -> float | None:
        """Return the seconds since anything arrived from a worker's process; None: not known."""
        peer = self._peers.get(worker_id)
        return (
            None if peer is None or self._server is None else self._server.seconds_since_data(peer)
        )

    def has_exited(self, worker_id: str) -> bool:
        """Whether the connection of a worker was closed, as the end of its process does."""
        peer = self._peers.get(worker_id)
        if peer is None or self._server is None:
            return False
        return not self._server.is_connected(peer)
