"""Clusters that this process takes part in, and the handles that resolve to them.

A variable, table, optimizer or strategy pickles as a handle: the id of its cluster, and its name
there. The coordinator registers a cluster when it creates a strategy, a worker when a coordinator
connects to it (`register_cluster`). In a process that does both, handles resolve to the cluster
registered first, so that a variable is one object there.

A `ServerCluster` has the client of its servers, a background thread (`BackgroundThread`), and the
names of its optimizers (`OptimizerNames`): "Adam", "Adam_1" ... for unnamed handles, in order of
creation; "Adam_in_functions" in functions, where each call creates the handle again.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from headrace.errors import FailedPreconditionError
from headrace.forks import register_fork_sensitive
from headrace.parameter_server.server_requests import ParameterServerClient

__all__ = [
    "BackgroundTask",
    "Handle",
    "ServerCluster",
    "find_cluster",
    "naming_clusters",
    "number_name",
    "register_cluster",
    "registered_cluster_ids",
    "unregister_cluster",
]


_log = logging.getLogger(__name__)

T = TypeVar("T")

_FORKED_MESSAGE = (
    "this process was forked while a task for the parameter servers was running, and only the "
    "parent process can wait for it: use variables and tables there"
)


class BackgroundTask(Generic[T]):
    """A submitted task; waiting for it in a forked child, which lacks the thread, raises an error.

    Args:
        future: Future of the task.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._process = os.getpid()

    def done(self) -> bool:
        """Return whether the task has ended."""
        return self._check_process().done()

    def wait(self) -> None:
        """Wait until the task has ended."""
        self._check_process().exception()

    def result(self) -> T:
        """Return the result once the task has ended, or raise its error."""
        return self._check_process().result()

    def _check_process(self) -> Future[T]:
        if self._process != os.getpid():
            raise FailedPreconditionError(_FORKED_MESSAGE)
        return self._future


class BackgroundThread:
    """A thread that starts with its first task and ends when it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        register_fork_sensitive(self)

    def submit(self, function: Callable[[], T]) -> BackgroundTask[T]:
        """Run a function after all tasks submitted before."""
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "headrace-parameter-servers")
            return BackgroundTask(self._thread.submit(function))

    def close(self) -> None:
        """Wait for all submitted tasks, and end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def after_fork_in_child(self) -> None:
        """Reset in a forked child, which does not have the thread."""
        self._lock, self._thread = threading.Lock(), None


def number_name(name: str, taken: Container[str]) -> str:
    """Return a free name: this one, or the same with a number appended."""
    unused, number = name, 0
    while unused in taken:
        number += 1
        unused = f"{name}_{number}"
    return unused


class OptimizerNames:
    """The names of optimizers in one cluster, as one process knows them.

    Attributes:
        assigns_numbers: Whether unnamed handles are numbered in this process, which has the
            strategy.
    """

    def __init__(self) -> None:
        self.assigns_numbers = False
        self._lock = threading.Lock()
        #: Class of the optimizer, by name.
        self._classes: dict[str, str] = {}
        #: Step counts that the servers had before this program, by name.
        self._earlier_counts: dict[str, int] = {}
        #: Variables trained by unnamed optimizers created in functions, by class.
        self._trained: dict[str, set[str]] = {}

    def assign_name(self, kind: str) -> str:
        """Return an unused name: the class, with a number from the second one on."""
        with self._lock:
            name = number_name(kind, self._classes)
            self._classes[name] = kind
            return name

    def claim_name(self, name: str, kind: str) -> None:
        """Record a name given by the user; several handles of one class may share it.

        Raises:
            ValueError: If an optimizer of another class has it.
        """
        found = self._classes.get(name)
        if found is None:
            with self._lock:
                found = self._classes.setdefault(name, kind)
        if found != kind:
            raise ValueError(
                f"`name` {name!r} belongs to an optimizer of class {found}, but this one is of "
                f"class {kind}: optimizers of one name share slots and steps, so use another name"
            )

    def check_in_function(self, kind: str, trains: Iterable[str], is_first: bool) -> None:
        """Check that an unnamed optimizer created in a function is not mistaken for another.

        Args:
            kind: Class, whose instances in functions share the step counter.
            trains: Names of the variables and tables of this step.
            is_first: Whether it is the first step of its handle.

        Raises:
            FailedPreconditionError: If its class has trained only other variables.
        """
        names = set(trains)
        with self._lock:
            seen = self._trained.setdefault(kind, set())
            if is_first and seen and seen.isdisjoint(names):
                raise FailedPreconditionError(
                    f"two optimizers of class {kind} were created in functions without a name: one "
                    f"trains {', '.join(sorted(seen)[:5])}, the other "
                    f"{', '.join(sorted(names)[:5])}. They would share one step counter; give each "
                    f'a name: {kind}(..., name="...")'
                )
            seen |= names

    # --- step counts that servers had before this program -----------------------------------------

    def record_earlier_counts(self, counters: Mapping[str, int]) -> None:
        """Record the counters that the servers had before this program."""
        self._earlier_counts = {name: count for name, count in counters.items() if count}

    def record_restored(self, name: str) -> None:
        """Record that a step counter was restored, so that continuing it is expected."""
        self._earlier_counts.pop(name, None)

    def warn_of_earlier_steps(self, name: str) -> None:
        """Warn once if an optimizer continues the step count of an earlier program."""
        if not self._earlier_counts:
            return
        count = self._earlier_counts.pop(name, 0)
        if count:
            _log.warning(
                "optimizer %r continues at step %d: the parameter servers have its step count and "
                "slots from before the start of this program. To start at step 0, give it another "
                "name, or restart the parameter servers",
                name,
                count,
            )


