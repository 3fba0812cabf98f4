"""A whole data service on this machine: a dispatcher in this process, workers beside it.

Workers are fresh interpreters, not forks: a fork would copy locks that other threads hold. Each
watches a pipe from this process and ends with it, however this process ends. This process watches
them in turn: one that dies by itself is reported and replaced.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from headrace.errors import FailedPreconditionError
from headrace.service.config import DispatcherConfig, WorkerConfig
from headrace.service.dispatcher.server import DispatchServer
from headrace.service.local_worker import (
    STOP_SECONDS,
    LocalWorker,
    restart_delay,
    start_processes,
)
from headrace.service.worker.server import WorkerServer

__all__ = ["LocalCluster", "LocalWorker"]

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.1
_GOOD_LIFE_SECONDS = 60.0


class LocalCluster:
    """A dispatcher and workers on this machine; a context manager.

    Args:
        num_workers: Workers to start.
        processes: Whether each worker is a process of its own; else all run in this one, which
            suits tests and pipelines that do not hold the interpreter's lock.
        work_dir: Where the dispatcher keeps its journal; with it, it survives restarts.
        worker_timeout_ms: Silence after which a worker counts as lost; None: the default.
        heartbeat_interval_ms: Milliseconds between the workers' heartbeats; None: the default.
        preload: Modules that each worker process imports at its start.
        restart: Whether a worker process that dies by itself is replaced, after a delay that grows
            while they go on dying. One that `kill_worker` killed is not.
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
        restart: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise TypeError(f"`num_workers` must be an integer, but got {num_workers!r}")
        if num_workers < 0:
            raise ValueError(f"`num_workers` must be at least 0, but got {num_workers}")
        self._processes = processes
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._preload = tuple(preload)
        self._restart = restart
        self._environment = dict(environment or {})
        self._config = DispatcherConfig(
            port=0 if work_dir is None else _lasting_port(),
            work_dir=work_dir,
            fault_tolerant_mode=work_dir is not None,
            worker_timeout_ms=worker_timeout_ms,
        )
        self._workers: list[LocalWorker] = []
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._dispatcher = DispatchServer(self._config)
        try:
            self._add(num_workers)
            if processes:
                self._watcher = threading.Thread(
                    target=self._watch, name="headrace-cluster-watch", daemon=True
                )
                self._watcher.start()
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
        self._workers[index].kill()

    def stop_worker(self, index: int) -> None:
        """Stop worker `index`."""
        self._workers[index].stop()

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
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        for worker in self._workers:
            worker.release()
        # They end side by side, and have one deadline.
        until = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.stop(until)
        self._dispatcher.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- watching -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Report workers that die by themselves, and replace them."""
        deaths, last_death = 0, 0.0
        #: When the next worker is to be started, for each that is missing.
        due: list[float] = []
        while not self._closing.wait(_WATCH_SECONDS):
            for worker in [worker for worker in self._workers if worker.has_died()]:
                now = time.monotonic()
                deaths = 1 if now - last_death > _GOOD_LIFE_SECONDS else deaths + 1
                last_death = now
                self._report(worker, restart_delay(deaths))
                due.append(now + restart_delay(deaths))
            if self._restart and due and due[0] <= time.monotonic():
                try:
                    self._add(1, self._closing.is_set)
                    due.pop(0)
                except Exception as error:
                    if not self._closing.is_set():
                        deaths, last_death = deaths + 1, time.monotonic()
                        due[0] = last_death + restart_delay(deaths)
                        _log.warning("no worker could be started: %s", error)

    def _report(self, worker: LocalWorker, delay: float) -> None:
        living = sum(other.is_running for other in self._workers)
        _log.warning(
            "worker process %d at %s %s; %d of the cluster's workers are left%s",
            worker.pid,
            worker.address,
            worker.death,
            living,
            f", and another starts in {delay:g} s" if self._restart else "",
        )

    # --- starting -----------------------------------------------------------------------------

    def _add(
        self, count: int, is_called_off: Callable[[], bool] = lambda: False
    ) -> list[LocalWorker]:
        address = self.target.partition("://")[2]
        if not self._processes:
            for _ in range(count):
                server = WorkerServer(
                    WorkerConfig(
                        dispatcher_address=address,
                        heartbeat_interval_ms=self._heartbeat_interval_ms,
                    )
                )
                self._workers.append(LocalWorker(server.address, os.getpid(), server=server))
            return self._workers[len(self._workers) - count :]
        added = start_processes(
            count,
            {
                "dispatcher_address": address,
                "heartbeat_interval_ms": self._heartbeat_interval_ms,
                "preload": self._preload,
            },
            self._environment,
            is_called_off,
        )
        self._workers.extend(added)
        return added


def _lasting_port() -> int:
    """Return a free port that will be free again after the dispatcher was stopped.

    Not one of those that the system gives to whoever connects: a client that tries to reach the
    dispatcher while it is away may be given the very port, and be connected with itself.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    return 0
