"""Application of the events of coordinated reads, as part of `dispatcher.apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.apply_reports import clear_awaited_report
from headrace.service.dispatcher.apply_splits import mark_partially_delivered
from headrace.service.dispatcher.event import require
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.modes.coordinated_reads.events import (
    HorizonAdvanced,
    RoundsReported,
    coordinated_iteration,
    coordinated_task,
)
from headrace.service.ranges import drop_below, union

__all__ = ["APPLY"]


def apply_horizon_advanced(state: DispatcherState, event: HorizonAdvanced) -> None:
    """Let consumers advance to the new horizon."""
    iteration = state.iterations[event.iteration_id]
    consumers = coordinated_iteration(iteration.mode_state)
    require(not iteration.finished, "the iteration is finished")
    require(event.horizon > consumers.horizon, "the horizon does not advance")
    consumers.horizon = event.horizon


def apply_rounds_reported(state: DispatcherState, event: RoundsReported) -> None:
    """Record how many rounds of a task a consumer received; the minimum over consumers counts."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    rounds, splits = coordinated_task(task.mode_state), task.assigned
    if rounds.received_rounds is None or event.rounds < rounds.received_rounds:
        rounds.received_rounds = event.rounds
        splits.delivered = union(drop_below(event.delivered, splits.num_done))
        splits.partially_delivered = ()
        mark_partially_delivered(task, (*event.delivered, *event.partially_delivered))


APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    HorizonAdvanced: apply_horizon_advanced,
    RoundsReported: apply_rounds_reported,
}
