"""What is to be said of a processing mode: how the workers share an iteration.

Which policy a job has, `modes.policy_for` says, and whoever needs to know what a mode does asks it.
Policies read a state and never write. What is the same for all of them, who gets the tasks and what
follows from a fact, is in `assignment`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import msgspec

from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.python_versions import can_run
from headrace.service.dispatcher.state import (
    Dataset,
    DispatcherState,
    Iteration,
    IterationMode,
    Task,
    TaskMode,
)
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import (
    ClientHeartbeat,
    ClientUpdate,
    GetSplit,
    IterationOpened,
    LostUnits,
    OpenIteration,
    TaskDefinition,
    Terms,
)

__all__ = ["Policy", "Post", "staying"]


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """A task that a worker is to get; what a task has of its own (`updates.TaskCreated`)."""

    worker_id: str
    mode: TaskMode | None = None
    attempt: int = 0
    replaces: bool = False


class Policy(ABC):
    """How workers share an iteration."""

    deals: ClassVar[bool]
    """Whether units of one stream are dealt to its tasks; else each task reads by itself. This and
    `exactly_once` are asked when an iteration begins, and are then facts about it."""
    exactly_once: ClassVar[bool] = False
    """Whether elements have origins, so that each comes once (`rows`)."""
    awaits_leavers: ClassVar[bool] = True
    """Whether a task waits for what a leaving worker may hand back, when nothing else is left."""
    hand_out: ClassVar[str] = "first_come"
    """How a worker hands out a task's elements (`messages.TaskDefinition.hand_out`)."""

    part: str = ""
    """Which part of the plan a task with a shard reads (`messages.TaskDefinition.part`)."""

    def positions(self, dataset: Dataset, units: int | None) -> int | None:
        """Return how many units are dealt of a dataset, or of `units`; None: nothing is dealt."""
        if not self.deals:
            return None
        return dataset.positions if units is None else units

    def check(self, state: DispatcherState, dataset: Dataset, opening: OpenIteration) -> None:
        """Refuse a dataset that cannot be processed so, or not here.

        Raises:
            HeadraceError: It says why.
        """
        return None

    def iteration_mode(self, terms: Terms) -> IterationMode | None:
        """Return the fields that the mode adds to a new iteration."""
        return None

    def seed(self, state: DispatcherState, iteration: Iteration, task: Task) -> int:
        """Return what random steps of a task draw from that have no seed of their own.

        Units mean the same on every worker, and so do shards.
        """
        return iteration.seed

    def admit(self, iteration: Iteration, opening: OpenIteration) -> None:
        """Refuse a client that cannot join an iteration which has begun.

        Raises:
            HeadraceError: It says why.
        """
        return None

    def opened(self, reply: IterationOpened, iteration: Iteration) -> IterationOpened:
        """Add the fields of the mode to the reply to a client that joins."""
        return reply

    def definition(
        self, definition: TaskDefinition, state: DispatcherState, task: Task
    ) -> TaskDefinition:
        """Add the fields of the mode to the definition that a worker receives."""
        return definition

    def heartbeat(
        self,
        state: DispatcherState,
        iteration: Iteration,
        request: ClientHeartbeat,
        moment: Moment,
    ) -> tuple[Update, ...]:
        """Return what follows from a client's heartbeat."""
        return ()

    def update(
        self,
        update: ClientUpdate,
        state: DispatcherState,
        iteration: Iteration,
        request: ClientHeartbeat,
        moment: Moment,
    ) -> ClientUpdate:
        """Add the fields of the mode to the reply to a heartbeat."""
        return update

    def affected_by_task(self, state: DispatcherState, iteration: Iteration) -> list[int]:
        """Return other iterations that may change when a task of this one ends."""
        return []

    @abstractmethod
    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return the tasks that workers should have of an unfinished iteration and have not."""
        return []

    def loose_end(self, state: DispatcherState, iteration: Iteration) -> Update | None:
        """Return what is to become of tasks or units before anything else; None: nothing."""
        return None

    @abstractmethod
    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether an iteration without loose ends is at its end."""

    def waits_for(
        self, state: DispatcherState, iteration: Iteration, is_silent: Callable[[str, int], bool]
    ) -> list[str]:
        """Return the clients for which its end waits all the same.

        Args:
            state: What is known.
            iteration: Which.
            is_silent: Whether a client was not heard of since a task of an iteration ended.
        """
        return []

    def goes_on(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether a finished iteration has a loose end for the sake of a client that reads it."""
        return False

    def failure(self, state: DispatcherState, iteration: Iteration) -> str:
        """Return why an iteration that is over was given up; empty: it was not."""
        return ""

    def next_units(
        self,
        state: DispatcherState,
        iteration: Iteration,
        task: Task,
        request: GetSplit,
        *,
        is_impatient: bool,
    ) -> tuple[int, int] | None:
        """Return units for a task that asks for some; None: it is to wait.

        It is asked where `deals`, while some are left.

        Args:
            state: What is known.
            iteration: The task's.
            task: Which runs, on a worker that stays.
            request: What it asks for.
            is_impatient: Nobody was dealt anything for a while.
        """
        raise NotImplementedError(f"{type(self).__name__} deals units, and does not say which")

    def while_idle(
        self,
        decision: Decision,
        state: DispatcherState,
        task: Task,
        request: GetSplit,
        moment: Moment,
    ) -> Decision:
        """Return the decision for a task for which no split is left: it waits, or ends."""
        return decision

    def done(self, task: Task, request: GetSplit) -> int:
        """Return how many splits of a task are done when it asks for more."""
        return request.done

    def incomplete(self, task: Task, left: int) -> str:
        """Return why a task that ends with splits left has failed; empty: it has not."""
        return ""

    def must_flush(
        self, state: DispatcherState, iteration: Iteration, task: Task, request: GetSplit
    ) -> bool:
        """Whether a task that is to wait gives what its steps hold (`SplitGranted.flush`)."""
        return False

    @abstractmethod
    def lost(self, state: DispatcherState, iteration: Iteration) -> tuple[LostUnits, ...]:
        """Return what is missing of a finished iteration."""

    @abstractmethod
    def is_kept(self, state: DispatcherState, iteration: Iteration, task: Task) -> bool:
        """Whether a client may still want what a task sent that has ended, from its worker."""


def staying(state: DispatcherState, iteration: Iteration) -> list[str]:
    """Return the workers that take work of an iteration: they can run its dataset, and stay."""
    dataset = state.dataset_of(iteration)
    return [
        worker_id
        for worker_id, worker in state.workers.items()
        if not worker.leaving and can_run(worker, dataset)
    ]
