"""Addresses of a cluster's tasks, by type and number, and roles of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.arguments import check_int
from headrace.errors import InvalidArgumentError

__all__ = [
    "CHIEF",
    "EVALUATOR",
    "PS",
    "TYPES",
    "WORKER",
    "ClusterSpec",
    "check_task",
    "is_chief",
    "rank",
    "workers",
]


class ClusterSpec:
    """Tasks of a cluster: for each type ("worker", "ps", ...) their addresses by number.

        ClusterSpec({"worker": ["host1:2222", "host2:2222"], "ps": {3: "host3:2222"}})

    The tasks of a list are numbered from 0; a dict has explicit numbers, which may have gaps. A
    spec without tasks is false.

    >>> spec = hr.distribute.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
    >>> spec.num_tasks("worker"), spec.task_address("worker", 1)
    (2, 'host2:2222')

    Args:
        cluster: A mapping from task types to addresses, or another ClusterSpec.

    Raises:
        TypeError: If it is neither, or an address is not a string.
        ValueError: If a number is negative.
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "`cluster` must be a dict such as {'worker': ['host1:2222', 'host2:2222']} or a "
                f"ClusterSpec, but got {cluster!r} of type {type(cluster).__name__}"
            )
        self._jobs = {
            _task_type(name): _addresses(name, tasks) for name, tasks in sorted(cluster.items())
        }

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return a dict of lists; with dicts for types whose numbers have gaps."""
        return {
            name: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for name, tasks in self._jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """Types of tasks, in alphabetical order."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a type.

        Raises:
            ValueError: If there is no such type.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of the tasks of a type, in order.

        Raises:
            ValueError: If there is no such type.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task, as in "host1:2222".

        Args:
            job_name: Name of a job, such as "worker" or "ps".
            task_index: Number of the task in its job.

        Raises:
            TypeError: If the number is not an integer.
            ValueError: If there is no such task.
        """
        tasks = self._tasks(job_name)
        task_index = check_int("task_index", task_index, minimum=0)
        if task_index not in tasks:
            existing = ", ".join(map(str, tasks))
            raise ValueError(
                f"No task with index {task_index} in job {job_name!r}; it has {existing}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a type by number, with None for missing numbers.

        Raises:
            ValueError: If there is no such type.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            existing = ", ".join(map(repr, self._jobs)) or "no jobs"
            raise ValueError(f"No such job in cluster: {job_name!r}; it has {existing}")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return any(self._jobs.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(tuple((name, tuple(tasks.items())) for name, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"


def _task_type(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(
            f"a task type must be a string, as in 'worker', but got {name!r} of type "
            f"{type(name).__name__}"
        )
    return name


def _addresses(name: str, tasks: object) -> dict[int, str]:
    """Return the addresses of one type by number, in order."""
    if isinstance(tasks, Mapping):
        numbered = dict(tasks)
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        numbered = dict(enumerate(tasks))
    else:
        raise TypeError(
            f"the tasks of {name!r} must be a list of addresses or a dict from numbers to "
            f"addresses, but got {tasks!r} of type {type(tasks).__name__}"
        )
    for index, address in numbered.items():
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"an index of a {name!r} task must be an integer, but got {index!r}")
        if index < 0:
            raise ValueError(f"an index of a {name!r} task must be at least 0, but got {index}")
        if not isinstance(address, str):
            raise TypeError(
                f"the address of {name!r} task {index} must be a string, as in 'host1:2222', but "
                f"got {address!r} of type {type(address).__name__}"
            )
    return dict(sorted(numbered.items()))


CHIEF = "chief"
WORKER = "worker"
PS = "ps"
EVALUATOR = "evaluator"
TYPES = (CHIEF, WORKER, PS, EVALUATOR)


def check_task(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Refuse unknown task types, more than one chief, and a task outside the cluster.

    An evaluator need not be part of the cluster.

    Raises:
        InvalidArgumentError: If the check fails.
    """
    unknown = [name for name in spec.jobs if name not in TYPES]
    if unknown:
        raise InvalidArgumentError(
            f"the cluster has tasks of type {', '.join(map(repr, unknown))}; types are "
            f"{', '.join(map(repr, TYPES))}"
        )
    if CHIEF in spec.jobs and spec.num_tasks(CHIEF) > 1:
        raise InvalidArgumentError(
            f"the cluster may have at most one chief, but has {spec.num_tasks(CHIEF)}: "
            "make the others workers"
        )
    if task_type is None or task_id is None:
        raise InvalidArgumentError(
            "the cluster has tasks, but the task of this process is not set: set "
            "task_type and task_id of the resolver ('task' in TF_CONFIG)"
        )
    if task_type not in TYPES:
        raise InvalidArgumentError(
            f"unknown task type {task_type!r}; types are {', '.join(map(repr, TYPES))}"
        )
    if task_type == EVALUATOR and EVALUATOR not in spec.jobs:
        return
    if task_type not in spec.jobs or task_id not in spec.task_indices(task_type):
        raise InvalidArgumentError(f"the cluster has no {task_type!r} task {task_id}: {spec}")


def workers(spec: ClusterSpec) -> list[tuple[str, int]]:
    """Return the tasks that train together, in rank order; the chief is the first."""
    return [
        (name, index)
        for name in (CHIEF, WORKER)
        if name in spec.jobs
        for index in spec.task_indices(name)
    ]


def rank(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    """Return the rank of a task among those that train together.

    Raises:
        InvalidArgumentError: If it is not one of them.
    """
    tasks = workers(spec)
    if (task_type, task_id) not in tasks:
        raise InvalidArgumentError(
            f"{task_type!r} task {task_id} is not one of the training tasks: {tasks}"
        )
    return tasks.index((task_type, task_id))


def is_chief(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> bool:
    """Return whether a task is the first of those that train together, which saves and reports.

    Without a cluster every process is its own chief.
    """
    tasks = workers(spec)
    return not tasks or (task_type, task_id) == tasks[0]
