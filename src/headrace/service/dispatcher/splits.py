"""Deciders that assign splits to tasks on request, and take them back.

The policy of an iteration chooses the splits of a task (`modes`). A task keeps its splits unless
its worker returns them or is lost.
"""

from __future__ import annotations

import msgspec

from headrace.errors import AbortedError, FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.policy import IterationPolicy
from headrace.service.dispatcher.policy_selection import policy_of
from headrace.service.dispatcher.soft_state import NoMoreWork
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    TaskPhase,
)
from headrace.service.dispatcher.tasks import get_worker_task
from headrace.service.element_sets import END_ORDINAL, PartialSplits
from headrace.service.ranges import (
    Ranges,
    drop_below,
    intersect,
    subtract,
    union,
)

__all__ = ["get_split", "return_splits", "validate_partial_splits", "validate_splits"]

_END_OF_SPLITS = messages.GetSplitReply(start=0, stop=0)


def get_split(
    state: DispatcherState, request: messages.GetSplit, context: DecisionContext
) -> DispatcherDecision:
    """Assign the next splits to a task.

    Raises:
        FailedPreconditionError: If the task's mode assigns no splits.
        AbortedError: If the task has sent a later request already.
        ValueError: If the request is invalid.
    """
    task = get_worker_task(state, request)
    assigned = task.assigned
    iteration = state.iterations[task.iteration_id]
    pool = iteration.pool
    if not iteration.assigns_splits:
        raise FailedPreconditionError(
            f"task {request.task_id} has no splits: only ShardingPolicy.DYNAMIC assigns splits"
        )
    policy = policy_of(state, iteration)
    request = msgspec.structs.replace(request, num_done=policy.num_done(task, request))
    if request.max_splits < 1:
        raise ValueError(f"max_splits must be at least 1; got {request.max_splits}")
    if request.assignment_number < 0:
        raise ValueError(f"assignment_number must not be negative; got {request.assignment_number}")
    if request.assignment_number == assigned.num_assignments - 1:
        return DispatcherDecision(
            reply=_assignment_reply(iteration, *assigned.last_assignment, assigned.last_ordinals)
        )
    _check_split_request(task, request)
    if task.phase is TaskPhase.LOST:
        # Its worker, which was paused, soon learns of the loss; it must not mistake this for the
        # end.
        return DispatcherDecision(reply=messages.GetSplitReply(start=0, stop=0, wait=True))
    if task.phase is not TaskPhase.RUNNING or state.workers[task.worker_id].draining:
        # A finished task has no readers, and a draining worker gets no new splits.
        return DispatcherDecision(reply=_END_OF_SPLITS)
    if task.task_id in context.soft_state.tasks_without_work:
        return DispatcherDecision(reply=_END_OF_SPLITS)
    if pool.num_unassigned == 0:
        return _wait_or_end(policy, state, task, request, context)
    waited = context.now - context.soft_state.last_assignments[iteration.iteration_id]
    is_stalled = waited > context.limits.assignment_stall_timeout
    chosen = policy.choose_splits(state, iteration, task, request, is_stalled=is_stalled)
    if chosen is None:
        return _wait_or_end(policy, state, task, request, context)
    start, stop = chosen
    assignment = events.SplitsAssigned(
        task_id=task.task_id,
        assignment_number=request.assignment_number,
        start=start,
        stop=stop,
        num_done=request.num_done,
    )
    ordinals = pool.partial_splits.get(start, ())
    # Saves a round trip in each epoch that a single worker reads.
    is_last = (
        pool.num_unassigned == stop - start
        and pool.num_held == assigned.num_held
        and not _may_be_returned(policy, state, iteration)
    )
    return DispatcherDecision(
        events=(assignment,),
        reply=_assignment_reply(iteration, start, stop, ordinals, is_last=is_last),
    )


def _wait_or_end(
    policy: IterationPolicy,
    state: DispatcherState,
    task: DispatcherTask,
    request: messages.GetSplit,
    context: DecisionContext,
) -> DispatcherDecision:
    """Tell a task to wait for splits that may be returned, or to end."""
    iteration = state.iterations[task.iteration_id]
    if iteration.pool.num_unassigned != 0 or _may_be_returned(policy, state, iteration):
        flush = policy.must_flush(state, iteration, task, request)
        wait = messages.GetSplitReply(start=0, stop=0, wait=True, flush=flush)
        decision = DispatcherDecision(reply=wait)
    else:
        decision = DispatcherDecision(reply=_END_OF_SPLITS, soft_events=(NoMoreWork(task.task_id),))
    return policy.on_no_splits(decision, state, task, request, context)


