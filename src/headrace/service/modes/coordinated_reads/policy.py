"""Rounds: the consumers of a job read together, one element each of every round.

A round is of one task, and tasks take turns (`turns` says how). What all consumers must
know alike is decided here, and journaled:

Rule 1. *Which tasks there are in a round.* An iteration has a horizon, beyond which no consumer
        goes. Consumers say how far they would like to go, and the horizon is put there
        (`RoundsOpened`). A task that comes later joins at the horizon (`TaskRounds.first`).
Rule 2. *How many rounds a task gave that is gone.* Each consumer says how many arrived
        (`RoundsSettled`); those that arrived everywhere count, the others never were. Where
        not all consumers had joined, none did. Of a finished task all did, whoever says so.
Rule 3. *Who is which consumer.* An index is read by one client. A consumer that left before the end
        is not replaced: nobody knows what it used. When all have left, the iteration is given up,
        and the next consumers begin it again.

How workers share the dataset, the mode says: copies (OFF), or units that are dealt (DYNAMIC).
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
from headrace.service.messages import (
    ClientHeartbeat,
    ClientHeartbeatReply,
    JobOptions,
    OpenIteration,
    OpenIterationReply,
    TaskDefinition,
)
from headrace.service.modes.coordinated_reads.records import (
    Consumers,
    RoundsOpened,
    TaskRounds,
    consumers_of,
    rounds_of,
)
from headrace.service.modes.dynamic.policy import DynamicSharding
from headrace.service.modes.no_sharding.policy import NoSharding
from headrace.service.passes import pass_in_words

__all__ = ["RoundCopies", "RoundDealing"]

_MOST_AHEAD = 1 << 20
"""Rounds by which the horizon is moved at once, at most."""


class _Rounds(IterationPolicy):
    """What copies and dealt units have in common where they are read in rounds."""

    delivery_policy = "rounds"

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Refuse consumers that have no job in common."""
        super().check_dataset(state, dataset, request)
        if request.job_name is None:
            raise FailedPreconditionError(
                "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
                f"{request.options.num_consumers}."
            )

    def new_iteration_state(self, options: JobOptions) -> Consumers:
        """Return consumers of which none is there yet."""
        assert options.num_consumers is not None
        return Consumers(options.num_consumers)

    def extend_opened_reply(
        self, reply: OpenIterationReply, iteration: JobIteration
    ) -> OpenIterationReply:
        """Add how far consumers may go."""
        return msgspec.structs.replace(reply, horizon=consumers_of(iteration.mode_state).horizon)

    def extend_definition(
        self, definition: TaskDefinition, state: DispatcherState, task: DispatcherTask
    ) -> TaskDefinition:
        """Add who reads the task, and from which round on."""
        consumers = consumers_of(state.iterations[task.iteration_id].mode_state)
        return msgspec.structs.replace(
            definition,
            starting_round=rounds_of(task.mode_state).first,
            num_consumers=consumers.number,
        )

    def check_client(self, iteration: JobIteration, request: OpenIteration) -> None:
        """Refuse a client whose index another has, or had."""
        _check_index(iteration, request)

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return the tasks that are to begin, from the horizon on."""
        horizon = consumers_of(iteration.mode_state).horizon
        return [
            msgspec.structs.replace(post, mode_state=TaskRounds(horizon))
            for post in super().tasks_to_create(state, iteration)
        ]

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return the end of an iteration that all consumers have left, or what else is first."""
        if not iteration.clients and consumers_of(iteration.mode_state).departed:
            return events.IterationDiscarded(iteration_id=iteration.iteration_id)
        return super().pending_recovery(state, iteration)

    def events_after_heartbeat(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> tuple[AnyEvent, ...]:
        """Let consumers go on where this one would like to."""
        horizon = consumers_of(iteration.mode_state).horizon
        until = min(request.horizon, horizon + _MOST_AHEAD)
        if iteration.finished or until <= horizon:
            return ()
        return (RoundsOpened(iteration_id=iteration.iteration_id, until=until),)

    def extend_heartbeat_reply(
        self,
        reply: ClientHeartbeatReply,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> ClientHeartbeatReply:
        """Add how far consumers may go; where something changed, also what has ended or left."""
        horizon = consumers_of(iteration.mode_state).horizon
        if reply.unchanged:
            return msgspec.structs.replace(reply, horizon=horizon)
        tasks = state.tasks_of(iteration)
        return msgspec.structs.replace(
            reply,
            horizon=horizon,
            complete_rounds=_lengths(tasks),
            missing_consumer=_leaver(iteration, tasks),
        )


class RoundCopies(_Rounds, NoSharding):
    """Copies that are read in rounds."""


class RoundDealing(_Rounds, DynamicSharding):
    """Units are dealt, and what tasks make of them is read in rounds."""

    #: A round that lacks a part stops all tasks, that of the leaving worker too: each would wait
    #: for the other. What comes back is dealt to a task that runs still, or begins then.
    awaits_draining_workers = False
    reports_complete_splits = False

    def awaited_clients(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        is_unheard: Callable[[str, int], bool],
    ) -> list[str]:
        """Return nobody: what was sent to a consumer, no other can use."""
        return []


def _check_index(iteration: JobIteration, opening: OpenIteration) -> None:
    index, client_id = opening.consumer_index, opening.client_id
    consumers = consumers_of(iteration.mode_state)
    if index is None or consumers.present.get(client_id) == index:
        return
    holders = {each: holder for holder, each in consumers.present.items()}
    if index in holders:
        seen = f"is client {holders[index]}, which reads it"
        cure = (
            "A client that is not heard counts as gone after `client_timeout_ms`. Start all "
            "consumers again once all have left"
        )
    elif index in consumers.departed:
        seen = f"was client {consumers.departed[index]}, which has left: what it used is not known"
        cure = "Start all consumers again once all have left"
    else:
        return
    raise FailedPreconditionError(
        f"consumer {index} of {opening.options.num_consumers} of job {opening.job_name}, "
        f"{pass_in_words(opening.epoch)}, {seen}; the current round has already "
        f"reached up to {consumers.horizon}. This may indicate that the consumer was restarted "
        f"with the same job name. {cure}, or choose another job_name"
    )


def _lengths(tasks: list[DispatcherTask]) -> tuple[tuple[int, int], ...]:
    """Return the tasks that are gone, each with how many of its rounds arrived everywhere."""
    return tuple(
        (task.task_id, rounds.arrived or 0)
        for task in tasks
        if task.is_unavailable
        and not task.awaiting_reports
        and not (rounds := rounds_of(task.mode_state)).torn
    )


def _leaver(iteration: JobIteration, tasks: list[DispatcherTask]) -> str:
    """Return which consumer left before the end; empty: none did."""
    # How many rounds of a torn task all have, nobody will ever say.
    if iteration.finished and not any(rounds_of(task.mode_state).torn for task in tasks):
        return ""
    return " and ".join(
        f"consumer {index} (client {client_id}) has left"
        for index, client_id in sorted(consumers_of(iteration.mode_state).departed.items())
    )
