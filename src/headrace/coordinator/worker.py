"""Server of a closure worker; `worker_session.py` runs its closures.

Rule 1. A worker belongs to the coordinator with the newest term that has started a session; older
        coordinators are refused with AbortedError.
Rule 2. Each `StartSession` begins a new session. The previous one ends, and further writes of its
        functions are rejected.
Rule 3. The server's thread never blocks. Users' functions run on other threads, so the server
        answers whatever they do.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from headrace.arguments import check_int, check_metrics, check_string
from headrace.coordinator.coordinator_server import WorkerRegistration
from headrace.coordinator.messages import (
    AcknowledgeResult,
    AwaitSessionEnd,
    CancelClosure,
    EndSession,
    FeedElements,
    FetchResult,
    LoadFunction,
    ReleaseResources,
    RunClosure,
    SessionStarted,
    StartSession,
    WorkerRequest,
)
from headrace.coordinator.metrics import WorkerCounters, worker_metrics
from headrace.coordinator.worker_session import WorkerSession
from headrace.errors import (
    AbortedError,
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
)
from headrace.parameter_server.cluster_registry import ServerCluster, register_cluster
from headrace.parameter_server.server_requests import ParameterServerClient
from headrace.serving.endpoint import Endpoint
from headrace.serving.life_cycle import LifeCycle
from headrace.serving.rpc import Done
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Request
from headrace.transport.limits import ServerLimits
from headrace.transport.security import Security
from headrace.versions import own_versions, python_mismatch

__all__ = ["MAX_CLOSURE_BYTES", "ClosureWorker", "process_name"]

MAX_CLOSURE_BYTES = 1 << 30
"""Maximum bytes of a function, or of its arguments."""
_JOIN_SECONDS = 0.5


def process_name() -> str:
    """Return the name of this process for messages: "host:pid"."""
    return f"{socket.gethostname()}:{os.getpid()}"


class ClosureWorker(LifeCycle):
    """Runs the functions that a coordinator schedules.

    >>> import headrace as hr
    >>> with hr.coordinator.ClosureWorker(0) as worker:
    ...     worker.address.startswith("127.0.0.1:")
    True

    A worker needs only an address: the coordinator that starts a session tells it its number,
    its cluster and the parameter servers. A function that is running when the worker stops
    continues, but its writes are rejected.

    Args:
        index: Number of the worker for messages; the number from the coordinator takes
            precedence.
        host: Interface to listen on.
        port: Port to listen on; 0 takes a free one.
        security: Keys of this worker and of permitted clients; required if `host` is reachable
            from another machine, since clients can run code here.
        coordinator: Address at which a coordinator listens (`ClusterCoordinator.listen`): the
            worker registers itself there, and the strategy need not name it.
        metrics_port: Port of `/metrics`, `/healthz` and `/readyz` over HTTP; 0 takes a free
            one, None disables them.
        metrics_host: Interface for these; by default this machine only.
        start: Whether to start now; otherwise call `start()`.
    """

    def __init__(
        self,
        index: int,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        security: Security | None = None,
        coordinator: str | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        start: bool = True,
    ) -> None:
        super().__init__()
        self.index: int = check_int("index", index, minimum=0)
        check_string("host", host, empty=False)
        self._host = host
        self._port = check_int("port", port, minimum=0, maximum=65535)
        self._security = security
        if coordinator is not None:
            addresses.split(coordinator)
        self._coordinator = coordinator
        check_metrics(metrics_port, metrics_host)
        self._metrics = metrics_host, metrics_port
        self._metrics_address = ""
        self._address = ""
        if start:
            self.start()

    @property
    def address(self) -> str:
        """Address for coordinators, as "host:port"; empty before `start`."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """Address of `/metrics`, as "host:port"; empty if `metrics_port` is None."""
        return self._metrics_address

    def _open(self) -> None:
        handler = _RequestHandler(self._security)
        self._on_stop(handler.close)
        host, port = self._metrics
        if port is not None:
            # Ready as soon as it listens, not when it has a session: if a name service lists only
            # ready workers, no coordinator would find it to start one.
            endpoint = Endpoint(
                host,
                port,
                metrics=lambda: worker_metrics(handler.counters()),
                not_ready_reason=lambda: "" if handler.is_open else "not listening yet",
            )
            self._on_stop(endpoint.close)
            self._metrics_address = endpoint.address
        server = zeromq.serve(
            handler.handle,
            request_type=WorkerRequest,
            host=self._host,
            port=self._port,
            security=self._security,
            limits=ServerLimits(request_bytes=MAX_CLOSURE_BYTES),
        )
        self._on_stop(server.close)
        # Before the server closes: it still sends pending replies.
        self._on_stop(handler.close)
        self._address = server.address
        handler.is_open = True
        if self._coordinator is not None:
            address = server.address
            if addresses.is_wildcard(self._host):
                host = addresses.local_address_for(self._coordinator)
                address = addresses.join(host, addresses.split(address)[1])
            keys = None if self._security is None else self._security.as_client()
            self._on_stop(WorkerRegistration(self._coordinator, address, keys).close)


class _RequestHandler:
    """Handler of coordinators' requests, which it passes to the worker's session."""

    def __init__(self, security: Security | None) -> None:
        self._security = security
        self.is_open = False
        """Whether requests are accepted."""
        self._counters = WorkerCounters()
        self._lock = threading.Lock()
        self._session: WorkerSession | None = None
        self._term = -1
        #: Process of the coordinator of the current term.
        self._coordinator_process = ""
        self._is_closed = False
        #: Cluster that was entered in this process; None if none was.
        self._cluster: ServerCluster | None = None

    def handle(self, requests: Sequence[Request]) -> None:
        """Handle requests of coordinators (`transport.channel.Handler`)."""
        for request in requests:
            try:
                _HANDLERS[type(request.message)](self, request, request.message)
            except HeadraceError as error:
                request.fail(error)

    def _find_session(self, session: int) -> WorkerSession:
        worker_session = self._session
        if worker_session is None or worker_session.start_message.session != session:
            raise AbortedError(
                "this worker has started another session since, or none yet; the request is of "
                f"session {session}"
            )
        return worker_session

    def _on_start_session(self, request: Request, message: StartSession) -> None:
        if message.term < self._term:
            raise AbortedError(
                "this worker belongs to a newer coordinator, in process "
                f"{self._coordinator_process} (its term is {self._term}, yours is "
                f"{message.term}): end this program, or give each coordinator separate workers"
            )
        if self._is_closed:
            # Start no session, since all closures sent to it would be lost.
            raise UnavailableError("this worker is stopping")
        own, coordinator_versions = own_versions(), message.versions
        if python_mismatch(coordinator_versions.python, own.python):
            raise FailedPreconditionError(
                f"this training worker, process {process_name()}, runs {own}, but the "
                f"coordinator in process {message.process} runs {coordinator_versions}: "
                "functions are sent as bytecode, which differs between minor versions of Python, "
                "so use the same version for both"
            )
        self._term, self._coordinator_process = message.term, message.process
        self._register_cluster(message)
        self._start_session(message)
        request.reply(SessionStarted(process=process_name()))

    def _register_cluster(self, message: StartSession) -> None:
        """Resolve handles of the cluster in this process."""
        previous = self._cluster
        if previous is not None:
            if (previous.cluster_id, previous.servers.addresses) == (
                message.cluster_id,
                message.servers,
            ):
                previous.servers.states.merge(message.acknowledged)
                return  # unchanged since the last `StartSession`
            self._cluster = None
            previous.close()
        if message.servers:
            keys = None if self._security is None else self._security.as_client()
            servers = ParameterServerClient(
                message.servers,
                security=keys,
                timeout=message.server_timeout,
                for_worker=True,
                replication=message.replication,
            )
            servers.states.merge(message.acknowledged)
            self._cluster = ServerCluster(message.cluster_id, servers)
            register_cluster(self._cluster)

    def _start_session(self, message: StartSession | None) -> None:
        with self._lock:
            previous, self._session = self._session, None
        if previous is not None:
            previous.close()
        if message is None:
            return
        with self._lock:
            if not self._is_closed:
                servers = None if self._cluster is None else self._cluster.servers
                acknowledged = tuple if servers is None else servers.acknowledged_states
                self._session = WorkerSession(message, self._counters, acknowledged)
                self._counters.num_sessions += 1

    def _on_end_session(self, request: Request, message: EndSession) -> None:
        self._find_session(message.session)
        self._start_session(None)
        request.reply(Done())

    def _on_await_session_end(self, request: Request, message: AwaitSessionEnd) -> None:
        self._find_session(message.session).await_end(request)

    def _on_load_function(self, request: Request, message: LoadFunction) -> None:
        self._find_session(message.session).load_function(message, request.buffers)
        request.reply(Done())

    def _on_run_closure(self, request: Request, message: RunClosure) -> None:
        self._find_session(message.session).run_closure(message, request)

    def _on_feed_elements(self, request: Request, message: FeedElements) -> None:
        self._find_session(message.session).feed_elements(message, request)

    def _on_cancel_closure(self, request: Request, message: CancelClosure) -> None:
        request.reply(self._find_session(message.session).cancel_closure(message))

    def _on_fetch_result(self, request: Request, message: FetchResult) -> None:
        request.reply(*self._find_session(message.session).fetch_result(message.number))

    def _on_acknowledge_result(self, request: Request, message: AcknowledgeResult) -> None:
        self._find_session(message.session).drop_result(message.number)
        request.reply(Done())

    def _on_release_resources(self, request: Request, message: ReleaseResources) -> None:
        self._find_session(message.session).release_resources(message.resources)
        request.reply(Done())

    def counters(self) -> WorkerCounters:
        """Return the counters, with the current state."""
        session, totals = self._session, self._counters
        totals.has_session = session is not None
        totals.num_running, totals.num_waiting = (0, 0) if session is None else session.counts
        return totals

    def close(self) -> None:
        """End the current session. Idempotent."""
        with self._lock:
            self._is_closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()
            session.join(_JOIN_SECONDS)
        if self._cluster is not None:
            self._cluster.close()


_HANDLERS: dict[type, Callable[[_RequestHandler, Request, Any], None]] = {
    AwaitSessionEnd: _RequestHandler._on_await_session_end,
    CancelClosure: _RequestHandler._on_cancel_closure,
    FeedElements: _RequestHandler._on_feed_elements,
    EndSession: _RequestHandler._on_end_session,
    StartSession: _RequestHandler._on_start_session,
    LoadFunction: _RequestHandler._on_load_function,
    AcknowledgeResult: _RequestHandler._on_acknowledge_result,
    ReleaseResources: _RequestHandler._on_release_resources,
    RunClosure: _RequestHandler._on_run_closure,
    FetchResult: _RequestHandler._on_fetch_result,
}
