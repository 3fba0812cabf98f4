"""Static policies: each slot of a fixed list of workers has a share of its own (FILE, DATA, HINT).

Shard i of n is read by the worker in slot i of n (`slots`), from its start to its end. When that
worker is lost, or leaves before the end, the one that takes the slot reads the shard again from the
start: each element comes at least once. A shard whose worker dies three times in a row, within a
minute each, is given up, and so is the iteration once the others are read: what kills every worker
soon would yield the same elements again and again. An iteration is over when every shard was read
to its end, or failed, or was given up; while a slot is empty it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.errors import NotFoundError
from headrace.service.dispatcher.policy import Policy, Post, staying
from headrace.service.dispatcher.state import (
    LEFT,
    Dataset,
    DispatcherState,
    Iteration,
    Task,
    TaskPhase,
)
from headrace.service.messages import LostUnits, OpenIteration, TaskDefinition
from headrace.service.modes.static.records import Shard, shard_of

__all__ = ["Static"]

_MOST_ATTEMPTS = 3
_OVER = (TaskPhase.FINISHED, TaskPhase.FAILED)


class Static(Policy):
    """Nothing is dealt, and each task is a part that is fixed beforehand.

    Args:
        part: Which (`messages.TaskDefinition.part`).
    """

    deals = False

    def __init__(self, part: str) -> None:
        self.part = part

    def check(self, state: DispatcherState, dataset: Dataset, opening: OpenIteration) -> None:
        """Refuse where no workers were named.

        Raises:
            NotFoundError: The dispatcher has no list of workers.
        """
        if not state.slots:
            raise NotFoundError(
                "Worker is not in the workers list: the static sharding policies (FILE, DATA, "
                "FILE_OR_DATA, HINT) share a dataset among a fixed list of workers, and this "
                "dispatcher has none. Set `worker_addresses` in the DispatcherConfig "
                '(--worker-address, once for each), as in ["host1:%port%", "host2:%port%"], or use '
                "ShardingPolicy.DYNAMIC"
            )

    def definition(
        self, definition: TaskDefinition, state: DispatcherState, task: Task
    ) -> TaskDefinition:
        """Add which shard it is."""
        assert isinstance(task.mode, Shard), task
        return msgspec.structs.replace(definition, shard=task.mode.index, of=task.mode.of)

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return a task for each shard that nobody reads and somebody could."""
        tasks = state.tasks_of(iteration)
        taken = {
            _shard(task) for task in tasks if task.phase is TaskPhase.RUNNING or _is_read(task)
        }
        taken.update(_given_up(tasks))
        able = staying(state, iteration)
        return [
            Post(
                worker_id=slot.worker_id,
                mode=Shard(index, len(state.slots)),
                attempt=_attempts(tasks, index),
            )
            for index, slot in enumerate(state.slots)
            if slot.worker_id in able and index not in taken
        ]

    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether every shard was read to its end, or failed, or was given up."""
        tasks = state.tasks_of(iteration)
        if any(task.phase is TaskPhase.RUNNING for task in tasks):
            return False
        read = {_shard(task) for task in tasks if _is_read(task)}
        return len(read.union(_given_up(tasks))) == len(state.slots)

    def failure(self, state: DispatcherState, iteration: Iteration) -> str:
        """Return that shards were given up, if some were."""
        return " ".join(
            f"Share {shard} was given up: its worker was lost {_MOST_ATTEMPTS} times in a row, "
            f"within a minute each, the last at {last.address} ({last.reason}). A function of the "
            "dataset may kill or block its process; the workers' logs may say more."
            for shard, last in _given_up(state.tasks_of(iteration)).items()
        )

    def lost(self, state: DispatcherState, iteration: Iteration) -> tuple[LostUnits, ...]:
        """Return nothing: what is missing, `failure` says."""
        return ()

    def is_kept(self, state: DispatcherState, iteration: Iteration, task: Task) -> bool:
        """Whether it ended on its worker, where the last answers may be asked for again."""
        return task.phase in _OVER


def _shard(task: Task) -> int:
    shard = shard_of(task.mode)
    assert shard is not None, task
    return shard.index


def _is_read(task: Task) -> bool:
    """Whether a task went through its shard, as far as that can be read."""
    return task.phase in _OVER and not task.cut


def _given_up(tasks: Sequence[Task]) -> dict[int, Task]:
    """Return the shards whose workers died again and again, each with the last task of it."""
    deaths: dict[int, list[Task]] = {}
    for task in tasks:
        if task.phase is not TaskPhase.LOST or task.lasted:
            deaths[_shard(task)] = []
        elif task.reason != LEFT:
            deaths.setdefault(_shard(task), []).append(task)
    return {shard: lost[-1] for shard, lost in deaths.items() if len(lost) >= _MOST_ATTEMPTS}


def _attempts(tasks: Sequence[Task], shard: int) -> int:
    return sum(_shard(task) == shard for task in tasks)
