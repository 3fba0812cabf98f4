"""Deciders: what a task is about, and how it ends."""

from __future__ import annotations

import hmac

from headrace.errors import FailedPreconditionError, NotFoundError, UnauthenticatedError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.modes import policy_of
from headrace.service.dispatcher.state import DispatcherState, Task, TaskPhase
from headrace.service.dispatcher.updates import Update
from headrace.service.ranges import Ranges, at_least, count, subtracted, united

__all__ = ["fail_task", "finish_task", "get_task", "workers_task"]

_LONGEST_REASON = 4096


def workers_task(
    state: DispatcherState,
    request: messages.GetSplit
    | messages.FinishTask
    | messages.FailTask
    | messages.HandBack
    | messages.DropClient
    | messages.SaveFiles,
) -> Task:
    """Return the task that a worker speaks of, if it is that worker's.

    Raises:
        FailedPreconditionError: Another incarnation of the dispatcher gave it out.
        UnauthenticatedError: The ticket is not the task's.
        NotFoundError: There is no such task, or it is another worker's.
    """
    incarnation, dash, _ = request.ticket.partition("-")
    if dash and incarnation != state.incarnation:
        raise FailedPreconditionError(
            f"task {request.task_id} is of another run of the dispatcher: the dispatcher was "
            "restarted without its journal, and what ran then is over. Open the iteration again; "
            "give the dispatcher a `work_dir` and `fault_tolerant_mode=True` so that it survives "
            "restarts"
        )
    known = state.tasks.get(request.task_id)
    ticket = state.ticket(request.task_id) if known is None else known.ticket
    if not hmac.compare_digest(request.ticket.encode(errors="replace"), ticket.encode()):
        raise UnauthenticatedError(
            f"the ticket shown for task {request.task_id} is not its ticket: only the worker and "
            "the clients that the dispatcher sent know that"
        )
    task = state.task(request.task_id)
    if task.worker_id != request.worker_id:
        raise NotFoundError(
            f"task {request.task_id} belongs to worker {task.worker_id}, not to {request.worker_id}"
        )
    return task


def get_task(state: DispatcherState, request: messages.GetTask, moment: Moment) -> Decision:
    """Say what a task is about, to its worker.

    Raises:
        NotFoundError: There is no such task for this worker to run.
    """
    task = state.task(request.task_id)
    iteration = state.iterations[task.iteration_id]
    is_finished = task.phase is TaskPhase.FINISHED
    # One that was left nothing to deal may be over before its worker first asks about it.
    is_empty = is_finished and iteration.is_dealt and not task.splits.dealt
    if task.worker_id != request.worker_id or not (task.phase is TaskPhase.RUNNING or is_empty):
        raise NotFoundError(
            f"task {request.task_id} is not for worker {request.worker_id} to run: it is "
            f"{task.phase.name.lower()} on worker {task.worker_id}"
        )
    job = state.jobs[iteration.job_id]
    policy, terms = policy_of(state, iteration), job.terms
    definition = messages.TaskDefinition(
        task_id=task.task_id,
        iteration_id=iteration.iteration_id,
        dataset_id=job.dataset_id,
        digest=state.datasets[job.dataset_id].digest,
        pass_number=iteration.pass_number,
        seed=policy.seed(state, iteration, task),
        fixed_seeds=iteration.fixed_seeds,
        ticket=task.ticket,
        deals=iteration.is_dealt,
        part=policy.part,
        hand_out=policy.hand_out,
        origins=iteration.splits.exactly_once,
        remainder=terms.remainder,
        cost_plan=terms.cost_plan,
        half=terms.half,
    )
    return Decision(reply=policy.definition(definition, state, task))


def finish_task(state: DispatcherState, request: messages.FinishTask, moment: Moment) -> Decision:
    """Note that a task reached its end; of one that is over already, nothing is noted."""
    task = workers_task(state, request)
    splits = task.splits
    if task.phase is not TaskPhase.RUNNING:
        return Decision()
    iteration = state.iterations[task.iteration_id]
    facts: list[Update] = []
    if request.cut and not state.workers[task.worker_id].leaving:
        # It was told to leave, and that it said so is still on its way: while this dispatcher was
        # away, perhaps. The dataset has not come to its end.
        facts.append(updates.WorkerLeaving(worker_id=task.worker_id))
    never_came = _never_came(task, request.dealt)
    if never_came:
        facts.append(updates.UnitsReturned(task_id=task.task_id, units=never_came))
    left = splits.held - count(never_came)
    reason = policy_of(state, iteration).incomplete(task, left)
    if reason:
        return Decision(updates=(updates.TaskFailed(task_id=task.task_id, reason=reason),))
    cut = request.cut and not iteration.is_dealt
    done = request.done if iteration.splits.exactly_once and request.done <= splits.dealt else 0
    facts.append(updates.TaskFinished(task_id=task.task_id, cut=cut, done=max(splits.done, done)))
    return Decision(updates=tuple(facts))


def _never_came(task: Task, dealt: int | None) -> Ranges:
    """Return units, in dealt order, that were dealt after those that came to the worker."""
    splits = task.splits
    if dealt is None or not 0 <= dealt < splits.dealt:
        return ()
    units = at_least(((dealt, splits.dealt),), splits.done)
    return subtracted(units, united((*splits.returned, *splits.received)))


def fail_task(state: DispatcherState, request: messages.FailTask, moment: Moment) -> Decision:
    """Note that a task ended by an error; what it was dealt and nobody received is lost."""
    task = workers_task(state, request)
    if task.phase is not TaskPhase.RUNNING:
        return Decision()
    reason = request.reason[:_LONGEST_REASON]
    return Decision(updates=(updates.TaskFailed(task_id=task.task_id, reason=reason),))
