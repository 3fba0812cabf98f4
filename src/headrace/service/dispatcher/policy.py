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

from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.python_versions import can_run
from headrace.service.dispatcher.state import (
    AnyIterationModeState,
    AnyTaskModeState,
    DispatcherState,
    DispatcherTask,
    JobIteration,
    RegisteredDataset,
)
from headrace.service.messages import (
    ClientHeartbeat,
    ClientHeartbeatReply,
    GetSplit,
    JobOptions,
    LostSplits,
    OpenIteration,
    OpenIterationReply,
    TaskDefinition,
)

__all__ = ["IterationPolicy", "TaskAssignment", "eligible_workers"]


class TaskAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A task that a worker is to get; what a task has of its own (`updates.TaskCreated`)."""

    worker_id: str
    mode_state: AnyTaskModeState | None = None
    attempt: int = 0
    is_replacement: bool = False


class IterationPolicy(ABC):
    """How workers share an iteration."""

    assigns_splits: ClassVar[bool]
    """Whether units of one stream are dealt to its tasks; else each task reads by itself. This and
    `exactly_once` are asked when an iteration begins, and are then facts about it."""
    exactly_once: ClassVar[bool] = False
    """Whether elements have origins, so that each comes once (`rows`)."""
    awaits_draining_workers: ClassVar[bool] = True
    """Whether a task waits for what a leaving worker may hand back, when nothing else is left."""
    delivery_policy: ClassVar[str] = "first_come"
    """How a worker hands out a task's elements (`messages.TaskDefinition.delivery_policy`)."""

    shard_kind: str = ""
    """Which part of the plan a task with a shard reads (`messages.TaskDefinition.shard_kind`)."""

    def num_splits(self, dataset: RegisteredDataset, override: int | None) -> int | None:
        """Return how many splits a dataset has, or `override`; None: none are assigned."""
        if not self.assigns_splits:
            return None
        return dataset.num_splits if override is None else override

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Refuse a dataset that cannot be processed so, or not here.

        Raises:
            HeadraceError: It says why.
        """
        return None

    def new_iteration_state(self, options: JobOptions) -> AnyIterationModeState | None:
        """Return the fields that the mode adds to a new iteration."""
        return None

    def seed(self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask) -> int:
        """Return what random steps of a task draw from that have no seed of their own.

        Units mean the same on every worker, and so do shards.
        """
        return iteration.seed

    def check_client(self, iteration: JobIteration, request: OpenIteration) -> None:
        """Refuse a client that cannot join an iteration which has begun.

        Raises:
            HeadraceError: It says why.
        """
        return None

    def extend_opened_reply(
        self, reply: OpenIterationReply, iteration: JobIteration
    ) -> OpenIterationReply:
        """Add the fields of the mode to the reply to a client that joins."""
        return reply

    def extend_definition(
        self, definition: TaskDefinition, state: DispatcherState, task: DispatcherTask
    ) -> TaskDefinition:
        """Add the fields of the mode to the definition that a worker receives."""
        return definition

    def events_after_heartbeat(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> tuple[AnyEvent, ...]:
        """Return what follows from a client's heartbeat."""
        return ()

    def extend_heartbeat_reply(
        self,
        reply: ClientHeartbeatReply,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> ClientHeartbeatReply:
        """Add the fields of the mode to the reply to a heartbeat."""
        return reply

    def affected_iterations(self, state: DispatcherState, iteration: JobIteration) -> list[int]:
        """Return other iterations that may change when a task of this one ends."""
        return []

    @abstractmethod
    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        """Return the tasks that workers should have of an unfinished iteration and have not."""
        return []

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return what is to become of tasks or units before anything else; None: nothing."""
        return None

    @abstractmethod
    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Whether an iteration without loose ends is at its end."""

    def awaited_clients(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        is_unheard: Callable[[str, int], bool],
    ) -> list[str]:
        """Return the clients for which its end waits all the same.

        Args:
            state: What is known.
            iteration: Which.
            is_unheard: Whether a client was not heard of since a task of an iteration ended.
        """
        return []

    def must_reopen(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Whether a finished iteration has a loose end for the sake of a client that reads it."""
        return False

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return why an iteration that is over was given up; empty: it was not."""
        return ""

    def choose_splits(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        task: DispatcherTask,
        request: GetSplit,
        *,
        is_stalled: bool,
    ) -> tuple[int, int] | None:
        """Return units for a task that asks for some; None: it is to wait.

        It is asked where `assigns_splits`, while some are left.

        Args:
            state: What is known.
            iteration: The task's.
            task: Which runs, on a worker that stays.
            request: What it asks for.
            is_stalled: Nobody was dealt anything for a while.
        """
        raise NotImplementedError(f"{type(self).__name__} deals units, and does not say which")

    def on_no_splits(
        self,
        decision: DispatcherDecision,
        state: DispatcherState,
        task: DispatcherTask,
        request: GetSplit,
        context: DecisionContext,
    ) -> DispatcherDecision:
        """Return the decision for a task for which no split is left: it waits, or ends."""
        return decision

    def num_done(self, task: DispatcherTask, request: GetSplit) -> int:
        """Return how many splits of a task are done when it asks for more."""
        return request.num_done

    def incomplete_reason(self, task: DispatcherTask, num_left: int) -> str:
        """Return why a task that ends with splits left has failed; empty: it has not."""
        return ""

    def must_flush(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        task: DispatcherTask,
        request: GetSplit,
    ) -> bool:
        """Whether a task that is to wait gives what its steps hold (`GetSplitReply.flush`)."""
        return False

    @abstractmethod
    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return what is missing of a finished iteration."""

    @abstractmethod
    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Whether a client may still want what a task sent that has ended, from its worker."""


def eligible_workers(state: DispatcherState, iteration: JobIteration) -> list[str]:
    """Return the workers that take work of an iteration: they can run its dataset, and stay."""
    dataset = state.dataset_of(iteration)
    return [
        worker_id
        for worker_id, worker in state.workers.items()
        if not worker.draining and can_run(worker, dataset)
    ]
