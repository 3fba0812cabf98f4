"""Ordered reading: each element comes once, in the order of the plan.

Splits are assigned as by `ExactDealing`. A slow worker delays every element after its split, so
such a split is assigned to a second worker as well (`backups`).
"""

from __future__ import annotations

import msgspec

from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.presence import Dismissed, GotOn
from headrace.service.dispatcher.state import DispatcherState, Iteration, Task
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import ClientHeartbeat, ClientUpdate, GetSplit, SplitGranted
from headrace.service.modes.dynamic.policy import ExactDealing
from headrace.service.modes.ordered.backups import helpers, others_hold, overdue, overdue_for_client

__all__ = ["OrderedDealing"]


class OrderedDealing(ExactDealing):
    """Dynamic sharding in which splits of a slow task are assigned a second time."""

    def heartbeat(
        self,
        state: DispatcherState,
        iteration: Iteration,
        request: ClientHeartbeat,
        moment: Moment,
    ) -> tuple[Update, ...]:
        """Assign the split that this client waits for a second time, if its task is slow."""
        taken = overdue_for_client(state, iteration, request.wanted, moment)
        return () if taken is None else (taken,)

    def update(
        self,
        update: ClientUpdate,
        state: DispatcherState,
        iteration: Iteration,
        request: ClientHeartbeat,
        moment: Moment,
    ) -> ClientUpdate:
        """Add the tasks to ask for the split that the client waits for, and splits given up."""
        return msgspec.structs.replace(
            update,
            helpers=helpers(state, iteration, request.wanted, moment),
            given_up=() if update.same else iteration.splits.given_up,
        )

    def while_idle(
        self,
        decision: Decision,
        state: DispatcherState,
        task: Task,
        request: GetSplit,
        moment: Moment,
    ) -> Decision:
        """Assign splits of a slow task to an idle one."""
        iteration = state.iterations[task.iteration_id]
        taken = overdue(state, iteration, task, request.done, moment)
        got_on = GotOn(task.task_id, request.done)
        assert isinstance(decision.reply, SplitGranted)
        if not decision.reply.wait and not others_hold(state, iteration, task, moment):
            notes = (got_on, Dismissed(task.task_id))
            return Decision(
                updates=() if taken is None else (taken,), notes=notes, reply=decision.reply
            )
        # Of some plans the last unit is known to be whole only when its steps have ended: before
        # that, tasks which wait would wait for each other.
        wait = SplitGranted(start=0, stop=0, wait=True, flush=True)
        return Decision(updates=() if taken is None else (taken,), notes=(got_on,), reply=wait)
