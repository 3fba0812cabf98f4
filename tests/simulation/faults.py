"""Faults of the data service, injected at random times and repaired at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.kernel import Process
from tests.simulation.network import Conditions

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

__all__ = ["FaultInjector"]

_MARGIN = 1.5
"""Seconds by which a harmless pause is shorter than a timeout, for a heartbeat and delays."""
_PAUSE_GAP = 3.0
"""Seconds between two harmless pauses of one process."""
_RESTART_SECONDS = 0.5
"""Seconds after which a supervisor replaces a worker process."""


class FaultInjector:
    """Injects the faults of a scenario; each public method is a fault, `start` apart.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._simulation, self._network = cluster.simulation, cluster.network
        self._limits = cluster.scenario.limits
        self.are_over = False
        self._paused_until: dict[str, float] = {}

    def start(self) -> None:
        """Inject faults for the duration given by the scenario, then repair everything."""
        scenario = self._cluster.scenario
        until = scenario.fault_seconds + 1.0
        if scenario.kind.faults and scenario.fault_seconds:
            faults = {name: getattr(self, name) for name in scenario.kind.faults}
            mean = scenario.seconds_between_faults
            self._simulation.inject_faults(faults, mean_seconds=mean, until=until)
        self._simulation.call_later(until, self._repair)
        self._supervise_workers()

    def _repair(self) -> None:
        """End all faults except pauses, which have fixed durations."""
        cluster = self._cluster
        self.are_over = True
        self._simulation.log("faults", "are over")
        self._network.heal()
        cluster.dispatcher.disk.is_full = False
        if not cluster.dispatcher.is_up:
            cluster.dispatcher.start()
        if not cluster.active_workers:
            cluster.add_worker()

    def _supervise_workers(self) -> None:
        """Restart workers killed by splits, and keep at least one worker at the end."""
        cluster = self._cluster
        for worker in cluster.workers:
            if not worker.is_up and worker.was_killed_by_split:
                worker.start()
        if self.are_over and not cluster.active_workers:
            cluster.add_worker()
        self._simulation.call_later(_RESTART_SECONDS, self._supervise_workers)

    def _pause(self, process: Process | None, most: float) -> None:
        """Pause a process unless its last pause ended a moment ago."""
        seconds, now = self._simulation.duration(most), self._simulation.now
        if process is not None and now >= self._paused_until.get(process.name, 0.0):
            self._paused_until[process.name] = now + seconds + _PAUSE_GAP
            process.pause(seconds)

    # --- the network ----------------------------------------------------------------------------

    def change_conditions(self) -> None:
        random = self._simulation.random
        self._network.conditions = Conditions(
            latency=random.choice((0.0002, 0.005, 0.05)),
            late=random.choice((0.0, 0.02, 0.2)),
            lateness=random.choice((0.01, 0.1, 0.3)),
            twice=random.choice((0.0, 0.05, 0.5)),
        )

    def reset_connection(self) -> None:
        cluster = self._cluster
        processes = [cluster.dispatcher, *cluster.workers, *cluster.clients]
        process = self._simulation.choose_running(processes)
        if process is not None:
            self._network.reset(process)

    def partition_briefly(self) -> None:
        self._partition(1.4)

    def partition_for_long(self) -> None:
        self._partition(40.0)

    def _partition(self, max_seconds: float) -> None:
        """Partition a worker from another process, or sometimes a client from the dispatcher."""
        cluster, choose = self._cluster, self._simulation.choose_running
        seconds = self._simulation.duration(max_seconds)
        one: Process | None = choose(cluster.workers)
        other: Process | None = choose([cluster.dispatcher, *cluster.clients])
        if one is None or other is None:
            return
        if self._simulation.random.random() < 0.2 and (client := choose(cluster.clients)):
            one, other = client, cluster.dispatcher
        self._network.partition(one, other, seconds)

    # --- the dispatcher -------------------------------------------------------------------------

    def pause_dispatcher(self) -> None:
        self._pause(self._cluster.dispatcher, 100.0)

    def restart_dispatcher(self) -> None:
        dispatcher = self._cluster.dispatcher
        if dispatcher.is_up:
            dispatcher.crash()
            dispatcher.start_in(self._simulation.duration(20.0))

    def fill_disk(self) -> None:
        disk = self._cluster.dispatcher.disk
        if disk.history:  # otherwise the dispatcher could not start
            disk.is_full = True
            self._simulation.log("disk", "is full")
            seconds = self._simulation.duration(5.0)
            self._simulation.call_later(seconds, lambda: setattr(disk, "is_full", False))

    # --- workers --------------------------------------------------------------------------------

    def pause_worker(self) -> None:
        most = 1.0 + self._limits.worker_timeout - _MARGIN
        self._pause(self._simulation.choose_running(self._cluster.workers), most)

    def pause_worker_for_long(self) -> None:
        self._pause(self._simulation.choose_running(self._cluster.workers), 60.0)

    def kill_worker(self) -> None:
        worker = self._simulation.choose_running(self._cluster.workers)
        if worker is not None:
            worker.crash("is killed")
            if self._simulation.random.random() < 0.5:
                worker.start_in(self._simulation.duration(20.0))

    def add_worker(self) -> None:
        if len(self._cluster.active_workers) < 2 * self._cluster.scenario.workers:
            self._cluster.add_worker()

    def drain_worker(self) -> None:
        worker = self._simulation.choose_running(self._cluster.active_workers)
        if worker is not None:
            worker.drain(10_000.0)

    def stop_worker(self) -> None:
        worker = self._simulation.choose_running(self._cluster.workers)
        if worker is not None:
            worker.stop()

    # --- clients --------------------------------------------------------------------------------

    def pause_client(self) -> None:
        most = 1.0 + min(self._limits.client_timeout, self._limits.report_timeout) - 2 * _MARGIN
        self._pause(self._simulation.choose_running(self._cluster.clients), most)

    def pause_client_for_long(self) -> None:
        self._pause(self._simulation.choose_running(self._cluster.clients), 120.0)

    def close_client(self) -> None:
        client = self._simulation.choose_running(self._cluster.clients)
        if client is not None:
            client.close()

    def kill_client(self) -> None:
        client = self._simulation.choose_running(self._cluster.clients)
        if client is not None:
            client.crash()
