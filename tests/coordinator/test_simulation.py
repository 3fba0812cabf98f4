"""Simulation with faults: closures end once, writes are applied once, staleness is bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.coordinator.closure import Closure
from headrace.errors import CancelledError
from tests.coordinator.replicated_store import TwoServers
from tests.coordinator.simulation import Cluster, Plan


def _plan(chance: random.Random, *, may_fail: bool = False) -> Plan:
    return Plan(
        writes=[chance.choice("abc") for _ in range(chance.randrange(5))],
        fails=may_fail and chance.random() < 0.05,
        is_large=chance.random() < 0.1,
        draws=chance.random() < 0.3,
        steps=chance.random() < 0.9,
    )


@contextmanager
def _drained(seed: int, count: int, **options: Any) -> Iterator[Cluster]:
    """Yield a cluster whose closures were scheduled under faults, and have all ended."""
    chance = random.Random(seed)
    options.setdefault("key_cleanup_delay", (0.0, 0.1, 1.0)[seed % 3])
    cluster = Cluster(seed, **options)
    with cluster.simulation.report():
        cluster.inject_faults(until=20.0, mean_seconds=chance.choice([0.2, 1.0, 5.0]))
        closures: list[Closure] = []
        for _ in range(count):
            has_input = closures and chance.random() < 0.2
            inputs = (chance.choice(closures).result,) if has_input else ()
            closures.append(cluster.schedule(_plan(chance), inputs))
            if chance.random() < 0.5:
                cluster.run_for(chance.expovariate(20))
        cluster.drain(400.0)
        yield cluster


def _check_invariants(cluster: Cluster, threads: int = 1) -> None:
    assert cluster.queue.failure is None
    assert all(count == 1 for count in cluster.told.values())
    assert set(cluster.told) == set(cluster.plans)
    owed = {}
    drawn: dict[bytes, list[bytes]] = {}
    for number, plan in cluster.plans.items():
        payload = cluster.results[number].payload
        assert payload is not None
        returned, *of_worker = payload.data.split(b":")
        assert returned == b"%d" % number
        if plan.draws:
            drawn.setdefault(of_worker[0], []).append(of_worker[1])
        owed |= {(number, *each): 1 for each in plan.numbered_writes()}
    assert cluster.store.applied == owed
    # With concurrent closures, the position of the slowest counts.
    for elements in drawn.values() if threads == 1 else ():
        assert len(set(elements)) == len(elements), "an element was duplicated"


@pytest.mark.catalogue("2.8.15")
@pytest.mark.parametrize("threads", [1, 2])
def test_under_faults_all_closures_end_and_each_write_is_applied_once(threads: int) -> None:
    for seed in range(60):
        with _drained(seed, 60, threads=threads) as cluster:
            _check_invariants(cluster, threads)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_under_faults_staleness_keeps_its_bound(staleness: int) -> None:
    for seed in range(1000, 1025):
        with _drained(seed, 30, staleness=staleness) as cluster:
            _check_invariants(cluster)
            assert cluster.worst_gap <= staleness


@pytest.mark.parametrize("round_size", [1, 2, 5])
def test_under_faults_rounds_are_consecutive_and_pushed_once(round_size: int) -> None:
    for seed in range(2000, 2020):
        with _drained(seed, 33, round_size=round_size) as cluster:
            _check_invariants(cluster)
            numbers = range(1, 34)
            rounds = [numbers[at : at + round_size] for at in range(0, 33, round_size)]
            steps = [tuple(n for n in each if cluster.plans[n].steps) for each in rounds]
            assert cluster.store.rounds == [each for each in steps if each]
            assert cluster.store.found == [{place} for place in range(len(cluster.store.rounds))]


@pytest.mark.parametrize("round_size", [None, 3])
def test_under_faults_replicated_stores_lose_or_duplicate_no_write(round_size: int | None) -> None:
    losses = mistakes = 0
    for seed in range(3000, 3020):
        with _drained(seed, 40, round_size=round_size, replicas=True) as cluster:
            _check_invariants(cluster)
            if round_size is not None:
                steps = [number for number in range(1, 41) if cluster.plans[number].steps]
                assert [number for each in cluster.store.rounds for number in each] == steps
            assert isinstance(cluster.servers, TwoServers)
            losses += cluster.servers.losses
            mistakes += cluster.servers.mistakes
    assert losses > 20
    assert mistakes > 20


@pytest.mark.catalogue("3.1.35")
def test_under_faults_the_queue_is_usable_after_errors_and_cancellations() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        staleness, round_size = chance.choice([(None, None), (2, None), (None, 3)])
        cluster = Cluster(
            seed, staleness=staleness, round_size=round_size, key_cleanup_delay=(0.0, 0.1)[seed % 2]
        )
        with cluster.simulation.report():
            cluster.inject_faults(until=15.0, mean_seconds=chance.choice([0.3, 2.0]))
            for _ in range(4):
                _use_the_queue_until_it_fails(cluster, chance)
            assert all(count == 1 for count in cluster.told.values())
            assert set(cluster.told) == set(cluster.plans)
            assert set(cluster.store.applied.values()) <= {1}
            returned = [n for n, result in cluster.results.items() if result.error is None]
            owed = [n for n in returned if round_size is not None and cluster.plans[n].steps]
            assert [number for each in cluster.store.rounds for number in each] == owed


def _use_the_queue_until_it_fails(cluster: Cluster, chance: random.Random) -> None:
    """Schedule closures, fail or cancel some, and add and remove workers."""
    closures: list[Closure] = []
    while len(closures) < 25 and cluster.queue.failure is None:
        closure = cluster.schedule(_plan(chance, may_fail=True))
        closure.timeout = chance.choice([None, None, None, 2.0])
        closures.append(closure)
        if chance.random() < 0.1:
            cluster.queue.cancel(chance.choice(closures), cluster.simulation.now)
        if chance.random() < 0.02:
            cluster.add_worker(1)
        contacts = cluster.core.connections
        staying = [worker for worker, each in contacts.items() if not each.is_draining]
        if chance.random() < 0.02 and len(staying) > 1:
            cluster.core.remove_worker(chance.choice(staying))
        cluster.run_for(chance.expovariate(20))
    cluster.drain(200.0)
    failure = cluster.queue.take_failure()
    failed = [each.result.error for each in closures if each.result.error is not None]
    assert (failure is None) == all(isinstance(error, CancelledError) for error in failed)
