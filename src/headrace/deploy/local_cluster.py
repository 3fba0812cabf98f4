"""Workers and parameter servers on this machine: for tests, first steps, and one large host.

Processes are fresh interpreters, not forks, and end with this one, however it ends. One that dies
by itself is started again at its address, as an orchestrator would do it on a cluster.
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

from headrace.arguments import check_flag, check_int, check_string
from headrace.cluster.resolver import SimpleClusterResolver
from headrace.cluster.spec import PS, WORKER, ClusterSpec
from headrace.deploy.server import Server
from headrace.errors import FailedPreconditionError
from headrace.forks import stays_with_parent
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

#: Clusters that were not closed; at the end of the program they are.
_open: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for cluster in list(_open):
        cluster.close()


class LocalCluster:
    """Workers and parameter servers on this machine, at addresses that last; a context manager.

    >>> import headrace as hr
    >>> with hr.distribute.LocalCluster(num_workers=2, num_ps=1, processes=False) as cluster:
    ...     cluster.cluster_resolver.cluster_spec().num_tasks("worker")
    2

    This process has no task in it: it is the coordinator's.

    Args:
        num_workers: Workers to start.
        num_ps: Parameter servers to start.
        processes: Whether each task is a process of its own; else all run in this one, which suits
            tests.
        restart: Whether a process that dies by itself is started again, after a delay that grows
            while it goes on dying. One that `kill` killed is not.
        environment: Variables for the processes, which else get those of this one, except that
            they see no accelerators.

    Raises:
        UnavailableError: A task did not start; the message holds what it wrote.
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
        #: Where a task has none it was killed, or left when a signal asked it to.
        self._posts: dict[tuple[str, int], SupervisedCommand] = {}
        self._servers: dict[tuple[str, int], Server] = {}
        self._household: Supervisor | None = None
        #: Strategies of this cluster, which wait for its tasks until they are closed.
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        _open.add(self)
        stays_with_parent(self)
        try:
            if processes:
                self._household = Supervisor("process", self._note, restarts=restart)
            self._start(self._tasks)
        except BaseException:
            self.close()
            raise

    @property
    def cluster_resolver(self) -> SimpleClusterResolver:
        """Where the tasks are, for strategies: it has no task of this process's own."""
        resolver = SimpleClusterResolver(self._spec, environment="local")
        resolver.users = self._users
        return resolver

    def is_running(self, task_type: str, task_index: int) -> bool:
        """Whether a task runs now."""
        task = self._checked(task_type, task_index)
        if self._household is None:
            return task in self._servers
        child = self._child(task)
        return child is not None and child.is_running

    def pid(self, task_type: str, task_index: int) -> int | None:
        """Return the process of a task; None: it has none now."""
        task = self._checked(task_type, task_index)
        if self._household is None:
            return os.getpid() if task in self._servers else None
        child = self._child(task)
        return child.pid if child is not None and child.is_running else None

    def kill(self, task_type: str, task_index: int) -> None:
        """Kill a task (SIGKILL); it is away until `restart`. A task in this process is stopped.

        Raises:
            ValueError: There is no such task.
        """
        task = self._checked(task_type, task_index)
        with self._lock:
            self._kill(task)

    def restart(self, task_type: str, task_index: int) -> None:
        """Start a task again, at its address and with nothing in its memory; kill it before.

        Raises:
            ValueError: There is no such task.
            UnavailableError: It did not start.
            FailedPreconditionError: The cluster is closed.
        """
        task = self._checked(task_type, task_index)
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("the cluster is closed; make another")
            self._kill(task)
            self._start([task])

    def close(self) -> None:
        """Close strategies that were made with its resolver, and stop all tasks."""
        _open.discard(self)
        for each in list(self._users):
            each.close()
        # Before the lock: it ends a start that waits.
        if self._household is not None:
            self._household.close()
        with self._lock:
            self._is_closed = True
            for server in self._servers.values():
                server.stop()
            self._servers.clear()

    stop = close

    def leave_to_parent(self) -> None:
        """Leave the cluster to the process that started it, where this one was forked from it."""
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalCluster {self._spec.as_dict()}>"

    def _start(self, tasks: list[tuple[str, int]]) -> None:
        if self._household is None:
            self._servers |= {task: Server(self._spec, *task) for task in tasks}
            return
        started = self._household.start([self._command(task) for task in tasks])
        self._posts |= {task: post for task, (post, _) in zip(tasks, started, strict=True)}

    def _command(self, task: tuple[str, int]) -> ChildCommand:
        return build_command(
            "headrace.deploy.task",
            json.dumps(self._spec.as_dict()),
            task[0],
            str(task[1]),
            environment=self._environment,
        )

    def _kill(self, task: tuple[str, int]) -> None:
        if self._household is not None:
            post = self._posts.pop(task, None)
            if post is not None:
                self._household.kill(post)
        elif task in self._servers:
            self._servers.pop(task).stop()

    def _child(self, task: tuple[str, int]) -> ChildProcess | None:
        post = self._posts.get(task)
        return None if post is None else post.child

    def _checked(self, task_type: str, task_index: int) -> tuple[str, int]:
        check_string("task_type", task_type)
        check_int("task_index", task_index, minimum=0)
        if (task_type, task_index) not in self._tasks:
            raise ValueError(f"the cluster has no {task_type!r} task {task_index}: {self._spec}")
        return task_type, task_index

    def _note(self, event: ProcessEvent) -> None:
        """Report what happened to a process that nobody waits for."""
        match event:
            case ProcessReady(post, child):
                _log.info("%s runs again, as process %d", self._words(post), child.pid)
            case ProcessExited(post, child, again_in) if not child.stop_requested:
                _log.warning(
                    "%s: process %d %s%s",
                    self._words(post),
                    child.pid,
                    child.exit_description,
                    "" if again_in is None else f", and another starts in {again_in:g} s",
                )
            case ProcessStartFailed(post, error, again_in):
                _log.warning(
                    "%s could not be started: %s; next try in %g s",
                    self._words(post),
                    error,
                    again_in,
                )

    def _words(self, post: SupervisedCommand) -> str:
        name, index = next(
            (task for task, each in list(self._posts.items()) if each is post), ("", -1)
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
