"""Server of a coordinator: registration of workers, and status for monitoring.

It exposes no user data: no functions and no values.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeAlias

import msgspec

from headrace.arguments import check_metrics
from headrace.coordinator.coordinator_runner import CoordinatorRunner
from headrace.coordinator.metrics import coordinator_metrics
from headrace.coordinator.status import CoordinatorStatus, GetCoordinatorStatus, coordinator_status
from headrace.errors import FailedPreconditionError, HeadraceError, InvalidArgumentError
from headrace.serving.endpoint import Endpoint
from headrace.serving.rpc import Done, Message, Ping, TypedRequest
from headrace.threads import start_thread
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Request
from headrace.transport.security import Security
from headrace.versions import Versions, own_versions, python_mismatch
from headrace.waiting import WaitWarningLimiter

__all__ = [
    "CoordinatorReply",
    "CoordinatorServer",
    "RegisterTrainingWorker",
    "TrainingWorkerRegistered",
    "WorkerRegistration",
]


_log = logging.getLogger(__name__)


class TrainingWorkerRegistered(Message, frozen=True):
    """Number of the registered worker; -1 if the worker was removed."""

    worker: int


class RegisterTrainingWorker(TypedRequest[TrainingWorkerRegistered], frozen=True):
    """Register a worker. Repeated periodically, since the coordinator may have been replaced.

    Attributes:
        address: Address at which the worker listens.
        process_id: Id of its process: a removed process stays removed, but another one at its
            address may register.
        versions: Versions of that process.
    """

    address: str
    process_id: str
    versions: Versions = msgspec.field(default_factory=own_versions)


_CoordinatorRequest: TypeAlias = RegisterTrainingWorker | GetCoordinatorStatus | Ping

CoordinatorReply: TypeAlias = TrainingWorkerRegistered | CoordinatorStatus | Done


class CoordinatorServer:
    """Answers workers and monitoring clients for one coordinator.

    Args:
        runner: Runner of the coordinator.
        staleness: Staleness bound; None without a bound.
    """

    def __init__(self, runner: CoordinatorRunner, staleness: int | None) -> None:
        self._runner = runner
        self._staleness = staleness
        #: Process ids of workers that were refused.
        self._refused: set[str] = set()
        #: Process ids of workers that were removed.
        self._removed: set[str] = set()
        #: Process id that registered last, by address.
        self._process_ids: dict[str, str] = {}
        self.address: str = ""
        """Address at which it listened last, as "host:port"; empty if never."""
        self.metrics_address: str = ""
        """Address of the metrics endpoint, as "host:port"; empty without one."""

    def listen(
        self,
        host: str,
        port: int,
        security: Security | None,
        metrics_host: str,
        metrics_port: int | None,
    ) -> ExitStack:
        """Start answering, and serving metrics if a port is given; return a stack that ends both.

        Raises:
            ValueError: If the metrics address is invalid, or `security` is missing.
            OSError: If a port is in use.
        """
        check_metrics(metrics_port, metrics_host)
        with ExitStack() as servers:
            server = zeromq.serve(
                self._handle,
                request_type=_CoordinatorRequest,
                host=host,
                port=port,
                security=security,
            )
            servers.callback(server.close)
            if metrics_port is not None:
                endpoint = Endpoint(
                    metrics_host,
                    metrics_port,
                    metrics=lambda: coordinator_metrics(self.status()),
                    not_ready_reason=lambda: "",
                )
                servers.callback(endpoint.close)
                self.metrics_address = endpoint.address
            self.address = server.address
            return servers.pop_all()

    def status(self) -> CoordinatorStatus:
        """Return the status of the coordinator."""
        with self._runner.lock:
            return coordinator_status(self._runner.core, time.monotonic(), self._staleness)

    def remove(self, address: str) -> None:
        """Mark a worker's process as removed: its later registrations are ignored."""
        process_id = self._process_ids.get(address)
        if process_id is not None:
            self._removed.add(process_id)

    def _handle(self, requests: Sequence[Request]) -> None:
        for request in requests:
            message = request.message
            if isinstance(message, RegisterTrainingWorker):
                try:
                    self._check_versions(message)
                    request.reply(TrainingWorkerRegistered(worker=self._register(message)))
                except FailedPreconditionError as error:
                    request.fail(error)
                except ValueError as error:
                    request.fail(InvalidArgumentError(str(error)))
            elif isinstance(message, GetCoordinatorStatus):
                request.reply(self.status())
            else:
                request.reply(Done())

    def _check_versions(self, message: RegisterTrainingWorker) -> None:
        """Refuse a worker with another Python version before waiting for it."""
        own, worker_versions = own_versions(), message.versions
        if not python_mismatch(own.python, worker_versions.python):
            return
        message_text = (
            f"the training worker at {message.address} runs {worker_versions}, but the "
            f"coordinator at {self.address} runs {own}: functions are sent as bytecode, which "
            "differs between minor versions of Python, so use the same version for both"
        )
        if message.process_id not in self._refused:
            self._refused.add(message.process_id)
            _log.warning("registration of a worker refused: %s", message_text)
        raise FailedPreconditionError(message_text)

    def _register(self, message: RegisterTrainingWorker) -> int:
        addresses.split(message.address)
        with self._runner.lock:
            if message.process_id in self._removed:
                return -1
            self._process_ids[message.address] = message.process_id
            now = time.monotonic()
            worker = self._runner.core.add_worker(message.address, now, registered_at=now)
        self._runner.wake()
        return worker


# --- registration of a worker at its coordinator, which then needs no configured address ----------

_REGISTER_INTERVAL = 2.0
_REPLY_TIMEOUT = 5.0


class WorkerRegistration:
    """Registers a worker every two seconds, until it is closed.

    Args:
        coordinator: Address of the coordinator, as "host:port".
        address: Address at which the worker listens.
        security: Client keys.
    """

    def __init__(self, coordinator: str, address: str, security: Security | None) -> None:
        self._coordinator = coordinator
        self._message = RegisterTrainingWorker(address=address, process_id=uuid.uuid4().hex)
        self._security = security
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-registration", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        channel = zeromq.connect(
            self._coordinator,
            reply_type=CoordinatorReply,
            security=self._security,
            shared_memory=False,
        )
        last_reply, warnings = time.monotonic(), WaitWarningLimiter()
        refusal = ""
        try:
            while True:
                try:
                    channel.call(self._message, timeout=_REPLY_TIMEOUT)
                except FailedPreconditionError as error:
                    # Another coordinator may listen there later, so registration continues.
                    if str(error) != refusal:
                        refusal = str(error)
                        _log.error("registration refused by the coordinator: %s", error)
                except HeadraceError as error:
                    # A hanging coordinator uses up the timeout of each attempt.
                    if warnings.should_warn(time.monotonic() - last_reply):
                        _log.warning(
                            "no reply from the coordinator at %s: %s", self._coordinator, error
                        )
                else:
                    last_reply = time.monotonic()
                    warnings.reset()
                if self._closed.wait(_REGISTER_INTERVAL):
                    return
        finally:
            channel.close()

    def close(self) -> None:
        """Stop after the current call."""
        self._closed.set()
        self._thread.join(_REGISTER_INTERVAL)
