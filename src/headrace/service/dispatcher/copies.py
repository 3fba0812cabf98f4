"""Copies: each worker reads the whole dataset (`ShardingPolicy.OFF`).

Each worker has one task of each unfinished iteration, one that joins later too. A copy that is lost
ends there: no other takes its place, neither at its address nor elsewhere, unless all were lost.
Then those that are there or join make another attempt, of which clients say that elements come
again. After three in a row, none of which lasted a minute, the iteration is given up: what kills
every worker soon would otherwise yield the same elements again and again.
"""

from __future__ import annotations

import hashlib

from headrace.service.dispatcher.losses import lost_copies
from headrace.service.dispatcher.policy import Policy, Post, staying
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task, TaskPhase
from headrace.service.messages import LostUnits

__all__ = ["Copies"]

_MOST_ATTEMPTS = 3


class Copies(Policy):
    """Nothing is dealt, and each task is a whole copy."""

    deals = False

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return a copy for each worker that may begin one."""
        tasks = state.tasks_of(iteration)
        last = max((task.attempt for task in tasks), default=-1)
        if _all_lost(tasks):
            return [Post(worker_id=each, attempt=last + 1) for each in staying(state)]
        current = [task for task in tasks if task.attempt == tasks[-1].attempt]
        if any(task.phase is TaskPhase.LOST for task in current):
            return []
        # Where a copy ended already, a worker that starts again would make a second one.
        served = {task.address for task in current}
        return [
            Post(worker_id=each, attempt=last)
            for each in staying(state)
            if state.workers[each].address not in served
        ]

    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether every copy ended; where all were lost, whether that is so again and again."""
        tasks = state.tasks_of(iteration)
        if not tasks or any(task.phase is TaskPhase.RUNNING for task in tasks):
            return False
        return not _all_lost(tasks) or _short_attempts(tasks) >= _MOST_ATTEMPTS

    def failure(self, state: DispatcherState, iteration: Iteration) -> str:
        """Return that all copies were lost, if they were."""
        tasks = state.tasks_of(iteration)
        if not _all_lost(tasks):
            return ""
        return (
            "every worker that had a copy of this iteration was lost, within a minute "
            f"{_MOST_ATTEMPTS} times in a row: {len(tasks)} workers, the last at "
            f"{tasks[-1].address} ({tasks[-1].reason}). A "
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


def _short_attempts(tasks: list[Task]) -> int:
    """Return how many attempts in a row, up to the last, ended soon."""
    lasted = max((task.attempt for task in tasks if task.lasted), default=-1)
    return max(task.attempt for task in tasks) - lasted
