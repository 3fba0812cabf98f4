"""How long what is waited for, and how much is kept."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.service.config import DispatcherConfig
from headrace.transport.limits import ServerLimits

__all__ = ["DispatcherLimits"]


_MIN_TIMEOUT_FOR_DEFAULT_PINGS = 10.0
"""From this `worker_timeout` on, in seconds, the pings of the workers' channels are enough."""
_MAX_SLOWDOWN = 5.0
"""How many usual intervals lie between two heartbeats where there are very many peers."""


@dataclass(frozen=True, kw_only=True)
class DispatcherLimits:
    """How long what is waited for, in seconds, and how much is kept."""

    check_interval: float = 1.0
    """Between looks for what is silent or no longer needed."""
    gc_timeout: float | None = 300.0
    """An iteration without clients is kept for so long; None: for ever."""
    dataset_timeout: float | None = 7 * 86400.0
    """An anonymous dataset that nobody uses is kept for so long; None: for ever."""
    worker_timeout: float = 10.0
    client_timeout: float = 300.0
    heartbeat_interval: float = 0.5
    """What workers are asked to keep, where they are few."""
    client_heartbeat_interval: float = 1.0
    """What clients are asked to keep, where they are few."""
    max_heartbeats_per_second: float = 200.0
    """What all workers together are asked for, and all clients: where they are many, each speaks
    less often, down to a fifth."""
    refused_worker_timeout: float = 1.0
    """A worker that refuses connections is lost after so much silence: two heartbeats missed. Where
    it was asked for fewer, after two of those."""
    stable_copy_seconds: float = 60.0
    """A copy of a dataset that ran for so long was not killed by what it reads."""
    unreachable_timeout: float = 60.0
    """A task is given up when all its clients have said for so long that they cannot reach its
    worker, which runs."""
    assignment_stall_timeout: float = 2.0
    """A task that holds its share of units gets more if nobody was dealt any for so long."""
    report_timeout: float = 30.0
    """A client that has not said after so long what it received of a task that is gone is waited
    for no more, where others read the iteration too."""
    gc_dynamic: bool = False
    max_plan_bytes: int = 4 << 30
    """What the plans of all datasets may take together."""
    max_saves_per_worker: int = 3
    """For how many saves one worker writes at a time."""
    deployment_mode: str = ""
    """Where workers of static policies are: "COLOCATED" or "REMOTE"; empty: not told."""
    keeps_journal: bool = False
    """Whether what is journaled outlives the process: only then may a dataset be saved."""

    @property
    def tick_interval(self) -> float:
        """Seconds between two calls of `Dispatcher.tick`."""
        return min(self.check_interval, self.worker_timeout / 4, self.refused_worker_timeout / 4)

    @property
    def server_limits(self) -> ServerLimits:
        """How often peers are pinged, and for how long they may be silent.

        Channels ping their server every 4 s, which is often enough for the usual `worker_timeout`.
        A connection stands for longer than that: when it ends before, a process has ended.
        """
        usual = ServerLimits()
        is_short = self.worker_timeout < _MIN_TIMEOUT_FOR_DEFAULT_PINGS
        return ServerLimits(
            keepalive_interval=self.worker_timeout / 4 if is_short else usual.keepalive_interval,
            keepalive_timeout=max(usual.keepalive_timeout, 2 * self.worker_timeout),
        )

    def interval_between_worker_heartbeats(self, workers: int) -> float:
        """Return the seconds between a worker's heartbeats, where there are so many workers."""
        return self._interval(self.heartbeat_interval, workers, self.worker_timeout)

    def interval_between_client_heartbeats(self, clients: int) -> float:
        """Return the seconds between a client's heartbeats, where there are so many clients."""
        return self._interval(self.client_heartbeat_interval, clients, self.client_timeout)

    def _interval(self, usual: float, peers: int, timeout: float) -> float:
        longest = max(usual, min(_MAX_SLOWDOWN * usual, timeout / 4))
        return min(max(usual, peers / self.max_heartbeats_per_second), longest)

    @classmethod
    def from_config(cls, config: DispatcherConfig) -> DispatcherLimits:
        """Read the limits from a dispatcher's configuration."""
        worker_timeout = _seconds(config.worker_timeout_ms, cls.worker_timeout)
        gc_timeout = (
            None
            if config.job_gc_timeout_ms == -1
            else _seconds(config.job_gc_timeout_ms, cls.gc_timeout or 0.0)
        )
        # Four heartbeats to a timeout: one that is late or lost does not cost the worker its tasks.
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
