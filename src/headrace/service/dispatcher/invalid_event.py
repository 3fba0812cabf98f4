"""Errors about events that contradict the state, with a description of everything they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.state import DispatcherState

__all__ = ["InvalidEventError", "invalid_event_error"]


class InvalidEventError(Exception):
    """An event contradicts the state; the message describes everything that the event names."""


def invalid_event_error(
    state: DispatcherState, event: AnyEvent, error: Exception
) -> InvalidEventError:
    """Return the error for an event whose application raised `error`."""
    return InvalidEventError(
        f"{event} cannot be applied: {type(error).__name__}: "
        f"{error}\n{_describe_named(state, event)}"
    )


def _describe_named(state: DispatcherState, event: AnyEvent) -> str:
    lines = []
    for field, records_of in _STATE_BY_FIELD.items():
        key = getattr(event, field, None)
        if key is not None:
            lines.append(f"  {field} {key}: {records_of(state).get(key, 'not found')}")
    return "\n".join(lines)


_STATE_BY_FIELD: dict[str, Callable[[DispatcherState], dict[Any, Any]]] = {
    "dataset_id": lambda state: state.datasets,
    "job_id": lambda state: state.jobs,
    "iteration_id": lambda state: state.iterations,
    "task_id": lambda state: state.tasks,
    "worker_id": lambda state: state.workers,
    "client_id": lambda state: state.clients,
    "save_id": lambda state: state.saves,
}
