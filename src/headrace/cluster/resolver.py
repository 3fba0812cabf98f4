"""Interface of cluster resolvers, and resolvers with explicit values.

Resolvers wait for tasks that start later with `wait_until_ready`, and load optional packages with
`import_package`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableSet
from typing import Any, TypeVar

from headrace.arguments import check_instance, check_int, check_string
from headrace.cluster.spec import ClusterSpec
from headrace.errors import MissingDependencyError, UnavailableError

__all__ = [
    "ClusterResolver",
    "SimpleClusterResolver",
    "UnionResolver",
    "import_package",
    "wait_for",
]


def import_package(module: str, *, needed_by: str, instead: str = "") -> Any:
    """Import and return a module of an optional package.

    Args:
        module: Name such as "torch.distributed". Headrace's extra is named like the package.
        needed_by: Name of the feature, for the error.
        instead: Alternative to add to the error.

    Raises:
        MissingDependencyError: If the package is not installed.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{needed_by} requires the package {package}, which is not installed; pip "
            f"install 'headrace[{package}]'{instead}"
        ) from error
    return sys.modules[package]


T = TypeVar("T")

_log = logging.getLogger(__name__)

_FIRST_DELAY = 0.02
_MAX_DELAY = 1.0
_FIRST_WARNING_SECONDS = 10.0
"""Seconds of waiting before the first warning."""
_WARNING_INTERVAL = 60.0
"""Seconds between later warnings."""


def wait_for(
    query: Callable[[], T],
    *,
    what: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Query repeatedly, with growing delays, until nothing is missing.

    Args:
        query: Returns the result, or raises an UnavailableError that names what is missing.
        what: Description of the result.
        seconds: Maximum seconds to wait.
        clock: Returns the time in seconds.
        sleep: Sleeps for a number of seconds.

    Raises:
        UnavailableError: If something is still missing; names it.
        Exception: Any other error of `query`.
    """
    start = clock()
    next_warning_at = start + _FIRST_WARNING_SECONDS
    delay = _FIRST_DELAY
    while True:
        try:
            return query()
        except UnavailableError as error:
            waited = clock() - start
            if waited >= seconds:
                raise UnavailableError(f"no {what} after {seconds:g} s: {error}") from error
            if clock() >= next_warning_at:
                next_warning_at = clock() + _WARNING_INTERVAL
                _log.warning(
                    "no %s after %.0f s: %s; the timeout is %g s",
                    what,
                    waited,
                    error,
                    seconds,
                )
        sleep(min(delay, max(0.0, start + seconds - clock())))
        delay = min(2 * delay, _MAX_DELAY)


class ClusterResolver(ABC):
    """Finds the tasks of a cluster, and the task of this process.

    >>> spec = hr.distribute.ClusterSpec({"worker": ["host1:2222"], "ps": ["host2:2222"]})
    >>> resolver = hr.distribute.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    >>> isinstance(resolver, hr.distribute.ClusterResolver), resolver.task_type, resolver.task_id
    (True, 'worker', 0)

    Args:
        task_type: Type of this process's task, as in "worker"; None if it has no task.
        task_id: Number of this process's task among those of its type.
        rpc_layer: Prefix of addresses, as in "grpc" for "grpc://host:2222"; None: no prefix.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    def __repr__(self) -> str:
        task = f"task_type={self._task_type!r}, task_id={self._task_id}"
        return f"{type(self).__name__}({task})"

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current tasks of the cluster."""

    @property
    def task_type(self) -> str | None:
        """Type of this process's task; None without a task. Settable."""
        return self._find_task()[0]

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        if value is not None:
            check_string("task_type", value)
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        """Number of this process's task among those of its type. Settable."""
        return self._find_task()[1]

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = None if value is None else check_int("task_id", value, minimum=0)

    def _find_task(self) -> tuple[str | None, int | None]:
        """Return this process's task as set. Subclasses may override it."""
        return self._task_type, self._task_id

    @property
    def rpc_layer(self) -> str | None:
        """Prefix of the addresses that `master` returns. Settable."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        if value is not None:
            check_string("rpc_layer", value)
        self._rpc_layer = value

    @property
    def environment(self) -> str:
        """Name of the environment in which the cluster runs; "" if unknown."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task with the prefix of addresses; "" if there is none.

        Args:
            task_type: Type of the task; None: this process's task, or the class's default master.
            task_id: Number of the task; None as above.
            rpc_layer: Replaces that of the resolver.

        Raises:
            ValueError: If the cluster has no such task.
        """
        address = self._find_master(task_type, task_id)
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if address and layer else address

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        """Return the result of `master` without a prefix. Subclasses may override it."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return self.cluster_spec().task_address(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Return the known number of accelerators of each kind of a task."""
        return {}


class SimpleClusterResolver(ClusterResolver):
    """Resolver with explicit values.

    >>> spec = hr.distribute.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
    >>> resolver = hr.distribute.SimpleClusterResolver(spec, task_type="worker", task_id=1)
    >>> resolver.master("worker", 0), resolver.cluster_spec().num_tasks("worker")
    ('host1:2222', 2)

    Args:
        cluster_spec: Tasks of the cluster.
        master: Result of `master()` without a task.
        task_type: Type of this process's task.
        task_id: Number of this process's task among those of its type.
        environment: Name of the environment in which the cluster runs.
        num_accelerators: Number of accelerators of each task, by kind.
        rpc_layer: Prefix of addresses.

    Raises:
        TypeError: If `cluster_spec` is not a ClusterSpec, or `master` not a string.
    """

    #: Strategies that use it add themselves here; None disables that.
    users: MutableSet[Any] | None = None

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        check_instance("cluster_spec", cluster_spec, ClusterSpec, fix="ClusterSpec({...})")
        check_string("master", master)
        check_string("environment", environment)
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})

    def __repr__(self) -> str:
        task = f"task_type={self._task_type!r}, task_id={self._task_id}"
        return f"{type(self).__name__}({self._cluster_spec!r}, {task})"

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks passed to the constructor."""
        return self._cluster_spec

    @property
    def environment(self) -> str:
        """Name passed to the constructor."""
        return self._environment

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        if task_type is None or task_id is None:
            return self._master
        return super()._find_master(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Return the value passed to the constructor."""
        return dict(self._num_accelerators)


