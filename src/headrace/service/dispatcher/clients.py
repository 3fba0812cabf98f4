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
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.departed_clients import finish_event
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy_selection import policy_of
from headrace.service.dispatcher.python_versions import check_iteration_can_run
from headrace.service.dispatcher.splits import validate_partial_splits, validate_splits
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, TaskPhase, Worker
from headrace.service.modes.coordinated_reads.records import RoundsSettled
from headrace.service.ranges import Ranges, at_least, common, subtracted, united
from headrace.service.rows import EVERYTHING, Parts, outside

__all__ = [
    "client_heartbeat",
    "close_iteration",
    "expire_clients",
    "expire_reports",
    "remove_client",
    "report_delivery",
    "task_addresses",
]


def task_addresses(
    tasks: Iterable[DispatcherTask], workers: Mapping[str, Worker]
) -> tuple[messages.TaskAddress, ...]:
    """Return where an iteration with these tasks can be read, whose workers are these."""
    found = []
    for task in tasks:
        if task.phase is TaskPhase.RUNNING:
            address = messages.TaskAddress(
                task_id=task.task_id,
                worker_id=task.worker_id,
                worker_address=task.address,
                task_token=task.task_token,
                attempt=task.attempt,
                tags=workers[task.worker_id].tags,
            )
            found.append(
                address if task.mode_state is None else task.mode_state.extend_address(address)
            )
    return tuple(found)


def client_heartbeat(
    state: DispatcherState, request: messages.ClientHeartbeat, context: DecisionContext
) -> DispatcherDecision:
    """Say what there is to read and to settle, and in the end what was lost."""
    client_id = request.client_id
    iteration = state.client_iteration(client_id)
    policy = policy_of(state, iteration)
    ending = finish_event(state, iteration, context)
    silent: list[str] = []
    if not (iteration.num_active_tasks or iteration.num_draining_tasks):
        if not (ending or iteration.finished):
            silent = policy.awaited_clients(state, iteration, context.is_unheard)
        owing = {each for task in state.tasks_of(iteration) for each in task.awaiting_reports}
        silent = sorted({*silent, *owing} - {client_id})
        if not (ending or silent):
            check_iteration_can_run(state, iteration)
    patience = context.limits.unreachable_timeout
    given_up = context.soft_state.reachability.unreachable_tasks(client_id, patience, context.now)
    limits = context.limits
    interval = context.next_heartbeat(
        limits.interval_between_client_heartbeats(len(state.clients)),
        limits.client_heartbeat_interval,
    )

    def compose(after: DispatcherState) -> messages.ClientHeartbeatReply:
        now = after.client_iteration(client_id)
        if request.known_version == now.version and not (silent or given_up):
            update = messages.ClientHeartbeatReply(
                tasks=(),
                finished=False,
                version=now.version,
                unchanged=True,
                heartbeat_interval=interval,
            )
        else:
            update = _full_reply(after, client_id, silent, given_up, interval)
        return policy.extend_heartbeat_reply(update, after, now, request, context)

    facts = policy.events_after_heartbeat(state, iteration, request, context)
    return DispatcherDecision(
        events=facts if ending is None else (*facts, ending), compose_reply=compose
    )


def _full_reply(
    state: DispatcherState,
    client_id: str,
    awaited_clients: list[str],
    unreachable_tasks: set[int],
    interval: float,
) -> messages.ClientHeartbeatReply:
    """Return all that a client should hear.

    Args:
        state: What is known.
        client_id: Which client.
        awaited_clients: Others that keep its iteration from its end.
        unreachable_tasks: Tasks whose worker it could not reach for long.
        interval: Seconds until its next heartbeat.
    """
    iteration = state.client_iteration(client_id)
    policy, tasks = policy_of(state, iteration), state.tasks_of(iteration)
    running = TaskPhase.RUNNING
    finished = iteration.finished and not any(task.awaiting_reports for task in tasks)
    return messages.ClientHeartbeatReply(
        tasks=task_addresses(tasks, state.workers),
        finished=finished,
        redeliverable=tuple(
            task.task_id
            for task in tasks
            if task.phase is not running
            and policy.is_redeliverable(state, iteration, task)
            and task.worker_id in state.workers
            and task.task_id not in unreachable_tasks
        ),
        reports_needed=tuple(task.task_id for task in tasks if client_id in task.awaiting_reports),
        lost=policy.lost_splits(state, iteration) if finished else (),
        version=iteration.version,
        failure_reason=iteration.failure_reason if finished else "",
        awaited_clients=tuple(awaited_clients),
        heartbeat_interval=interval,
    )


