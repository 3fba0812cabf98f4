"""A complete data service on this machine: a dispatcher in this process, and workers.

Worker processes are new interpreters, not forks, because a fork would copy locks held by other
threads. Each watches a pipe from this process and ends with it, however this process ends. This
process supervises them: one that dies unexpectedly is reported and replaced.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

from headrace.argument_names import explain_unknown_arguments
from headrace.arguments import check_int, check_strings
from headrace.data.iterator_cleanup import close_iterators
from headrace.errors import FailedPreconditionError
from headrace.forks import register_fork_sensitive
from headrace.process.child import ChildCommand, ChildProcess
from headrace.process.supervisor import (
    ProcessEvent,
    ProcessExited,
    ProcessReady,
    ProcessStartFailed,
    Supervisor,
)
from headrace.service.config import DispatcherConfig, WorkerConfig, default_cache_bytes
from headrace.service.dispatcher.server import DispatchServer
from headrace.service.local_launcher import ProcessLauncher, ThreadLauncher
from headrace.service.local_worker import (
    LocalWorker,
    ProcessWorker,
    ThreadWorker,
    worker_command,
)
from headrace.service.worker.server import DRAIN_SECONDS, WorkerServer
from headrace.service.worker_scaler import WorkerLauncher, WorkerScaler
from headrace.transport.address import find_stable_port

__all__ = ["LocalCluster", "LocalWorker"]

_log = logging.getLogger(__name__)

#: Open clusters. They are closed in order at the end of the program; otherwise, workers that lose
#: the dispatcher would log warnings about undelivered splits.
_open: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    close_iterators()
    for cluster in list(_open):
        cluster.close()


@explain_unknown_arguments
class LocalCluster:
    """Dispatcher and workers on this machine; a context manager.

    >>> with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
    ...     distribute = hr.service.distribute("distributed_epoch", cluster.target)
    ...     sorted(int(x) for x in hr.Dataset.range(5).apply(distribute))
    [0, 1, 2, 3, 4]

    Args:
        num_workers: Number of workers to start.
        processes: Whether each worker is a separate process; otherwise all run in this one, which
            suits tests and pipelines that release the global interpreter lock.
        work_dir: Directory of the dispatcher's journal, which makes restarts possible.
        max_workers: Maximum number of workers. If given, workers are added while clients wait for
            elements, and removed, down to `num_workers`, while fewer suffice. Removed workers first
            deliver all that they have computed. None keeps `num_workers`.
        worker_timeout_ms: Milliseconds without a heartbeat after which a worker is lost; None for
            the default.
        heartbeat_interval_ms: Milliseconds between the workers' heartbeats; None for the default.
        preload: Modules that each worker process imports at its start: names, or paths of Python
            files.
        worker_addresses: Slots of the static sharding policies, in shard order, as in
            `DispatcherConfig`: `["localhost"] * 3` for any three workers of this cluster.
        restart: Whether a worker process that dies unexpectedly is replaced, after a delay that
            grows if they keep dying. A worker killed by `kill_worker` is not replaced.
        hang_timeout_ms: Maximum milliseconds of one function call, or of one wait of a source for
            data, before the worker process is replaced, as in `WorkerConfig`; None for 10 minutes,
            0 for no limit.
        environment: Additional variables for worker processes, which inherit those of this process,
            except that accelerators are hidden from them.

    Raises:
        ValueError: If `max_workers` is less than `num_workers`, or given with `worker_addresses`.
        UnavailableError: If a worker did not start; the message has its output.
    """

    _restarts_signaled = False
    """Whether a worker process that got SIGTERM is replaced, rather than taken out of service."""

    def __init__(
        self,
        num_workers: int = 2,
        processes: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
        *,
        max_workers: int | None = None,
        worker_timeout_ms: int | None = None,
        heartbeat_interval_ms: int | None = None,
        preload: tuple[str, ...] = (),
        worker_addresses: Sequence[str] | None = None,
        restart: bool = True,
        environment: Mapping[str, str] | None = None,
        hang_timeout_ms: int | None = None,
    ) -> None:
        self._hang_timeout_ms = hang_timeout_ms
        num_workers = check_int("num_workers", num_workers, minimum=0)
        if max_workers is not None:
            _check_max_workers(max_workers, num_workers, worker_addresses)
        self._heartbeat_interval_ms = heartbeat_interval_ms
        check_strings("preload", preload)
        self._preload = tuple(preload)
        self._environment = dict(environment or {})
        self._cache_bytes = default_cache_bytes(max_workers or num_workers)
        # Workers of a scaled cluster drain as long as it takes, because it removes them itself.
        self._drain_seconds = DRAIN_SECONDS if max_workers is None else math.inf
        self._config = DispatcherConfig(
            port=0 if work_dir is None else find_stable_port(),
            work_dir=work_dir,
            fault_tolerant_mode=work_dir is not None,
            worker_timeout_ms=worker_timeout_ms,
            worker_addresses=worker_addresses,
        )
        self._workers: list[LocalWorker] = []
        self._supervisor: Supervisor | None = None
        self._thread_launcher: ThreadLauncher | None = None
        self._scaler: WorkerScaler | None = None
        self._dispatcher = DispatchServer(self._config)
        _open.add(self)
        register_fork_sensitive(self)
        try:
            if processes:
                self._supervisor = Supervisor(
                    "worker process",
                    self._handle_event,
                    restarts=restart,
                    restarts_signaled=self._restarts_signaled,
                )
            self._add(num_workers)
            if max_workers is not None:
                self._scaler = WorkerScaler(
                    self.target, self._create_launcher(), num_workers, max_workers
                )
                self._scaler.start()
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """Address of the service, for `distribute(service=...)`."""
        return self._dispatcher.target

    @property
    def dispatcher(self) -> DispatchServer:
        """The dispatcher."""
        return self._dispatcher

    @property
    def workers(self) -> tuple[LocalWorker, ...]:
        """All workers ever started, in order, including stopped, killed and replaced ones."""
        return tuple(self._workers)

    def __repr__(self) -> str:
        kind = "threads of this process" if self._supervisor is None else "processes"
        running = sum([worker.is_running for worker in self._workers])
        return f"<LocalCluster at {self.target}, workers running: {running}, as {kind}>"

    def add_worker(self) -> LocalWorker:
        """Start another worker; return when it has registered."""
        return self._add(1)[0]

    def kill_worker(self, index: int) -> None:
        """Kill the process of worker `index` (SIGKILL)."""
        self._worker(index).kill()

    def stop_worker(self, index: int) -> None:
        """Stop worker `index`."""
        self._worker(index).stop()

    def _worker(self, index: int) -> LocalWorker:
        check_int("index", index, minimum=0, maximum=len(self._workers) - 1)
        return self._workers[index]

    def restart_dispatcher(self) -> None:
        """Stop the dispatcher, and start another from its journal, at the same address.

        Raises:
            FailedPreconditionError: If the cluster has no `work_dir`.
        """
        if self._config.work_dir is None:
            raise FailedPreconditionError(
                "cannot restart a dispatcher without a journal; use LocalCluster(work_dir=...)"
            )
        self._dispatcher.stop()
        self._dispatcher = DispatchServer(self._config)

    def close(self) -> None:
        """Stop all workers, then the dispatcher. Idempotent.

        Worker processes that do not end within a few seconds are killed, for example if a user
        function holds the global interpreter lock.
        """
        _open.discard(self)
        if self._scaler is not None:
            self._scaler.stop()
        if self._supervisor is not None:
            self._supervisor.close()
        for worker in self._workers:
            if worker.is_running:
                worker.stop()
        if self._thread_launcher is not None:
            self._thread_launcher.close()
        self._dispatcher.stop()

    stop = close

    def after_fork_in_child(self) -> None:
        """In a forked process, leave the cluster to the process that started it."""
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- supervision ------------------------------------------------------------------------------

    def _handle_event(self, event: ProcessEvent) -> None:
        """Handle an event of a worker process that no caller waits for."""
        match event:
            case ProcessReady(_, child):
                self._workers.append(ProcessWorker(child))
            case ProcessExited(_, child, restart_in):
                if restart_in is not None or not child.stop_requested:
                    self._log_exit(child, restart_in)
            case ProcessStartFailed(_, error, retry_in):
                _log.warning("starting a worker failed: %s; retry in %g s", error, retry_in)

    def _log_exit(self, child: ChildProcess, restart_in: float | None) -> None:
        """Log that a process died unexpectedly."""
        output = child.read_startup_output()
        address = "not ready yet"
        for worker in self._workers:
            if isinstance(worker, ProcessWorker) and worker.child is child:
                worker.exit_reason = child.exit_description
                address = worker.address
        _log.warning(
            "worker process %d (%s) %s; remaining workers: %d%s%s",
            child.pid,
            address,
            child.exit_description,
            sum(worker.is_running for worker in self._workers),
            "" if restart_in is None else f"; replacement starts in {restart_in:g} s",
            f". Its output:\n{output}" if child.ready_message is None and output else "",
        )

    # --- starting -----------------------------------------------------------------------------

    def _worker_command(self, options: Mapping[str, Any]) -> ChildCommand:
        """Return the command of a worker process.

        Args:
            options: Arguments of `WorkerConfig`.
        """
        return worker_command(options, self._environment, self._drain_seconds)

    def _process_command(self) -> ChildCommand:
        return self._worker_command(
            {
                "dispatcher_address": self._address,
                "heartbeat_interval_ms": self._heartbeat_interval_ms,
                "hang_timeout_ms": self._hang_timeout_ms,
                "preload": self._preload,
                "cross_trainer_cache_size_bytes": self._cache_bytes,
            }
        )

    def _thread_config(self) -> WorkerConfig:
        return WorkerConfig(
            dispatcher_address=self._address,
            heartbeat_interval_ms=self._heartbeat_interval_ms,
            cross_trainer_cache_size_bytes=self._cache_bytes,
        )

    @property
    def _address(self) -> str:
        return self.target.partition("://")[2]

    def _add(self, count: int) -> Sequence[LocalWorker]:
        added: list[LocalWorker] = []
        if self._supervisor is not None:
            started = self._supervisor.start([self._process_command()] * count)
            added += [ProcessWorker(child) for _, child in started]
        else:
            config = self._thread_config()
            added += [ThreadWorker(WorkerServer(config)) for _ in range(count)]
        self._workers += added
        return added

    def _create_launcher(self) -> WorkerLauncher:
        if self._supervisor is not None:
            return ProcessLauncher(self._supervisor, self._process_command)
        self._thread_launcher = ThreadLauncher(self._thread_config(), self._workers)
        return self._thread_launcher


def _check_max_workers(
    max_workers: int, num_workers: int, worker_addresses: Sequence[str] | None
) -> None:
    check_int("max_workers", max_workers, minimum=1)
    if max_workers < num_workers:
        raise ValueError(
            f"max_workers={max_workers} must not be less than num_workers={num_workers}: the "
            "cluster starts num_workers workers, and adds others up to max_workers"
        )
    if worker_addresses is not None:
        raise ValueError(
            f"max_workers={max_workers} cannot be combined with worker_addresses: static sharding "
            "has a fixed number of workers"
        )
