"""Deciders: who is alive, who leaves, who is gone."""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.departures import departed_from
from headrace.service.dispatcher.presence import Left, Paced, Refused, Unreached
from headrace.service.dispatcher.state import DispatcherState, Task, TaskPhase
from headrace.service.dispatcher.updates import Update
from headrace.service.ranges import Ranges, subtracted

__all__ = [
    "expire_workers",
    "give_up_unreachable",
    "late_heartbeats",
    "note_lasting_copies",
    "report_unreachable",
    "worker_heartbeat",
    "worker_leaving",
    "worker_left",
]

_LATE_SECONDS = 60.0
_MOST_NAMED = 5


def worker_heartbeat(
    state: DispatcherState, request: messages.WorkerHeartbeat, moment: Moment
) -> Decision:
    """Say which of a worker's tasks nobody needs any more.

    A finished task stays with its worker while clients are left in its iteration: one whose answer
    was lost on the way may ask for it again.

    Raises:
        NotFoundError: The worker is not registered, or was declared lost.
    """
    worker_id = request.worker_id
    state.worker(worker_id)
    limits, pace = moment.limits, moment.limits.worker_interval(len(state.workers))
    is_known = moment.presence.paces.get(worker_id) == pace
    return Decision(
        notes=() if is_known else (Paced(worker_id, pace),),
        reply=messages.WorkerUpdate(
            tasks_to_delete=tuple(
                task_id for task_id in request.tasks if not _is_needed(state, worker_id, task_id)
            ),
            incarnation=state.incarnation,
            departed=departed_from(state, worker_id),
            begin=_to_begin(state, request),
            heartbeat_interval=moment.next_heartbeat(pace, limits.heartbeat_interval),
        ),
    )


def _to_begin(state: DispatcherState, request: messages.WorkerHeartbeat) -> tuple[int, ...]:
    """Return the tasks of a worker that it has not begun, and that no client will ask for."""
    return tuple(
        task_id
        for task_id in sorted(state.workers[request.worker_id].tasks)
        if state.jobs[state.iterations[state.tasks[task_id].iteration_id].job_id].save
        and task_id not in request.tasks
    )


def _is_needed(state: DispatcherState, worker_id: str, task_id: int) -> bool:
    task = state.tasks.get(task_id)
    if task is None or task.worker_id != worker_id or task.phase is TaskPhase.LOST:
        return False
    iteration = state.iterations[task.iteration_id]
    return not iteration.finished or bool(iteration.clients) or bool(task.departed)


def worker_leaving(
    state: DispatcherState, request: messages.WorkerLeaving, moment: Moment
) -> Decision:
    """Give a worker no more work.

    Raises:
        NotFoundError: The worker is not registered, or was declared lost.
    """
    worker = state.worker(request.worker_id)
    if worker.leaving:
        return Decision()
    return Decision(updates=(updates.WorkerLeaving(worker_id=request.worker_id),))


def worker_left(state: DispatcherState, request: messages.WorkerLeft, moment: Moment) -> Decision:
    """Let a worker go; one that is not known has gone already."""
    known = request.worker_id in state.workers
    left = updates.WorkerLeft(worker_id=request.worker_id)
    return Decision(updates=(left,) if known else (), notes=(Left(request.worker_id),))


def report_unreachable(
    state: DispatcherState, request: messages.ReportUnreachable, moment: Moment
) -> Decision:
    """Look closer at a worker whose address refuses connections.

    It is lost if it is silent for a few heartbeats; that is for `expire_workers` to see, after all
    requests in hand were heard. One that goes on sending heartbeats is not: it is the way between
    the two that is broken, and its task is given up only when all clients say so for long. One that
    is only silent has the whole worker timeout.
    """
    task = state.tasks.get(request.task_id)
    if task is None or task.worker_id not in state.workers:
        return Decision()
    unreached = Unreached(request.task_id, request.client_id)
    return Decision(notes=(Refused(task.worker_id), unreached) if request.refused else (unreached,))


