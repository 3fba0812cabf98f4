"""The worker: where it listens, and whom it obeys. What it does then, `life.py` says.

Rule 1. It belongs to the coordinator with the newest incarnation that has greeted it; older ones
        are refused, with AbortedError.
Rule 2. Each greeting begins a new life: what was there before is dropped, and may write no more.
Rule 3. The server's thread never waits. Users' functions run on threads of their own, so it answers
        whatever they do.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from headrace.arguments import check_int, check_metrics, check_string
from headrace.coordinator.gauges import Totals, metrics_of_worker
from headrace.coordinator.life import Life
from headrace.coordinator.messages import (
    Attend,
    CallOff,
    Feed,
    Forget,
    Greet,
    Greeted,
    LoadFunction,
    Received,
    Release,
    Run,
    TakeResult,
    WorkerRequest,
)
from headrace.coordinator.reception import Announcing
from headrace.errors import (
    AbortedError,
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
)
from headrace.parameter_server.cluster_registry import ServerCluster, register_cluster
from headrace.parameter_server.server_requests import ParameterServerClient
from headrace.serving.call import Done
from headrace.serving.endpoint import Endpoint
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Request
from headrace.transport.limits import ServerLimits
from headrace.transport.security import Security
from headrace.versions import own_versions, python_mismatch

__all__ = ["LARGEST_CLOSURE", "ClosureWorker", "this_process"]

LARGEST_CLOSURE = 1 << 30
"""Bytes of the largest function, or arguments, that a worker takes."""
_JOIN_SECONDS = 0.5


def this_process() -> str:
    """Return which process this is, for words: "host:pid"."""
    return f"{socket.gethostname()}:{os.getpid()}"


class ClosureWorker(LifeCycle):
    """Runs the functions that a coordinator schedules.

    >>> import headrace as hr
    >>> with hr.coordinator.ClosureWorker(0) as worker:
    ...     worker.address.startswith("127.0.0.1:")
    True

    It needs no more than an address: a coordinator that greets it says which worker of which
    cluster it is, and where its parameter servers are. A function that runs when it stops is left
    to itself, and may write no more.

    Args:
        index: Its number among the workers, for words; what the coordinator says holds.
        host: Where to listen.
        port: 0 takes one that is free.
        security: This worker's keys, and whom it lets in; required where `host` can be reached from
            another machine: whoever is let in can run code here.
        coordinator: Where a coordinator listens (`ClusterCoordinator.listen`): the worker announces
            itself there, and need not be named by the strategy.
        metrics_port: Where `/metrics`, `/healthz` and `/readyz` are served over HTTP; 0 takes one
            that is free, None serves none.
        metrics_host: Whom these are served for; the default is this machine alone.
        start: Start now; else `start()` does.
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
        self.index = check_int("index", index, minimum=0)
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
        """Where coordinators reach it, as "host:port"; empty before `start`."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """Where `/metrics` is, as "host:port"; empty where `metrics_port` is None."""
        return self._metrics_address

    def _open(self) -> None:
        desk = _Desk(self._security)
        self._keep(desk.close)
        host, port = self._metrics
        if port is not None:
            # Ready as soon as it listens: who waits for a coordinator before it may be found by
            # its name would never be found by one.
            endpoint = Endpoint(
                host,
                port,
                metrics=lambda: metrics_of_worker(desk.totals()),
                why_not_ready=lambda: "" if desk.is_open else "it does not listen yet",
            )
            self._keep(endpoint.close)
            self._metrics_address = endpoint.address
        server = zeromq.serve(
            desk.handle,
            request_type=WorkerRequest,
            host=self._host,
            port=self._port,
            security=self._security,
            limits=ServerLimits(request_bytes=LARGEST_CLOSURE),
        )
        self._keep(server.close)
        # Before the server: it takes the answers that are owed along.
        self._keep(desk.close)
        self._address = server.address
        desk.is_open = True
        if self._coordinator is not None:
            address = server.address
            if addresses.is_wildcard(self._host):
                host = addresses.local_address_for(self._coordinator)
                address = addresses.join(host, addresses.split(address)[1])
            keys = None if self._security is None else self._security.as_client()
            self._keep(Announcing(self._coordinator, address, keys).close)


class _Desk:
    """Takes requests to the life that they belong to."""

    def __init__(self, security: Security | None) -> None:
        self._security = security
        self.is_open = False
        """Whether requests can come."""
        self._totals = Totals()
        self._lock = threading.Lock()
        self._life: Life | None = None
        self._incarnation = -1
        #: In which process the coordinator of this incarnation is.
        self._obeyed = ""
        self._is_closed = False
        #: The cluster that was entered here; None: none was.
        self._cluster: ServerCluster | None = None

    def handle(self, requests: Sequence[Request]) -> None:
        """Answer requests of coordinators (`transport.channel.Handler`)."""
        for request in requests:
            try:
                _TABLE[type(request.message)](self, request, request.message)
            except HeadraceError as error:
                request.fail(error)

    def _of(self, session: int) -> Life:
        life = self._life
        if life is None or life.greeting.session != session:
            raise AbortedError(
                "this worker was greeted again, or has not been greeted: what is asked belongs to "
                "a life that is over"
            )
        return life

    def _greet(self, request: Request, message: Greet) -> None:
        if message.incarnation < self._incarnation:
            raise AbortedError(
                f"this worker obeys a newer coordinator, in process {self._obeyed} (incarnation "
                f"{self._incarnation}; yours is {message.incarnation}): end this program, or give "
                "each of the two workers of its own"
            )
        if self._is_closed:
            # No life begins, and what is sent here would count as lost, again and again.
            raise UnavailableError("this worker is stopping")
        mine, theirs = own_versions(), message.versions
        if python_mismatch(theirs.python, mine.python):
            raise FailedPreconditionError(
                f"this training worker, process {this_process()}, runs {mine}, and the coordinator "
                f"in process {message.process} runs {theirs}: functions travel as bytecode, which "
                "is different in each minor version of Python, so run both on the same one"
            )
        self._incarnation, self._obeyed = message.incarnation, message.process
        self._take_part(message)
        self._begin(message)
        request.reply(Greeted(process=this_process()))

    def _take_part(self, message: Greet) -> None:
        """Have handles of the cluster resolve here."""
        before = self._cluster
        if before is not None:
            if (before.cluster_id, before.servers.addresses) == (
                message.cluster_id,
                message.servers,
            ):
                before.servers.states.merge(message.acknowledged)
                return  # since the last greeting
            self._cluster = None
            before.close()
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

    def _begin(self, message: Greet | None) -> None:
        with self._lock:
            before, self._life = self._life, None
        if before is not None:
            before.close()
        if message is None:
            return
        with self._lock:
            if not self._is_closed:
                servers = None if self._cluster is None else self._cluster.servers
                acknowledged = tuple if servers is None else servers.acknowledged_states
                self._life = Life(message, self._totals, acknowledged)
                self._totals.greetings += 1

    def _forget(self, request: Request, message: Forget) -> None:
        self._of(message.session)
        self._begin(None)
        request.reply(Done())

    def _attend(self, request: Request, message: Attend) -> None:
        self._of(message.session).attend(request)

    def _load(self, request: Request, message: LoadFunction) -> None:
        self._of(message.session).load(message, request.buffers)
        request.reply(Done())

    def _run(self, request: Request, message: Run) -> None:
        self._of(message.session).run(message, request)

    def _feed(self, request: Request, message: Feed) -> None:
        self._of(message.session).feed(message, request)

    def _call_off(self, request: Request, message: CallOff) -> None:
        request.reply(self._of(message.session).call_off(message))

    def _take(self, request: Request, message: TakeResult) -> None:
        request.reply(*self._of(message.session).take(message.number))

    def _received(self, request: Request, message: Received) -> None:
        self._of(message.session).received(message.number)
        request.reply(Done())

    def _release(self, request: Request, message: Release) -> None:
        self._of(message.session).release(message.resources)
        request.reply(Done())

    def totals(self) -> Totals:
        """Return what was done so far, and what is going on."""
        life, totals = self._life, self._totals
        totals.is_greeted = life is not None
        totals.running, totals.waiting = (0, 0) if life is None else life.counts
        return totals

    def close(self) -> None:
        """End the life that there is. May be called twice."""
        with self._lock:
            self._is_closed = True
            life, self._life = self._life, None
        if life is not None:
            life.close()
            life.join(_JOIN_SECONDS)
        if self._cluster is not None:
            self._cluster.close()


_TABLE: dict[type, Callable[[_Desk, Request, Any], None]] = {
    Attend: _Desk._attend,
    CallOff: _Desk._call_off,
    Feed: _Desk._feed,
    Forget: _Desk._forget,
    Greet: _Desk._greet,
    LoadFunction: _Desk._load,
    Received: _Desk._received,
    Release: _Desk._release,
    Run: _Desk._run,
    TakeResult: _Desk._take,
}
