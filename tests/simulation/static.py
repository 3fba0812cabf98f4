"""Fixed shares: each slot of a list of workers has a share of its own, whoever holds the slot.

As in the other runs a seed decides what goes wrong. Whoever runs such a list looks after it: where
a slot is empty, a process starts again at its address, or another one at a new address.

What must hold beside the promises of all runs
    every element comes at least once, unless a client went, or a share was given up and said to be;
    nothing of one reading of a share comes twice, and it holds no element of another share;
    a share that is read again is read from its start, and each client is told.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict

from headrace.errors import FailedPreconditionError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.modes.static.records import shard_of
from tests.simulation import promises
from tests.simulation.cast import BOUNDS, Cast
from tests.simulation.client import Outcome, Reading
from tests.simulation.production import Atom
from tests.simulation.run import run
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import BrokenPromiseError

__all__ = ["StaticCast", "run_static", "static_scenario_of"]

_LOOK_SECONDS = 2.0
_MOST_DEATHS = 3


def static_scenario_of(seed: int) -> Scenario:
    """Return what a seed stands for where the dataset is shared among slots."""
    scenario = scenario_of(seed)
    chance = random.Random(f"static {seed}")
    policies = (ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.HINT)
    return dataclasses.replace(
        scenario,
        in_order=False,
        mode=chance.choice(policies),
        visitation=None,
        # What kills a worker late in its share is not given up, and the share begins again.
        limits=dataclasses.replace(scenario.limits, copy_lasts=1e9)
        if scenario.plan.deadly
        else scenario.limits,
    )


class StaticCast(Cast):
    """A cast with a list of workers."""

    option = "--static"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.dispatcher.worker_addresses = ("localhost",) * scenario.workers

    def begin(self) -> None:
        super().begin()
        self.world.at(3.0, self._look_after_slots)

    def add_worker(self) -> WorkerProcess:
        number = len(self.workers) + 1
        worker = WorkerProcess(
            self.network,
            f"worker{number}",
            self.dispatcher.address,
            lambda _: self.scenario.plan,
            BOUNDS,
            address=f"localhost:{number}",
        )
        self.workers.append(worker)
        worker.begin()
        return worker

    def _look_after_slots(self) -> None:
        """Start a process where a slot is empty, sooner or later."""
        self.world.at(_LOOK_SECONDS, self._look_after_slots)
        if len(self.staying) >= self.scenario.workers or self.world.chance.random() < 0.5:
            return
        down = [each for each in self.workers if not each.is_up]
        if down and self.world.chance.random() < 0.5:
            self.world.chance.choice(down).begin()
        else:
            self.add_worker()


def run_static(scenario: Scenario, *, last: int = 40) -> StaticCast:
    """Run a scenario; check every promise.

    Raises:
        AssertionError: One is broken.
    """
    cast = StaticCast(scenario)
    run(scenario, cast=cast, check=_check_at_end, last=last)
    return cast


def _require(holds: bool, promise: str, *about: object) -> None:
    if not holds:
        raise BrokenPromiseError(f"{promise}: {' '.join(map(str, about))}")


def _check_at_end(cast: Cast) -> None:
    promises.check_now(cast, thoroughly=True)
    by_iteration: dict[int, list[Reading]] = defaultdict(list)
    for client in cast.clients:
        for reading in client.readings:
            if not _gave_up(cast, reading):
                promises.check_outcome(cast, client, reading)
            promises.check_order(client, reading)
            by_iteration[reading.iteration_id].append(reading)
    if cast.scenario.promises.nobody_is_lost:
        declared = [
            fact
            for fact in cast.dispatcher.disk.history
            if isinstance(fact, updates.WorkerLost) and promises.is_there(cast, fact.worker_id)
        ]
        _require(not declared, "nobody is declared lost who is only paused", *declared)
    if not cast.scenario.promises.is_durable:
        return
    for not_opened in (-1, 0):
        by_iteration.pop(not_opened, None)
    for iteration_id, shared in by_iteration.items():
        _check_shares(cast, iteration_id, shared)


def _gave_up(cast: Cast, reading: Reading) -> bool:
    """Whether a reading failed because workers of a share died again and again, and they did."""
    failure = reading.failure
    if not (isinstance(failure, FailedPreconditionError) and "was given up" in str(failure)):
        return False
    lost = [each for each in cast.dispatcher.disk.history if isinstance(each, updates.WorkerLost)]
    return len(lost) >= _MOST_DEATHS


def _check_shares(cast: Cast, iteration_id: int, shared: list[Reading]) -> None:
    scenario, plan = cast.scenario, cast.scenario.plan
    tasks = {
        fact.task_id: fact
        for fact in cast.dispatcher.disk.history
        if isinstance(fact, updates.TaskCreated) and fact.iteration_id == iteration_id
    }
    shards = {task_id: shard_of(fact.mode).index for task_id, fact in tasks.items()}
    got: dict[int, Counter[Atom]] = defaultdict(Counter)
    for reading in shared:
        for task_id, atom in promises.atoms_of(reading):
            got[task_id][atom] += 1
    for task_id, share in got.items():
        twice = [atom for atom, times in share.items() if times > 1]
        _require(not twice, "nothing of a share comes twice", task_id, twice[:5])
        strange = [atom for atom in share if atom[0] % scenario.workers != shards[task_id]]
        _require(not strange, "a share holds its own elements", task_id, strange[:5])
    for reading in shared:
        again = {
            (shards[task_id], tasks[task_id].attempt)
            for task_id, _ in promises.atoms_of(reading)
            if tasks[task_id].attempt
        }
        told = sum("reads it again from the start" in each for each in reading.warnings)
        _require(
            told >= len(again),
            "each share that is read again is said",
            f"{reading.client_id}: {sorted(again)}, told {told} times",
        )
    if plan.broken or not all(each.outcome is Outcome.ENDED for each in shared):
        return
    if scenario.promises.clients_go:
        return
    everything = plan.everything()
    came = {atom for share in got.values() for atom in share}
    cut_off = {shards[each] for each in promises.said_to_be_cut_off(shared) if each in tasks}
    missing = sorted(
        atom for atom in everything - came if atom[0] % scenario.workers not in cut_off
    )
    _require(not missing, "every element comes at least once", missing[:10], len(missing))
