"""Copies: each worker reads the whole dataset (`ShardingPolicy.OFF`).

Each worker that is there or joins while an iteration runs gets a copy of its own, whatever became
of other copies. A worker gets no second one, and none starts again at the address of a copy that
ended by itself. When all copies were lost, those that are there or join make another attempt, of
which clients say that elements come again.

A function that kills its process would be restarted without end. So no more copies begin after
three deaths for each worker that had a copy at first, all within a minute of a copy's start and
after the last copy that ran for longer. The iteration then ends with the copies that still run, and
fails if all were lost. A worker that leaves has not died.
"""

from __future__ import annotations

import hashlib

from headrace.service.dispatcher.losses import lost_copies
from headrace.service.dispatcher.policy import Policy, Post, staying
from headrace.service.dispatcher.state import (
    LEFT,
    DispatcherState,
    Iteration,
    Task,
    TaskPhase,
)
from headrace.service.messages import LostUnits

__all__ = ["Copies"]

_MOST_ATTEMPTS = 3


class Copies(Policy):
    """Nothing is dealt, and each task is a whole copy."""

    deals = False

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return a copy for each worker that may begin one."""
        tasks = state.tasks_of(iteration)
        if _is_deadly(tasks):
            return []
        attempt = max((task.attempt for task in tasks), default=-1)
        workers = staying(state, iteration)
        if _all_lost(tasks):
            attempt += 1
        else:
            had = {task.worker_id for task in tasks}
            # Where a copy ended already, a worker that starts again would make a second one.
            taken = {task.address for task in tasks if not _is_cut_short(task)}
            workers = [
                each
                for each in workers
                if each not in had and state.workers[each].address not in taken
            ]
        replaced = sum(task.replaces for task in tasks)
        to_replace = sum(map(_is_cut_short, tasks)) - replaced
        return [
            Post(worker_id=each, attempt=attempt, replaces=number < to_replace)
            for number, each in enumerate(workers)
        ]

    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether every copy ended; where all were lost, whether workers die again and again."""
        tasks = state.tasks_of(iteration)
        if not tasks or any(task.phase is TaskPhase.RUNNING for task in tasks):
            return False
        return not _all_lost(tasks) or _is_deadly(tasks)

    def failure(self, state: DispatcherState, iteration: Iteration) -> str:
        """Return that all copies were lost, if they were."""
        tasks = state.tasks_of(iteration)
        if not _all_lost(tasks):
            return ""
        return (
            "every worker that had a copy of this iteration was lost, the last "
            f"{len(_early_deaths(tasks))} within a minute of their start: {len(tasks)} workers, "
            f"the last at {tasks[-1].address} ({tasks[-1].reason}). A "
            "function of the dataset may kill or block its process; the workers' logs may say more"
        )

    def seed(self, state: DispatcherState, iteration: Iteration, task: Task) -> int:
        """Return another number for each worker: whole copies are shuffled differently."""
        digest = hashlib.sha256(f"{iteration.seed} {task.worker_id}".encode()).digest()
        return int.from_bytes(digest[:8]) >> 12

    def lost(self, state: DispatcherState, iteration: Iteration) -> tuple[LostUnits, ...]:
        """Return the copies that ended early."""
        return lost_copies(iteration, state.tasks_of(iteration))

    def is_kept(self, state: DispatcherState, iteration: Iteration, task: Task) -> bool:
        """Whether it ended on its worker, where the last answers may be asked for again."""
        return task.phase in (TaskPhase.FINISHED, TaskPhase.FAILED)


def _all_lost(tasks: list[Task]) -> bool:
    return all(task.phase is TaskPhase.LOST for task in tasks)


def _is_cut_short(task: Task) -> bool:
    return task.phase is TaskPhase.LOST or task.cut


def _is_deadly(tasks: list[Task]) -> bool:
    """Whether as many workers died soon as would if all died three times."""
    workers = sum(not task.replaces for task in tasks)
    return len(_early_deaths(tasks)) >= _MOST_ATTEMPTS * max(1, workers)


def _early_deaths(tasks: list[Task]) -> list[Task]:
    """Return the copies whose workers died soon, of those begun after the last that lasted."""
    lasted = max((number for number, task in enumerate(tasks, 1) if task.lasted), default=0)
    return [task for task in tasks[lasted:] if task.phase is TaskPhase.LOST and task.reason != LEFT]
