"""The parameter server: where it listens, and its life. What it does, `applying` says."""

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
"""A request holds a whole shard at most; the rest bounds what slow readers make a server keep."""


class ParameterServer(LifeCycle):
    """Keeps shards of variables and tables, and changes them as it is asked.

    What it keeps is in its memory alone. One that is started again at the same address is empty;
    whoever asks it learns that before anything is written to it.

    >>> from headrace.parameter_server.server import ParameterServer
    >>> with ParameterServer(0) as server:
    ...     server.address.rpartition(":")[0]
    '127.0.0.1'

    Args:
        index: Its number among the servers of the cluster.
        host: A name or number of this machine.
        port: 0 takes one that is free.
        security: The keys of this server, and who may enter; required where `host` can be reached
            from another machine.
        metrics_port: Where `/metrics`, `/healthz` and `/readyz` are served over HTTP; 0 takes one
            that is free, None serves none.
        metrics_host: Whom these are served for; the default is this machine alone.
        start: Start now; else `start()` does.

    Raises:
        ValueError: The host is not loopback and there is no `security`.
        OSError: The port is in use.
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
        """Its number among the servers of the cluster."""
        return self._index

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"; empty before `start`."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """Where `/metrics` is, as "host:port"; empty where `metrics_port` is None."""
        return self._metrics_address

    def status(self) -> ServerStatus:
        """Return what the server has done so far.

        Raises:
            RuntimeError: It was not started.
        """
        if self._status is None:
            raise RuntimeError("the parameter server was not started: call start()")
        return self._status()

    def _open(self) -> None:
        room = ReplyAllocator()
        store = ShardStore(room.allocate)
        applying = OperationExecutor(store, self._index, room)
        saving = CheckpointThread(store, applying)
        replicas = StoreReplicas(
            self._index, None if self._security is None else self._security.as_client()
        )
        self._keep(replicas.close)

        def status() -> ServerStatus:
            return replicas.add_to_status(applying.status())

        def handle(requests: Sequence[Request]) -> None:
            others: list[Request] = []
            for request in replicas.handle(requests):
                if isinstance(request.message, GetServerStatus):
                    request.reply(status())
                else:
                    others.append(request)
            applying.handle(others)

        self._status = status
        is_open = threading.Event()
        host, port = self._metrics
        if port is not None:
            endpoint = Endpoint(
                host,
                port,
                metrics=lambda: collect_metrics(status()),
                why_not_ready=lambda: "" if is_open.is_set() else "it does not listen yet",
            )
            self._keep(endpoint.close)
            self._metrics_address = endpoint.address
        server = zeromq.serve(
            handle,
            request_type=ServerRequest,
            host=self._host,
            port=self._port,
            security=self._security,
            limits=_LIMITS,
        )
        self._keep(server.close)
        self._address = server.address
        applying.start()
        self._keep(applying.close)
        saving.start()
        self._keep(saving.close)
        is_open.set()

    def __repr__(self) -> str:
        return f"<ParameterServer {self._index} at {self._address or 'no address yet'}>"
