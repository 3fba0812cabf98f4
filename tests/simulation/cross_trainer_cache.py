"""Cross-trainer cache: clients read for trainers, which share the output of workers.

Some clients read for the same trainer. Workers keep small windows, and clients close after a while,
before the end of the data. Invariants:

    Every client receives its number of batches, or ends for a reason that the scenario permits.
    No trainer receives an element of a task twice; clients receive a copy's elements in order.
    Gaps in the elements of a copy are reported to the trainer.
    If elements are counted, the number of outstanding elements is bounded.
    Windows are bounded, and removed when no client reads.
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
from tests.simulation.invariants import check_now, duplicates, reports_lost_copies
from tests.simulation.kernel import require, require_none
from tests.simulation.production import Plan
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.worker import WorkerProcess

__all__ = ["CrossTrainerCache"]

_NUM_SPLITS = 20_000
"""More than any client reads."""
_ELEMENT = 1 << 18
_UNBOUNDED = 1 << 30
_MAX_BATCHES = 25


class _Worker(WorkerProcess):
    """Worker with shared windows."""

    def buffered_output(self) -> list[tuple[int, int]]:
        for task in self.session.tasks._tasks.values():
            delivery = task._delivery
            assert isinstance(delivery, SharedWindowDelivery)
            fits = delivery.window_usage[1] <= self.bounds.window_bytes
            require(fits, "windows are bounded", self.name, of=[self])
        return []


class CrossTrainerCache(Cluster):
    """Cluster of workers with small windows, and clients that read for trainers."""

    mode = "cross_trainer_cache"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return the scenario of a seed in which trainers share the output of workers."""
        rng = random.Random(f"shared scenario {seed}")
        return dataclasses.replace(
            scenario_of(seed),
            in_order=False,
            plan=Plan(size=_NUM_SPLITS, cost=rng.choice((0.0, 0.001, 0.02)), bytes=_ELEMENT),
            is_named=True,
            clients=rng.choice((1, 2, 3, 4)),
            epochs=1,
        )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        rng = random.Random(f"shared {scenario.seed}")
        self._window = rng.choice((_ELEMENT, 4 * _ELEMENT, _UNBOUNDED))
        self._trainers = [f"trainer{rng.randrange(1 + n)}" for n in range(scenario.clients)]
        self._some_are_slow = rng.random() < 0.5
        self._counts_elements = rng.random() < 0.4

    def new_worker(self, number: int) -> WorkerProcess:
        bounds = BufferLimits(window_bytes=self._window)
        return _Worker(self.network, f"worker{number}", DISPATCHER, self.scenario.plan, bounds)

    def registration(self, **options: Any) -> RegisterDataset:
        return super().registration(cardinality=-1, num_splits=-1, has_element_ids=False, **options)

    def job_options(self) -> JobOptions:
        return JobOptions(processing_mode=int(self.scenario.mode), cross_trainer_cache=True)

    def consumer(self, number: int) -> Consumer:
        slowness = 1 + 3 * (number - 1) if self._some_are_slow else 1
        return Consumer(
            max_outstanding=self.scenario.max_outstanding,
            think=self.scenario.think * slowness,
            close_after=_MAX_BATCHES,
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
        if self.scenario.kind.is_durable:  # otherwise each dispatcher starts with the same task ids
            self._check_trainers()

    def _check_client(self, client: ClientProcess) -> None:
        most = self.scenario.max_outstanding
        if self._counts_elements and client.most_tasks <= most:
            fits = client.most_elements <= most
            require(fits, "elements are counted", client.most_elements, most, of=[client])
        for reading in client.readings:
            about = client.name, reading.outcome, reading.failure, reading.errors
            reason = "each reading ends for a reason that the scenario permits"
            require(self._may_end(reading), reason, *about, of=[client])

    def _may_end(self, reading: Reading) -> bool:
        kind, failure = self.scenario.kind, reading.failure
        if reading.outcome in (Outcome.DIED, Outcome.CLOSED):
            return kind.clients_leave or len(reading.yielded) + 1 >= _MAX_BATCHES
        if reading.outcome is not Outcome.FAILED:
            return False
        is_lost = isinstance(failure, FailedPreconditionError | NotFoundError)
        # The dispatcher may be unreachable for a minute while an iteration is opened.
        return (
            (is_lost and not (kind.no_losses and kind.is_durable))
            or isinstance(failure, UnavailableError)
            or reports_lost_copies(self, failure)
        )

    def _check_trainers(self) -> None:
        is_copied = self.scenario.mode == ShardingPolicy.OFF
        got: dict[tuple[str, int], list[int]] = defaultdict(list)
        for client in self.clients:
            trainer = client.consumer.trainer_id
            for reading in client.readings:
                by_task = _splits_by_task(reading)
                for task_id, splits in by_task.items():
                    got[trainer, task_id] += splits
                    in_order = not is_copied or splits == sorted(splits)
                    require(in_order, "elements of a copy arrive in order", client.name, splits)
                if by_task and is_copied and self._trainers.count(trainer) == 1:
                    gaps = sum(
                        splits[-1] - splits[0] + 1 - len(splits) for splits in by_task.values()
                    )
                    reported = client.session._lag_reporter.total_skipped
                    require(gaps <= reported, "each gap is reported", client.name, gaps, reported)
                    keeps_all = self._window == _UNBOUNDED
                    require(
                        not (keeps_all and reported),
                        "a large window keeps all",
                        client.name,
                        reported,
                    )
        for (trainer, task_id), splits in got.items():
            repeated = duplicates(Counter(splits))
            require_none(repeated, "no trainer receives an element twice", trainer, task_id)


def _splits_by_task(reading: Reading) -> dict[int, list[int]]:
    splits: dict[int, list[int]] = defaultdict(list)
    for batch in reading.yielded:
        splits[batch.task.task_id] += [split for split, _ in batch.atoms()]
    return splits