def _assignment_reply(
    iteration: JobIteration, start: int, stop: int, ordinals: Ranges, *, is_last: bool = False
) -> messages.GetSplitReply:
    is_poison_candidate = bool(intersect(((start, stop),), iteration.pool.poison_candidates))
    return messages.GetSplitReply(
        start=start,
        stop=stop,
        is_poison_candidate=is_poison_candidate,
        ordinals=ordinals,
        is_last=is_last,
    )


def _check_split_request(task: DispatcherTask, request: messages.GetSplit) -> None:
    assigned = task.assigned
    if request.assignment_number < assigned.num_assignments:
        raise AbortedError(
            f"task {task.task_id} repeated the request for assignment {request.assignment_number} "
            f"after {assigned.num_assignments} assignments: only the last one can be repeated"
        )
    if request.assignment_number > assigned.num_assignments:
        raise ValueError(
            f"task {task.task_id} requested assignment {request.assignment_number}, but the next "
            f"one is {assigned.num_assignments}"
        )
    if not assigned.num_done <= request.num_done <= assigned.num_assigned:
        raise ValueError(
            f"task {task.task_id} reported num_done={request.num_done}; expected a value from "
            f"{assigned.num_done}, reported before, to {assigned.num_assigned}, the assigned splits"
        )


def _may_be_returned(
    policy: IterationPolicy, state: DispatcherState, iteration: JobIteration
) -> bool:
    may_drain = (
        policy.awaits_draining_workers
        and iteration.num_draining_tasks > 0
        and any(
            task.assigned.num_held and state.workers[task.worker_id].draining
            for task in state.running_tasks(iteration)
        )
    )
    return may_drain or state.may_return_splits(iteration)


def return_splits(
    state: DispatcherState, request: messages.ReturnSplits, context: DecisionContext
) -> DispatcherDecision:
    """Take back splits that a worker has not delivered and will not deliver.

    Raises:
        FailedPreconditionError: If the task does not run.
        ValueError: If the splits were not assigned to the task, or are done.
    """
    task = get_worker_task(state, request)
    assigned = task.assigned
    splits = validate_splits(task, request.splits)
    if splits != drop_below(splits, assigned.num_done):
        raise ValueError(
            f"task {task.task_id} returned split {splits[0][0]}, but has already reported that all "
            f"splits before {assigned.num_done} are done"
        )
    # Splits that a client reported as received were delivered, even if the worker does not know it.
    splits = subtract(splits, union((*assigned.returned, *assigned.delivered)))
    if not splits:
        return DispatcherDecision()
    if task.phase is not TaskPhase.RUNNING:
        raise FailedPreconditionError(
            f"task {task.task_id} is {task.phase.name.lower()}: only a running task can return "
            "splits"
        )
    return DispatcherDecision(events=(events.SplitsReturned(task_id=task.task_id, splits=splits),))


def validate_splits(task: DispatcherTask, ranges: Ranges) -> Ranges:
    """Return splits of a task, in assignment order, as a set.

    Raises:
        ValueError: If one was not assigned to the task.
    """
    for start, stop in ranges:
        if not 0 <= start < stop <= task.assigned.num_assigned:
            raise ValueError(
                f"task {task.task_id} has {task.assigned.num_assigned} assigned splits; got the "
                f"range ({start}, {stop})"
            )
    return union(ranges)


def validate_partial_splits(task: DispatcherTask, partial_splits: PartialSplits) -> PartialSplits:
    """Return the entries of unfinished splits.

    Raises:
        ValueError: If a split was not assigned to the task or occurs twice, or its ordinals are not
            ranges.
    """
    assigned = task.assigned
    for split, ordinals in partial_splits:
        is_sorted = ordinals == union(ordinals) and all(
            0 <= start < stop <= END_ORDINAL for start, stop in ordinals
        )
        if not 0 <= split < assigned.num_assigned or not ordinals or not is_sorted:
            raise ValueError(
                f"task {task.task_id} has {assigned.num_assigned} assigned splits; got "
                f"ordinals {ordinals} of split {split}, expected sorted ranges of an assigned split"
            )
    if len({split for split, _ in partial_splits}) < len(partial_splits):
        raise ValueError(f"partial_splits of task {task.task_id} contains a split twice")
    return tuple(each for each in partial_splits if each[0] >= assigned.num_done)