class ServerCluster:
    """A cluster as one process sees it.

    Args:
        cluster_id: Id of the cluster in handles.
        servers: Client of its parameter servers.
    """

    def __init__(self, cluster_id: str, servers: ParameterServerClient) -> None:
        self.cluster_id = cluster_id
        self.servers = servers
        self.background: BackgroundThread = BackgroundThread()
        #: Last known values of counters: they only grow, unless they are lost.
        self.counters: dict[str, int] = {}
        self.optimizers: OptimizerNames = OptimizerNames()
        self.is_closed: bool = False
        self._lock = threading.RLock()
        self._objects: weakref.WeakValueDictionary[tuple[str, str], Any] = (
            weakref.WeakValueDictionary()
        )

    def resolve(self, kind: str, name: str, make: Callable[[], T]) -> T:
        """Return the object of this process for a handle; the first call creates it with `make`."""
        with self._lock:
            found: T | None = self._objects.get((kind, name))
            if found is None:
                found = self._objects[kind, name] = make()
            return found

    def register(self, kind: str, name: str, target: object) -> None:
        """Make later handles of this name resolve to `target`, as long as it is alive."""
        with self._lock:
            self._objects[kind, name] = target

    def close(self) -> None:
        """Stop requests to the servers and resolving handles, after pending tasks have finished."""
        self.is_closed = True
        unregister_cluster(self)
        self.background.close()
        self.servers.close()


_clusters: dict[str, list[ServerCluster]] = {}

_lock = threading.Lock()


def register_cluster(cluster: ServerCluster) -> None:
    """Resolve handles of a cluster until it is closed."""
    with _lock:
        _clusters.setdefault(cluster.cluster_id, []).append(cluster)


def unregister_cluster(cluster: ServerCluster) -> None:
    """Stop resolving handles of a cluster."""
    with _lock:
        registered = _clusters.get(cluster.cluster_id, [])
        if cluster in registered:
            registered.remove(cluster)
        if not registered:
            _clusters.pop(cluster.cluster_id, None)


def registered_cluster_ids() -> list[str]:
    """Return the ids of the clusters that this process takes part in."""
    with _lock:
        return list(_clusters)


def naming_clusters() -> list[ServerCluster]:
    """Return the clusters in which this process numbers optimizers: those of its strategies."""
    with _lock:
        return [
            cluster
            for registered in _clusters.values()
            for cluster in registered
            if cluster.optimizers.assigns_numbers
        ]


def find_cluster(cluster_id: str, description: str) -> ServerCluster:
    """Return the cluster of a handle.

    Args:
        cluster_id: Id of the cluster in the handle.
        description: Description of the handle, for the error.

    Raises:
        FailedPreconditionError: If this process does not take part in the cluster.
    """
    with _lock:
        registered = list(_clusters.get(cluster_id, ()))
    if not registered:
        raise FailedPreconditionError(
            f"{description} belongs to the cluster {cluster_id}, which this process does not take "
            "part in: use it in the process that created its strategy, or in functions that a "
            "coordinator schedules"
        )
    return registered[0]


# --- handles of variables and tables on parameter servers -----------------------------------------


class _Record(Protocol):
    """Record of a handle; its name is unique among those of its kind."""

    @property
    def name(self) -> str: ...

    @property
    def shards(self) -> tuple[Any, ...]: ...


R = TypeVar("R", bound=_Record)


class Handle(Generic[R]):
    """An object on servers; one Python object in each process that takes part in its cluster.

    It pickles as the cluster's id and its record, and is unpickled as the object of that record in
    the other process.

    Attributes:
        kind: Kind, for messages.
        name: Name, unique among those of its kind in the cluster.
    """

    kind: ClassVar[str]

    name: str
    _cluster: ServerCluster
    _record: R

    def _bind(self, cluster: ServerCluster, record: R) -> None:
        self._cluster = cluster
        self._record = record
        self.name = record.name
        cluster.register(self.kind, record.name, self)

    @classmethod
    def of(cls, cluster: ServerCluster, record: R) -> Self:
        """Return the object of a record."""
        handle = cls.__new__(cls)
        handle._bind(cluster, record)
        return handle

    @property
    def cluster(self) -> ServerCluster:
        """Cluster of the object."""
        return self._cluster

    @property
    def placed(self) -> tuple[Any, ...]:
        """Shards as servers know them: each has a `spec` and a `server`."""
        return self._record.shards

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve, (type(self), self._cluster.cluster_id, self._record)


def _resolve(cls: type[Handle[R]], cluster_id: str, record: R) -> Handle[R]:
    cluster = find_cluster(cluster_id, f"{cls.kind} {record.name!r}")
    return cluster.resolve(cls.kind, record.name, lambda: cls.of(cluster, record))
