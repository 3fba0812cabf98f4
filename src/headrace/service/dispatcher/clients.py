"""Deciders for clients: heartbeats, delivery reports and departure.

An iteration is reported as finished only after each client has reported what it received of every
lost task, so that no received element counts as lost or is assigned again. If a client does not
report within `limits.report_timeout`, it is assumed to have received elements of every split. There
is no such limit for the only client of an iteration, which delays no other: it has until its lease
expires.
"""

from __future__ import annotations

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.departed_clients import finish_event
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy_selection import policy_of
from headrace.service.dispatcher.python_versions import check_iteration_can_run
from headrace.service.dispatcher.splits import validate_partial_splits, validate_splits
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask
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
]


def client_heartbeat(
    state: DispatcherState, request: messages.ClientHeartbeat, context: DecisionContext
) -> DispatcherDecision:
    """Return the tasks to read and to report on, and the losses of a finished iteration."""
    client_id = request.client_id
    iteration = state.client_iteration(client_id)
    policy = policy_of(state, iteration)
    finish = finish_event(state, iteration, context)
    awaited: list[str] = []
    if not (iteration.num_active_tasks or iteration.num_draining_tasks):
        if not (finish or iteration.finished):
            awaited = policy.awaited_clients(state, iteration, context.is_unheard)
        reporting = {each for task in state.tasks_of(iteration) for each in task.awaiting_reports}
        awaited = sorted({*awaited, *reporting} - {client_id})
        if not (finish or awaited):
            check_iteration_can_run(state, iteration)
    timeout = context.limits.unreachable_timeout
    unreachable = context.soft_state.reachability.unreachable_tasks(client_id, timeout, context.now)
    limits = context.limits
    interval = context.next_heartbeat(
        limits.interval_between_client_heartbeats(len(state.clients)),
        limits.client_heartbeat_interval,
    )

    def compose(new_state: DispatcherState) -> messages.ClientHeartbeatReply:
        updated = new_state.client_iteration(client_id)
        if request.known_version == updated.version and not (awaited or unreachable):
            reply = messages.ClientHeartbeatReply(
                tasks=(),
                finished=False,
                version=updated.version,
                unchanged=True,
                heartbeat_interval=interval,
            )
        else:
            reply = _full_reply(new_state, request, awaited, unreachable, interval, context)
        return policy.extend_heartbeat_reply(reply, new_state, updated, request, context)

    new_events = policy.events_after_heartbeat(state, iteration, request, context)
    return DispatcherDecision(
        events=new_events if finish is None else (*new_events, finish), compose_reply=compose
    )


