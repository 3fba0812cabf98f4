"""The parameter server: endpoint, start and stop. `operation_executor` executes the operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headrace.arguments import check_int, check_metrics, check_string
from headrace.parameter_server.checkpoint_thread import CheckpointThread
from headrace.parameter_server.messages import GetServerStatus, ServerRequest, ServerStatus
from headrace.parameter_server.operation_executor import (
    OperationExecutor,
    ReplyAllocator,
    collect_metrics,
)
from headrace.parameter_server.store import ShardStore
from headrace.parameter_server.store_replica import StoreReplicas
from headrace.serving.endpoint import Endpoint
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import zeromq
from headrace.transport.channel import Request
from headrace.transport.limits import ServerLimits
from headrace.transport.security import Security, check_security

__all__ = ["ParameterServer"]

_LIMITS = ServerLimits(request_bytes=16 << 30, pending_reply_bytes=1 << 30)
"""A request has at most a whole shard; the reply limit bounds the memory used for slow readers."""


class ParameterServer(LifeCycle):
    """A server that holds shards of variables and tables, and executes operations on them.

    All contents are in memory. A server restarted at the same address is empty; clients learn that
    before they write anything to it.

    >>> from headrace.parameter_server.server import ParameterServer
    >>> with ParameterServer(0) as server:
    ...     server.address.rpartition(":")[0]
    '127.0.0.1'

    Args:
        index: Index among the servers of the cluster.
        host: Host name or address of this machine.
        port: Port; 0 chooses a free one.
        security: Keys of this server, and its authorized clients; required if `host` can be reached
            from another machine.
        metrics_port: HTTP port of `/metrics`, `/healthz` and `/readyz`; 0 chooses a free one, None
            serves none.
        metrics_host: Address to serve these on; the default is reachable from this machine only.
        start: Whether to start now; else call `start()`.

    Raises:
        ValueError: If the host is not loopback and there is no `security`.
        OSError: If the port is in use.
    """

    def __init__(
        self,
        index: int,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        security: Security | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        start: bool = True,
    ) -> None:
        super().__init__()
        self._index = check_int("index", index, minimum=0)
        check_security(security)
        check_string("host", host, empty=False)
        self._host = host
        self._port = check_int("port", port, minimum=0, maximum=65535)
        self._security = security
        check_metrics(metrics_port, metrics_host)
        self._metrics = metrics_host, metrics_port
        self._address = ""
        self._metrics_address = ""
        self._status: Callable[[], ServerStatus] | None = None
        if start:
            self.start()

    @property
    def index(self) -> int:
        """Index among the servers of the cluster."""
        return self._index

    @property
    def address(self) -> str:
        """Address, as "host:port"; empty before `start`."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """Address of `/metrics`, as "host:port"; empty if `metrics_port` is None."""
        return self._metrics_address

    def status(self) -> ServerStatus:
        """Return the statistics of the server.

        Raises:
            RuntimeError: If the server was not started.
        """
        if self._status is None:
            raise RuntimeError("the parameter server was not started: call start()")
        return self._status()

    def _open(self) -> None:
        allocator = ReplyAllocator()
        store = ShardStore(allocator.allocate)
        executor = OperationExecutor(store, self._index, allocator)
        checkpoint_thread = CheckpointThread(store, executor)
        replicas = StoreReplicas(
            self._index, None if self._security is None else self._security.as_client()
        )
        self._on_stop(replicas.close)

        def status() -> ServerStatus:
            return replicas.add_to_status(executor.status())

        def handle(requests: Sequence[Request]) -> None:
            others: list[Request] = []
            for request in replicas.handle(requests):
                if isinstance(request.message, GetServerStatus):
                    request.reply(status())
                else:
                    others.append(request)
            executor.handle(others)

        self._status = status
        is_open = threading.Event()
        host, port = self._metrics
        if port is not None:
            endpoint = Endpoint(
                host,
                port,
                metrics=lambda: collect_metrics(status()),
                not_ready_reason=lambda: (
                    "" if is_open.is_set() else "the server is not listening yet"
                ),
            )
            self._on_stop(endpoint.close)
            self._metrics_address = endpoint.address
        server = zeromq.serve(
            handle,
            request_type=ServerRequest,
            host=self._host,
            port=self._port,
            security=self._security,
            limits=_LIMITS,
        )
        self._on_stop(server.close)
        self._address = server.address
        executor.start()
        self._on_stop(executor.close)
        checkpoint_thread.start()
        self._on_stop(checkpoint_thread.close)
        is_open.set()

    def __repr__(self) -> str:
        return f"<ParameterServer {self._index} at {self._address or 'no address yet'}>"
