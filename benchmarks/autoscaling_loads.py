"""Loads of the autoscaling benchmark: thirty minutes each, so that start-up does not dominate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["GRACE", "LOADS", "TARGET_LOADS", "Load", "SimulatedJob"]

GRACE = 30.0
"""Seconds after a step of the load in which waits do not count."""
_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A job of a load.

    Attributes:
        demand: Returns the workers that its consumers keep busy, by time; 0 in a pause.
        num_clients: Number of consumers.
        start: Time in seconds at which its consumers start.
        end: Time at which they leave.
        num_splits: Number of splits of its only epoch; None if it is unlimited.
    """

    demand: Callable[[float], float]
    num_clients: int = 8
    start: float = 0.0
    end: float = math.inf
    num_splits: int | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """A load and the cluster that serves it.

    Attributes:
        name: Name in the table.
        seconds: Duration.
        jobs: Jobs of the load.
        steps: Times at which the demand jumps up.
        speeds: Lowest and highest speed of a worker; the mean should be 1.
        start_seconds: Shortest and longest time from the request for a worker to its registration.
        drain_seconds: Time that a worker takes to stop.
    """

    name: str
    seconds: float
    jobs: tuple[SimulatedJob, ...]
    steps: tuple[float, ...] = (0.0,)
    speeds: tuple[float, float] = (1.0, 1.0)
    start_seconds: tuple[float, float] = (5.0, 8.0)
    drain_seconds: float = 2.0

    def need(self, now: float) -> float:
        """Return the workers that all jobs keep busy at a time."""
        return sum(job.demand(now) for job in self.jobs if job.start <= now < job.end)

    def is_grace(self, now: float) -> bool:
        """Return whether waits do not count, because the load has just jumped."""
        return any(step <= now < step + GRACE for step in self.steps)


def _step(now: float) -> float:
    return 12.0 if 600.0 <= now < 1200.0 else 4.0


def _ramp(now: float) -> float:
    return 4.0 + 12.0 * min(1.0, max(0.0, (now - 300.0) / 600.0))


def _diurnal(now: float) -> float:
    """Two "days" of 15 minutes."""
    return 10.0 - 6.0 * math.cos(now * 2.0 * math.pi / 900.0)


def _flash_crowd(now: float) -> float:
    """Four times the load for two minutes, which decays within two more."""
    if now < 600.0:
        return 5.0
    return 5.0 + 15.0 * max(0.0, 1.0 - max(0.0, now - 720.0) / 120.0)


def _pausing(now: float) -> float:
    """A checkpoint of 30 s every five minutes."""
    return 0.0 if now % 300.0 > 270.0 else 8.0


def _constant(now: float) -> float:
    return 9.5


TARGET_LOADS = (
    Load(name="step", seconds=_SECONDS, jobs=(SimulatedJob(demand=_step),), steps=(0.0, 600.0)),
    Load(name="ramp", seconds=_SECONDS, jobs=(SimulatedJob(demand=_ramp),)),
    Load(name="diurnal", seconds=_SECONDS, jobs=(SimulatedJob(demand=_diurnal),)),
    Load(
        name="flash crowd",
        seconds=_SECONDS,
        jobs=(SimulatedJob(demand=_flash_crowd),),
        steps=(0.0, 600.0),
    ),
)
"""The loads for which the project states targets."""

LOADS = (
    *TARGET_LOADS,
    Load(name="constant", seconds=_SECONDS, jobs=(SimulatedJob(demand=_constant),)),
    Load(name="pauses", seconds=_SECONDS, jobs=(SimulatedJob(demand=_pausing),)),
    Load(
        name="three jobs",
        seconds=_SECONDS,
        jobs=(
            SimulatedJob(demand=_diurnal, num_clients=8),
            SimulatedJob(demand=lambda now: 3.0, num_clients=2, start=300.0, end=1200.0),
            SimulatedJob(demand=lambda now: 6.0, num_clients=4, start=600.0, end=1500.0),
        ),
        steps=(0.0, 300.0, 600.0),
    ),
    Load(
        name="unequal workers",
        seconds=_SECONDS,
        jobs=(SimulatedJob(demand=_diurnal),),
        speeds=(0.5, 1.5),
    ),
    Load(
        name="slow start",
        seconds=_SECONDS,
        jobs=(SimulatedJob(demand=_diurnal),),
        start_seconds=(15.0, 20.0),
    ),
)
