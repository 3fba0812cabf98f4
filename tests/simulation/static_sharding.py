"""Static sharding: each slot of a list of workers has a shard of its own, whoever holds the slot.

Whoever runs such a list looks after it: where a slot is empty, a process starts again at its
address, or another one at a new address.

What must hold beside the invariants of all runs
    every element comes at least once, unless a client went, or a shard was given up and said to be;
    nothing of one reading of a shard comes twice, and it holds no element of another shard;
    a shard that is read again is read from its start, and each client is told.
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
    check_told_of_repeats,
    duplicates,
    said_to_be_cut_off,
    tasks_of,
)
from tests.simulation.kernel import require_none
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.worker import WorkerProcess

__all__ = ["StaticSharding"]

_LOOK_SECONDS = 2.0
_MOST_DEATHS = 3


class StaticSharding(Cluster):
    """A cluster with a list of workers."""

    mode = "static"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return what a seed stands for where the dataset is shared among slots."""
        scenario = scenario_of(seed)
        chance = random.Random(f"static {seed}")
        policies = (ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.HINT)
        limits = scenario.limits
        if scenario.plan.deadly:
            # What kills a worker late in its shard is not given up, and the shard begins again.
            limits = dataclasses.replace(limits, stable_copy_seconds=1e9)
        mode = chance.choice(policies)
        return dataclasses.replace(
            scenario, in_order=False, mode=mode, visitation=None, limits=limits
        )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.dispatcher.worker_addresses = ("localhost",) * scenario.workers

    def start(self) -> None:
        super().start()
        self.simulation.call_later(3.0, self._look_after_slots)

    def new_worker(self, number: int) -> WorkerProcess:
        address, plan = f"localhost:{number}", self.scenario.plan
        return WorkerProcess(self.network, f"worker{number}", DISPATCHER, plan, address=address)

    def _look_after_slots(self) -> None:
        """Start a process where a slot is empty, sooner or later."""
        self.simulation.call_later(_LOOK_SECONDS, self._look_after_slots)
        random = self.simulation.random
        if len(self.staying) >= self.scenario.workers or random.random() < 0.5:
            return
        down = [each for each in self.workers if not each.is_up]
        if down and random.random() < 0.5:
            random.choice(down).start()
        else:
            self.add_worker()

    def may_fail(self, reading: Reading) -> bool:
        """Whether it failed because workers of a shard died again and again, and they did."""
        failure = reading.failure
        return (
            isinstance(failure, FailedPreconditionError)
            and "was given up" in str(failure)
            and len(self.journaled(events.WorkerLost)) >= _MOST_DEATHS
        )

    def check_at_end(self) -> None:
        check_readings(self)
        if self.scenario.kind.is_durable:
            for iteration_id, readings in self.readings_by_iteration().items():
                self._check_shards(iteration_id, readings)

    def _check_shards(self, iteration_id: int, readings: list[Reading]) -> None:
        plan, of = self.scenario.plan, self.scenario.workers
        tasks, got = tasks_of(self, iteration_id), atoms_by_task(readings)
        shards = {task_id: shard_of(fact.mode_state).index for task_id, fact in tasks.items()}
        for task_id, share in got.items():
            require_none(duplicates(share), "nothing of a shard comes twice", task_id)
            strange = [atom for atom in share if atom[0] % of != shards[task_id]]
            require_none(strange, "a shard holds its own elements", task_id)
        check_told_of_repeats(self, iteration_id, readings)
        all_ended = all(each.outcome is Outcome.ENDED for each in readings)
        if plan.broken or not all_ended or self.scenario.kind.clients_go:
            return
        came = {atom for share in got.values() for atom in share}
        cut_off = {shards[each] for each in said_to_be_cut_off(readings) if each in tasks}
        missing = [atom for atom in plan.everything() - came if atom[0] % of not in cut_off]
        require_none(sorted(missing), "every element comes at least once")
