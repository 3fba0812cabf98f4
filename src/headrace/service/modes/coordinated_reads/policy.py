"""Policy of coordinated reads: the consumers of a job each read one element of every round.

A round belongs to one task, and tasks take turns (`round_order`). Everything that all consumers
must agree on is decided here and journaled:

Rule 1. *Tasks of each round.* An iteration has a horizon, which no consumer passes. Consumers
    request a new horizon, and the dispatcher moves it there (`HorizonAdvanced`). A task that is
    created later joins at the horizon (`CoordinatedTask.starting_round`).
Rule 2. *Number of rounds of an unavailable task.* Each consumer reports how many arrived
    (`RoundsReported`); those that arrived everywhere count, the others are void. If not all
    consumers had joined, none did. All rounds of a finished task arrived everywhere, whichever
    consumer reports.
Rule 3. *Identity of consumers.* An index is read by one client. A consumer that left before the end
    is not replaced, because it is unknown what it consumed. When all have left, the iteration is
    discarded, and the next consumers start again.

The processing mode determines how workers share the dataset: a copy each (OFF), or assigned splits
(DYNAMIC).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import DecisionContext
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy import IterationPolicy, TaskAssignment
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    JobIteration,
    RegisteredDataset,
)
from headrace.service.epochs import format_epoch
from headrace.service.messages import (
    ClientHeartbeat,
    ClientHeartbeatReply,
    JobOptions,
    OpenIteration,
    OpenIterationReply,
    TaskDefinition,
)
from headrace.service.modes.coordinated_reads.events import (
    CoordinatedIteration,
    CoordinatedTask,
    HorizonAdvanced,
    coordinated_iteration,
    coordinated_task,
)
from headrace.service.modes.dynamic.policy import DynamicSharding
from headrace.service.modes.no_sharding.policy import NoSharding

__all__ = ["CoordinatedDynamicSharding", "CoordinatedNoSharding"]

_MAX_HORIZON_STEP = 1 << 20
"""Maximum number of rounds by which the horizon advances at once."""


class _CoordinatedPolicy(IterationPolicy):
    """Common part of both sharding policies for reading in rounds."""

    delivery_policy = "rounds"

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Reject consumers without a common job."""
        super().check_dataset(state, dataset, request)
        if request.job_name is None:
            raise FailedPreconditionError(
                "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
                f"{request.options.num_consumers}."
            )

    def new_iteration_state(self, options: JobOptions) -> CoordinatedIteration:
        """Return a state without consumers."""
        assert options.num_consumers is not None
        return CoordinatedIteration(options.num_consumers)

    def extend_opened_reply(
        self, reply: OpenIterationReply, iteration: JobIteration
    ) -> OpenIterationReply:
        """Add the horizon."""
        return msgspec.structs.replace(
            reply, horizon=coordinated_iteration(iteration.mode_state).horizon
        )

    def extend_definition(
        self, definition: TaskDefinition, state: DispatcherState, task: DispatcherTask
    ) -> TaskDefinition:
        """Add the number of consumers and the first round of the task."""
        consumers = coordinated_iteration(state.iterations[task.iteration_id].mode_state)
        return msgspec.structs.replace(
            definition,
            starting_round=coordinated_task(task.mode_state).starting_round,
            num_consumers=consumers.num_consumers,
        )

    def check_client(self, iteration: JobIteration, request: OpenIteration) -> None:
        """Reject a client whose index belongs or belonged to another client."""
        _check_index(iteration, request)

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return the tasks to create, which begin at the horizon."""
        horizon = coordinated_iteration(iteration.mode_state).horizon
        return [
            msgspec.structs.replace(assignment, mode_state=CoordinatedTask(horizon))
            for assignment in super().tasks_to_create(state, iteration)
        ]

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return the discarding of an iteration that all consumers left, or another due event."""
        if not iteration.clients and coordinated_iteration(iteration.mode_state).departed_consumers:
            return events.IterationDiscarded(iteration_id=iteration.iteration_id)
        return super().pending_recovery(state, iteration)

    def events_after_heartbeat(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> tuple[AnyEvent, ...]:
        """Advance the horizon if this consumer asks for it."""
        horizon = coordinated_iteration(iteration.mode_state).horizon
        until = min(request.horizon, horizon + _MAX_HORIZON_STEP)
        if iteration.finished or until <= horizon:
            return ()
        return (HorizonAdvanced(iteration_id=iteration.iteration_id, horizon=until),)

    def extend_heartbeat_reply(
        self,
        reply: ClientHeartbeatReply,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> ClientHeartbeatReply:
        """Add the horizon and, after a change, ended tasks and departed consumers."""
        horizon = coordinated_iteration(iteration.mode_state).horizon
        if reply.unchanged:
            return msgspec.structs.replace(reply, horizon=horizon)
        tasks = state.tasks_of(iteration)
        return msgspec.structs.replace(
            reply,
            horizon=horizon,
            complete_rounds=_final_round_counts(tasks),
            missing_consumer=_describe_departed(iteration, tasks),
        )


class CoordinatedNoSharding(_CoordinatedPolicy, NoSharding):
    """A copy of the dataset per worker, read in rounds."""


class CoordinatedDynamicSharding(_CoordinatedPolicy, DynamicSharding):
    """Assigned splits, whose elements are read in rounds."""

    #: A round with a missing part blocks all tasks, including that of the draining worker, so each
    #: would wait for the other. Returned splits are assigned to a running or new task.
    awaits_draining_workers = False
    reports_complete_splits = False

    def awaited_clients(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        is_unheard: Callable[[str, int], bool],
    ) -> list[str]:
        """Return no clients: elements sent to one consumer cannot be used by another."""
        return []


def _check_index(iteration: JobIteration, opening: OpenIteration) -> None:
    index, client_id = opening.consumer_index, opening.client_id
    consumers = coordinated_iteration(iteration.mode_state)
    if index is None or consumers.consumer_by_client.get(client_id) == index:
        return
    clients = {each: client for client, each in consumers.consumer_by_client.items()}
    if index in clients:
        status = f"is client {clients[index]}, which is still reading"
        fix = (
            "A client without heartbeats expires after `client_timeout_ms`. Start all consumers "
            "again once all have left or expired"
        )
    elif index in consumers.departed_consumers:
        client = consumers.departed_consumers[index]
        status = f"was client {client}, which has left: the elements it consumed are not known"
        fix = "Start all consumers again once all have left"
    else:
        return
    raise FailedPreconditionError(
        f"consumer {index} of {opening.options.num_consumers} of job {opening.job_name}, "
        f"{format_epoch(opening.epoch)}, {status}; the current round has already "
        f"reached up to {consumers.horizon}. This may indicate that the consumer was restarted "
        f"with the same job name. {fix}, or choose another job_name"
    )


def _final_round_counts(tasks: list[DispatcherTask]) -> tuple[tuple[int, int], ...]:
    """Return the unavailable tasks, each with the number of its rounds that arrived everywhere."""
    return tuple(
        (task.task_id, rounds.received_rounds or 0)
        for task in tasks
        if task.is_unavailable
        and not task.awaiting_reports
        and not (rounds := coordinated_task(task.mode_state)).has_unknown_length
    )


def _describe_departed(iteration: JobIteration, tasks: list[DispatcherTask]) -> str:
    """Return which consumers left before the end; empty if none did."""
    # The number of rounds that all consumers have of such a task remains unknown.
    if iteration.finished and not any(
        coordinated_task(task.mode_state).has_unknown_length for task in tasks
    ):
        return ""
    return " and ".join(
        f"consumer {index} (client {client_id}) has left"
        for index, client_id in sorted(
            coordinated_iteration(iteration.mode_state).departed_consumers.items()
        )
    )
