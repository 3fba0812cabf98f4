"""Workers and parameter servers on this machine: for tests, first steps, and one large host.

Processes are fresh interpreters, not forks, and end with this one, however it ends. A process that
crashes is restarted at its address, as an orchestrator would do on a cluster.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Self

from headrace.argument_names import explain_unknown_arguments
from headrace.arguments import check_flag, check_int, check_string
from headrace.cluster.resolver import SimpleClusterResolver
from headrace.cluster.spec import PS, WORKER, ClusterSpec
from headrace.deploy.server import Server
from headrace.errors import FailedPreconditionError
from headrace.forks import register_fork_sensitive
from headrace.process.child import ChildCommand, ChildProcess, build_command
from headrace.process.supervisor import (
    ProcessEvent,
    ProcessExited,
    ProcessReady,
    ProcessStartFailed,
    SupervisedCommand,
    Supervisor,
)
from headrace.transport import address as addresses

__all__ = ["LocalCluster"]

_log = logging.getLogger(__name__)

_HOST = "127.0.0.1"

#: Open clusters, which are closed at the end of the program.
_open: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for cluster in list(_open):
        cluster.close()


@explain_unknown_arguments
class LocalCluster:
    """Workers and parameter servers on this machine, at stable addresses; a context manager.

    >>> import headrace as hr
    >>> with hr.distribute.LocalCluster(num_workers=2, num_ps=1, processes=False) as cluster:
    ...     cluster.cluster_resolver.cluster_spec().num_tasks("worker")
    2

    This process is not a task of the cluster: it runs the coordinator.

    Args:
        num_workers: Number of workers.
        num_ps: Number of parameter servers.
        processes: Whether each task runs in a separate process; otherwise all run in this one,
            which suits tests.
        restart: Whether a process that crashes is restarted, after a delay that grows with
            repeated crashes. A process killed by `kill` is not restarted.
        environment: Additional variables for the processes, which inherit those of this one, except
            that accelerators are hidden from them.

    Raises:
        UnavailableError: If a task did not start; the message includes its output.
    """

    def __init__(
        self,
        num_workers: int,
        num_ps: int,
        processes: bool = True,
        *,
        restart: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        counts = {
            WORKER: check_int("num_workers", num_workers, minimum=0),
            PS: check_int("num_ps", num_ps, minimum=0),
        }
        check_flag("processes", processes, or_none=False)
        check_flag("restart", restart, or_none=False)
        self._environment = dict(environment or {})
        self._spec = _free_addresses(counts)
        self._tasks = [(name, i) for name, count in counts.items() for i in range(count)]
        self._lock = threading.Lock()
        self._is_closed = False
        #: Supervised processes; without tasks that were killed, or ended on a signal.
        self._supervised: dict[tuple[str, int], SupervisedCommand] = {}
        self._servers: dict[tuple[str, int], Server] = {}
        self._supervisor: Supervisor | None = None
        #: Strategies that use this cluster; they wait for its tasks until they are closed.
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        _open.add(self)
        register_fork_sensitive(self)
        try:
            if processes:
                self._supervisor = Supervisor("process", self._report_event, restarts=restart)
            self._start(self._tasks)
        except BaseException:
            self.close()
            raise

    @property
    def cluster_resolver(self) -> SimpleClusterResolver:
        """Return a resolver of the tasks, for strategies; this process has no task in it."""
        resolver = SimpleClusterResolver(self._spec, environment="local")
        resolver.users = self._users
        return resolver

    def is_running(self, task_type: str, task_index: int) -> bool:
        """Return whether a task is running."""
        task = self._check_task(task_type, task_index)
        if self._supervisor is None:
            return task in self._servers
        child = self._child(task)
        return child is not None and child.is_running

    def pid(self, task_type: str, task_index: int) -> int | None:
        """Return the process id of a task, or None if it is not running."""
        task = self._check_task(task_type, task_index)
        if self._supervisor is None:
            return os.getpid() if task in self._servers else None
        child = self._child(task)
        return child.pid if child is not None and child.is_running else None

    def kill(self, task_type: str, task_index: int) -> None:
        """Kill a task (SIGKILL) until `restart`. A task in this process is stopped.

        Raises:
            ValueError: If there is no such task.
        """
        task = self._check_task(task_type, task_index)
        with self._lock:
            self._kill(task)

    def restart(self, task_type: str, task_index: int) -> None:
        """Kill a task, and start it again at its address with empty memory.

        Raises:
            ValueError: If there is no such task.
            UnavailableError: If it did not start.
            FailedPreconditionError: If the cluster is closed.
        """
        task = self._check_task(task_type, task_index)
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("the cluster is closed; create another one")
            self._kill(task)
            self._start([task])

    def close(self) -> None:
        """Close strategies that use its resolver, and stop all tasks."""
        _open.discard(self)
        for each in list(self._users):
            each.close()
        # Before taking the lock: it ends a start that waits.
        if self._supervisor is not None:
            self._supervisor.close()
        with self._lock:
            self._is_closed = True
            for server in self._servers.values():
                server.stop()
            self._servers.clear()

    stop = close

    def after_fork_in_child(self) -> None:
        """Leave the cluster to the parent process, in a forked child."""
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalCluster {self._spec.as_dict()}>"

    def _start(self, tasks: list[tuple[str, int]]) -> None:
        if self._supervisor is None:
            self._servers |= {task: Server(self._spec, *task) for task in tasks}
            return
        started = self._supervisor.start([self._command(task) for task in tasks])
        self._supervised |= {
            task: supervised for task, (supervised, _) in zip(tasks, started, strict=True)
        }

    def _command(self, task: tuple[str, int]) -> ChildCommand:
        return build_command(
            "headrace.deploy.task",
            json.dumps(self._spec.as_dict()),
            task[0],
            str(task[1]),
            environment=self._environment,
        )

    def _kill(self, task: tuple[str, int]) -> None:
        if self._supervisor is not None:
            supervised = self._supervised.pop(task, None)
            if supervised is not None:
                self._supervisor.kill(supervised)
        elif task in self._servers:
            self._servers.pop(task).stop()

    def _child(self, task: tuple[str, int]) -> ChildProcess | None:
        supervised = self._supervised.get(task)
        return None if supervised is None else supervised.child

    def _check_task(self, task_type: str, task_index: int) -> tuple[str, int]:
        check_string("task_type", task_type)
        check_int("task_index", task_index, minimum=0)
        if (task_type, task_index) not in self._tasks:
            raise ValueError(f"the cluster has no {task_type!r} task {task_index}: {self._spec}")
        return task_type, task_index

    def _report_event(self, event: ProcessEvent) -> None:
        """Log an event of a process for which no call waits."""
        match event:
            case ProcessReady(supervised, child):
                _log.info("%s restarted as process %d", self._describe(supervised), child.pid)
            case ProcessExited(supervised, child, restart_in) if not child.stop_requested:
                _log.warning(
                    "%s: process %d %s%s",
                    self._describe(supervised),
                    child.pid,
                    child.exit_description,
                    "" if restart_in is None else f"; restarting it in {restart_in:g} s",
                )
            case ProcessStartFailed(supervised, error, restart_in):
                _log.warning(
                    "cannot start %s: %s; retrying in %g s",
                    self._describe(supervised),
                    error,
                    restart_in,
                )

    def _describe(self, supervised: SupervisedCommand) -> str:
        name, index = next(
            (task for task, each in list(self._supervised.items()) if each is supervised), ("", -1)
        )
        if not name:
            return "a task"
        return f"{name} {index} at {self._spec.task_address(name, index)}"


def _free_addresses(counts: Mapping[str, int]) -> ClusterSpec:
    ports: set[int] = set()
    while len(ports) < sum(counts.values()):
        ports.add(addresses.find_stable_port(_HOST))
    left = iter(ports)
    return ClusterSpec(
        {
            name: [addresses.join(_HOST, next(left)) for _ in range(count)]
            for name, count in counts.items()
        }
    )
