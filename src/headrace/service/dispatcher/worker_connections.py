"""Connections of workers, which show whether their processes run.

A heartbeat needs the interpreter's lock of the worker, a connection does not: ZeroMQ replies to
pings on its own thread. So a worker whose heartbeats are late is

    alive     if it is connected and data arrives: a function holds the lock
    silent    if it is connected and nothing arrives: it is stopped, or unreachable
    exited    if its connection was closed: the system closes it when the process ends
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from headrace.service import messages
from headrace.transport.channel import Request, TransportServer

__all__ = ["WorkerConnections"]


class WorkerConnections:
    """The connections of workers to the dispatcher. Thread-safe."""

    def __init__(self) -> None:
        self._server: TransportServer | None = None
        #: Worker -> `Request.peer`.
        self._peers: dict[str, str] = {}

    def attach(self, server: TransportServer) -> None:
        """Use this server from now on."""
        self._server = server

    def record_requests(self, requests: Sequence[Request]) -> None:
        """Record the connections that workers use."""
        for request in requests:
            message = request.message
            if isinstance(message, messages.RegisterWorker | messages.WorkerHeartbeat):
                self._peers[message.worker_id] = request.peer

    def keep_only(self, workers: Container[str]) -> None:
        """Forget all workers except these."""
        for worker_id in [each for each in self._peers if each not in workers]:
            self._peers.pop(worker_id, None)

    def seconds_since_data(self, worker_id: str) -> float | None:
        """Return the seconds since a worker's process sent data; None if unknown."""
        peer = self._peers.get(worker_id)
        return (
            None if peer is None or self._server is None else self._server.seconds_since_data(peer)
        )

    def has_exited(self, worker_id: str) -> bool:
        """Return whether a worker's connection was closed, as happens when its process ends."""
        peer = self._peers.get(worker_id)
        if peer is None or self._server is None:
            return False
        return not self._server.is_connected(peer)
