"""Cluster of named Ray actors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from headrace.arguments import check_int, check_seconds, check_string
from headrace.cluster.resolver import ClusterResolver, import_package, wait_for
from headrace.cluster.spec import ClusterSpec
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.transport import address as addresses

__all__ = ["AddressRegistry", "ClusterTask", "RayClusterResolver"]


#: Type and number of a task.
ClusterTask: TypeAlias = tuple[str, int]

_CALL_SECONDS = 30.0


class _AddressActor:
    """Actor that stores the addresses."""

    def __init__(self) -> None:
        self._addresses: dict[ClusterTask, str] = {}

    def put(self, task: ClusterTask, address: str) -> None:
        self._addresses[task] = address

    def all(self) -> dict[ClusterTask, str]:
        return self._addresses


class AddressRegistry:
    """Client of the named actor with which tasks register their addresses.

    The driver creates the actor, so that it lives as long as the program.

    Args:
        name: Name of the actor.

    Raises:
        FailedPreconditionError: If the package `ray` is not installed, or `ray.init` was not
            called.
    """

    def __init__(self, name: str) -> None:
        self._ray = import_package("ray", needed_by="RayClusterResolver")
        if not self._ray.is_initialized():
            raise FailedPreconditionError("Ray is not initialized: call ray.init() first")
        self._name = name
        self._context = self._ray.get_runtime_context()
        self._is_in_driver = self._context.worker.mode != self._ray.WORKER_MODE
        self._actor: Any = None
        if self._is_in_driver:
            options = {"name": name, "get_if_exists": True, "num_cpus": 0}
            self._actor = self._ray.remote(_AddressActor).options(**options).remote()

    def own_name(self) -> str:
        """Return the name of this process's actor; "" if it is not a named actor."""
        return "" if self._is_in_driver else self._context.get_actor_name() or ""

    def own_host(self) -> str:
        """Return the address of this process's Ray node."""
        return str(self._ray.util.get_node_ip_address())

    def put(self, task: ClusterTask, address: str) -> None:
        """Register the address of a task.

        Raises:
            UnavailableError: If the actor is missing, or does not answer.
        """
        self._call_actor("put", task, address)

    def all(self) -> dict[ClusterTask, str]:
        """Return the registered addresses of all tasks.

        Raises:
            UnavailableError: If the actor is missing, or does not answer.
        """
        return dict(self._call_actor("all"))

    def _call_actor(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            try:
                self._actor = self._ray.get_actor(self._name)
            except ValueError as error:
                raise UnavailableError(
                    f"no Ray actor {self._name!r} in namespace {self._context.namespace!r}: "
                    "create a RayClusterResolver in the driver before the actors"
                ) from error
        try:
            reply = getattr(self._actor, method).remote(*arguments)
            return self._ray.get(reply, timeout=_CALL_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(
                f"no reply from the Ray actor {self._name!r}: {str(error).partition(chr(10))[0]}"
            ) from error


class RayClusterResolver(ClusterResolver):
    """Resolves tasks from named Ray actors: "worker-1" or "training-worker-1" is worker 1.

        ray.init()
        resolver = RayClusterResolver({"worker": 2, "ps": 1})    # in the driver, first
        actors = [Trainer.options(name=f"worker-{i}").remote() for i in range(2)]

        class Trainer:                                           # in each actor
            def train(self):
                resolver = RayClusterResolver({"worker": 2, "ps": 1})

    Ray does not report addresses at which its actors could listen. So the first call of
    `cluster_spec` in an actor chooses a port, registers its address with a separate named actor,
    and waits until all tasks have done so. The driver's resolver creates that actor, which ends
    with the driver. An actor that Ray restarts on the same host keeps its address.

    Args:
        jobs: Number of tasks of each type.
        name: Name of the registry actor. Clusters in one namespace of Ray need different names.
        port: Port of this task; 0 chooses a free one, or the previous one.
        host: Host at which other tasks reach this one; None: the address of its Ray node.
        timeout: Seconds to wait for the other tasks.
        rpc_layer: Prefix of addresses.
        task_type: Type of this process's task; None derives it from the name of its actor. A
            process without a task, such as the driver, waits for the others and has no address.
        task_id: Number of this process's task; None as above.

    Raises:
        FailedPreconditionError: If the package `ray` is not installed, or `ray.init` was not
            called.
        InvalidArgumentError: If `jobs` has no such task.
        TypeError, ValueError: If `jobs` is not a mapping from types to counts.
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        name: str = "headrace-cluster",
        port: int = 0,
        host: str | None = None,
        timeout: float = 300.0,
        rpc_layer: str | None = None,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        self._jobs = _counts(jobs)
        # Where it is pickled to, an actor has another name.
        self._rebuild = functools.partial(
            RayClusterResolver, self._jobs, name, port, host, timeout, rpc_layer,
            task_type=task_type, task_id=task_id,
        )  # fmt: skip
        check_string("name", name, empty=False)
        self._port = check_int("port", port, minimum=0, maximum=65535)
        if host is not None:
            check_string("host", host, empty=False)
        self._host = host
        check_seconds("timeout", timeout)
        self._timeout = timeout
        self._registry = AddressRegistry(name)
        if task_type is None and task_id is None:
            task_type, task_id = _parse_task(self._registry.own_name(), self._jobs)
        super().__init__(task_type, task_id, rpc_layer)
        self._own_address: ClusterTask | None = None

    def __reduce__(self) -> tuple[Callable[[], RayClusterResolver], tuple[()]]:
        return self._rebuild, ()

    def cluster_spec(self) -> ClusterSpec:
        """Return the current addresses of all tasks.

        Raises:
            UnavailableError: If not all have registered, or the driver has not created a resolver.
        """
        found = wait_for(
            self._query_addresses, what=f"cluster of {self._jobs}", seconds=self._timeout
        )
        return ClusterSpec(
            {
                name: [found[name, index] for index in range(count)]
                for name, count in self._jobs.items()
            }
        )

    def _query_addresses(self) -> dict[ClusterTask, str]:
        found = self._registry.all()
        task = self._task()
        if task is not None and task != self._own_address:
            host = self._host or self._registry.own_host()
            found[task] = self._address(host, found.get(task, ""))
            self._registry.put(task, found[task])
            self._own_address = task
        missing = [task for task in self._tasks() if task not in found]
        if missing:
            raise UnavailableError(
                ", ".join(f"{name} {index}" for name, index in missing)
                + ": has not registered its address; has it called cluster_spec()?"
            )
        return found

    def _tasks(self) -> list[ClusterTask]:
        return [(name, index) for name, count in self._jobs.items() for index in range(count)]

    def _task(self) -> ClusterTask | None:
        """Return this process's task."""
        if self.task_type is None or self.task_id is None:
            return None
        if (self.task_type, self.task_id) not in self._tasks():
            raise InvalidArgumentError(
                f"no {self.task_type!r} task {self.task_id}: jobs are {self._jobs}"
            )
        return self.task_type, self.task_id

    def _address(self, host: str, before: str) -> str:
        if self._port:
            return addresses.join(host, self._port)
        if before and addresses.split(before)[0] == host:
            return before
        return addresses.join(host, addresses.find_stable_port())


def _parse_task(actor: str, jobs: Mapping[str, int]) -> tuple[str, int] | tuple[None, None]:
    """Return the task that an actor's name denotes: "worker-1", "my-worker_1"."""
    for name, count in jobs.items():
        found = re.fullmatch(rf"(?:.*[^a-zA-Z0-9])?{re.escape(name)}[-_]?(\d+)", actor)
        if found is not None and int(found[1]) < count:
            return name, int(found[1])
    return None, None


def _counts(jobs: Any) -> dict[str, int]:
    if not isinstance(jobs, Mapping) or not jobs:
        raise TypeError(
            "`jobs` must be a dict from task types to counts, as in {'ps': 1, 'worker': 2}, but "
            f"got {jobs!r} of type {type(jobs).__name__}"
        )
    for name in jobs:
        check_string("task_type", name, empty=False)
    return {name: check_int(f"jobs[{name!r}]", count, minimum=0) for name, count in jobs.items()}
