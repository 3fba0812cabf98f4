"""The cross-trainer cache: clients read for trainers, who share what workers make.

Some clients read for the same trainer. Workers keep small windows, and clients close after a while:
the data has no end that anybody comes to. Whatever goes wrong,

    every client gets what it came for, or ends for a reason that the scenario gives;
    no trainer gets an element of a task twice, and of a copy each client gets them in order;
    of what a trainer did not get of a copy, between two elements that it got, it was told;
    where elements are counted, no more are outstanding than may be;
    windows are no larger than they may be, and nothing is left where nobody reads.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from typing import Any

from headrace.errors import FailedPreconditionError, NotFoundError, UnavailableError
from headrace.service.config import ShardingPolicy
from headrace.service.messages import JobOptions, RegisterDataset
from headrace.service.modes.cross_trainer_cache.shared_window import SharedWindowDelivery
from headrace.service.worker.delivery_policy import BufferLimits
from tests.simulation.client import ClientProcess, Consumer, Outcome, Reading
from tests.simulation.cluster import DISPATCHER, Cluster
from tests.simulation.invariants import check_now, duplicates, says_that_copies_are_gone
from tests.simulation.kernel import require, require_none
from tests.simulation.production import Plan
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.worker import WorkerProcess

__all__ = ["CrossTrainerCache"]

_UNITS = 20_000
"""More than anybody reads."""
_ELEMENT = 1 << 18
_UNBOUNDED = 1 << 30
_PORTIONS = 25


class _Worker(WorkerProcess):
    """A worker that keeps windows."""

    def kept(self) -> list[tuple[int, int]]:
        for task in self.session.tasks._tasks.values():
            hand_out = task._delivery
            assert isinstance(hand_out, SharedWindowDelivery)
            fits = hand_out.window_usage[1] <= self.bounds.window_bytes
            require(fits, "windows are bounded", self.name, of=[self])
        return []


class CrossTrainerCache(Cluster):
    """Workers with small windows, and clients that read for trainers."""

    mode = "shared"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return what a seed stands for where trainers share what workers make."""
        chance = random.Random(f"shared scenario {seed}")
        return dataclasses.replace(
            scenario_of(seed),
            in_order=False,
            plan=Plan(size=_UNITS, cost=chance.choice((0.0, 0.001, 0.02)), bytes=_ELEMENT),
            is_named=True,
            clients=chance.choice((1, 2, 3, 4)),
            passes=1,
        )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        chance = random.Random(f"shared {scenario.seed}")
        self._window = chance.choice((_ELEMENT, 4 * _ELEMENT, _UNBOUNDED))
        self._trainers = [f"trainer{chance.randrange(1 + n)}" for n in range(scenario.clients)]
        self._some_are_slow = chance.random() < 0.5
        self._counts_elements = chance.random() < 0.4

    def new_worker(self, number: int) -> WorkerProcess:
        bounds = BufferLimits(window_bytes=self._window)
        return _Worker(self.network, f"worker{number}", DISPATCHER, self.scenario.plan, bounds)

    def registration(self, **options: Any) -> RegisterDataset:
        return super().registration(cardinality=-1, num_splits=-1, has_element_ids=False, **options)

    def terms(self) -> JobOptions:
        return JobOptions(processing_mode=int(self.scenario.mode), cross_trainer_cache=True)

    def consumer(self, number: int) -> Consumer:
        slowness = 1 + 3 * (number - 1) if self._some_are_slow else 1
        return Consumer(
            max_outstanding=self.scenario.max_outstanding,
            think=self.scenario.think * slowness,
            close_after=_PORTIONS,
            trainer_id=self._trainers[number - 1],
            counts_elements=self._counts_elements,
        )

    def deadline(self) -> float:
        limits = self.scenario.limits
        waits = 3 * limits.worker_timeout + 2 * limits.client_timeout + 2 * limits.report_timeout
        return self.scenario.fault_seconds + 600.0 + waits

    def check_at_end(self) -> None:
        check_now(self, thoroughly=True)
        for client in self.clients:
            self._check_client(client)
        if self.scenario.kind.is_durable:  # else each dispatcher begins with the same numbers
            self._check_trainers()

    def _check_client(self, client: ClientProcess) -> None:
        most = self.scenario.max_outstanding
        if self._counts_elements and client.most_tasks <= most:
            fits = client.most_elements <= most
            require(fits, "elements are counted", client.most_elements, most, of=[client])
        for reading in client.readings:
            about = client.name, reading.outcome, reading.failure, reading.errors
            reason = "each reading ends for a reason that the scenario gives"
            require(self._may_end_so(reading), reason, *about, of=[client])

    def _may_end_so(self, reading: Reading) -> bool:
        kind, failure = self.scenario.kind, reading.failure
        if reading.outcome in (Outcome.DIED, Outcome.CLOSED):
            return kind.clients_go or len(reading.yielded) + 1 >= _PORTIONS
        if reading.outcome is not Outcome.FAILED:
            return False
        is_lost = isinstance(failure, FailedPreconditionError | NotFoundError)
        # A dispatcher may be away for a minute while an iteration is opened.
        return (
            (is_lost and not (kind.nobody_is_lost and kind.is_durable))
            or isinstance(failure, UnavailableError)
            or says_that_copies_are_gone(self, failure)
        )

    def _check_trainers(self) -> None:
        is_copied = self.scenario.mode == ShardingPolicy.OFF
        got: dict[tuple[str, int], list[int]] = defaultdict(list)
        for client in self.clients:
            trainer = client.consumer.trainer_id
            for reading in client.readings:
                by_task = _units_by_task(reading)
                for task_id, units in by_task.items():
                    got[trainer, task_id] += units
                    in_order = not is_copied or units == sorted(units)
                    require(in_order, "elements of a copy come in order", client.name, units)
                if by_task and is_copied and self._trainers.count(trainer) == 1:
                    gaps = sum(units[-1] - units[0] + 1 - len(units) for units in by_task.values())
                    told = client.session._lag_reporter.total_skipped
                    require(gaps <= told, "each gap is told", client.name, gaps, told)
                    keeps_all = self._window == _UNBOUNDED
                    require(not (keeps_all and told), "a large window keeps all", client.name, told)
        for (trainer, task_id), units in got.items():
            twice = duplicates(Counter(units))
            require_none(twice, "no trainer gets an element twice", trainer, task_id)


def _units_by_task(reading: Reading) -> dict[int, list[int]]:
    units: dict[int, list[int]] = defaultdict(list)
    for portion in reading.yielded:
        units[portion.task.task_id] += [unit for unit, _ in portion.atoms()]
    return units
