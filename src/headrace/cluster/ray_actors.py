"""Where the tasks of a Ray cluster meet: a named actor that keeps their addresses."""

from __future__ import annotations

from typing import Any, TypeAlias

from headrace.cluster.packages import load
from headrace.errors import FailedPreconditionError, UnavailableError

__all__ = ["MeetingPlace", "Task"]

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
