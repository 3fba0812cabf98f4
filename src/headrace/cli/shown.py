"""What a look found, as text and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.cli.asking import Look
from headrace.cli.coordinator_frame import render_coordinator, render_server
from headrace.cli.frame import render
from headrace.coordinator.status import CoordinatorStatus
from headrace.parameter_server.messages import ServerStatus
from headrace.service.config import ShardingPolicy
from headrace.service.messages import DispatcherStatus

__all__ = ["WIDTH_WITHOUT_TERMINAL", "as_json", "render_look"]

WIDTH_WITHOUT_TERMINAL = 120


def render_look(look: Look, previous: Look | None, width: int) -> str:
    """Return what was seen as lines of at most `width` letters."""
    match look.status:
        case CoordinatorStatus() as status:
            return render_coordinator(look, status, previous, width)
        case ServerStatus() as status:
            return render_server(look, status, previous, width)
        case status:
            before = None if previous is None else previous.status
            return render(status, before if isinstance(before, DispatcherStatus) else None, width)


def as_json(look: Look) -> str:
    """Write what was seen as JSON: the fields of the records, and modes by name."""
    plain = msgspec.to_builtins(look.status)
    for job in plain.get("jobs", ()):
        job["processing_mode"] = ShardingPolicy(job["processing_mode"]).name
    if look.servers:
        plain["servers"] = msgspec.to_builtins(look.servers)
    _drop_types(plain)
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def _drop_types(value: Any) -> None:
    """Leave out which record it was: what it is, its place says."""
    if isinstance(value, dict):
        value.pop("type", None)
        for each in value.values():
            _drop_types(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _drop_types(each)
