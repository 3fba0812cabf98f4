"""Applies facts about rounds. A part of `dispatcher.apply`, which says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.apply_settled import settled
from headrace.service.dispatcher.apply_units import touch
from headrace.service.dispatcher.fact import require
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.modes.coordinated_reads.records import (
    RoundsOpened,
    RoundsSettled,
    consumers_of,
    rounds_of,
)
from headrace.service.ranges import at_least, united

__all__ = ["APPLY"]


def rounds_opened(state: DispatcherState, fact: RoundsOpened) -> None:
    """Let consumers go on."""
    iteration = state.iterations[fact.iteration_id]
    consumers = consumers_of(iteration.mode)
    require(not iteration.finished, "the iteration is finished")
    require(fact.until > consumers.horizon, "consumers may go there already")
    consumers.horizon = fact.until


def rounds_settled(state: DispatcherState, fact: RoundsSettled) -> None:
    """Note how many rounds of a task a consumer received; the fewest of all count."""
    task = settled(state, fact.task_id, fact.client_id)
    rounds, splits = rounds_of(task.mode), task.splits
    if rounds.arrived is None or fact.rounds < rounds.arrived:
        rounds.arrived = fact.rounds
        splits.received = united(at_least(fact.received, splits.done))
        splits.touched = ()
        touch(task, (*fact.received, *fact.touched))


APPLY: dict[type, Callable[[DispatcherState, Any], None]] = {
    RoundsOpened: rounds_opened,
    RoundsSettled: rounds_settled,
}
