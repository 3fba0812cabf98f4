"""Static sharding: each slot in a fixed list of workers has a shard, whichever worker has the slot.

A supervisor fills empty slots: it restarts a process at its address, or starts one at a new
address.

Invariants in addition to those of all runs
    Every element is delivered at least once, unless a client left, or its shard was abandoned with
    a report.
    Within one reading of a shard no element is duplicated, and none belongs to another shard.
    A repeated shard is read from its start, and each client receives a report.
"""

from __future__ import annotations

import dataclasses
import random

from headrace.errors import FailedPreconditionError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.modes.static.records import shard_of
from tests.simulation.client import Outcome, Reading
from tests.simulation.cluster import DISPATCHER, Cluster
from tests.simulation.invariants import (
    atoms_by_task,
    check_readings,
    check_repeats_reported,
    duplicates,
    reported_truncated_tasks,
    tasks_of,
)
from tests.simulation.kernel import require_none
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.worker import WorkerProcess

__all__ = ["StaticSharding"]

_CHECK_SECONDS = 2.0
_MAX_DEATHS = 3


class StaticSharding(Cluster):
    """Cluster with a fixed list of workers."""

    mode = "static_sharding"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return the scenario of a seed in which slots read shards."""
        scenario = scenario_of(seed)
        rng = random.Random(f"static {seed}")
        policies = (ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.HINT)
        limits = scenario.limits
        if scenario.plan.poison:
            # A split that kills a worker late in its shard is not abandoned; the shard restarts.
            limits = dataclasses.replace(limits, stable_copy_seconds=1e9)
        mode = rng.choice(policies)
        return dataclasses.replace(
            scenario, in_order=False, mode=mode, visitation=None, limits=limits
        )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.dispatcher.worker_addresses = ("localhost",) * scenario.workers

    def start(self) -> None:
        super().start()
        self.simulation.call_later(3.0, self._fill_slots)

    def new_worker(self, number: int) -> WorkerProcess:
        address, plan = f"localhost:{number}", self.scenario.plan
        return WorkerProcess(self.network, f"worker{number}", DISPATCHER, plan, address=address)

    def _fill_slots(self) -> None:
        """Start a process for an empty slot after a random time."""
        self.simulation.call_later(_CHECK_SECONDS, self._fill_slots)
        random = self.simulation.random
        if len(self.active_workers) >= self.scenario.workers or random.random() < 0.5:
            return
        down = [each for each in self.workers if not each.is_up]
        if down and random.random() < 0.5:
            random.choice(down).start()
        else:
            self.add_worker()

    def may_fail(self, reading: Reading) -> bool:
        """Return whether it failed because workers of a shard crashed repeatedly."""
        failure = reading.failure
        return (
            isinstance(failure, FailedPreconditionError)
            and "was abandoned" in str(failure)
            and len(self.journaled(events.WorkerLost)) >= _MAX_DEATHS
        )

    def check_at_end(self) -> None:
        check_readings(self)
        if self.scenario.kind.is_durable:
            for iteration_id, readings in self.readings_by_iteration().items():
                self._check_shards(iteration_id, readings)

    def _check_shards(self, iteration_id: int, readings: list[Reading]) -> None:
        plan, num_shards = self.scenario.plan, self.scenario.workers
        tasks, got = tasks_of(self, iteration_id), atoms_by_task(readings)
        shards = {task_id: shard_of(task.mode_state).index for task_id, task in tasks.items()}
        for task_id, elements in got.items():
            require_none(duplicates(elements), "no element of a shard is duplicated", task_id)
            unexpected = [atom for atom in elements if atom[0] % num_shards != shards[task_id]]
            require_none(unexpected, "a shard has only its own elements", task_id)
        check_repeats_reported(self, iteration_id, readings)
        all_ended = all(each.outcome is Outcome.ENDED for each in readings)
        if plan.broken or not all_ended or self.scenario.kind.clients_leave:
            return
        received = {atom for elements in got.values() for atom in elements}
        truncated = {shards[each] for each in reported_truncated_tasks(readings) if each in tasks}
        missing = [
            atom for atom in plan.everything() - received if atom[0] % num_shards not in truncated
        ]
        require_none(sorted(missing), "every element is delivered at least once")