class UnionResolver(ClusterResolver):
    """Union of the tasks of several resolvers.

    Lists of one type are joined in the order of the resolvers. If one of them has numbers with
    gaps, all keep their numbers, which must be unique. Without a task, `master()` uses the first
    resolver.

    >>> one, other = (
    ...     hr.distribute.SimpleClusterResolver(hr.distribute.ClusterSpec({"worker": [address]}))
    ...     for address in ("host1:2222", "host2:2222")
    ... )
    >>> hr.distribute.UnionResolver(one, other).cluster_spec().as_dict()
    {'worker': ['host1:2222', 'host2:2222']}

    Args:
        *resolvers: At least one. The first one provides this process's task, the environment and
            the accelerators.
        task_type: Replaces that of the first one.
        task_id: Replaces that of the first one, even if 0.
        rpc_layer: Replaces that of the first one.

    Raises:
        TypeError: If an argument is not a resolver.
        ValueError: If there are no resolvers.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("a UnionResolver requires at least one cluster resolver, but got none")
        for position, each in enumerate(resolvers):
            check_instance(f"resolvers[{position}]", each, ClusterResolver)
        first = resolvers[0]
        super().__init__(
            first.task_type if task_type is None else task_type,
            first.task_id if task_id is None else task_id,
            first.rpc_layer if rpc_layer is None else rpc_layer,
        )
        self._resolvers = resolvers

    def __repr__(self) -> str:
        parts = [
            *map(repr, self._resolvers),
            f"task_type={self._task_type!r}",
            f"task_id={self._task_id}",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all resolvers.

        Raises:
            KeyError: If two of them have a task of the same type and number.
        """
        clusters = [each.cluster_spec().as_dict() for each in self._resolvers]
        types = {name for cluster in clusters for name in cluster}
        return ClusterSpec(
            {name: _merge_tasks(name, [c[name] for c in clusters if name in c]) for name in types}
        )

    @property
    def environment(self) -> str:
        """Environment of the first resolver."""
        return self._resolvers[0].environment

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        if task_type is None or task_id is None:
            # Through the public method: a user's resolver implements only that.
            return self._resolvers[0].master(rpc_layer="")
        return super()._find_master(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Return the result of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _merge_tasks(name: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """Return the tasks of one type of several clusters."""
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        duplicates = sorted(tasks.keys() & merged.keys())
        if duplicates:
            raise KeyError(
                f"two clusters define {name!r} task {duplicates[0]}: {merged[duplicates[0]]} and "
                f"{tasks[duplicates[0]]}; use lists, which are concatenated, or different indices"
            )
        merged |= tasks
    return merged
