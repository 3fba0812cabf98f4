"""Rounds: the consumers of a job read together, one element each of every round.

A round is of one task, and tasks take turns (`client.rounds` says how). What all consumers must
know alike is decided here, and journaled:

Rule 1. *Which tasks there are in a round.* An iteration has a horizon, beyond which no consumer
        goes. Consumers say how far they would like to go, and the horizon is put there
        (`RoundsOpened`). A task that comes later joins at the horizon (`Task.starting_round`).
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
from headrace.service.dispatcher.policy import Post
from headrace.service.dispatcher.state import (
    Dataset,
    DispatcherState,
    Iteration,
    Task,
)
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import OpenIteration
from headrace.service.modes.dynamic.policy import Dealing
from headrace.service.modes.no_sharding.policy import Copies
from headrace.service.passes import pass_in_words

__all__ = ["RoundCopies", "RoundDealing", "leaver", "lengths", "opened"]

_MOST_AHEAD = 1 << 20
"""Rounds by which the horizon is moved at once, at most."""


class RoundCopies(Copies):
    """Copies that are read in rounds."""

    hand_out = "rounds"

    def check(self, state: DispatcherState, dataset: Dataset, opening: OpenIteration) -> None:
        """Refuse consumers that have no job in common."""
        super().check(state, dataset, opening)
        _check_name(opening)

    def admit(self, iteration: Iteration, opening: OpenIteration) -> None:
        """Refuse a client whose index another has, or had."""
        _check_index(iteration, opening)

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return a copy for each worker that may begin one, from the horizon on."""
        return _from_horizon(super().vacant(state, iteration), iteration)

    def loose_end(self, state: DispatcherState, iteration: Iteration) -> Update | None:
        """Return the end of an iteration that all consumers have left."""
        return _abandoned(iteration) or super().loose_end(state, iteration)


class RoundDealing(Dealing):
    """Units are dealt, and what tasks make of them is read in rounds."""

    #: A round that lacks a part stops all tasks, that of the leaving worker too: each would wait
    #: for the other. What comes back is dealt to a task that runs still, or begins then.
    awaits_leavers = False
    hand_out = "rounds"
    says_what_is_whole = False

    def check(self, state: DispatcherState, dataset: Dataset, opening: OpenIteration) -> None:
        """Refuse a dataset without units, and consumers that have no job in common."""
        super().check(state, dataset, opening)
        _check_name(opening)

    def admit(self, iteration: Iteration, opening: OpenIteration) -> None:
        """Refuse a client whose index another has, or had."""
        _check_index(iteration, opening)

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return a task for each worker without one, from the horizon on."""
        return _from_horizon(super().vacant(state, iteration), iteration)

    def loose_end(self, state: DispatcherState, iteration: Iteration) -> Update | None:
        """Return the end of an iteration that all have left, or what becomes of units."""
        return _abandoned(iteration) or super().loose_end(state, iteration)

    def waits_for(
        self, state: DispatcherState, iteration: Iteration, is_silent: Callable[[str, int], bool]
    ) -> list[str]:
        """Return nobody: what was sent to a consumer, no other can use."""
        return []


def _abandoned(iteration: Iteration) -> updates.IterationCollected | None:
    if iteration.clients or not iteration.departed:
        return None
    return updates.IterationCollected(iteration_id=iteration.iteration_id)


def _from_horizon(posts: list[Post], iteration: Iteration) -> list[Post]:
    return [msgspec.structs.replace(post, starting_round=iteration.horizon) for post in posts]


def _check_name(opening: OpenIteration) -> None:
    if opening.job_name is None:
        raise FailedPreconditionError(
            "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
            f"{opening.terms.num_consumers}."
        )


def _check_index(iteration: Iteration, opening: OpenIteration) -> None:
    index, client_id = opening.consumer_index, opening.client_id
    if index is None or iteration.consumers.get(client_id) == index:
        return
    holders = {each: holder for holder, each in iteration.consumers.items()}
    if index in holders:
        seen = f"is client {holders[index]}, which reads it"
        cure = (
            "A client that is not heard counts as gone after `client_timeout_ms`. Start all "
            "consumers again once all have left"
        )
    elif index in iteration.departed:
        seen = f"was client {iteration.departed[index]}, which has left: what it used is not known"
        cure = "Start all consumers again once all have left"
    else:
        return
    raise FailedPreconditionError(
        f"consumer {index} of {opening.terms.num_consumers} of job {opening.job_name}, "
        f"{pass_in_words(opening.pass_number)}, {seen}; the current round has already "
        f"reached up to {iteration.horizon}. This may indicate that the consumer was restarted "
        f"with the same job name. {cure}, or choose another job_name"
    )


def opened(iteration: Iteration, wanted: int) -> tuple[updates.RoundsOpened, ...]:
    """Return what follows where a consumer would like to go up to a round."""
    until = min(wanted, iteration.horizon + _MOST_AHEAD)
    if iteration.num_consumers is None or iteration.finished or until <= iteration.horizon:
        return ()
    return (updates.RoundsOpened(iteration_id=iteration.iteration_id, until=until),)


def lengths(iteration: Iteration, tasks: list[Task]) -> tuple[tuple[int, int], ...]:
    """Return the tasks that are gone, each with how many of its rounds arrived everywhere."""
    if iteration.num_consumers is None:
        return ()
    return tuple(
        (task.task_id, task.rounds or 0)
        for task in tasks
        if task.gone and not task.unsettled and not task.torn
    )


def leaver(iteration: Iteration, tasks: list[Task]) -> str:
    """Return which consumer left before the end; empty: none did."""
    # How many rounds of a torn task all have, nobody will ever say.
    if iteration.finished and not any(task.torn for task in tasks):
        return ""
    return " and ".join(
        f"consumer {index} (client {client_id}) has left"
        for index, client_id in sorted(iteration.departed.items())
    )
