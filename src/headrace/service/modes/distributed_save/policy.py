"""Saving: the units of one stream go to whoever asks, and what is made of them into files.

As with dealing, each worker has one task of a save, one that joins later too, unless it writes for
so many other saves already that it is to finish those first. Nobody reads the elements: a unit is
done once the file that holds it counts (`FilesCommitted`), and of a task that is lost all others
are dealt again. So each element is in the files once.

A save fails as a whole. When a task of it fails, or units were given up because workers died with
them, or the directory is lost, the other tasks are ended where they are.
"""

from __future__ import annotations

import msgspec

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher import events
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy import TaskAssignment
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    RegisteredDataset,
    TaskPhase,
)
from headrace.service.messages import GetSplit, OpenIteration, SaveDestination, TaskDefinition
from headrace.service.modes.distributed_save.records import SaveState, TaskFiles
from headrace.service.modes.dynamic.policy import DynamicSharding
from headrace.service.ranges import Ranges, count

__all__ = ["SaveSharding", "save_of"]


_MAX_SHOWN = 20


class SaveSharding(DynamicSharding):
    """Units are dealt to tasks, which write them to files."""

    delivery_policy = "files"

    def check_dataset(
        self,
        state: DispatcherState,
        dataset: RegisteredDataset,
        request: OpenIteration | None = None,
    ) -> None:
        """Refuse a dataset that cannot be dealt.

        Raises:
            FailedPreconditionError: It has no units.
        """
        if dataset.num_splits is None:
            raise FailedPreconditionError(
                f"dataset {dataset.dataset_id} cannot be saved by several workers: it has no "
                "positions that could be dealt, because it reads another service or has a source "
                "that cannot be split. Use Dataset.save, which reads it in this process"
            )

    def extend_definition(
        self, definition: TaskDefinition, state: DispatcherState, task: DispatcherTask
    ) -> TaskDefinition:
        """Add where files are written."""
        save = save_of(state, state.iterations[task.iteration_id])
        order = SaveDestination(
            save_id=save.save_id, path=save.path, spec=save.spec, chunk_bytes=save.chunk_bytes
        )
        return msgspec.structs.replace(definition, save_destination=order)

    def num_done(self, task: DispatcherTask, request: GetSplit) -> int:
        """Return what its files say, of which more may have been heard since."""
        return task.assigned.num_done

    def incomplete_reason(self, task: DispatcherTask, num_left: int) -> str:
        """Return that units are in no file, if some are not."""
        return f"it ended with {num_left} units that are in no file" if num_left else ""

    def affected_iterations(self, state: DispatcherState, iteration: JobIteration) -> list[int]:
        """Return the other saves: the worker of the task may have time for them now."""
        return [each for each in _unfinished_iterations(state) if each != iteration.iteration_id]

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return a task for each worker without one that has time for it."""
        save = save_of(state, iteration)
        if not save.is_open or save.error:
            return []
        posts = super().tasks_to_create(state, iteration)
        return [
            msgspec.structs.replace(post, mode_state=TaskFiles())
            for post in posts
            if _count_saves(state, post.worker_id) < save.max_saves_per_worker
        ]

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return the end of a task where the save has failed, or what else is to be first."""
        if self.failure_reason(state, iteration):
            running = next(iter(state.running_tasks(iteration)), None)
            if running is None:
                return None
            return events.TaskLost(task_id=running.task_id, reason="its save has failed")
        return super().pending_recovery(state, iteration)

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Whether no task runs, and every unit is in a file, or the save has failed."""
        if state.running_tasks(iteration):
            return False
        if self.failure_reason(state, iteration):
            return True
        return iteration.pool.num_unassigned == 0 and save_of(state, iteration).is_open

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return why the save failed; empty: it did not."""
        pool = iteration.pool
        save = save_of(state, iteration)
        if save.error:
            return save.error
        for task in state.tasks_of(iteration):
            if task.phase is TaskPhase.FAILED:
                return f"the worker at {task.address}: {task.reason}"
        if pool.abandoned:
            several = "s" * (count(pool.abandoned) > 1)
            return (
                f"position{several} {_describe_splits(pool.abandoned)} of the dataset "
                f"{'were' if several else 'was'} given up, because the worker died each time that "
                "one read it (the dispatcher's log names the workers): a function of the dataset "
                "may kill its process"
            )
        return ""

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Nobody asks for what was written."""
        return False


def save_of(state: DispatcherState, iteration: JobIteration) -> SaveState:
    """Return the save that an iteration is of."""
    return state.saves[state.jobs[iteration.job_id].save_id]


def _unfinished_iterations(state: DispatcherState) -> list[int]:
    """Return the iterations of saves of which units are still dealt."""
    return [
        save.iteration_id
        for save in state.saves.values()
        if not save.is_closed and not state.iterations[save.iteration_id].finished
    ]


def _count_saves(state: DispatcherState, worker_id: str) -> int:
    """Return for how many saves a worker writes now."""
    return sum(
        bool(state.jobs[state.iterations[state.tasks[task_id].iteration_id].job_id].save_id)
        for task_id in state.workers[worker_id].tasks
    )


def _describe_splits(units: Ranges) -> str:
    shown = [str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in units]
    more = f" and {len(shown) - _MAX_SHOWN} more ranges" * (len(shown) > _MAX_SHOWN)
    return ", ".join(shown[:_MAX_SHOWN]) + more
