"""Handles: what stands in a program for a variable or a table that is on parameter servers."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from headrace.parameter_server.current import Cluster, cluster_of

__all__ = ["Handle"]


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
