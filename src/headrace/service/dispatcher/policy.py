"""Interface of processing modes: how the workers share an iteration.

`policy_selection.policy_for` selects the policy of a job. Policies only read the state;
`assignment` derives events from what they return.
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
    """A task to create on a worker, with the fields of `events.TaskCreated`."""

    worker_id: str
    mode_state: AnyTaskModeState | None = None
    attempt: int = 0
    is_replacement: bool = False


class IterationPolicy(ABC):
    """Policy by which workers share an iteration."""

    assigns_splits: ClassVar[bool]
    """Whether splits of one stream are assigned to its tasks; otherwise each task reads a copy or a
    shard. This and `exactly_once` are read when an iteration starts and then recorded in it."""
    exactly_once: ClassVar[bool] = False
    """Whether elements have ids, so that each is delivered once."""
    awaits_draining_workers: ClassVar[bool] = True
    """Whether a task to which nothing can be assigned waits for splits that a draining worker may
    return."""
    delivery_policy: ClassVar[str] = "fifo"
    """Policy by which a worker delivers a task's elements
    (`messages.TaskDefinition.delivery_policy`)."""

    shard_kind: str = ""
    """How a task's shard is selected in the plan (`messages.TaskDefinition.shard_kind`)."""

    def num_splits(self, dataset: RegisteredDataset, override: int | None) -> int | None:
        """Return how many splits a dataset has, or `override`; None if none are assigned."""
        if not self.assigns_splits:
            return None
        return dataset.num_splits if override is None else override

    def check_dataset(
        self, state: DispatcherState, dataset: RegisteredDataset, request: OpenIteration
    ) -> None:
        """Reject a dataset that cannot be processed in this mode.

        Raises:
            HeadraceError: If the dataset or the dispatcher does not support the mode.
        """
        return None

    def new_iteration_state(self, options: JobOptions) -> AnyIterationModeState | None:
        """Return the fields that the mode adds to a new iteration."""
        return None

    def seed(self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask) -> int:
        """Return the seed of a task for unseeded random steps.

        The default is the iteration's seed, so that splits and shards are the same on every worker.
        """
        return iteration.seed

    def check_client(self, iteration: JobIteration, request: OpenIteration) -> None:
        """Reject a client that cannot join a running iteration.

        Raises:
            HeadraceError: If the client cannot join.
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
        """Return the events that follow from a client's heartbeat."""
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
        """Return the tasks to create on workers for an unfinished iteration."""
        return []

    def pending_recovery(self, state: DispatcherState, iteration: JobIteration) -> AnyEvent | None:
        """Return the next event needed to recover tasks or splits; None if there is none."""
        return None

    @abstractmethod
    def is_complete(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether an iteration without pending recovery is complete."""

    def awaited_clients(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        is_unheard: Callable[[str, int], bool],
    ) -> list[str]:
        """Return the clients that the end of an iteration must wait for.

        Args:
            state: State of the dispatcher.
            iteration: Iteration that is otherwise complete.
            is_unheard: Returns whether a client has sent no heartbeat since a task of an iteration
                ended.
        """
        return []

    def must_reopen(self, state: DispatcherState, iteration: JobIteration) -> bool:
        """Return whether a finished iteration needs recovery for a client that still reads it."""
        return False

    def failure_reason(self, state: DispatcherState, iteration: JobIteration) -> str:
        """Return why a complete iteration was abandoned; empty if it was not."""
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
        """Return splits for a task that requests some, or None if it must wait.

        Called only if `assigns_splits`, while some are left.

        Args:
            state: State of the dispatcher.
            iteration: Iteration of the task.
            task: Running task, on a worker that is not draining.
            request: Request of the worker.
            is_stalled: True if no task of the iteration was assigned anything for a while.
        """
        raise NotImplementedError(
            f"{type(self).__name__} assigns splits and must implement `choose_splits`"
        )

    def on_no_splits(
        self,
        decision: DispatcherDecision,
        state: DispatcherState,
        task: DispatcherTask,
        request: GetSplit,
        context: DecisionContext,
    ) -> DispatcherDecision:
        """Return the decision if no split is left for a task: it waits or ends."""
        return decision

    def num_done(self, task: DispatcherTask, request: GetSplit) -> int:
        """Return how many splits of a task are done when it requests more."""
        return request.num_done

    def incomplete_reason(self, task: DispatcherTask, num_left: int) -> str:
        """Return why a task that ends with splits left has failed; empty if it has not."""
        return ""

    def must_flush(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        task: DispatcherTask,
        request: GetSplit,
    ) -> bool:
        """Return whether a waiting task must flush its steps (`GetSplitReply.flush`)."""
        return False

    @abstractmethod
    def lost_splits(
        self, state: DispatcherState, iteration: JobIteration
    ) -> tuple[LostSplits, ...]:
        """Return the losses of a finished iteration."""

    @abstractmethod
    def is_redeliverable(
        self, state: DispatcherState, iteration: JobIteration, task: DispatcherTask
    ) -> bool:
        """Return whether a client may still need elements of an ended task from its worker."""


def eligible_workers(state: DispatcherState, iteration: JobIteration) -> list[str]:
    """Return the workers that can run an iteration's dataset and are not draining."""
    dataset = state.dataset_of(iteration)
    return [
        worker_id
        for worker_id, worker in state.workers.items()
        if not worker.draining and can_run(worker, dataset)
    ]
