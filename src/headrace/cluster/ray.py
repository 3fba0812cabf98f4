"""A cluster of named Ray actors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from headrace.arguments import check_int, check_seconds, check_string
from headrace.cluster.resolver import ClusterResolver, load, wait_for
from headrace.cluster.spec import ClusterSpec
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.transport import address as addresses

__all__ = ["MeetingPlace", "RayClusterResolver", "Task"]


#: A type and a number.
Task: TypeAlias = tuple[str, int]

_CALL_SECONDS = 30.0


class _Addresses:
    """The actor."""

    def __init__(self) -> None:
        self._known: dict[Task, str] = {}

    def put(self, task: Task, address: str) -> None:
        self._known[task] = address

    def all(self) -> dict[Task, str]:
        return self._known


class MeetingPlace:
    """The named actor, as a process of the cluster sees it.

    The driver makes it, so that it lives as long as the program, and no longer.

    Args:
        name: Of the actor.

    Raises:
        FailedPreconditionError: The package `ray` is not installed, or `ray.init` was not called.
    """

    def __init__(self, name: str) -> None:
        self._ray = load("ray", needed_by="RayClusterResolver")
        if not self._ray.is_initialized():
            raise FailedPreconditionError("Ray is not there yet: call ray.init() first")
        self._name = name
        self._context = self._ray.get_runtime_context()
        self._is_in_driver = self._context.worker.mode != self._ray.WORKER_MODE
        self._actor: Any = None
        if self._is_in_driver:
            options = {"name": name, "get_if_exists": True, "num_cpus": 0}
            self._actor = self._ray.remote(_Addresses).options(**options).remote()

    def own_name(self) -> str:
        """Return the name of the actor that this process is; "" if it is none."""
        return "" if self._is_in_driver else self._context.get_actor_name() or ""

    def own_host(self) -> str:
        """Return the address of this process's Ray node."""
        return str(self._ray.util.get_node_ip_address())

    def put(self, task: Task, address: str) -> None:
        """Keep where a task listens.

        Raises:
            UnavailableError: The actor is not there, or does not answer.
        """
        self._ask("put", task, address)

    def all(self) -> dict[Task, str]:
        """Return the addresses of all tasks that have said theirs.

        Raises:
            UnavailableError: The actor is not there, or does not answer.
        """
        return dict(self._ask("all"))

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            try:
                self._actor = self._ray.get_actor(self._name)
            except ValueError as error:
                raise UnavailableError(
                    f"there is no Ray actor {self._name!r} in the namespace "
                    f"{self._context.namespace!r}: make a RayClusterResolver in the driver, before "
                    "the actors"
                ) from error
        try:
            answer = getattr(self._actor, method).remote(*arguments)
            return self._ray.get(answer, timeout=_CALL_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(
                f"the Ray actor {self._name!r} does not answer: {str(error).partition(chr(10))[0]}"
            ) from error


class RayClusterResolver(ClusterResolver):
    """Makes tasks of named Ray actors: "worker-1", or "training-worker-1", is worker 1.

        ray.init()
        resolver = RayClusterResolver({"worker": 2, "ps": 1})    # in the driver, first
        actors = [Trainer.options(name=f"worker-{i}").remote() for i in range(2)]

        class Trainer:                                           # in each actor
            def train(self):
                resolver = RayClusterResolver({"worker": 2, "ps": 1})

    Ray does not say where its actors could listen. So the first call of `cluster_spec` in an actor
    chooses a port and puts its address where all meet, an actor of a name of its own that the
    driver's resolver makes and that ends with the driver; it waits until all tasks have done so. An
    actor that Ray starts again on the same host has its former address.

    Args:
        jobs: How many tasks of each type there are.
        name: Of the meeting place. Clusters in one namespace of Ray need different ones.
        port: Where this task listens; 0: a free one is chosen, or the one that it had.
        host: Where the others find it; None: the address of its Ray node.
        timeout: Seconds for which the other tasks are waited for.
        rpc_layer: The prefix of addresses.
        task_type: Of this process; None: as the name of its actor says. A process without a task,
            such as the driver, waits for the others and has no address.
        task_id: Likewise.

    Raises:
        FailedPreconditionError: The package `ray` is not installed, or `ray.init` was not called.
        InvalidArgumentError: There is no such task in `jobs`.
        TypeError, ValueError: `jobs` is no mapping from types to counts.
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
        self._make_again = functools.partial(
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
        self._meeting_place = MeetingPlace(name)
        if task_type is None and task_id is None:
            task_type, task_id = _task_of(self._meeting_place.own_name(), self._jobs)
        super().__init__(task_type, task_id, rpc_layer)
        self._own: Task | None = None

    def __reduce__(self) -> tuple[Callable[[], RayClusterResolver], tuple[()]]:
        return self._make_again, ()

    def cluster_spec(self) -> ClusterSpec:
        """Return where all tasks listen now.

        Raises:
            UnavailableError: Not all have said so, or the driver has made no resolver.
        """
        found = wait_for(self._look, what=f"cluster of {self._jobs}", seconds=self._timeout)
        return ClusterSpec(
            {
                name: [found[name, index] for index in range(count)]
                for name, count in self._jobs.items()
            }
        )

    def _look(self) -> dict[Task, str]:
        found = self._meeting_place.all()
        task = self._task()
        if task is not None and task != self._own:
            host = self._host or self._meeting_place.own_host()
            found[task] = self._address(host, found.get(task, ""))
            self._meeting_place.put(task, found[task])
            self._own = task
        missing = [task for task in self._tasks() if task not in found]
        if missing:
            raise UnavailableError(
                ", ".join(f"{name} {index}" for name, index in missing)
                + ": has not said where it listens; has it called cluster_spec()?"
            )
        return found

    def _tasks(self) -> list[Task]:
        return [(name, index) for name, count in self._jobs.items() for index in range(count)]

    def _task(self) -> Task | None:
        """Return this process's task."""
        if self.task_type is None or self.task_id is None:
            return None
        if (self.task_type, self.task_id) not in self._tasks():
            raise InvalidArgumentError(
                f"there is no {self.task_type!r} task {self.task_id}: jobs are {self._jobs}"
            )
        return self.task_type, self.task_id

    def _address(self, host: str, before: str) -> str:
        if self._port:
            return addresses.join(host, self._port)
        if before and addresses.split(before)[0] == host:
            return before
        return addresses.join(host, addresses.find_stable_port())


def _task_of(actor: str, jobs: Mapping[str, int]) -> tuple[str, int] | tuple[None, None]:
    """Return the task that the name of an actor says: "worker-1", "my-worker_1"."""
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
