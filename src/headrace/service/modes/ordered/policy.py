"""Ordered reading: each element is delivered once, in the order of the plan.

Splits are assigned as by `ExactlyOnceSharding`. A slow worker delays all elements after its split,
so such a split is assigned to a second worker as well (`speculation`).
"""

from __future__ import annotations

import msgspec

from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.soft_state import NoMoreWork, ProgressReported
from headrace.service.dispatcher.state import DispatcherState, DispatcherTask, JobIteration
from headrace.service.messages import ClientHeartbeat, ClientHeartbeatReply, GetSplit, GetSplitReply
from headrace.service.modes.dynamic.policy import ExactlyOnceSharding
from headrace.service.modes.ordered.speculation import (
    find_other_holders,
    reassign_awaited_split,
    reassign_straggler,
    urgent_tasks,
)

__all__ = ["OrderedSharding"]


class OrderedSharding(ExactlyOnceSharding):
    """Dynamic sharding in which splits of a slow task are assigned a second time."""

    def events_after_heartbeat(
        self,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> tuple[AnyEvent, ...]:
        """Assign the split that this client waits for a second time, if its task is slow."""
        reassignment = reassign_awaited_split(state, iteration, request.wanted_split, context)
        return () if reassignment is None else (reassignment,)

    def extend_heartbeat_reply(
        self,
        reply: ClientHeartbeatReply,
        state: DispatcherState,
        iteration: JobIteration,
        request: ClientHeartbeat,
        context: DecisionContext,
    ) -> ClientHeartbeatReply:
        """Add the tasks that can deliver the awaited split, and the abandoned splits."""
        return msgspec.structs.replace(
            reply,
            urgent_tasks=urgent_tasks(state, iteration, request.wanted_split, context),
            abandoned_splits=() if reply.unchanged else iteration.pool.abandoned,
        )

    def on_no_splits(
        self,
        decision: DispatcherDecision,
        state: DispatcherState,
        task: DispatcherTask,
        request: GetSplit,
        context: DecisionContext,
    ) -> DispatcherDecision:
        """Assign splits of a slow task to an idle one."""
        iteration = state.iterations[task.iteration_id]
        reassignment = reassign_straggler(state, iteration, task, request.num_done, context)
        progress = ProgressReported(task.task_id, request.num_done)
        assert isinstance(decision.reply, GetSplitReply)
        if not decision.reply.wait and not find_other_holders(state, iteration, task, context):
            soft_events = (progress, NoMoreWork(task.task_id))
            return DispatcherDecision(
                events=() if reassignment is None else (reassignment,),
                soft_events=soft_events,
                reply=decision.reply,
            )
        # In some plans the last split is known to be complete only after its steps have ended.
        # Without the flush, waiting tasks would wait for each other.
        wait = GetSplitReply(start=0, stop=0, wait=True, flush=True)
        return DispatcherDecision(
            events=() if reassignment is None else (reassignment,),
            soft_events=(progress,),
            reply=wait,
        )
