"""What the dispatcher remembers of coordinated reads, and the facts that change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.service.dispatcher.event import Event, require
from headrace.service.dispatcher.mode_state import IterationModeState, TaskModeState
from headrace.service.messages import TaskAddress
from headrace.service.ranges import Ranges

if TYPE_CHECKING:
    from headrace.service.dispatcher.state import DispatcherTask, JobIteration

__all__ = ["Consumers", "RoundsOpened", "RoundsSettled", "TaskRounds", "consumers_of", "rounds_of"]


class Consumers(IterationModeState):
    """The consumers of an iteration that is read in rounds."""

    clients_read_together = True

    number: int
    #: Of its clients that said so: which consumer each is.
    present: dict[str, int] = msgspec.field(default_factory=dict)
    #: Consumers that left before the end, with the client that each was; none of them is in
    #: `present`, where no two are the same.
    departed: dict[int, str] = msgspec.field(default_factory=dict)
    #: Tasks that are to come join not before this round.
    horizon: int = 0

    def task_created(self, task: DispatcherTask) -> None:
        """Check that no consumer is beyond the first round of the task."""
        rounds = rounds_of(task.mode_state)
        require(rounds is not None, "it does not say at which round it begins")
        require(rounds.first >= self.horizon, "consumers may be beyond that round")

    def client_joined(self, iteration: JobIteration, client_id: str, index: int | None) -> None:
        """Record which consumer a client is."""
        if index is not None:
            taken = {*self.present.values(), *self.departed}
            require(iteration.finished or index not in taken, "another is that consumer")
            self.present[client_id] = index

    def client_left(
        self, iteration: JobIteration, tasks: Sequence[DispatcherTask], client_id: str
    ) -> None:
        """Record a consumer that left before the end, or before it reported what it received."""
        index = self.present.pop(client_id, None)
        is_missed = not iteration.finished
        for task in tasks:
            if client_id in task.awaiting_reports and not task.is_finished:
                rounds_of(task.mode_state).torn = True
                # Also at the end of the iteration: others wait for what it received.
                is_missed = True
        if index is not None and is_missed:
            self.departed[index] = client_id


class TaskRounds(TaskModeState):
    """The rounds of a task."""

    first: int
    """The round at which it joined."""
    #: How many of its own arrived at all consumers that said so; only if it is gone. A consumer may
    #: be gone, too, so that this will not be known.
    arrived: int | None = None
    torn: bool = False

    def extend_address(self, address: TaskAddress) -> TaskAddress:
        """Add the first round."""
        return msgspec.structs.replace(address, starting_round=self.first)

    def task_unavailable(self, iteration: JobIteration, task: DispatcherTask) -> None:
        """Ask each consumer how many rounds it received."""
        consumers = consumers_of(iteration.mode_state)
        task.awaiting_reports = set(iteration.clients)
        # Of one that is finished all rounds arrived everywhere, whoever has left since.
        if not task.is_finished:
            self.torn = bool(consumers.departed)
            # Before all have joined, no round arrived everywhere.
            self.arrived = 0 if len(consumers.present) < consumers.number else None


class RoundsOpened(Event, frozen=True):
    """Consumers may go on up to a round: a task that is created later joins with it, or later."""

    iteration_id: int
    until: int


class RoundsSettled(Event, frozen=True):
    """It became known how many rounds of a task a consumer had received.

    Of what several consumers say, the fewest rounds count.
    """

    task_id: int
    client_id: str
    rounds: int
    received: Ranges
    """Units that came whole with them, in dealt order."""
    touched: Ranges = ()
    """Units of which something may have come with them."""


def consumers_of(mode: IterationModeState | None) -> Consumers:
    """Return the consumers of an iteration that is read in rounds."""
    assert isinstance(mode, Consumers), mode
    return mode


def rounds_of(mode: TaskModeState | None) -> TaskRounds:
    """Return how far a task is that is read in rounds."""
    assert isinstance(mode, TaskRounds), mode
    return mode
