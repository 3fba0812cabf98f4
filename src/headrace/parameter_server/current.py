"""What handles resolve to in this process: the clusters that it takes part in.

A variable, table, optimizer or strategy pickles as a handle: the id of its cluster, and what it is
called there. The coordinator fills this when it makes a strategy, a worker when a coordinator
greets it (`enter`).

A process that is both has entered twice: handles mean what the first one made of them, so that a
variable is one object there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from headrace.errors import FailedPreconditionError
from headrace.parameter_server.background import Background
from headrace.parameter_server.connection import Servers
from headrace.parameter_server.optimizer_names import OptimizerNames

__all__ = ["Cluster", "Handle", "cluster_of", "clusters_here", "enter", "leave", "naming_clusters"]


T = TypeVar("T")


class Cluster:
    """A cluster as one process sees it.

    Args:
        cluster_id: Names it in handles.
        servers: Leads to its parameter servers.
    """

    def __init__(self, cluster_id: str, servers: Servers) -> None:
        self.cluster_id = cluster_id
        self.servers = servers
        self.background = Background()
        #: What counters were at when they were last asked: they only grow, unless they are lost.
        self.counters: dict[str, int] = {}
        self.optimizers = OptimizerNames()
        self.is_closed = False
        self._lock = threading.RLock()
        self._things: weakref.WeakValueDictionary[tuple[str, str], Any] = (
            weakref.WeakValueDictionary()
        )

    def resolve(self, kind: str, name: str, make: Callable[[], T]) -> T:
        """Return the one object of this process for a handle; `make` makes the first."""
        with self._lock:
            found: T | None = self._things.get((kind, name))
            if found is None:
                found = self._things[kind, name] = make()
            return found

    def keep(self, kind: str, name: str, thing: object) -> None:
        """Have later handles of this name resolve to `thing`, as long as it lives."""
        with self._lock:
            self._things[kind, name] = thing

    def close(self) -> None:
        """Ask the servers nothing more, and resolve nothing more; what is under way is finished."""
        self.is_closed = True
        leave(self)
        self.background.close()
        self.servers.close()


_clusters: dict[str, list[Cluster]] = {}

_lock = threading.Lock()


def enter(cluster: Cluster) -> None:
    """Resolve handles of a cluster from now on, until it is closed."""
    with _lock:
        _clusters.setdefault(cluster.cluster_id, []).append(cluster)


def leave(cluster: Cluster) -> None:
    """Resolve no more handles of a cluster."""
    with _lock:
        entered = _clusters.get(cluster.cluster_id, [])
        if cluster in entered:
            entered.remove(cluster)
        if not entered:
            _clusters.pop(cluster.cluster_id, None)


def clusters_here() -> list[str]:
    """Return the ids of the clusters that this process takes part in."""
    with _lock:
        return list(_clusters)


def naming_clusters() -> list[Cluster]:
    """Return the clusters in which this process numbers optimizers: whose strategy it made."""
    with _lock:
        return [
            cluster
            for entered in _clusters.values()
            for cluster in entered[:1]
            if cluster.optimizers.numbers
        ]


def cluster_of(cluster_id: str, what: str) -> Cluster:
    """Return the cluster of a handle.

    Args:
        cluster_id: Stands in the handle.
        what: Which handle it is, for the error.

    Raises:
        FailedPreconditionError: This process takes part in no such cluster.
    """
    with _lock:
        entered = list(_clusters.get(cluster_id, ()))
    if not entered:
        raise FailedPreconditionError(
            f"{what} belongs to the cluster {cluster_id}, which this process does not take part "
            "in: it can be used where its strategy was made, and in functions that a coordinator "
            "schedules"
        )
    return entered[0]


# --- handles: what stands in a program for a variable or a table that is on parameter servers -----


class _Record(Protocol):
    """What a handle knows of its thing; the name is unique among those of its kind."""

    @property
    def name(self) -> str: ...

    @property
    def shards(self) -> tuple[Any, ...]: ...


R = TypeVar("R", bound=_Record)


class Handle(Generic[R]):
    """A thing on servers, one object in each process that takes part in its cluster.

    It pickles as the cluster's id and its record, and means the same thing wherever the cluster is
    known.

    Attributes:
        kind: What messages call it.
        name: Unique among those of its kind in the cluster.
    """

    kind: ClassVar[str]

    name: str
    _cluster: Cluster
    _record: R

    def _become(self, cluster: Cluster, record: R) -> None:
        self._cluster = cluster
        self._record = record
        self.name = record.name
        cluster.keep(self.kind, record.name, self)

    @classmethod
    def of(cls, cluster: Cluster, record: R) -> Self:
        """Return what a record names."""
        made = cls.__new__(cls)
        made._become(cluster, record)
        return made

    @property
    def cluster(self) -> Cluster:
        """The cluster that it is in."""
        return self._cluster

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve, (type(self), self._cluster.cluster_id, self._record)


def _resolve(cls: type[Handle[R]], cluster_id: str, record: R) -> Handle[R]:
    cluster = cluster_of(cluster_id, f"{cls.kind} {record.name!r}")
    return cluster.resolve(cls.kind, record.name, lambda: cls.of(cluster, record))
