"""The worker's shell: where it listens, its heartbeat, its tasks.

start       listen, register; from then on a heartbeat
drain       say that the worker is leaving, deliver what there is, then stop
stop        hand back what was not delivered, say that the worker left, close everything
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from headrace.errors import CancelledError, HeadraceError, NotFoundError, UnavailableError
from headrace.service.config import WorkerConfig
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import (
    Done,
    Ping,
    RegisterWorker,
    WorkerHeartbeat,
    WorkerLeaving,
    WorkerLeft,
    WorkerRegistered,
    WorkerRequest,
)
from headrace.service.worker.connections import Connections
from headrace.service.worker.failure import describe
from headrace.service.worker.plans import PlanCache
from headrace.service.worker.task_set import TaskSet, Undelivered
from headrace.serving.call import Question
from headrace.transport import address as addresses
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Request, Server
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["DRAIN_SECONDS", "LEFT_CODE", "WorkerServer"]

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 25.0
"""How long a worker that leaves delivers what it has, unless it is given another time."""

LEFT_CODE = 128 + signal.SIGTERM
"""Exit code of a worker process that a signal asked to leave, for whoever started it: any other end
was not asked for, and 0 is what a user's function ends the process with as well."""

_DISPATCHER_SECONDS = 3600.0
_CALL_SECONDS = 2.0
_STOP_SECONDS = 1.0
_SETTLE_POLL_SECONDS = 0.02
_SAY_AGAIN_SECONDS = 1.0
# Parts of the second that `stop` may take.
_UNDER_WAY_SECONDS = 0.2
_LEAVE_SECONDS = 0.4


