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
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Moment
from headrace.service.dispatcher.policy import Policy, Post
from headrace.service.dispatcher.state import (
    Dataset,
    DispatcherState,
    Iteration,
    Task,
)
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import (
    ClientHeartbeat,
    ClientUpdate,
    IterationOpened,
    OpenIteration,
    TaskDefinition,
    Terms,
)
from headrace.service.modes.coordinated_reads.records import (
    Consumers,
    RoundsOpened,
    TaskRounds,
    consumers_of,
    rounds_of,
)
from headrace.service.modes.dynamic.policy import Dealing
from headrace.service.modes.no_sharding.policy import Copies
from headrace.service.passes import pass_in_words

__all__ = ["RoundCopies", "RoundDealing"]

_MOST_AHEAD = 1 << 20
"""Rounds by which the horizon is moved at once, at most."""


class _Rounds(Policy):
    """What copies and dealt units have in common where they are read in rounds."""

    hand_out = "rounds"

    def check(self, state: DispatcherState, dataset: Dataset, opening: OpenIteration) -> None:
        """Refuse consumers that have no job in common."""
        super().check(state, dataset, opening)
        if opening.job_name is None:
            raise FailedPreconditionError(
                "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
                f"{opening.terms.num_consumers}."
            )

    def iteration_mode(self, terms: Terms) -> Consumers:
        """Return consumers of which none is there yet."""
        assert terms.num_consumers is not None
        return Consumers(terms.num_consumers)

    def opened(self, reply: IterationOpened, iteration: Iteration) -> IterationOpened:
        """Add how far consumers may go."""
        return msgspec.structs.replace(reply, horizon=consumers_of(iteration.mode).horizon)

    def definition(
        self, definition: TaskDefinition, state: DispatcherState, task: Task
    ) -> TaskDefinition:
        """Add who reads the task, and from which round on."""
        consumers = consumers_of(state.iterations[task.iteration_id].mode)
        return msgspec.structs.replace(
            definition, starting_round=rounds_of(task.mode).first, num_consumers=consumers.number
        )

    def admit(self, iteration: Iteration, opening: OpenIteration) -> None:
        """Refuse a client whose index another has, or had."""
        _check_index(iteration, opening)

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return the tasks that are to begin, from the horizon on."""
        horizon = consumers_of(iteration.mode).horizon
        return [
            msgspec.structs.replace(post, mode=TaskRounds(horizon))
            for post in super().vacant(state, iteration)
        ]

    def loose_end(self, state: DispatcherState, iteration: Iteration) -> Update | None:
        """Return the end of an iteration that all consumers have left, or what else is first."""
        if not iteration.clients and consumers_of(iteration.mode).departed:
            return updates.IterationCollected(iteration_id=iteration.iteration_id)
        return super().loose_end(state, iteration)

    def heartbeat(
        self,
        state: DispatcherState,
        iteration: Iteration,
        request: ClientHeartbeat,
        moment: Moment,
    ) -> tuple[Update, ...]:
        """Let consumers go on where this one would like to."""
        horizon = consumers_of(iteration.mode).horizon
        until = min(request.horizon, horizon + _MOST_AHEAD)
        if iteration.finished or until <= horizon:
            return ()
        return (RoundsOpened(iteration_id=iteration.iteration_id, until=until),)

    def update(
        self,
        update: ClientUpdate,
        state: DispatcherState,
        iteration: Iteration,
        request: ClientHeartbeat,
        moment: Moment,
    ) -> ClientUpdate:
        """Add how far consumers may go; where something changed, also what has ended or left."""
        horizon = consumers_of(iteration.mode).horizon
        if update.same:
            return msgspec.structs.replace(update, horizon=horizon)
        tasks = state.tasks_of(iteration)
        return msgspec.structs.replace(
            update, horizon=horizon, rounds=_lengths(tasks), left=_leaver(iteration, tasks)
        )


class RoundCopies(_Rounds, Copies):
    """Copies that are read in rounds."""


class RoundDealing(_Rounds, Dealing):
    """Units are dealt, and what tasks make of them is read in rounds."""

    #: A round that lacks a part stops all tasks, that of the leaving worker too: each would wait
    #: for the other. What comes back is dealt to a task that runs still, or begins then.
    awaits_leavers = False
    says_what_is_whole = False

    def waits_for(
        self, state: DispatcherState, iteration: Iteration, is_silent: Callable[[str, int], bool]
    ) -> list[str]:
        """Return nobody: what was sent to a consumer, no other can use."""
        return []


def _check_index(iteration: Iteration, opening: OpenIteration) -> None:
    index, client_id = opening.consumer_index, opening.client_id
    consumers = consumers_of(iteration.mode)
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
        f"consumer {index} of {opening.terms.num_consumers} of job {opening.job_name}, "
        f"{pass_in_words(opening.pass_number)}, {seen}; the current round has already "
        f"reached up to {consumers.horizon}. This may indicate that the consumer was restarted "
        f"with the same job name. {cure}, or choose another job_name"
    )


def _lengths(tasks: list[Task]) -> tuple[tuple[int, int], ...]:
    """Return the tasks that are gone, each with how many of its rounds arrived everywhere."""
    return tuple(
        (task.task_id, rounds.arrived or 0)
        for task in tasks
        if task.gone and not task.unsettled and not (rounds := rounds_of(task.mode)).torn
    )


def _leaver(iteration: Iteration, tasks: list[Task]) -> str:
    """Return which consumer left before the end; empty: none did."""
    # How many rounds of a torn task all have, nobody will ever say.
    if iteration.finished and not any(rounds_of(task.mode).torn for task in tasks):
        return ""
    return " and ".join(
        f"consumer {index} (client {client_id}) has left"
        for index, client_id in sorted(consumers_of(iteration.mode).departed.items())
    )
