"""Distributed save: splits of one stream are assigned on request, and their elements go to files.

As in dynamic sharding, each worker has one task of a save, also if it joins later, unless it
already writes for `max_saves_per_worker` other saves. No client reads the elements: a split is done
once the file that contains it is committed (`FilesCommitted`), and all other splits of a lost task
are assigned again. So each element is in the files once.

A save fails as a whole. If a task of it fails, or splits were abandoned because workers died with
them, or the directory is lost, the other tasks are stopped.
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
from headrace.service.ranges import Ranges, total_length

__all__ = ["SaveSharding", "save_of"]


_MAX_SHOWN = 20


class SaveSharding(DynamicSharding):
    """Assigns splits to tasks that write them to files."""

    delivery_policy = "files"

    def check_dataset(
        self,
        state: DispatcherState,
        dataset: RegisteredDataset,
        request: OpenIteration | None = None,
    ) -> None:
        """Reject a dataset without splits.

        Raises:
            FailedPreconditionError: If the dataset has no splits.
        """
        if dataset.num_splits is None:
            raise FailedPreconditionError(
                f"dataset {dataset.dataset_id} cannot be saved by several workers: it has no "
                "splits, because it reads from a data service or has a source that cannot be "
                "split. Use Dataset.save, which reads it in this process"
            )

    def extend_definition(
        self, definition: TaskDefinition, state: DispatcherState, task: DispatcherTask
    ) -> TaskDefinition:
        """Add the destination of the files."""
        save = save_of(state, state.iterations[task.iteration_id])
        destination = SaveDestination(
            save_id=save.save_id, path=save.path, spec=save.spec, chunk_bytes=save.chunk_bytes
        )
        return msgspec.structs.replace(definition, save_destination=destination)

    def num_done(self, task: DispatcherTask, request: GetSplit) -> int:
        """Return the number of splits in committed files, which may exceed that in the request."""
        return task.assigned.num_done

    def incomplete_reason(self, task: DispatcherTask, num_left: int) -> str:
        """Return an error if splits are in no file; otherwise empty."""
        return f"it ended with {num_left} splits that are in no file" if num_left else ""

    def affected_iterations(self, state: DispatcherState, iteration: JobIteration) -> list[int]:
        """Return the other saves: the worker of the ended task may now have capacity for them."""
        return [each for each in _unfinished_iterations(state) if each != iteration.iteration_id]

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return a task for each worker that has none and writes for few enough saves."""
        save = save_of(state, iteration)
        if not save.is_open or save.error:
            return []
        assignments = super().tasks_to_create(state, iteration)
        return [
            msgspec.structs.replace(assignment, mode_state=TaskFiles())
            for assignment in assignments
            if _count_saves(state, assignment.worker_id) < save.max_saves_per_worker
        ]

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return the end of a task if the save has failed, or an event that recovers splits."""
        if self.failure_reason(state, iteration):
            running = next(iter(state.running_tasks(iteration)), None)
            if running is None:
                return None
            return events.TaskLost(task_id=running.task_id, reason="its save has failed")
        return super().pending_recovery(state, iteration)

    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether no task runs, and every split is in a file or the save has failed."""
        if state.running_tasks(iteration):
            return False
        if self.failure_reason(state, iteration):
            return True
        return iteration.pool.num_unassigned == 0 and save_of(state, iteration).is_open

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return why the save failed; empty if it did not."""
        pool = iteration.pool
        save = save_of(state, iteration)
        if save.error:
            return save.error
        for task in state.tasks_of(iteration):
            if task.phase is TaskPhase.FAILED:
                return f"task {task.task_id} on worker {task.address} failed: {task.reason}"
        if pool.abandoned:
            is_one = total_length(pool.abandoned) == 1
            noun, verb = ("split", "was") if is_one else ("splits", "were")
            return (
                f"{noun} {_describe_splits(pool.abandoned)} of the dataset {verb} abandoned, "
                "because every worker that processed them died (the dispatcher's log names the "
                "workers): a function of the dataset may terminate its process"
            )
        return ""

    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Return False: no client requests what was written."""
        return False


def save_of(state: DispatcherState, iteration: JobIteration) -> SaveState:
    """Return the save that an iteration belongs to."""
    return state.saves[state.jobs[iteration.job_id].save_id]


def _unfinished_iterations(state: DispatcherState) -> list[int]:
    """Return the unfinished iterations of saves."""
    return [
        save.iteration_id
        for save in state.saves.values()
        if not save.is_closed and not state.iterations[save.iteration_id].finished
    ]


def _count_saves(state: DispatcherState, worker_id: str) -> int:
    """Return the number of saves that a worker writes for now."""
    return sum(
        bool(state.jobs[state.iterations[state.tasks[task_id].iteration_id].job_id].save_id)
        for task_id in state.workers[worker_id].tasks
    )


def _describe_splits(splits: Ranges) -> str:
    parts = [
        str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in splits
    ]
    more = f" and {len(parts) - _MAX_SHOWN} more ranges" * (len(parts) > _MAX_SHOWN)
    return ", ".join(parts[:_MAX_SHOWN]) + more
