"""What a task is for the others of its cluster.

Types are those of the field: one "chief" at most, "worker", "ps" (a parameter server) and
"evaluator", which computes beside the others and which nobody waits for.
"""

from __future__ import annotations

from headrace.cluster.spec import ClusterSpec
from headrace.errors import InvalidArgumentError

__all__ = [
    "CHIEF",
    "EVALUATOR",
    "PS",
    "TYPES",
    "WORKER",
    "check_task",
    "is_chief",
    "rank",
    "workers",
]

CHIEF = "chief"
WORKER = "worker"
PS = "ps"
EVALUATOR = "evaluator"
TYPES = (CHIEF, WORKER, PS, EVALUATOR)


def check_task(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Refuse a cluster of other types, two chiefs, and a task that is not there.

    An evaluator need not stand in the cluster.

    Raises:
        InvalidArgumentError: It says what was found.
    """
    strange = [name for name in spec.jobs if name not in TYPES]
    if strange:
        raise InvalidArgumentError(
            f"the cluster has tasks of type {', '.join(map(repr, strange))}; types are "
            f"{', '.join(map(repr, TYPES))}"
        )
    if CHIEF in spec.jobs and spec.num_tasks(CHIEF) > 1:
        raise InvalidArgumentError(
            f"the cluster has {spec.num_tasks(CHIEF)} chiefs, and there can be one at most: make "
            "the others workers"
        )
    if task_type is None or task_id is None:
        raise InvalidArgumentError(
            "the cluster has tasks, but nobody says which of them this process is: set task_type "
            "and task_id of the resolver ('task' in TF_CONFIG)"
        )
    if task_type not in TYPES:
        raise InvalidArgumentError(
            f"task type {task_type!r} is not known; types are {', '.join(map(repr, TYPES))}"
        )
    if task_type == EVALUATOR and EVALUATOR not in spec.jobs:
        return
    if task_type not in spec.jobs or task_id not in spec.task_indices(task_type):
        raise InvalidArgumentError(f"the cluster has no {task_type!r} task {task_id}: {spec}")


def workers(spec: ClusterSpec) -> list[tuple[str, int]]:
    """Return the tasks that train together, in the order of their ranks: the chief is the first."""
    return [
        (name, index)
        for name in (CHIEF, WORKER)
        if name in spec.jobs
        for index in spec.task_indices(name)
    ]


def rank(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    """Return the number of a task among those that train together.

    Raises:
        InvalidArgumentError: It is none of them.
    """
    tasks = workers(spec)
    if (task_type, task_id) not in tasks:
        raise InvalidArgumentError(
            f"{task_type!r} task {task_id} is none of the tasks that train together: {tasks}"
        )
    return tasks.index((task_type, task_id))


def is_chief(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> bool:
    """Whether a task is the first one of those that train together, who saves and reports.

    Without a cluster every process is its own chief.
    """
    tasks = workers(spec)
    return not tasks or (task_type, task_id) == tasks[0]
