"""The worker's shell: where it listens, its heartbeat, its tasks."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from headrace.errors import (
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.config import WorkerConfig
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import (
    Done,
    Ping,
    RegisterWorker,
    WorkerHeartbeat,
    WorkerRegistered,
    WorkerRequest,
)
from headrace.service.worker.task_set import TaskSet
from headrace.transport import address as addresses
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Request, Server
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["WorkerServer"]

_log = logging.getLogger(__name__)

_DISPATCHER_SECONDS = 3600.0
_CALL_SECONDS = 2.0


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
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._started = False
        self._servers: list[Server] = []
        self._tasks: TaskSet | None = None
        self._heartbeat: threading.Thread | None = None
        self._address = ""
        self._worker_id = ""
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
        except BaseException:
            self.stop()
            raise
        self._heartbeat = threading.Thread(
            target=self._beat, args=(interval,), name="headrace-worker-heartbeat", daemon=True
        )
        self._heartbeat.start()

    def join(self) -> None:
        """Wait until the server is stopped."""
        # In slices, so that Ctrl-C gets through on every platform.
        while not self._stopped.wait(1.0):
            pass

    def stop(self) -> None:
        """Stop listening, call all tasks off, join all threads. May be called twice."""
        self._stopping.set()
        for server in self._servers:
            server.close()
        tasks = self._tasks
        if tasks is not None:
            tasks.close()
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat is not threading.current_thread():
            heartbeat.join()
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
        self._servers.append(server)
        _, port = addresses.split(server.address)
        self._address = (config.worker_address or server.address).replace("%port%", str(port))
        # Clients of this process ask for the address that the dispatcher names.
        name, number = addresses.split(self._address)
        self._servers.append(
            inprocess.serve(self._handle, request_type=WorkerRequest, host=name, port=number)
        )

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
        worker_id = uuid.uuid4().hex
        tasks = TaskSet(worker_id, self._connect, self._timeout())
        before, self._tasks = self._tasks, tasks
        if before is not None:
            before.close()
        try:
            registered: WorkerRegistered = stub.register_worker(
                RegisterWorker(
                    worker_id=worker_id,
                    address=self._address,
                    tags=tuple(self._config.worker_tags or ()),
                ),
                timeout=timeout,
            )
        except BaseException:
            self._tasks = None
            tasks.close()
            raise
        self._worker_id = worker_id
        wished = self._config.heartbeat_interval_ms
        return registered.heartbeat_interval if wished is None else max(1, wished) / 1000

    def _beat(self, interval: float) -> None:
        stub = self._connect()
        try:
            while not self._stopping.wait(interval):
                try:
                    self._beat_once(stub)
                except NotFoundError:
                    _log.warning(
                        "the dispatcher at %s does not know this worker any more (it was "
                        "restarted, or took the worker for lost); registering again",
                        self._config.dispatcher_address,
                    )
                    try:
                        interval = self._register(stub)
                    except HeadraceError as error:
                        _log.debug("cannot register again yet: %s", error)
                except HeadraceError as error:
                    _log.debug("no heartbeat: %s", error)
        finally:
            stub.close()

    def _beat_once(self, stub: DispatcherStub) -> None:
        tasks = self._tasks
        if tasks is None:
            raise NotFoundError("not registered")
        update = stub.worker_heartbeat(
            WorkerHeartbeat(worker_id=self._worker_id, tasks=tasks.running), timeout=_CALL_SECONDS
        )
        tasks.delete(update.tasks_to_delete)
        tasks.tell_finished(lambda message: stub.finish_task(message, timeout=_CALL_SECONDS))
