"""Policy of autoscaling: how many workers a data service should have.

A pure function of the load, so that it can be simulated. The dispatcher evaluates it and reports
the result; launchers act on it (`service.worker_scaler`).

Rule 1. The need of a job is the time of its busy workers per time that its clients compute:
        `busy_workers / (1 - client_wait_ratio)` workers. Its demand in elements per second,
        divided by the elements that a busy worker computes per second, is the same. It does not
        depend on the number of workers, so workers that start or drain do not change it.
Rule 2. If clients wait most of the time, the need is uncertain: it is at most `max_growth` times
        the busy workers. Workers that have nothing to do, because a job has no more splits or its
        clients and connections are the bottleneck, are not busy and cause no growth.
Rule 3. Workers are added as soon as the need exceeds them, or exceeds the target utilization while
        the ready queue is empty; those that start count. They are removed when the need was lower
        during a whole stable period, so noise, pauses of the consumers and the time between epochs
        remove none; and then at most half at once.
Rule 4. After a worker or a job was added, the policy waits for new readings, and subtracts what
        clients waited before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

__all__ = ["JobLoad", "ScalingPolicy", "ScalingState", "ServiceLoad"]

_RATE_TIME_CONSTANT = 5.0
"""Time constant, in seconds, of the mean over time in `client_wait_ratio` (`serving.rates`)."""

Reading = tuple[float, float]
"""Time in seconds, and a value."""


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
    """What the policy remembers from one evaluation to the next.

    Attributes:
        wanted: Number of wanted workers.
        num_workers: Number of registered workers.
        started_at: Time of the first evaluation.
        changed_at: When a worker or a job was last added.
        removed_at: When the number of wanted workers was last reduced.
        wait_ratios: Recent wait ratios of each iteration, the oldest first.
        needs: Needs of the last stable period that no later one has exceeded, the oldest first.
    """

    wanted: int = 0
    num_workers: int = 0
    started_at: float = -math.inf
    changed_at: float = -math.inf
    removed_at: float = -math.inf
    wait_ratios: Mapping[int, tuple[Reading, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    needs: tuple[Reading, ...] = ()


@dataclass(frozen=True)
class ScalingPolicy:
    """Adds workers while clients wait, and removes workers that were not needed for a while.

    Example:
        >>> policy, state = ScalingPolicy(), ScalingState()
        >>> for now in range(10):  # the only worker is busy, and the client waits half of the time
        ...     job = JobLoad(1, 100.0, 0.5, 1.0, 0, num_clients=1)
        ...     wanted, state = policy.decide(ServiceLoad(now, 1, (job,)), state)
        >>> wanted
        3

    Attributes:
        target_utilization: Fraction of the workers' time that should be used. The ready queue
            absorbs the variation of a few batches, so it can be close to 1; the rest is the
            reserve for a growing demand while workers start.
        max_growth: Bound of a job's need, in multiples of its busy workers. With 4, three rounds
            of starting workers are enough for 16.
        stable_seconds: Time for which fewer workers must be enough before any are removed. It
            should exceed the pauses of consumers, such as checkpoints.
        removal_seconds: Time between two reductions, of at most half each. After a longer pause,
            some workers are left to continue with.
        settling_seconds: Time after a worker or a job was added until readings reflect it: a few
            heartbeats.
    """

    target_utilization: float = 0.95
    max_growth: float = 4.0
    stable_seconds: float = 40.0
    removal_seconds: float = 10.0
    settling_seconds: float = 3.0

    def decide(self, load: ServiceLoad, state: ScalingState) -> tuple[int, ScalingState]:
        """Return the number of wanted workers, and the state for the next evaluation.

        The number has no upper limit; launchers clamp it. It becomes 0 if no job needed a worker
        for a stable period.
        """
        state = _observe(load, state)
        needs_worker = any(job.remaining_splits != 0 for job in load.jobs)
        wanted = max(state.wanted, int(needs_worker))
        if needs_worker and load.now - state.started_at < self.stable_seconds:
            # The dispatcher may have restarted: workers stay until their readings have arrived.
            wanted = max(wanted, load.num_workers)
        if load.now - state.changed_at < self.settling_seconds:
            return wanted, replace(state, wanted=wanted)
        need = self._need(load, state)
        state = replace(state, needs=self._add_need(load.now, need, state.needs))
        is_empty = sum(job.ready_batches - job.num_clients for job in load.jobs) < 0
        if need > wanted or (is_empty and need > wanted * self.target_utilization):
            wanted = max(wanted, self._workers(need))
        elif load.now >= max(
            state.started_at + self.stable_seconds, state.removed_at + self.removal_seconds
        ):
            enough = max(self._workers(state.needs[0][1]), int(needs_worker))
            if enough < wanted:
                wanted = max(enough, wanted - wanted // 2) if enough else 0
                state = replace(state, removed_at=load.now)
        return wanted, replace(state, wanted=wanted)

    def _need(self, load: ServiceLoad, state: ScalingState) -> float:
        """Return the workers that all jobs keep busy while no client waits."""
        total_busy = sum(job.busy_workers for job in load.jobs)
        if not load.num_workers or not total_busy:
            return 0.0
        # Jobs that share a worker are busy at the same time. A worker is used while any of them
        # is; as in a queue with processor sharing, each is busy independently of the others.
        used = 1.0 - math.prod(
            1.0 - min(1.0, job.busy_workers / load.num_workers) for job in load.jobs
        )
        share = used * load.num_workers / total_busy
        return sum(self._job_need(job, share, load.now, state) for job in load.jobs)

    def _job_need(self, job: JobLoad, share: float, now: float, state: ScalingState) -> float:
        wait_ratio = _recent_wait_ratio(state.wait_ratios[job.iteration_id], now)
        growth = 1.0 / max(1.0 - wait_ratio, 1.0 / self.max_growth)
        need = share * job.busy_workers * growth
        if job.remaining_splits is not None:
            # A worker without a split is idle.
            need = min(need, job.remaining_splits * self.target_utilization)
        return need

    def _workers(self, need: float) -> int:
        return math.ceil(need / self.target_utilization - 1e-9)

    def _add_need(self, now: float, need: float, needs: tuple[Reading, ...]) -> tuple[Reading, ...]:
        recent = [
            (time, earlier)
            for time, earlier in needs
            if time > now - self.stable_seconds and earlier > need
        ]
        return (*recent, (now, need))


def _observe(load: ServiceLoad, state: ScalingState) -> ScalingState:
    """Record the readings of a load."""
    is_added = load.num_workers > state.num_workers or any(
        job.iteration_id not in state.wait_ratios for job in load.jobs
    )
    changed_at = load.now if is_added else state.changed_at
    is_first = state.started_at == -math.inf
    oldest = max(changed_at, load.now - _RATE_TIME_CONSTANT)
    wait_ratios = {}
    for job in load.jobs:
        readings = (
            *state.wait_ratios.get(job.iteration_id, ()),
            (load.now, job.client_wait_ratio),
        )
        first = max((n for n, (time, _) in enumerate(readings) if time <= oldest), default=0)
        wait_ratios[job.iteration_id] = readings[first:]
    return replace(
        state,
        num_workers=load.num_workers,
        started_at=load.now if is_first else state.started_at,
        changed_at=changed_at,
        wait_ratios=MappingProxyType(wait_ratios),
    )


def _recent_wait_ratio(readings: tuple[Reading, ...], now: float) -> float:
    """Return the wait ratio since the first of the readings, which are decaying means."""
    (began, before), (_, after) = readings[0], readings[-1]
    weight = math.exp((began - now) / _RATE_TIME_CONSTANT)
    if weight == 1.0:
        return after
    return min(1.0, max(0.0, (after - before * weight) / (1.0 - weight)))
