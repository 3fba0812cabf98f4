"""Applies facts about rounds. A part of `dispatcher.apply`, which says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.apply_reports import clear_awaited_report
from headrace.service.dispatcher.apply_splits import mark_partially_delivered
from headrace.service.dispatcher.event import require
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.modes.coordinated_reads.records import (
    RoundsOpened,
    RoundsSettled,
    consumers_of,
    rounds_of,
)
from headrace.service.ranges import at_least, united

__all__ = ["APPLY"]


def rounds_opened(state: DispatcherState, event: RoundsOpened) -> None:
    """Let consumers go on."""
    iteration = state.iterations[event.iteration_id]
    consumers = consumers_of(iteration.mode_state)
    require(not iteration.finished, "the iteration is finished")
    require(event.until > consumers.horizon, "consumers may go there already")
    consumers.horizon = event.until


def rounds_settled(state: DispatcherState, event: RoundsSettled) -> None:
    """Note how many rounds of a task a consumer received; the fewest of all count."""
    task = clear_awaited_report(state, event.task_id, event.client_id)
    rounds, splits = rounds_of(task.mode_state), task.assigned
    if rounds.arrived is None or event.rounds < rounds.arrived:
        rounds.arrived = event.rounds
        splits.delivered = united(at_least(event.received, splits.num_done))
        splits.partially_delivered = ()
        mark_partially_delivered(task, (*event.received, *event.touched))


APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    RoundsOpened: rounds_opened,
    RoundsSettled: rounds_settled,
}
