"""A whole data service on this machine: a dispatcher in this process, workers beside it.

Workers are fresh interpreters, not forks: a fork would copy locks that other threads hold. Each
watches a pipe from this process and ends with it, however this process ends. This process watches
them in turn: one that dies by itself is reported and replaced.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Self

from headrace.arguments import check_int, check_strings
from headrace.data.at_exit import close_iterators
from headrace.errors import FailedPreconditionError
from headrace.forks import stays_with_parent
from headrace.process.child import ChildProcess
from headrace.process.supervisor import (
    ProcessEvent,
    ProcessExited,
    ProcessReady,
    ProcessStartFailed,
    Supervisor,
)
from headrace.service.config import DispatcherConfig, WorkerConfig, default_cache_bytes
from headrace.service.dispatcher.server import DispatchServer
from headrace.service.local_worker import (
    LocalWorker,
    ProcessWorker,
    ThreadWorker,
    worker_command,
)
from headrace.service.worker.server import WorkerServer
from headrace.transport.address import find_stable_port

__all__ = ["LocalCluster", "LocalWorker"]

_log = logging.getLogger(__name__)

#: Clusters that were not closed. At the end of the program they are, in order: workers that find
#: the dispatcher gone would speak of what they cannot hand back.
_open: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    close_iterators()
    for cluster in list(_open):
        cluster.close()


class LocalCluster:
    """A dispatcher and workers on this machine; a context manager.

    >>> with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
    ...     distribute = hr.service.distribute("distributed_epoch", cluster.target)
    ...     sorted(int(x) for x in hr.Dataset.range(5).apply(distribute))
    [0, 1, 2, 3, 4]

    Args:
        num_workers: Workers to start.
        processes: Whether each worker is a process of its own; else all run in this one, which
            suits tests and pipelines that do not hold the interpreter's lock.
        work_dir: Where the dispatcher keeps its journal; with it, it survives restarts.
        worker_timeout_ms: Silence after which a worker counts as lost; None: the default.
        heartbeat_interval_ms: Milliseconds between the workers' heartbeats; None: the default.
        preload: Modules that each worker process imports at its start: names, or paths of Python
            files.
        worker_addresses: The slots of the static sharding policies, in shard order, as in
            `DispatcherConfig`: `["localhost"] * 3` for any three workers of this cluster.
        restart: Whether a worker process that dies by itself is replaced, after a delay that grows
            while they go on dying. One that `kill_worker` killed is not.
        hang_timeout_ms: How long one call of a function, or one wait of a source for data, may take
            before its worker process is replaced, as in `WorkerConfig`; None: 10 minutes; 0: for
            ever.
        environment: Variables for worker processes, which else get those of this process, except
            that they see no accelerators.

    Raises:
        UnavailableError: A worker did not start; the message holds what it wrote.
    """

    def __init__(
        self,
        num_workers: int = 2,
        processes: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
        *,
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
        self._heartbeat_interval_ms = heartbeat_interval_ms
        check_strings("preload", preload)
        self._preload = tuple(preload)
        self._environment = dict(environment or {})
        self._cache_bytes = default_cache_bytes(num_workers)
        self._config = DispatcherConfig(
            port=0 if work_dir is None else find_stable_port(),
            work_dir=work_dir,
            fault_tolerant_mode=work_dir is not None,
            worker_timeout_ms=worker_timeout_ms,
            worker_addresses=worker_addresses,
        )
        self._workers: list[LocalWorker] = []
        self._household: Supervisor | None = None
        self._dispatcher = DispatchServer(self._config)
        _open.add(self)
        stays_with_parent(self)
        try:
            if processes:
                self._household = Supervisor("worker process", self._note, restarts=restart)
            self._add(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """The service's address, for `distribute(service=...)`."""
        return self._dispatcher.target

    @property
    def dispatcher(self) -> DispatchServer:
        """The dispatcher."""
        return self._dispatcher

    @property
    def workers(self) -> tuple[LocalWorker, ...]:
        """All workers ever started, in order; stopped, killed and replaced ones included."""
        return tuple(self._workers)

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
            FailedPreconditionError: The cluster has no `work_dir`.
        """
        if self._config.work_dir is None:
            raise FailedPreconditionError(
                "the dispatcher cannot be restarted: it keeps no journal. "
                "Use LocalCluster(work_dir=...)"
            )
        self._dispatcher.stop()
        self._dispatcher = DispatchServer(self._config)

    def close(self) -> None:
        """Stop all workers, then the dispatcher. May be called twice.

        Worker processes that do not end in a few seconds, as when a function of the user's holds
        the interpreter's lock, are killed.
        """
        _open.discard(self)
        if self._household is not None:
            self._household.close()
        for worker in self._workers:
            if worker.is_running:
                worker.stop()
        self._dispatcher.stop()

    stop = close

    def leave_to_parent(self) -> None:
        """Leave the cluster to the process that started it, where this one was forked from it."""
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- watching -----------------------------------------------------------------------------

    def _note(self, event: ProcessEvent) -> None:
        """Take note of a worker process that nobody waits for."""
        match event:
            case ProcessReady(_, child):
                self._workers.append(ProcessWorker(child))
            case ProcessExited(_, child, again_in) if not child.stop_requested:
                self._report(child, again_in)
            case ProcessStartFailed(_, error, again_in):
                _log.warning("no worker could be started: %s; next try in %g s", error, again_in)

    def _report(self, child: ChildProcess, again_in: float | None) -> None:
        """Report a process that died by itself."""
        where = "that was not ready yet"
        for worker in self._workers:
            if isinstance(worker, ProcessWorker) and worker.child is child:
                worker.death = child.exit_description
                where = f"at {worker.address}"
        _log.warning(
            "worker process %d %s %s; %d of the cluster's workers are left%s",
            child.pid,
            where,
            child.exit_description,
            sum(other.is_running for other in self._workers),
            "" if again_in is None else f", and another starts in {again_in:g} s",
        )

    # --- starting -----------------------------------------------------------------------------

    def _add(self, count: int) -> Sequence[LocalWorker]:
        address = self.target.partition("://")[2]
        added: list[LocalWorker] = []
        if self._household is not None:
            options = {
                "dispatcher_address": address,
                "heartbeat_interval_ms": self._heartbeat_interval_ms,
                "hang_timeout_ms": self._hang_timeout_ms,
                "preload": self._preload,
                "cross_trainer_cache_size_bytes": self._cache_bytes,
            }
            started = self._household.start([worker_command(options, self._environment)] * count)
            added += [ProcessWorker(child) for _, child in started]
        else:
            config = WorkerConfig(
                dispatcher_address=address,
                heartbeat_interval_ms=self._heartbeat_interval_ms,
                cross_trainer_cache_size_bytes=self._cache_bytes,
            )
            added += [ThreadWorker(WorkerServer(config)) for _ in range(count)]
        self._workers += added
        return added