class WorkerServer:
    """Runs tasks for the clients of a data service.

    Args:
        config: Whose dispatcher, and where to listen.
        start: Start now; else `start()` does.

    Raises:
        ValueError: `config` names no dispatcher.
        UnavailableError: The dispatcher did not answer in `config.dispatcher_timeout_ms`.
    """

    def __init__(self, config: WorkerConfig, start: bool = True) -> None:
        if config is None or not config.dispatcher_address:
            raise ValueError(
                "Must specify a `dispatcher_address` in the `config` passed to `WorkerServer`"
            )
        self._config = config
        self._lock = threading.Lock()
        self._draining = threading.Event()
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._started = False
        self._servers: list[Server] = []
        self._plans = PlanCache()
        self._tasks: TaskSet | None = None
        self._heartbeat: threading.Thread | None = None
        self._address = ""
        self._incarnation = ""
        if start:
            self.start()

    @property
    def address(self) -> str:
        """Where clients reach it, as "host:port"; empty before `start`."""
        return self._address

    def num_tasks(self) -> int:
        """Return the number of tasks that are not finished."""
        tasks = self._tasks
        return 0 if tasks is None else len(tasks.running)

    def start(self) -> None:
        """Listen and register with the dispatcher. Does nothing when it was started before.

        Raises:
            RuntimeError: The server was stopped.
            UnavailableError: The dispatcher did not answer in time.
        """
        with self._lock:
            if self._stopping.is_set():
                raise RuntimeError("Server cannot be started after it has been stopped")
            if self._started:
                return
            self._started = True
        try:
            self._listen()
            interval = self._register_first()
            with self._lock:
                if self._stopping.is_set():
                    raise CancelledError("the worker was stopped while it started")
                self._heartbeat = threading.Thread(
                    target=self._beat,
                    args=(interval,),
                    name="headrace-worker-heartbeat",
                    daemon=True,
                )
                self._heartbeat.start()
        except BaseException:
            self.stop()
            raise

    def join(self) -> None:
        """Wait until the server is stopped."""
        # In slices, so that Ctrl-C gets through on every platform.
        while not self._stopped.wait(1.0):
            pass

    def drain(self, timeout: float | None = None) -> None:
        """Deliver what there is, then stop.

        The worker takes no new tasks and no new units. Tasks with dealt units run out; copies of a
        whole dataset end where they are. What was not delivered in time is handed back to the
        dispatcher where that is possible, and a warning says how much was not. `stop`, from another
        thread, ends the wait.

        Args:
            timeout: Seconds to deliver in; None: `DRAIN_SECONDS`.
        """
        until = time.monotonic() + (DRAIN_SECONDS if timeout is None else timeout)
        with self._lock:
            self._draining.set()
            tasks = self._tasks
        if tasks is not None and not self._stopping.is_set():
            leaving = WorkerLeaving(worker_id=tasks.worker_id)
            # The dispatcher may be away: the tasks take no more units either way.
            tasks.drain()
            heard, again_at = False, 0.0
            while time.monotonic() < until:
                if not heard and time.monotonic() >= again_at:
                    heard = self._say([leaving], until)
                    again_at = time.monotonic() + _SAY_AGAIN_SECONDS
                if tasks.is_settled or self._stopping.wait(_SETTLE_POLL_SECONDS):
                    break
        self.stop()

    def stop(self) -> None:
        """Hand back what was not delivered and close everything. May be called twice.

        Takes a second at most: a function of the user's that does not return is left to itself.
        """
        until = time.monotonic() + _STOP_SECONDS
        with self._lock:
            # No other tasks, servers and heartbeat from here on.
            is_first = not self._stopping.is_set()
            self._stopping.set()
            servers, tasks, heartbeat = list(self._servers), self._tasks, self._heartbeat
        if not is_first:
            self._stopped.wait(_STOP_SECONDS)
            return
        try:
            if tasks is not None:
                # Before the servers are closed: what is handed out after that does not arrive.
                self._leave(tasks, until)
            for server in servers:
                server.close()
            if tasks is not None:
                tasks.close(until - time.monotonic())
            if heartbeat is not None and heartbeat is not threading.current_thread():
                heartbeat.join(max(0.0, until - time.monotonic()))
        finally:
            self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- the wire -----------------------------------------------------------------------------

    def _listen(self) -> None:
        config = self._config
        server = zeromq.serve(
            self._handle,
            request_type=WorkerRequest,
            host=config.host,
            port=config.port,
            security=config.security,
        )
        self._keep(server)
        _, port = addresses.split(server.address)
        self._address = (config.worker_address or server.address).replace("%port%", str(port))
        # Clients of this process ask for the address that the dispatcher names.
        name, number = addresses.split(self._address)
        self._keep(
            inprocess.serve(self._handle, request_type=WorkerRequest, host=name, port=number)
        )

    def _keep(self, server: Server) -> None:
        with self._lock:
            stopping = self._stopping.is_set()
            if not stopping:
                self._servers.append(server)
        if stopping:
            server.close()
            raise CancelledError("the worker was stopped while it started")

    def _handle(self, requests: Sequence[Request]) -> None:
        tasks = self._tasks
        for request in requests:
            if isinstance(request.message, Ping):
                request.reply(Done())
            elif tasks is None:
                request.fail(UnavailableError(f"the worker at {self._address} is not ready yet"))
            else:
                tasks.take(request)

    # --- the dispatcher -----------------------------------------------------------------------

    def _connect(self) -> DispatcherStub:
        keys = self._config.security
        return DispatcherStub(
            self._config.dispatcher_address, security=None if keys is None else keys.as_client()
        )

    def _timeout(self) -> float:
        milliseconds = self._config.dispatcher_timeout_ms
        return _DISPATCHER_SECONDS if milliseconds is None else max(1, milliseconds) / 1000

    def _register_first(self) -> float:
        with self._connect() as stub:
            return retry(
                lambda timeout: self._register(stub, timeout),
                RetryPolicy(deadline=self._timeout()),
                whom=f"the dispatcher at {self._config.dispatcher_address}, with which the "
                f"worker at {self._address} wants to register,",
                attempt_timeout=_CALL_SECONDS,
                stop=self._stopping.wait,
            )

    def _register(self, stub: DispatcherStub, timeout: float = _CALL_SECONDS) -> float:
        """Register under a new id, with an empty set of tasks; return the heartbeat interval."""
        with self._lock:
            if self._stopping.is_set() or self._draining.is_set():
                raise CancelledError("the worker stops")
            tasks = TaskSet(
                uuid.uuid4().hex, Connections(self._connect, self._timeout()), self._plans
            )
            before, self._tasks = self._tasks, tasks
        if before is not None:
            before.close()
        try:
            registered: WorkerRegistered = stub.call(
                RegisterWorker(
                    worker_id=tasks.worker_id,
                    address=self._address,
                    tags=tuple(self._config.worker_tags or ()),
                ),
                timeout=timeout,
            )
        except BaseException:
            with self._lock:
                self._tasks = None
            tasks.close()
            raise
        self._incarnation = registered.incarnation
        wished = self._config.heartbeat_interval_ms
        return registered.heartbeat_interval if wished is None else max(1, wished) / 1000

    def _beat(self, interval: float) -> None:
        stub: DispatcherStub | None = None
        while not self._stopping.wait(interval):
            try:
                stub = stub or self._connect()
                interval = self._beat_once(stub, interval)
            except HeadraceError as error:
                _log.debug("no heartbeat: %s", error)
            except BaseException as error:
                # Without a heartbeat the worker would be taken for lost while it serves on. What
                # is short now (memory, file descriptors) may be there again the next time.
                _log.warning("no heartbeat: %s", describe(error))
                _close(stub)
                stub = None
        _close(stub)

    def _beat_once(self, stub: DispatcherStub, interval: float) -> float:
        tasks = self._tasks
        if tasks is None:
            return self._register(stub)
        tasks.tick()
        try:
            update = stub.call(
                WorkerHeartbeat(worker_id=tasks.worker_id, tasks=tasks.running),
                timeout=_CALL_SECONDS,
            )
            is_known = update.incarnation in ("", self._incarnation)
        except NotFoundError:
            is_known = False
        if not is_known:
            if self._draining.is_set():
                return interval
            _log.warning(
                "the dispatcher at %s does not know this worker any more (it was restarted, or "
                "took the worker for lost); registering again",
                self._config.dispatcher_address,
            )
            return self._register(stub)
        tasks.drop_clients(update.departed, lambda word: stub.call(word, timeout=_CALL_SECONDS))
        tasks.delete(update.tasks_to_delete)
        tasks.report_finished(lambda word: stub.call(word, timeout=_CALL_SECONDS))
        return interval

    # --- the end ------------------------------------------------------------------------------

    def _leave(self, tasks: TaskSet, until: float) -> None:
        """Call the tasks off, and tell the dispatcher what they had not delivered."""
        left = tasks.call_off(_UNDER_WAY_SECONDS)
        words = [*left.hand_backs, WorkerLeft(worker_id=tasks.worker_id)]
        said = self._say(words, min(until, time.monotonic() + _LEAVE_SECONDS))
        self._warn_of(left, handed_back=said)

    def _warn_of(self, left: Undelivered, *, handed_back: bool) -> None:
        if left.units and not handed_back:
            _log.warning(
                "the worker at %s leaves, and %d units of its tasks are lost: the dispatcher at %s "
                "did not answer when they were to be handed back",
                self._address,
                left.units,
                self._config.dispatcher_address,
            )
        if self._draining.is_set() and (left.units or left.elements or left.unacknowledged):
            _log.warning(
                "the worker at %s leaves before everything was delivered: %d units were not "
                "delivered%s, %d elements had been produced and were asked for by nobody, %d were "
                "sent and not acknowledged",
                self._address,
                left.units,
                " and were handed back" if left.units and handed_back else "",
                left.elements,
                left.unacknowledged,
            )

    def _say(self, words: Sequence[Question[Done]], until: float) -> bool:
        """Say words to the dispatcher, each once; return whether it answered all by `until`.

        One that it has no use for (its iteration was closed, the worker is not known) is answered.
        """
        try:
            with self._connect() as stub:
                for word in words:
                    left = min(_LEAVE_SECONDS, until - time.monotonic())
                    try:
                        stub.call(word, timeout=max(0.0, left))
                    except NotFoundError as error:
                        _log.debug("the dispatcher knows nothing of it: %s", error)
        except Exception as error:
            _log.debug("the dispatcher does not hear that the worker leaves: %s", describe(error))
            return False
        return True


def _close(stub: DispatcherStub | None) -> None:
    """Close a connection, whatever state it is in."""
    if stub is not None:
        with contextlib.suppress(Exception):
            stub.close()
