"""Number of workers that the service should have, evaluated about once per second."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headrace.service.dispatcher.worker_scaling import ScalingPolicy, ScalingState, ServiceLoad

__all__ = ["WorkerDemand"]

_INTERVAL_SECONDS = 1.0
_GRACE_SECONDS = 10.0
"""Seconds for peers from before a restart to send their first report."""


@dataclass
class WorkerDemand:
    """Latest result of the scaling policy, and what the policy remembers.

    Attributes:
        started_at: Start of this process of the dispatcher, in seconds of a monotonic clock.
        wanted_workers: Number of workers that the jobs need; 0 if there is no job.
        policy: Policy that decides.
    """

    started_at: float = 0.0
    wanted_workers: int = 0
    policy: ScalingPolicy = field(default_factory=ScalingPolicy)
    _state: ScalingState = field(default_factory=ScalingState)
    _evaluated_at: float | None = None
    _pauses: float = 0.0

    def is_due(self, now: float, *, reports_missing: bool) -> bool:
        """Return whether to evaluate the policy now.

        Args:
            now: Current time.
            reports_missing: Whether tasks or clients from before a restart have not reported yet.
                The number of workers then stays as it was, because their load is unknown.
        """
        if reports_missing and now - self.started_at < _GRACE_SECONDS:
            return False
        return self._evaluated_at is None or now - self._evaluated_at >= _INTERVAL_SECONDS

    def evaluate(self, load: ServiceLoad) -> None:
        """Decide for a load."""
        self._evaluated_at = load.now
        load = replace(load, now=load.now - self._pauses)
        self.wanted_workers, self._state = self.policy.decide(load, self._state)

    def exclude_pause(self, pause: float) -> None:
        """Exclude `pause` seconds, in which nothing was received, from the policy's time."""
        self._pauses += pause
