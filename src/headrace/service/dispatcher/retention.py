"""What is forgotten, so that a dispatcher that runs for months stays small.

Iterations go when they had no client for `Limits.gc_timeout`.

Anonymous datasets, which `distribute` registers, are forgotten when nobody has used them for
`Limits.dataset_timeout`; those that somebody was given the id of (`register_dataset`) never are. A
plan goes with its last dataset; one that no dataset has, and no job for its cost function, goes
after `Limits.client_timeout`. All plans together have `Limits.plan_bytes`: for another one,
anonymous datasets that nobody has used for `Limits.client_timeout` are forgotten early, the longest
unused first.

Of the tasks that were lost, an iteration keeps the last ones; what was lost with the others is
remembered without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Moment
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task, TaskPhase
from headrace.service.dispatcher.updates import Update

__all__ = ["collect_idle", "forget_tasks", "forget_unused", "room_for_plan"]

_TASKS_KEPT = 200
_TASKS_AT_ONCE = 50


def collect_idle(state: DispatcherState, moment: Moment) -> list[Update]:
    """Give up iterations that had no client for too long, and forget those that are finished.

    A named DYNAMIC iteration is kept unless the configuration says otherwise: to begin it again
    would deal its elements twice.
    """
    timeout = moment.limits.gc_timeout
    if timeout is None:
        return []
    return [
        updates.IterationForgotten(iteration_id=iteration.iteration_id)
        if iteration.finished
        else updates.IterationCollected(iteration_id=iteration.iteration_id)
        for iteration in _idle(state, moment, timeout)
        if iteration.finished or moment.limits.gc_dynamic or not iteration.is_dealt
    ]


def _idle(state: DispatcherState, moment: Moment, timeout: float) -> Iterable[Iteration]:
    for iteration_id, since in moment.presence.idle.items():
        iteration = state.iterations[iteration_id]
        is_read = not state.jobs[iteration.job_id].save  # that of a save goes with it
        if is_read and not iteration.clients and moment.now - since > timeout:
            yield iteration


def forget_unused(state: DispatcherState, moment: Moment) -> list[Update]:
    """Forget datasets and plans that nobody has used for long."""
    timeout, last_use = moment.limits.dataset_timeout, moment.presence.last_use
    idle = _idle_datasets(state)
    in_use = state.plans_in_use
    loose = [digest for digest in state.plans if digest not in in_use]
    last_use.watch([*idle, *loose], moment.now)
    facts: list[Update] = []
    if timeout is not None:
        facts += [
            updates.DatasetForgotten(dataset_id=dataset_id)
            for dataset_id in idle
            if last_use.since(dataset_id, moment.now) > timeout
        ]
    facts += [
        updates.PlanForgotten(digest=digest)
        for digest in loose
        if last_use.since(digest, moment.now) > moment.limits.client_timeout
    ]
    return facts


def _idle_datasets(state: DispatcherState) -> list[str]:
    used = {job.dataset_id for job in state.jobs.values()}
    return [
        dataset_id
        for dataset_id, dataset in state.datasets.items()
        if dataset.anonymous and dataset_id not in used
    ]


def room_for_plan(
    state: DispatcherState, digest: bytes, size: int, moment: Moment
) -> list[updates.DatasetForgotten]:
    """Return what is forgotten for a plan of `size` bytes, which begins to arrive.

    Raises:
        FailedPreconditionError: There is no room for it beside the plans that are in use.
    """
    limits, last_use = moment.limits, moment.presence.last_use
    arriving = sum(
        upload.total for each, upload in moment.presence.uploads.items() if each != digest
    )
    excess = sum(state.plans.values()) + arriving + size - limits.plan_bytes
    unused = {each: last_use.since(each, moment.now) for each in _idle_datasets(state)}
    users = Counter(dataset.digest for dataset in state.datasets.values())
    users.update(job.terms.cost_plan for job in state.jobs.values())
    facts = []
    for dataset_id in sorted(unused, key=unused.__getitem__, reverse=True):
        if excess <= 0 or unused[dataset_id] <= limits.client_timeout:
            break
        facts.append(updates.DatasetForgotten(dataset_id=dataset_id))
        plan = state.datasets[dataset_id].digest
        users[plan] -= 1
        if not users[plan]:
            excess -= state.plans[plan]
    if excess > 0:
        raise FailedPreconditionError(
            f"there is no room for a plan of {size:,} bytes: the dispatcher keeps plans of "
            f"{limits.plan_bytes:,} bytes together, and this is {excess:,} too much beside those "
            "of datasets that are registered by `register_dataset`, read, or were used in the last "
            f"{limits.client_timeout:g} s. Read files on the workers in place of arrays in the "
            "plan, or start the dispatcher with a larger `max_plan_bytes` (--max-plan-bytes)"
        )
    return facts


def forget_tasks(state: DispatcherState, moment: Moment) -> list[Update]:
    """Forget the oldest lost tasks of iterations that have had very many."""
    facts: list[Update] = []
    for iteration_id, iteration in state.iterations.items():
        if len(iteration.tasks) <= _TASKS_KEPT + _TASKS_AT_ONCE or iteration.finished:
            continue
        lost = [
            task.task_id for task in state.tasks_of(iteration) if _is_done_with(iteration, task)
        ]
        if len(lost) > _TASKS_KEPT:
            facts.append(
                updates.TasksForgotten(
                    iteration_id=iteration_id, task_ids=tuple(lost[:-_TASKS_KEPT])
                )
            )
    return facts


def _is_done_with(iteration: Iteration, task: Task) -> bool:
    is_settled = task.phase is TaskPhase.LOST and not (task.unsettled or task.splits.kept_by)
    return is_settled and not iteration.left_of(task)
