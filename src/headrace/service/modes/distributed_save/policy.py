"""Saving: the units of one stream go to whoever asks, and what is made of them into files.

As with dealing, each worker has one task of a save, one that joins later too, unless it writes for
so many other saves already that it is to finish those first. Nobody reads the elements: a unit is
done once the file that holds it counts (`FilesSaved`), and of a task that is lost all others are
dealt again. So each element is in the files once.

A save fails as a whole. When a task of it fails, or units were given up because workers died with
them, or the directory is lost, the other tasks are ended where they are.
"""

from __future__ import annotations

import msgspec

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.policy import Post
from headrace.service.dispatcher.state import (
    Dataset,
    DispatcherState,
    Iteration,
    Task,
    TaskPhase,
)
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import GetSplit, OpenIteration, SaveOrder, TaskDefinition
from headrace.service.modes.distributed_save.records import Save, TaskFiles
from headrace.service.modes.dynamic.policy import Dealing
from headrace.service.ranges import Ranges, count

__all__ = ["Saving", "save_of"]


_MOST_SHOWN = 20


class Saving(Dealing):
    """Units are dealt to tasks, which write them to files."""

    hand_out = "files"

    def check(
        self, state: DispatcherState, dataset: Dataset, opening: OpenIteration | None = None
    ) -> None:
        """Refuse a dataset that cannot be dealt.

        Raises:
            FailedPreconditionError: It has no units.
        """
        if dataset.positions is None:
            raise FailedPreconditionError(
                f"dataset {dataset.dataset_id} cannot be saved by several workers: it has no "
                "positions that could be dealt, because it reads another service or has a source "
                "that cannot be split. Use Dataset.save, which reads it in this process"
            )

    def definition(
        self, definition: TaskDefinition, state: DispatcherState, task: Task
    ) -> TaskDefinition:
        """Add where files are written."""
        save = save_of(state, state.iterations[task.iteration_id])
        order = SaveOrder(
            save=save.save, path=save.path, spec=save.spec, chunk_bytes=save.chunk_bytes
        )
        return msgspec.structs.replace(definition, save=order)

    def done(self, task: Task, request: GetSplit) -> int:
        """Return what its files say, of which more may have been heard since."""
        return task.splits.done

    def incomplete(self, task: Task, left: int) -> str:
        """Return that units are in no file, if some are not."""
        return f"it ended with {left} units that are in no file" if left else ""

    def affected_by_task(self, state: DispatcherState, iteration: Iteration) -> list[int]:
        """Return the other saves: the worker of the task may have time for them now."""
        return [each for each in _unfinished(state) if each != iteration.iteration_id]

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return a task for each worker without one that has time for it."""
        save = save_of(state, iteration)
        if not save.is_open or save.error:
            return []
        posts = super().vacant(state, iteration)
        return [
            msgspec.structs.replace(post, mode=TaskFiles())
            for post in posts
            if _writes(state, post.worker_id) < save.at_once
        ]

    def loose_end(self, state: DispatcherState, iteration: Iteration) -> Update | None:
        """Return the end of a task where the save has failed, or what else is to be first."""
        if self.failure(state, iteration):
            running = next(iter(state.running_tasks(iteration)), None)
            if running is None:
                return None
            return updates.TaskLost(task_id=running.task_id, reason="its save has failed")
        return super().loose_end(state, iteration)

    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether no task runs, and every unit is in a file, or the save has failed."""
        if state.running_tasks(iteration):
            return False
        if self.failure(state, iteration):
            return True
        return iteration.splits.rest == 0 and save_of(state, iteration).is_open

    def failure(self, state: DispatcherState, iteration: Iteration) -> str:
        """Return why the save failed; empty: it did not."""
        pool = iteration.splits
        save = save_of(state, iteration)
        if save.error:
            return save.error
        for task in state.tasks_of(iteration):
            if task.phase is TaskPhase.FAILED:
                return f"the worker at {task.address}: {task.reason}"
        if pool.given_up:
            several = "s" * (count(pool.given_up) > 1)
            return (
                f"position{several} {_in_words(pool.given_up)} of the dataset "
                f"{'were' if several else 'was'} given up, because the worker died each time that "
                "one read it (the dispatcher's log names the workers): a function of the dataset "
                "may kill its process"
            )
        return ""

    def is_kept(self, state: DispatcherState, iteration: Iteration, task: Task) -> bool:
        """Nobody asks for what was written."""
        return False


def save_of(state: DispatcherState, iteration: Iteration) -> Save:
    """Return the save that an iteration is of."""
    return state.saves[state.jobs[iteration.job_id].save]


def _unfinished(state: DispatcherState) -> list[int]:
    """Return the iterations of saves of which units are still dealt."""
    return [
        save.iteration_id
        for save in state.saves.values()
        if not save.is_closed and not state.iterations[save.iteration_id].finished
    ]


def _writes(state: DispatcherState, worker_id: str) -> int:
    """Return for how many saves a worker writes now."""
    return sum(
        bool(state.jobs[state.iterations[state.tasks[task_id].iteration_id].job_id].save)
        for task_id in state.workers[worker_id].tasks
    )


def _in_words(units: Ranges) -> str:
    shown = [str(start) if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in units]
    more = f" and {len(shown) - _MOST_SHOWN} more ranges" * (len(shown) > _MOST_SHOWN)
    return ", ".join(shown[:_MOST_SHOWN]) + more
