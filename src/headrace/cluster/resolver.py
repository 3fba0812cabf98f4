"""What every cluster resolver answers, and those that are told what they answer.

Resolvers wait for tasks that start later with `wait_for`, and load packages that only one of them
needs with `load`.
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
from headrace.errors import FailedPreconditionError, UnavailableError

__all__ = ["ClusterResolver", "SimpleClusterResolver", "UnionResolver", "load", "wait_for"]


def load(module: str, *, needed_by: str, instead: str = "") -> Any:
    """Return the package of a module, which is imported.

    Args:
        module: As in "torch.distributed". The extra of Headrace has the name of its package.
        needed_by: Who says so in the error.
        instead: What else would do, to end the error with.

    Raises:
        FailedPreconditionError: It is not installed here.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise FailedPreconditionError(
            f"{needed_by} needs the package {package}, which is not installed here; "
            f"pip install 'headrace[{package}]'{instead}"
        ) from error
    return sys.modules[package]


T = TypeVar("T")

_log = logging.getLogger(__name__)

_FIRST_DELAY = 0.02
_LONGEST_DELAY = 1.0
_QUIET_SECONDS = 10.0
"""How long something is missing before the log says so."""
_WORDS_SECONDS = 60.0
"""After so many more it says so again."""


def wait_for(
    look: Callable[[], T],
    *,
    what: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Look, and look again, less and less often, while something is missing.

    Args:
        look: Returns what is waited for, or raises an UnavailableError that says what is missing.
        what: What is waited for, in words.
        seconds: For how long.
        clock: Tells the time in seconds.
        sleep: Waits so many seconds.

    Raises:
        UnavailableError: Something is still missing; it says what.
        Exception: Whatever else `look` raises.
    """
    began = clock()
    words_at = began + _QUIET_SECONDS
    delay = _FIRST_DELAY
    while True:
        try:
            return look()
        except UnavailableError as error:
            waited = clock() - began
            if waited >= seconds:
                raise UnavailableError(f"no {what} after {seconds:g} s: {error}") from error
            if clock() >= words_at:
                words_at = clock() + _WORDS_SECONDS
                _log.warning(
                    "no %s after %.0f s: %s; it is waited for %g s in all",
                    what,
                    waited,
                    error,
                    seconds,
                )
        sleep(min(delay, max(0.0, began + seconds - clock())))
        delay = min(2 * delay, _LONGEST_DELAY)


class ClusterResolver(ABC):
    """Finds out which tasks a cluster has, and which of them this process is.

    >>> spec = hr.distribute.ClusterSpec({"worker": ["host1:2222"], "ps": ["host2:2222"]})
    >>> resolver = hr.distribute.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    >>> isinstance(resolver, hr.distribute.ClusterResolver), resolver.task_type, resolver.task_id
    (True, 'worker', 0)

    Args:
        task_type: Of this process, as in "worker"; None: it is none of the cluster's tasks.
        task_id: Its number among those of its type.
        rpc_layer: A prefix of addresses, as in "grpc" for "grpc://host:2222"; None: no prefix.
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
        """Return the tasks that the cluster has now."""

    @property
    def task_type(self) -> str | None:
        """The type of this process's task; None: it has none. It may be set."""
        return self._find_task()[0]

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        if value is not None:
            check_string("task_type", value)
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        """The number of this process's task among those of its type. It may be set."""
        return self._find_task()[1]

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = None if value is None else check_int("task_id", value, minimum=0)

    def _find_task(self) -> tuple[str | None, int | None]:
        """Return this process's task as it was set. Subclasses have a word in it here."""
        return self._task_type, self._task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of addresses that `master` returns. It may be set."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        if value is not None:
            check_string("rpc_layer", value)
        self._rpc_layer = value

    @property
    def environment(self) -> str:
        """A word for where the cluster runs, "" if nobody said."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task with the prefix of addresses; "" if there is none.

        Args:
            task_type: Of the task; None: of this process's, or what the class says of a master.
            task_id: Its number; None: likewise.
            rpc_layer: In place of the resolver's.

        Raises:
            ValueError: The cluster has no such task.
        """
        address = self._find_master(task_type, task_id)
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if address and layer else address

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        """Return what `master` does, without a prefix. Subclasses have a word in it here."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return self.cluster_spec().task_address(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Return how many accelerators of each kind a task has, as far as that is known."""
        return {}


class SimpleClusterResolver(ClusterResolver):
    """Answers what it is given.

    >>> spec = hr.distribute.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
    >>> resolver = hr.distribute.SimpleClusterResolver(spec, task_type="worker", task_id=1)
    >>> resolver.master("worker", 0), resolver.cluster_spec().num_tasks("worker")
    ('host1:2222', 2)

    Args:
        cluster_spec: The tasks.
        master: What `master()` returns where no task is named.
        task_type: Of this process.
        task_id: Its number among those of its type.
        environment: A word for where the cluster runs.
        num_accelerators: Of each task, by kind.
        rpc_layer: The prefix of addresses.

    Raises:
        TypeError: `cluster_spec` is no ClusterSpec, or `master` no string.
    """

    #: Where strategies that use it add themselves; None: nowhere.
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
        check_instance("cluster_spec", cluster_spec, ClusterSpec, cure="ClusterSpec({...})")
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
        """Return the tasks that were given."""
        return self._cluster_spec

    @property
    def environment(self) -> str:
        """The word that was given."""
        return self._environment

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        if task_type is None or task_id is None:
            return self._master
        return super()._find_master(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Return what was given."""
        return dict(self._num_accelerators)


class UnionResolver(ClusterResolver):
    """The tasks of several resolvers together.

    Lists of one type are joined in the order of the resolvers. Where one of them has numbers with
    gaps, all keep their numbers, none of which may occur twice. Where `master()` is asked for no
    task, the first resolver's is the answer.

    >>> one, other = (
    ...     hr.distribute.SimpleClusterResolver(hr.distribute.ClusterSpec({"worker": [address]}))
    ...     for address in ("host1:2222", "host2:2222")
    ... )
    >>> hr.distribute.UnionResolver(one, other).cluster_spec().as_dict()
    {'worker': ['host1:2222', 'host2:2222']}

    Args:
        *resolvers: At least one. The first one's task is this process's, and its environment and
            accelerators are the answers.
        task_type: In place of the first one's.
        task_id: In place of the first one's; 0 too.
        rpc_layer: In place of the first one's.

    Raises:
        TypeError: One is no resolver.
        ValueError: There is none.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("a UnionResolver needs at least one cluster resolver, and got none")
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
        """Return the tasks of all.

        Raises:
            KeyError: Two of them have a task of one type under one number.
        """
        clusters = [each.cluster_spec().as_dict() for each in self._resolvers]
        types = {name for cluster in clusters for name in cluster}
        return ClusterSpec(
            {name: _united(name, [c[name] for c in clusters if name in c]) for name in types}
        )

    @property
    def environment(self) -> str:
        """The first resolver's."""
        return self._resolvers[0].environment

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        if task_type is None or task_id is None:
            # Asked as anybody may: a resolver of the user's has this method and no other.
            return self._resolvers[0].master(rpc_layer="")
        return super()._find_master(task_type, task_id)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Return what the first resolver says."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _united(name: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """Return the tasks of one type of several clusters."""
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    together: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(tasks.keys() & together.keys())
        if twice:
            raise KeyError(
                f"two of the clusters have a {name!r} task {twice[0]}: {together[twice[0]]} and "
                f"{tasks[twice[0]]}; give lists, which are joined, or other numbers"
            )
        together |= tasks
    return together
