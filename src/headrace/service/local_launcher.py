"""Launchers of a local cluster's workers, for `WorkerScaler`: as processes, or in this process.

Workers that are removed drain without a time limit, so nothing is lost; closing the cluster ends
the drain. The newest workers are removed first.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial

from headrace.errors import CancelledError
from headrace.process.child import ChildCommand
from headrace.process.supervisor import Supervisor
from headrace.service.config import WorkerConfig
from headrace.service.local_worker import LocalWorker, ThreadWorker
from headrace.service.worker.server import WorkerServer

__all__ = ["ProcessLauncher", "ThreadLauncher"]

_log = logging.getLogger(__name__)


class ProcessLauncher:
    """Launcher of worker processes, which drain on SIGTERM.

    Args:
        supervisor: Supervisor of the processes.
        make_command: Returns the command of a worker process.
    """

    def __init__(self, supervisor: Supervisor, make_command: Callable[[], ChildCommand]) -> None:
        self._supervisor = supervisor
        self._make_command = make_command

    def num_workers(self) -> int:
        return self._supervisor.num_active

    def start_workers(self, count: int) -> None:
        self._supervisor.start_soon([self._make_command()] * count)

    def stop_workers(self, count: int) -> None:
        self._supervisor.stop_newest(count)


class ThreadLauncher:
    """Launcher of workers in this process.

    Args:
        config: Configuration of each worker.
        workers: Workers of the cluster, to which this object adds those that it starts.
    """

    def __init__(self, config: WorkerConfig, workers: list[LocalWorker]) -> None:
        self._config = config
        self._workers = workers
        #: Guards the attributes below.
        self._lock = threading.Lock()
        self._starting: list[WorkerServer] = []
        self._draining: set[ThreadWorker] = set()
        self._threads: list[threading.Thread] = []

    def num_workers(self) -> int:
        with self._lock:
            return len(self._starting) + len(self._active())

    def start_workers(self, count: int) -> None:
        for _ in range(count):
            server = WorkerServer(self._config, start=False)
            with self._lock:
                self._starting.append(server)
            self._run(partial(self._start, server))

    def stop_workers(self, count: int) -> None:
        with self._lock:
            starting = self._starting[-count:]
            running = self._active()[-(count - len(starting)) :] if count > len(starting) else []
            self._draining.update(running)
            del self._starting[len(self._starting) - len(starting) :]
        for server in starting:
            server.stop()
        for worker in running:
            self._run(partial(self._drain, worker))

    def close(self) -> None:
        """Stop the workers that are starting, and wait for all threads.

        Running workers must be stopped before, which ends their drains.
        """
        with self._lock:
            starting, self._starting = self._starting, []
        for server in starting:
            server.stop()
        for thread in self._threads:
            thread.join()

    def _active(self) -> list[ThreadWorker]:
        return [
            worker
            for worker in self._workers
            if isinstance(worker, ThreadWorker)
            and worker.is_running
            and worker not in self._draining
        ]

    def _run(self, work: Callable[[], object]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name="headrace-local-worker", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _start(self, server: WorkerServer) -> None:
        try:
            server.start()
        except CancelledError:
            return  # removed by `stop_workers` or `close`
        except Exception as error:
            _log.warning("starting a worker failed: %s", error)
        with self._lock:
            # Otherwise `stop_workers` stops it.
            if server in self._starting:
                self._starting.remove(server)
                if not server.is_stopped:
                    self._workers.append(ThreadWorker(server))

    def _drain(self, worker: ThreadWorker) -> None:
        worker.drain(math.inf)
        with self._lock:
            self._draining.discard(worker)
