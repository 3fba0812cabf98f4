"""Deciders: clients read, settle what was lost, and leave.

A client hears of the end of an iteration once every task that was lost while it read is settled; so
nobody counts as lost, or is dealt again, what somebody received. A client that hangs is settled for
after a while, as if it had received something of everything; one that reads alone holds nobody up,
and is waited for as long as it counts as alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.departures import finished_now
from headrace.service.dispatcher.modes import policy_of
from headrace.service.dispatcher.python_versions import check_iteration_can_run
from headrace.service.dispatcher.splits import checked_parts, checked_units
from headrace.service.dispatcher.state import DispatcherState, Task, TaskPhase, Worker
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.coordinated_reads.records import RoundsSettled
from headrace.service.ranges import Ranges, at_least, common, subtracted, united
from headrace.service.rows import EVERYTHING, Parts, outside

__all__ = [
    "addresses",
    "client_heartbeat",
    "close_iteration",
    "expire_clients",
    "leave",
    "settle_for_silent",
    "settle_task",
]


def addresses(
    tasks: Iterable[Task], workers: Mapping[str, Worker]
) -> tuple[messages.TaskAddress, ...]:
    """Return where an iteration with these tasks can be read, whose workers are these."""
    found = []
    for task in tasks:
        if task.phase is TaskPhase.RUNNING:
            address = messages.TaskAddress(
                task_id=task.task_id,
                worker_id=task.worker_id,
                worker_address=task.address,
                ticket=task.ticket,
                attempt=task.attempt,
                tags=workers[task.worker_id].tags,
            )
            found.append(address if task.mode is None else task.mode.address(address))
    return tuple(found)


def client_heartbeat(
    state: DispatcherState, request: messages.ClientHeartbeat, moment: Moment
) -> Decision:
    """Say what there is to read and to settle, and in the end what was lost."""
    client_id = request.client_id
    iteration = state.client_iteration(client_id)
    policy = policy_of(state, iteration)
    ending = finished_now(state, iteration, moment)
    silent: list[str] = []
    if not (iteration.takers or iteration.leavers):
        if not (ending or iteration.finished):
            silent = policy.waits_for(state, iteration, moment.is_silent)
        owing = {each for task in state.tasks_of(iteration) for each in task.unsettled}
        silent = sorted({*silent, *owing} - {client_id})
        if not (ending or silent):
            check_iteration_can_run(state, iteration)
    patience = moment.limits.reach_timeout
    given_up = moment.presence.unreachable.is_agreed_of(client_id, patience, moment.now)
    limits = moment.limits
    interval = moment.next_heartbeat(
        limits.client_interval(len(state.clients)), limits.client_heartbeat_interval
    )

    def compose(after: DispatcherState) -> messages.ClientUpdate:
        now = after.client_iteration(client_id)
        if request.known == now.version and not (silent or given_up):
            update = messages.ClientUpdate(
                tasks=(),
                finished=False,
                version=now.version,
                same=True,
                heartbeat_interval=interval,
            )
        else:
            update = _update(after, client_id, silent, given_up, interval)
        return policy.update(update, after, now, request, moment)

    facts = policy.heartbeat(state, iteration, request, moment)
    return Decision(updates=facts if ending is None else (*facts, ending), compose=compose)


def _update(
    state: DispatcherState,
    client_id: str,
    silent: list[str],
    given_up: set[int],
    interval: float,
) -> messages.ClientUpdate:
    """Return all that a client should hear.

    Args:
        state: What is known.
        client_id: Which client.
        silent: Others that keep its iteration from its end.
        given_up: Tasks whose worker it could not reach for long.
        interval: Seconds until its next heartbeat.
    """
    iteration = state.client_iteration(client_id)
    policy, tasks = policy_of(state, iteration), state.tasks_of(iteration)
    running = TaskPhase.RUNNING
    finished = iteration.finished and not any(task.unsettled for task in tasks)
    return messages.ClientUpdate(
        tasks=addresses(tasks, state.workers),
        finished=finished,
        kept=tuple(
            task.task_id
            for task in tasks
            if task.phase is not running
            and policy.is_kept(state, iteration, task)
            and task.worker_id in state.workers
            and task.task_id not in given_up
        ),
        settle=tuple(task.task_id for task in tasks if client_id in task.unsettled),
        lost=policy.lost(state, iteration) if finished else (),
        version=iteration.version,
        failed=iteration.failed if finished else "",
        silent=tuple(silent),
        heartbeat_interval=interval,
    )


def settle_task(state: DispatcherState, request: messages.SettleTask, moment: Moment) -> Decision:
    """Note what a client received of a task.

    Raises:
        NotFoundError: The client does not read the task's iteration.
        ValueError: The task was not dealt these units.
    """
    iteration = state.client_iteration(request.client_id)
    pool = iteration.splits
    task = state.task(request.task_id)
    splits = task.splits
    if task.iteration_id != iteration.iteration_id:
        raise NotFoundError(
            f"client {request.client_id} reads iteration {iteration.iteration_id}; task "
            f"{request.task_id} is of iteration {task.iteration_id}"
        )
    num_consumers = state.jobs[iteration.job_id].terms.num_consumers
    if (request.rounds is None) != (num_consumers is None):
        raise ValueError(f"rounds={request.rounds} does not go with {num_consumers=}")
    received = at_least(checked_units(task, request.received), splits.done)
    touched = at_least(checked_units(task, request.touched), splits.done)
    if pool.exactly_once:
        touched = ()  # what came, `parts` says
    parts = checked_parts(task, request.parts) if pool.exactly_once else ()
    is_known = (
        not (request.used and request.client_id in splits.kept_by)
        and not subtracted(received, splits.received)
        and not subtracted(touched, splits.touched)
        and not any(
            common(rows, splits.rows.get(unit, EVERYTHING))
            for unit, rows in outside(parts, united((*splits.received, *splits.returned)))
        )
    )
    if request.client_id not in task.unsettled and (is_known or request.rounds is not None):
        return Decision()
    whose = task.task_id, request.client_id
    settled: Update
    if request.rounds is not None:
        settled = RoundsSettled(*whose, request.rounds, received, touched)
    elif request.used and pool.exactly_once:
        settled = updates.ElementsUsed(*whose, received, parts)
    elif pool.exactly_once:
        settled = updates.ElementsReceived(*whose, *_given_by(task, received, parts))
    else:
        settled = updates.TaskSettled(*whose, received, touched)
    return Decision(updates=(settled,))


def _given_by(task: Task, units: Ranges, parts: Parts) -> tuple[Ranges, Parts]:
    """Return what a task had still to give of what a client says that it received of it.

    Of a unit that the task was dealt in part, this is the part: others have the rest.
    """
    splits = task.splits
    units = subtracted(units, united((*splits.received, *splits.returned)))
    in_part = common(units, united((unit, unit + 1) for unit in splits.rows))
    came = {unit: EVERYTHING for start, stop in in_part for unit in range(start, stop)}
    came.update(outside(parts, united((*splits.received, *splits.returned, *units))))
    given = (
        (unit, common(rows, splits.rows.get(unit, EVERYTHING)))
        for unit, rows in sorted(came.items())
    )
    return subtracted(units, in_part), tuple((unit, rows) for unit, rows in given if rows)


def settle_for_silent(state: DispatcherState, moment: Moment) -> list[Update]:
    """Wait no longer for clients that do not settle.

    Consumers that read in rounds wait for each other in any case.
    """
    patience = moment.limits.settle_patience
    return [
        updates.TaskSettled(
            task_id=task.task_id,
            client_id=client_id,
            received=(),
            touched=((task.splits.done, task.splits.dealt),),
        )
        for iteration_id, since in moment.presence.lost.items()
        if moment.now - since > patience
        and len(state.iterations[iteration_id].clients) > 1
        and not state.iterations[iteration_id].clients_read_together
        and not state.iterations[iteration_id].splits.exactly_once
        for task in state.tasks_of(state.iterations[iteration_id])
        for client_id in sorted(task.unsettled)
    ]


def close_iteration(
    state: DispatcherState, request: messages.CloseIteration, moment: Moment
) -> Decision:
    """Let a client go; one that is not known has gone already."""
    if request.client_id not in state.clients:
        return Decision()
    return Decision(updates=tuple(leave(state, request.client_id)))


def leave(state: DispatcherState, client_id: str) -> list[Update]:
    """Return the facts that follow when a client is gone.

    A job of the client's own goes with it, since nobody else can join; its `JobForgotten` comes
    last.
    """
    iteration = state.iterations[state.clients[client_id]]
    job = state.jobs[iteration.job_id]
    left = updates.ClientLeft(client_id=client_id, is_final=not iteration.finished)
    facts: list[Update] = [left]
    if job.name is None:
        facts.append(updates.IterationCollected(iteration_id=iteration.iteration_id))
        facts.append(updates.JobForgotten(job_id=job.job_id))
    return facts


def expire_clients(state: DispatcherState, moment: Moment) -> list[Update]:
    """Let go of clients that were silent for too long."""
    silent = [
        client_id
        for client_id, heard in moment.presence.clients.items()
        if moment.now - heard > moment.limits.client_timeout
    ]
    return [fact for client_id in silent for fact in leave(state, client_id)]
