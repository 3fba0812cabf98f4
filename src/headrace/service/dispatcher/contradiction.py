"""Contradictions: facts that do not fit the state, with the story of what they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import Update

__all__ = ["IllegalFactError", "illegal"]


class IllegalFactError(Exception):
    """A fact does not fit the state; the message tells the story of what it names."""


def illegal(state: DispatcherState, fact: Update, error: Exception) -> IllegalFactError:
    """Return an error that tells the story of a fact at which `error` was met."""
    return IllegalFactError(
        f"{fact} cannot be applied: {type(error).__name__}: {error}\n{_story(state, fact)}"
    )


def _story(state: DispatcherState, fact: Update) -> str:
    lines = []
    for name, known in _NAMED.items():
        key = getattr(fact, name, None)
        if key is not None:
            lines.append(f"  {name} {key}: {known(state).get(key, 'not known')}")
    return "\n".join(lines)


_NAMED: dict[str, Callable[[DispatcherState], dict[Any, Any]]] = {
    "dataset_id": lambda state: state.datasets,
    "job_id": lambda state: state.jobs,
    "iteration_id": lambda state: state.iterations,
    "task_id": lambda state: state.tasks,
    "worker_id": lambda state: state.workers,
    "client_id": lambda state: state.clients,
    "save": lambda state: state.saves,
}
