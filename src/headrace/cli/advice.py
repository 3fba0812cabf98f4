"""What bounds a pass, from who waits for whom, and what would help.

clients wait | tasks wait for clients | what bounds it
-------------+------------------------+------------------------------------------------
yes          | no                     | the workers, or that there is nothing to read
no           | yes                    | the clients
yes          | yes                    | the way between them
no           | no                     | nothing: both have what they need
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from headrace.service.messages import IterationStatus

__all__ = ["Bound", "bound_of", "bound_of_save"]

_WAITS = 0.2
"""Who waits for a part of the time that is less does not wait; nor who waits for half as long as
the others."""
_TOO_SOON = 3.0
"""Seconds in which too little was heard to judge."""


@dataclass(frozen=True)
class Bound:
    """What bounds a pass."""

    by: str
    """A few words, to stand after "bound by"."""
    advice: str
    """What would help; empty where nothing needs to."""


def bound_of(reading: IterationStatus) -> Bound | None:
    """Return what bounds a pass; None: it is over, or too little was heard of it."""
    if reading.finished:
        return None
    if not reading.tasks:
        return Bound("nobody who works", "no worker reads for this job; start one, or wait for it")
    if not reading.clients:
        return Bound("nobody who reads", "its elements wait for a client to come back")
    if reading.seconds < _TOO_SOON:
        return None
    clients_wait = _mean([each.waiting for each in reading.clients])
    tasks_wait = _mean([each.waiting_for_clients for each in reading.tasks])
    clients = clients_wait >= max(_WAITS, tasks_wait / 2)
    tasks = tasks_wait >= max(_WAITS, clients_wait / 2)
    if clients and tasks:
        return Bound(
            "the way between workers and clients",
            "both wait: see the network, put workers nearer, or raise max_outstanding_requests",
        )
    if tasks:
        return Bound(
            "the clients", "workers wait for them: training takes the time, and fewer workers do"
        )
    if clients:
        return _short_of_work(reading)
    return Bound("nothing", "")


def bound_of_save(saving: IterationStatus) -> Bound | None:
    """Return what bounds a save, which nobody reads; None: it is over, or began just now."""
    if saving.finished:
        return None
    if not saving.tasks:
        return Bound("nobody who works", "no worker writes its files; start one, or wait for it")
    if saving.seconds < _TOO_SOON:
        return None
    if _mean([each.waiting_for_clients for each in saving.tasks]) >= _WAITS:
        return Bound("the dispatcher", "workers wait until it has heard of their files")
    return _short_of_work(saving)


def _short_of_work(reading: IterationStatus) -> Bound:
    starved = _mean([each.waiting_for_units for each in reading.tasks]) >= 0.5
    if starved and reading.units_left == 0:
        return Bound("the last units", "all units are dealt; the pass ends when they are done")
    if starved:
        return Bound(
            "the dealing of units",
            "workers wait for units: make them larger (a batch before distribute, larger files)",
        )
    if not reading.stages:
        return Bound("the workers", "add workers")
    stage = reading.stages[0]
    return Bound(f"{stage.stage}, on the workers", "add workers, or make that step faster")


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
