"""Deciders for clients: heartbeats, delivery reports and departure.

A client learns that an iteration is finished once every task that was lost while it read is
reported on, so that no received element counts as lost or is assigned again. The dispatcher stops
waiting for the report of a client that hangs after a while, as if it had received something of
every split; a client that reads alone delays no other, and keeps its whole lease.
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
from headrace.service.element_sets import ALL_ORDINALS, PartialSplits, exclude_splits
from headrace.service.modes.coordinated_reads.events import RoundsReported
from headrace.service.ranges import Ranges, drop_below, intersect, subtract, union

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
    """Return the addresses of the running tasks, given the workers they run on."""
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
    """Return the tasks to read and to report on, and the losses of a finished iteration."""
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
    """Return a complete update for a client.

    Args:
        state: State of the dispatcher.
        client_id: Client that receives the update.
        awaited_clients: Other clients that keep its iteration from finishing.
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
    """Record what a client received of a task.

    Raises:
        NotFoundError: If the client does not read the task's iteration.
        ValueError: If the splits were not assigned to the task.
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
    received = drop_below(validate_splits(task, request.delivered), splits.num_done)
    touched = drop_below(validate_splits(task, request.partially_delivered), splits.num_done)
    if pool.exactly_once:
        touched = ()  # `partial_splits` says what was received
    parts = validate_partial_splits(task, request.partial_splits) if pool.exactly_once else ()
    is_known = (
        not (request.consumed and request.client_id in splits.unacknowledged)
        and not subtract(received, splits.delivered)
        and not subtract(touched, splits.partially_delivered)
        and not any(
            intersect(rows, splits.remaining_ordinals.get(unit, ALL_ORDINALS))
            for unit, rows in exclude_splits(parts, union((*splits.delivered, *splits.returned)))
        )
    )
    if request.client_id not in task.awaiting_reports and (is_known or request.rounds is not None):
        return DispatcherDecision()
    whose = task.task_id, request.client_id
    settled: AnyEvent
    if request.rounds is not None:
        settled = RoundsReported(*whose, request.rounds, received, touched)
    elif request.consumed and pool.exactly_once:
        settled = events.ElementsConsumed(*whose, received, parts)
    elif pool.exactly_once:
        settled = events.ElementsReceived(*whose, *_newly_delivered(task, received, parts))
    else:
        settled = events.DeliveryReported(*whose, received, touched)
    return DispatcherDecision(events=(settled,))


def _newly_delivered(
    task: DispatcherTask, units: Ranges, parts: PartialSplits
) -> tuple[Ranges, PartialSplits]:
    """Return the part of a client's report that the task was responsible for.

    Of a split that the task was assigned in part, this is that part: other tasks have the rest.
    """
    splits = task.assigned
    units = subtract(units, union((*splits.delivered, *splits.returned)))
    in_part = intersect(units, union((unit, unit + 1) for unit in splits.remaining_ordinals))
    came = {unit: ALL_ORDINALS for start, stop in in_part for unit in range(start, stop)}
    came.update(exclude_splits(parts, union((*splits.delivered, *splits.returned, *units))))
    given = (
        (unit, intersect(rows, splits.remaining_ordinals.get(unit, ALL_ORDINALS)))
        for unit, rows in sorted(came.items())
    )
    return subtract(units, in_part), tuple((unit, rows) for unit, rows in given if rows)


def expire_reports(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Stop waiting for clients that do not report.

    Consumers of coordinated reads always wait for each other.
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
    """Remove a client; an unknown client has already left."""
    if request.client_id not in state.clients:
        return DispatcherDecision()
    return DispatcherDecision(events=tuple(remove_client(state, request.client_id)))


def remove_client(state: DispatcherState, client_id: str) -> list[AnyEvent]:
    """Return the events that remove a client.

    A job of the client's own is removed with it, since no other client can join; its `JobForgotten`
    comes last.
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
    """Remove clients that were silent for too long."""
    silent = [
        client_id
        for client_id, heard in context.soft_state.client_heartbeats.items()
        if context.now - heard > context.limits.client_timeout
    ]
    return [fact for client_id in silent for fact in remove_client(state, client_id)]
