"""Decider: the parts of a source are dealt to whoever asks.

A part is large while much is left and small near the end, so that few requests deal much and all
workers end at about the same time. What was dealt to a task stays with it: if its worker is lost,
so is the rest of that part (each element at most once).
"""

from __future__ import annotations

from headrace.errors import AbortedError, FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.state import DispatcherState, SourceProgress, TaskPhase

__all__ = ["get_split"]

_NOTHING_LEFT = Decision(reply=messages.SplitGranted(start=0, stop=0))


def get_split(state: DispatcherState, request: messages.GetSplit, moment: Moment) -> Decision:
    """Deal the next part of a source in the pass that the task is in.

    An earlier pass than the source's is over; a later one begins it anew, and what was left of the
    pass before is dealt to nobody. A source without end gives as much as is wanted, for ever.

    Raises:
        NotFoundError: There is no such task or source.
        FailedPreconditionError: The task's mode deals no splits.
        AbortedError: The task has asked a later question already.
    """
    task = state.task(request.task_id)
    iteration = state.iterations[task.iteration_id]
    if state.jobs[iteration.job_id].processing_mode != ShardingPolicy.DYNAMIC:
        raise FailedPreconditionError(
            f"task {request.task_id} reads its sources whole: only ShardingPolicy.DYNAMIC deals "
            "splits"
        )
    if not 0 <= request.source < len(iteration.sources):
        raise NotFoundError(
            f"task {request.task_id} has {len(iteration.sources)} sources; there is no number "
            f"{request.source}"
        )
    if request.want < 1:
        raise ValueError(f"want={request.want} must be at least 1")
    last = task.grants.get(request.source)
    if last is not None and request.number <= last.number:
        if request.number < last.number:
            raise AbortedError(
                f"task {task.task_id} asked for split {request.number} of source "
                f"{request.source} after split {last.number}: the answer is no longer known"
            )
        return Decision(reply=messages.SplitGranted(start=last.start, stop=last.stop))
    if task.phase is not TaskPhase.RUNNING or iteration.finished:
        # Nobody would read what a task that is over were given.
        return _NOTHING_LEFT
    size = state.dataset_of(iteration).split_sizes[request.source]
    grant = _next_part(iteration.sources[request.source], size, request, len(state.workers))
    if grant.start == grant.stop:
        return Decision(reply=grant)
    produced = updates.SplitProduced(
        task_id=task.task_id,
        source=request.source,
        repetition=request.repetition,
        number=request.number,
        start=grant.start,
        stop=grant.stop,
    )
    return Decision(updates=(produced,), reply=grant)


def _next_part(
    progress: SourceProgress, size: int, request: messages.GetSplit, workers: int
) -> messages.SplitGranted:
    if request.repetition < progress.repetition:
        return messages.SplitGranted(start=0, stop=0)
    start = progress.next if request.repetition == progress.repetition else 0
    if size < 0:
        return messages.SplitGranted(start=start, stop=start + request.want)
    # Half of an equal share of what is left, rounded up: whoever is slow holds up the end by one
    # small part at most.
    share = -(-(size - start) // (2 * max(workers, 1)))
    return messages.SplitGranted(start=start, stop=start + min(request.want, max(share, 0)))
