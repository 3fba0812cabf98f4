"""Policy of autoscaling: how many workers a data service should have.

A pure function of the load, so that it can be simulated. The dispatcher evaluates it and reports
the result; launchers act on it (`service.worker_scaler`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["JobLoad", "ScalingPolicy", "ScalingState", "ServiceLoad"]


@dataclass(frozen=True)
class JobLoad:
    """Load of one unfinished iteration.

    Attributes:
        iteration_id: Identifies the iteration from one evaluation to the next.
        elements_per_second: Rate at which its clients receive elements.
        client_wait_ratio: Mean over its clients of the fraction of time waited for elements.
        busy_workers: Sum over its tasks of the fraction of time spent in computing elements,
            rather than in waiting for clients or splits.
        ready_batches: Batches buffered by tasks and clients.
        num_clients: Number of clients that read.
        remaining_splits: Splits that no worker has finished; None without splits.
    """

    iteration_id: int
    elements_per_second: float
    client_wait_ratio: float
    busy_workers: float
    ready_batches: int
    num_clients: int
    remaining_splits: int | None = None


@dataclass(frozen=True)
class ServiceLoad:
    """Load of a data service.

    Attributes:
        now: Time in seconds of a monotonic clock.
        num_workers: Number of registered workers, without draining ones.
        jobs: Loads of the unfinished iterations that have clients.
    """

    now: float
    num_workers: int
    jobs: tuple[JobLoad, ...]


@dataclass(frozen=True)
class ScalingState:
    """What the policy remembers from one evaluation to the next."""


@dataclass(frozen=True)
class ScalingPolicy:
    """Policy with hysteresis: adds workers while clients wait, removes workers that idle."""

    def decide(self, load: ServiceLoad, state: ScalingState) -> tuple[int, ScalingState]:
        """Return the number of wanted workers, and the state for the next evaluation.

        The number has no upper limit; launchers clamp it. It is 0 if no job needs a worker.
        """
        if not load.jobs:
            return 0, state
        is_waiting = any(job.client_wait_ratio > 0.02 for job in load.jobs)
        return max(1, load.num_workers + is_waiting), state
