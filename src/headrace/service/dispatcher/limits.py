"""Timeouts, intervals and sizes of the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.service.config import DispatcherConfig
from headrace.transport.limits import ServerLimits

__all__ = ["DispatcherLimits"]


_MIN_TIMEOUT_FOR_DEFAULT_PINGS = 10.0
"""Shortest `worker_timeout`, in seconds, with which the default pings suffice."""
_MAX_SLOWDOWN = 5.0
"""Factor by which heartbeats become rarer, at most, if there are many peers."""


@dataclass(frozen=True, kw_only=True)
class DispatcherLimits:
    """Timeouts and intervals in seconds, and sizes."""

    check_interval: float = 1.0
    """Time between checks for expired and unused records."""
    gc_timeout: float | None = 300.0
    """Lifetime of an iteration without clients; None keeps it forever."""
    dataset_timeout: float | None = 7 * 86400.0
    """Lifetime of an unused anonymous dataset; None keeps it forever."""
    worker_timeout: float = 10.0
    client_timeout: float = 300.0
    heartbeat_interval: float = 0.5
    """Heartbeat interval of workers if there are few."""
    client_heartbeat_interval: float = 1.0
    """Heartbeat interval of clients if there are few."""
    max_heartbeats_per_second: float = 200.0
    """Maximum rate of the heartbeats of all workers, and of all clients: with many peers, each
    sends them less often, down to a fifth."""
    refused_worker_timeout: float = 1.0
    """Time without a heartbeat after which a worker that refuses connections is lost: two missed
    heartbeats, also if its interval is longer."""
    stable_copy_seconds: float = 60.0
    """Running time after which a copy of a dataset is assumed not to kill its worker."""
    unreachable_timeout: float = 60.0
    """Time after which a task is lost if all its clients report that they cannot reach its running
    worker."""
    assignment_stall_timeout: float = 2.0
    """Time without an assignment after which a task gets more than its part of the splits."""
    report_timeout: float = 30.0
    """Time after which the dispatcher gives up on a client's report about an unavailable task, if
    other clients read the iteration."""
    gc_dynamic: bool = False
    max_plan_bytes: int = 4 << 30
    """Maximum total size of the plans of all datasets."""
    max_saves_per_worker: int = 3
    """Number of saves that one worker writes for at the same time."""
    deployment_mode: str = ""
    """Location of the workers of static policies: "COLOCATED" or "REMOTE"; empty if unspecified."""
    keeps_journal: bool = False
    """Whether the journal outlives the process: only then can datasets be saved."""

    @property
    def tick_interval(self) -> float:
        """Seconds between two calls of `Dispatcher.tick`."""
        return min(self.check_interval, self.worker_timeout / 4, self.refused_worker_timeout / 4)

    @property
    def server_limits(self) -> ServerLimits:
        """Interval of pings, and limit of a peer's silence.

        Channels ping their server every 4 s, which is often enough for the default
        `worker_timeout`. The keepalive timeout is longer than `worker_timeout`: a connection that
        breaks before means that a process ended.
        """
        default = ServerLimits()
        needs_more_pings = self.worker_timeout < _MIN_TIMEOUT_FOR_DEFAULT_PINGS
        return ServerLimits(
            keepalive_interval=self.worker_timeout / 4
            if needs_more_pings
            else default.keepalive_interval,
            keepalive_timeout=max(default.keepalive_timeout, 2 * self.worker_timeout),
        )

    def interval_between_worker_heartbeats(self, workers: int) -> float:
        """Return the seconds between a worker's heartbeats for this number of workers."""
        return self._interval(self.heartbeat_interval, workers, self.worker_timeout)

    def interval_between_client_heartbeats(self, clients: int) -> float:
        """Return the seconds between a client's heartbeats for this number of clients."""
        return self._interval(self.client_heartbeat_interval, clients, self.client_timeout)

    def _interval(self, base: float, peers: int, timeout: float) -> float:
        max_interval = max(base, min(_MAX_SLOWDOWN * base, timeout / 4))
        return min(max(base, peers / self.max_heartbeats_per_second), max_interval)

    @classmethod
    def from_config(cls, config: DispatcherConfig) -> DispatcherLimits:
        """Create the limits from a dispatcher's configuration."""
        worker_timeout = _seconds(config.worker_timeout_ms, cls.worker_timeout)
        gc_timeout = (
            None
            if config.job_gc_timeout_ms == -1
            else _seconds(config.job_gc_timeout_ms, cls.gc_timeout or 0.0)
        )
        # Four heartbeats per timeout: a single late or lost one does not cost the worker its tasks.
        heartbeat_interval = min(cls.heartbeat_interval, worker_timeout / 4)
        return cls(
            check_interval=_seconds(config.job_gc_check_interval_ms, cls.check_interval),
            gc_timeout=gc_timeout,
            dataset_timeout=(
                None if gc_timeout is None else max(gc_timeout, cls.dataset_timeout or 0.0)
            ),
            worker_timeout=worker_timeout,
            client_timeout=_seconds(config.client_timeout_ms, cls.client_timeout),
            heartbeat_interval=heartbeat_interval,
            refused_worker_timeout=min(worker_timeout, 2 * heartbeat_interval),
            gc_dynamic=config.gc_dynamic_sharding_jobs,
            max_plan_bytes=config.max_plan_bytes or cls.max_plan_bytes,
            max_saves_per_worker=config.worker_max_concurrent_snapshots or cls.max_saves_per_worker,
            deployment_mode=config.deployment_mode or "",
            keeps_journal=config.fault_tolerant_mode,
        )


def _seconds(milliseconds: int | None, default: float) -> float:
    return default if milliseconds is None else max(milliseconds, 1) / 1000