def expire_workers(state: DispatcherState, moment: Moment) -> list[Update]:
    """Declare lost who was silent for too long; suspects get less time.

    A worker whose process is heard on its connection is alive, however late its heartbeats are: a
    function may hold the interpreter's lock.
    """
    presence, limits = moment.presence, moment.limits
    lost: list[Update] = []
    for worker_id, heard in presence.workers.items():
        refuses, silent = worker_id in presence.suspects, moment.now - heard
        patience = limits.worker_timeout
        if refuses:
            # Asked by an earlier run: there were as many of them as now.
            pace = presence.paces.get(worker_id) or limits.worker_interval(len(state.workers))
            patience = min(patience, max(limits.suspect_timeout, 2 * pace))
        if silent <= patience:
            continue
        of_process = presence.connections.silence(worker_id)
        if of_process is not None and of_process <= limits.worker_timeout:
            continue
        exited = refuses or presence.connections.has_exited(worker_id)
        seen = "refuses connections, and" if refuses else "closed its connection, and"
        reason = f"it {f'{seen} ' if exited else ''}was not heard of for {silent:.0f} s"
        lost.append(updates.WorkerLost(worker_id=worker_id, reason=reason, silent=not exited))
    return lost


def late_heartbeats(state: DispatcherState, moment: Moment) -> list[str]:
    """Describe workers whose processes live and whose heartbeats are very late, once a minute."""
    reported, found = moment.presence.reported_late, []
    for worker_id, heard in moment.presence.workers.items():
        silent = moment.now - heard
        if silent <= max(_LATE_SECONDS, moment.limits.worker_timeout):
            reported.pop(worker_id, None)
        elif moment.now - reported.get(worker_id, heard) >= _LATE_SECONDS:
            reported[worker_id] = moment.now
            worker = state.workers[worker_id]
            splits = [
                f"{start} to {stop - 1}"
                for task in map(state.tasks.__getitem__, sorted(worker.tasks))
                for start, stop in _in_hand(task)
            ]
            holds = f"; it holds splits {', '.join(splits[:_MOST_NAMED])}" if splits else ""
            found.append(
                f"the worker at {worker.address} has sent no heartbeat for {silent:.0f} s, but its "
                f"process lives: a function seems to hold the interpreter's lock{holds}"
            )
    return found


def _in_hand(task: Task) -> Ranges:
    splits = task.splits
    held = subtracted(((splits.done, splits.dealt),), splits.returned) if splits.held else ()
    return splits.located(held)


def note_lasting_copies(state: DispatcherState, moment: Moment) -> list[Update]:
    """Note which copies have run for long."""
    running = [
        task.task_id
        for iteration in state.iterations.values()
        if not iteration.is_dealt and not iteration.finished
        for task in state.running_tasks(iteration)
        if not task.lasted
    ]
    moment.presence.copies.watch(running, moment.now)
    return [
        updates.CopyLasted(task_id=task_id)
        for task_id in running
        if moment.presence.copies.since(task_id, moment.now) > moment.limits.copy_lasts
    ]


def give_up_unreachable(state: DispatcherState, moment: Moment) -> list[Update]:
    """Give up tasks on workers that are heard here and that none of their clients reaches."""
    patience = moment.limits.reach_timeout
    return [
        updates.TaskLost(
            task_id=task_id,
            reason=(
                f"none of its clients could reach it for {patience:.0f} s, though it runs; is "
                f"{task.address} an address that clients can reach?"
            ),
        )
        for task_id in moment.presence.unreachable.tasks()
        if (task := state.tasks.get(task_id)) is not None
        and task.phase is TaskPhase.RUNNING
        and moment.presence.unreachable.is_agreed(
            task_id, state.iterations[task.iteration_id].clients, patience, moment.now
        )
    ]
