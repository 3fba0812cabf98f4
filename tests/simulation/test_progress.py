"""Reading and saving end in time with slow or repeatedly crashing workers."""

from __future__ import annotations

import dataclasses
import random

import pytest

from headrace.service.messages import CommitFiles
from tests.simulation.cluster import Cluster
from tests.simulation.distributed_save import DistributedSave
from tests.simulation.production import Plan
from tests.simulation.scenario import Scenario
from tests.simulation.worker import WorkerProcess

_SLOWNESS = 2000.0


def _read_with_a_slow_worker(
    seed: int, slowness: float, *, reorder_limit: int, dies_at: float | None = None
) -> Cluster:
    """Read in order with one worker that is `slowness` times slower and may crash."""
    rng = random.Random(f"backups {seed}")
    plan = Plan(size=60, max_split_elements=rng.choice((1, 9)), cost=0.02)
    workers = rng.choice((2, 3, 4))
    cluster = Cluster(
        Scenario(
            seed=seed,
            kind_name="kills",
            plan=plan,
            workers=workers,
            in_order=True,
            reorder_limit=reorder_limit,
        )
    )

    def arrange() -> None:
        at, workers = cluster.simulation.call_later, cluster.workers
        at(1.001, lambda: setattr(workers[0], "slowness", slowness))
        if dies_at is not None:
            at(dies_at, lambda: workers[0].crash("is killed"))

    cluster.run_for(600.0, arrange)
    return cluster


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reorder_limit", [1000, 20, 4])
def test_the_duration_of_ordered_reading_is_bounded_by_the_fast_workers(reorder_limit: int) -> None:
    """Includes reorder buffers so small that fast workers wait for room."""
    for seed in range(10):
        cluster = _read_with_a_slow_worker(seed, 1.0, reorder_limit=reorder_limit)
        workers = cluster.scenario.workers
        expected_seconds = cluster.simulation.now * workers / (workers - 1)
        seconds = _read_with_a_slow_worker(
            seed, _SLOWNESS, reorder_limit=reorder_limit
        ).simulation.now
        assert seconds < 2 * expected_seconds + 5.0, (seed, expected_seconds, seconds)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reorder_limit", [1000, 4])
def test_a_slow_worker_that_dies_causes_no_third_assignment(reorder_limit: int) -> None:
    for seed in range(10):
        for dies_at in (1.5, 3.0, 4.5):
            _read_with_a_slow_worker(seed, _SLOWNESS, reorder_limit=reorder_limit, dies_at=dies_at)


def _read_while_workers_are_killed(seed: int, kills_until: float, seconds: float) -> None:
    """Read while a worker is killed each second and replaced within a second."""
    rng = random.Random(f"progress {seed}")
    plan = Plan(
        size=480,
        max_split_elements=rng.choice((1, 3)),
        cycle_length=rng.choice((1, 3)),
        shuffle_buffer=rng.choice((30, 64, 1000)),
        batch_size=rng.choice((1, 1, 7)),
        cost=0.01,
    )
    outstanding, think = rng.choice((1, 4, 16)), rng.choice((0.0, 0.001))
    cluster = Cluster(
        Scenario(
            seed=seed,
            kind_name="kills",
            plan=plan,
            workers=3,
            max_outstanding=outstanding,
            think=think,
        )
    )
    simulation = cluster.simulation

    def kill() -> None:
        running = [each for each in cluster.workers if each.is_running]
        if running and simulation.now < kills_until:
            worker = simulation.random.choice(running)
            worker.crash("is killed")
            worker.start_in(0.1 + simulation.random.random())
        simulation.call_later(0.5 + simulation.random.random(), kill)

    cluster.run_for(seconds, lambda: simulation.call_later(1.5, kill))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills_until", [6.0, 60.0], ids=["for a while", "all the time"])
def test_a_shuffle_of_values_ends_while_a_worker_is_killed_each_second(
    kills_until: float,
) -> None:
    for seed in range(15):
        # Without crashes, two seconds would suffice.
        _read_while_workers_are_killed(seed, kills_until, 60.0)


@pytest.mark.parametrize(("cycle_length", "shuffle_buffer"), [(1, 30), (30, 1), (3, 1)])
def test_a_save_that_must_fail_fails_soon_with_buffering_steps(
    cycle_length: int, shuffle_buffer: int
) -> None:
    plan = Plan(
        size=400,
        cycle_length=cycle_length,
        shuffle_buffer=shuffle_buffer,
        filters=True,
        cost=0.01,
        poison=frozenset({80}),
    )
    for seed in range(5):
        scenario = dataclasses.replace(
            DistributedSave.scenario_of(seed), plan=plan, kind_name="kills", workers=2
        )
        cluster = DistributedSave(scenario)

        def restart_workers(cluster: DistributedSave = cluster) -> None:
            for worker in cluster.workers:
                worker.start_in(0.0)
            cluster.simulation.call_later(0.5, restart_workers)

        cluster.run_for(60.0, restart_workers)
        (save,) = cluster.dispatcher.state.saves.values()
        assert "abandoned, because" in save.error


def test_a_worker_that_dies_after_its_last_files_duplicates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = WorkerProcess._reply_received

    def die_when_files_count(self: WorkerProcess, ticket: int, answer: object, why: object) -> None:
        was_file_report = isinstance(self._pending_calls.get(ticket), CommitFiles)
        original(self, ticket, answer, why)
        now, rng = self.simulation.now, self.simulation.random
        if was_file_report and self.is_up and now < 20.0 and rng.random() < 0.3:
            self.crash("is killed")
            self.start_in(0.3)

    monkeypatch.setattr(WorkerProcess, "_reply_received", die_when_files_count)
    for seed in range(40):
        rng = random.Random(seed)
        plan = Plan(
            size=60,
            max_split_elements=rng.choice((1, 3)),
            cycle_length=rng.choice((1, 3)),
            shuffle_buffer=rng.choice((1, 30)),
            batch_size=rng.choice((1, 7)),
            filters=True,
        )
        scenario = dataclasses.replace(
            DistributedSave.scenario_of(seed), plan=plan, kind_name="kills", fault_seconds=0.0
        )
        DistributedSave(scenario).run()
