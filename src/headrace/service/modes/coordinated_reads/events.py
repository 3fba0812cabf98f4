"""Dispatcher state of coordinated reads, and the events that change it."""

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

__all__ = [
    "CoordinatedIteration",
    "CoordinatedTask",
    "HorizonAdvanced",
    "RoundsReported",
    "coordinated_iteration",
    "coordinated_task",
]


class CoordinatedIteration(IterationModeState):
    """Consumers of an iteration that is read in rounds."""

    clients_read_together = True

    num_consumers: int
    #: Consumer index of each client that gave one.
    consumer_by_client: dict[str, int] = msgspec.field(default_factory=dict)
    #: Consumers that left before the end, with their clients. They are not in `consumer_by_client`,
    #: whose indices are unique.
    departed_consumers: dict[int, str] = msgspec.field(default_factory=dict)
    #: Future tasks join at this round or later.
    horizon: int = 0

    def task_created(self, task: DispatcherTask) -> None:
        """Check that no consumer is beyond the first round of the task."""
        rounds = coordinated_task(task.mode_state)
        require(rounds is not None, "starting_round is missing")
        require(rounds.starting_round >= self.horizon, "starting_round is before the horizon")

    def client_joined(self, iteration: JobIteration, client_id: str, index: int | None) -> None:
        """Record which consumer a client is."""
        if index is not None:
            taken = {*self.consumer_by_client.values(), *self.departed_consumers}
            require(iteration.finished or index not in taken, "the consumer index is taken")
            self.consumer_by_client[client_id] = index

    def client_left(
        self, iteration: JobIteration, tasks: Sequence[DispatcherTask], client_id: str
    ) -> None:
        """Record a consumer that left before the end, or before it reported what it received."""
        index = self.consumer_by_client.pop(client_id, None)
        is_missed = not iteration.finished
        for task in tasks:
            if client_id in task.awaiting_reports and not task.is_finished:
                coordinated_task(task.mode_state).has_unknown_length = True
                # Also at the end of the iteration, because others wait for its report.
                is_missed = True
        if index is not None and is_missed:
            self.departed_consumers[index] = client_id


class CoordinatedTask(TaskModeState):
    """Rounds of a task."""

    starting_round: int
    """Round at which it joined."""
    #: Number of its rounds that arrived at all consumers that have reported; only for an
    #: unavailable task. If a consumer has left too, the final number remains unknown.
    received_rounds: int | None = None
    has_unknown_length: bool = False

    def extend_address(self, address: TaskAddress) -> TaskAddress:
        """Add the first round."""
        return msgspec.structs.replace(address, starting_round=self.starting_round)

    def task_unavailable(self, iteration: JobIteration, task: DispatcherTask) -> None:
        """Ask each consumer how many rounds it received."""
        consumers = coordinated_iteration(iteration.mode_state)
        task.awaiting_reports = set(iteration.clients)
        # All rounds of a finished task arrived everywhere, even at consumers that have left since.
        if not task.is_finished:
            self.has_unknown_length = bool(consumers.departed_consumers)
            # Before all consumers have joined, no round has arrived everywhere.
            self.received_rounds = (
                0 if len(consumers.consumer_by_client) < consumers.num_consumers else None
            )


class HorizonAdvanced(Event, frozen=True):
    """Consumers may advance up to a round; tasks that are created later join there or later."""

    iteration_id: int
    horizon: int


class RoundsReported(Event, frozen=True):
    """A consumer reported how many rounds of a task it received.

    The minimum over all consumers counts.
    """

    task_id: int
    client_id: str
    rounds: int
    delivered: Ranges
    """Splits that are complete with these rounds, in assignment order."""
    partially_delivered: Ranges = ()
    """Splits that may have elements in these rounds."""


def coordinated_iteration(mode: IterationModeState | None) -> CoordinatedIteration:
    """Return the consumers of an iteration that is read in rounds."""
    assert isinstance(mode, CoordinatedIteration), mode
    return mode


def coordinated_task(mode: TaskModeState | None) -> CoordinatedTask:
    """Return the rounds of a task that is read in rounds."""
    assert isinstance(mode, CoordinatedTask), mode
    return mode