def _full_reply(
    state: DispatcherState,
    request: messages.ClientHeartbeat,
    awaited_clients: list[str],
    unreachable_tasks: set[int],
    interval: float,
    context: DecisionContext,
) -> messages.ClientHeartbeatReply:
    """Return a complete update for a client, of whose tasks only changes may be listed.

    Args:
        state: State of the dispatcher.
        request: Heartbeat of the client that receives the update.
        awaited_clients: Other clients that keep its iteration from finishing.
        unreachable_tasks: Tasks whose worker it could not reach for long.
        interval: Seconds until its next heartbeat.
        context: Context of the decision.
    """
    client_id = request.client_id
    iteration = state.client_iteration(client_id)
    policy, tasks = (
        policy_of(state, iteration),
        context.soft_state.task_addresses.of(state, iteration),
    )
    ended = tasks.ended
    is_finished = iteration.finished and not any(task.awaiting_reports for task in ended)
    changes = tasks.changes_since(request.known_version) if request.accepts_changes else None
    return messages.ClientHeartbeatReply(
        tasks=tasks.listed if changes is None else changes.started,
        changed_since=-1 if changes is None else request.known_version,
        ended_tasks=() if changes is None else changes.ended,
        finished=is_finished,
        redeliverable=tuple(
            task.task_id
            for task in ended
            if policy.is_redeliverable(state, iteration, task)
            and task.worker_id in state.workers
            and task.task_id not in unreachable_tasks
        ),
        reports_needed=tuple(task.task_id for task in ended if client_id in task.awaiting_reports),
        lost=policy.lost_splits(state, iteration) if is_finished else (),
        version=iteration.version,
        failure_reason=iteration.failure_reason if is_finished else "",
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
    assigned = task.assigned
    if task.iteration_id != iteration.iteration_id:
        raise NotFoundError(
            f"client {request.client_id} reads iteration {iteration.iteration_id}, but task "
            f"{request.task_id} belongs to iteration {task.iteration_id}"
        )
    num_consumers = state.jobs[iteration.job_id].options.num_consumers
    if (request.rounds is None) != (num_consumers is None):
        raise ValueError(
            f"rounds must be set if, and only if, the job has num_consumers: got "
            f"rounds={request.rounds} with {num_consumers=}"
        )
    received = drop_below(validate_splits(task, request.delivered), assigned.num_done)
    partially_received = drop_below(
        validate_splits(task, request.partially_delivered), assigned.num_done
    )
    if pool.exactly_once:
        partially_received = ()  # `partial_splits` says what was received
    partial_splits = (
        validate_partial_splits(task, request.partial_splits) if pool.exactly_once else ()
    )
    is_already_recorded = (
        not (request.consumed and request.client_id in assigned.unacknowledged)
        and not subtract(received, assigned.delivered)
        and not subtract(partially_received, assigned.partially_delivered)
        and not any(
            intersect(ordinals, assigned.remaining_ordinals.get(split, ALL_ORDINALS))
            for split, ordinals in exclude_splits(
                partial_splits, union((*assigned.delivered, *assigned.returned))
            )
        )
    )
    if request.client_id not in task.awaiting_reports and (
        is_already_recorded or request.rounds is not None
    ):
        return DispatcherDecision()
    ids = task.task_id, request.client_id
    report: AnyEvent
    if request.rounds is not None:
        report = RoundsReported(*ids, request.rounds, received, partially_received)
    elif request.consumed and pool.exactly_once:
        report = events.ElementsConsumed(*ids, received, partial_splits)
    elif pool.exactly_once:
        report = events.ElementsReceived(*ids, *_newly_delivered(task, received, partial_splits))
    else:
        report = events.DeliveryReported(*ids, received, partially_received)
    return DispatcherDecision(events=(report,))


def _newly_delivered(
    task: DispatcherTask, splits: Ranges, partial_splits: PartialSplits
) -> tuple[Ranges, PartialSplits]:
    """Return the part of a client's report that the task was responsible for.

    Of a split that the task was assigned in part, this is that part: other tasks have the rest.
    """
    assigned = task.assigned
    splits = subtract(splits, union((*assigned.delivered, *assigned.returned)))
    held_partially = intersect(
        splits, union((split, split + 1) for split in assigned.remaining_ordinals)
    )
    ordinals_by_split = {
        split: ALL_ORDINALS for start, stop in held_partially for split in range(start, stop)
    }
    ordinals_by_split.update(
        exclude_splits(partial_splits, union((*assigned.delivered, *assigned.returned, *splits)))
    )
    new_ordinals = (
        (split, intersect(ordinals, assigned.remaining_ordinals.get(split, ALL_ORDINALS)))
        for split, ordinals in sorted(ordinals_by_split.items())
    )
    return subtract(splits, held_partially), tuple(
        (split, ordinals) for split, ordinals in new_ordinals if ordinals
    )


def expire_reports(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Stop waiting for clients that do not report.

    Consumers of coordinated reads always wait for each other.
    """
    timeout = context.limits.report_timeout
    return [
        events.DeliveryReported(
            task_id=task.task_id,
            client_id=client_id,
            delivered=(),
            partially_delivered=((task.assigned.num_done, task.assigned.num_assigned),),
        )
        for iteration_id, lost_at in context.soft_state.last_task_losses.items()
        if context.now - lost_at > timeout
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
    client_left = events.ClientLeft(client_id=client_id, may_not_rejoin=not iteration.finished)
    new_events: list[AnyEvent] = [client_left]
    if job.name is None:
        new_events.append(events.IterationDiscarded(iteration_id=iteration.iteration_id))
        new_events.append(events.JobForgotten(job_id=job.job_id))
    return new_events


def expire_clients(state: DispatcherState, context: DecisionContext) -> list[AnyEvent]:
    """Remove clients that were silent for too long."""
    expired = [
        client_id
        for client_id, last_heartbeat in context.soft_state.client_heartbeats.items()
        if context.now - last_heartbeat > context.limits.client_timeout
    ]
    return [event for client_id in expired for event in remove_client(state, client_id)]