def report_delivery(
    state: DispatcherState, request: messages.ReportDelivery, context: DecisionContext
) -> DispatcherDecision:
    """Note what a client received of a task.

    Raises:
        NotFoundError: The client does not read the task's iteration.
        ValueError: The task was not dealt these units.
    """
    iteration = state.client_iteration(request.client_id)
    pool = iteration.pool
    task = state.task(request.task_id)
    splits = task.assigned
    if task.iteration_id != iteration.iteration_id:
        raise NotFoundError(
            f"client {request.client_id} reads iteration {iteration.iteration_id}; task "
            f"{request.task_id} is of iteration {task.iteration_id}"
        )
    num_consumers = state.jobs[iteration.job_id].options.num_consumers
    if (request.rounds is None) != (num_consumers is None):
        raise ValueError(f"rounds={request.rounds} does not go with {num_consumers=}")
    received = at_least(validate_splits(task, request.delivered), splits.num_done)
    touched = at_least(validate_splits(task, request.partially_delivered), splits.num_done)
    if pool.exactly_once:
        touched = ()  # what came, `parts` says
    parts = validate_partial_splits(task, request.partial_splits) if pool.exactly_once else ()
    is_known = (
        not (request.consumed and request.client_id in splits.unacknowledged)
        and not subtracted(received, splits.delivered)
        and not subtracted(touched, splits.partially_delivered)
        and not any(
            common(rows, splits.remaining_ordinals.get(unit, EVERYTHING))
            for unit, rows in outside(parts, united((*splits.delivered, *splits.returned)))
        )
    )
    if request.client_id not in task.awaiting_reports and (is_known or request.rounds is not None):
        return DispatcherDecision()
    whose = task.task_id, request.client_id
    settled: AnyEvent
    if request.rounds is not None:
        settled = RoundsSettled(*whose, request.rounds, received, touched)
    elif request.consumed and pool.exactly_once:
        settled = events.ElementsConsumed(*whose, received, parts)
    elif pool.exactly_once:
        settled = events.ElementsReceived(*whose, *_newly_delivered(task, received, parts))
    else:
        settled = events.DeliveryReported(*whose, received, touched)
    return DispatcherDecision(events=(settled,))


def _newly_delivered(task: DispatcherTask, units: Ranges, parts: Parts) -> tuple[Ranges, Parts]:
    """Return what a task had still to give of what a client says that it received of it.

    Of a unit that the task was dealt in part, this is the part: others have the rest.
    """
    splits = task.assigned
    units = subtracted(units, united((*splits.delivered, *splits.returned)))
    in_part = common(units, united((unit, unit + 1) for unit in splits.remaining_ordinals))
    came = {unit: EVERYTHING for start, stop in in_part for unit in range(start, stop)}
    came.update(outside(parts, united((*splits.delivered, *splits.returned, *units))))
    given = (
        (unit, common(rows, splits.remaining_ordinals.get(unit, EVERYTHING)))
        for unit, rows in sorted(came.items())
    )
    return subtracted(units, in_part), tuple((unit, rows) for unit, rows in given if rows)


def expire_reports(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Wait no longer for clients that do not settle.

    Consumers that read in rounds wait for each other in any case.
    """
    patience = context.limits.report_timeout
    return [
        events.DeliveryReported(
            task_id=task.task_id,
            client_id=client_id,
            delivered=(),
            partially_delivered=((task.assigned.num_done, task.assigned.num_assigned),),
        )
        for iteration_id, since in context.soft_state.last_task_losses.items()
        if context.now - since > patience
        and len(state.iterations[iteration_id].clients) > 1
        and not state.iterations[iteration_id].clients_read_together
        and not state.iterations[iteration_id].pool.exactly_once
        for task in state.tasks_of(state.iterations[iteration_id])
        for client_id in sorted(task.awaiting_reports)
    ]


def close_iteration(
    state: DispatcherState, request: messages.CloseIteration, context: DecisionContext
) -> DispatcherDecision:
    """Let a client go; one that is not known has gone already."""
    if request.client_id not in state.clients:
        return DispatcherDecision()
    return DispatcherDecision(events=tuple(remove_client(state, request.client_id)))


def remove_client(state: DispatcherState, client_id: str) -> list[AnyEvent]:
    """Return the facts that follow when a client is gone.

    A job of the client's own goes with it, since nobody else can join; its `JobForgotten` comes
    last.
    """
    iteration = state.iterations[state.clients[client_id]]
    job = state.jobs[iteration.job_id]
    left = events.ClientLeft(client_id=client_id, may_not_rejoin=not iteration.finished)
    facts: list[AnyEvent] = [left]
    if job.name is None:
        facts.append(events.IterationDiscarded(iteration_id=iteration.iteration_id))
        facts.append(events.JobForgotten(job_id=job.job_id))
    return facts


def expire_clients(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Let go of clients that were silent for too long."""
    silent = [
        client_id
        for client_id, heard in context.soft_state.client_heartbeats.items()
        if context.now - heard > context.limits.client_timeout
    ]
    return [fact for client_id in silent for fact in remove_client(state, client_id)]
