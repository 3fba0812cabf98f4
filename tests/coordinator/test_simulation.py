"""Whatever goes wrong, closures end, once; retried ones write once; staleness keeps its bound."""

from __future__ import annotations

import random

import pytest

from headrace.coordinator.closure import Closure
from headrace.errors import CancelledError
from tests.coordinator.simulation import Cluster, Plan


def _plan(chance: random.Random, *, may_fail: bool = False) -> Plan:
    return Plan(
        writes=[chance.choice("abc") for _ in range(chance.randrange(5))],
        fails=may_fail and chance.random() < 0.05,
        is_large=chance.random() < 0.1,
        draws=chance.random() < 0.3,
        steps=chance.random() < 0.9,
    )


def _run(seed: int, count: int, **options: object) -> Cluster:
    """Schedule closures in a storm, and wait until all are over."""
    chance = random.Random(seed)
    options.setdefault("settle_within", (0.0, 0.1, 1.0)[seed % 3])
    cluster = Cluster(seed, **options)  # type: ignore[arg-type]
    cluster.storm(until=20.0, mean=chance.choice([0.2, 1.0, 5.0]))
    closures = []
    for _ in range(count):
        inputs = (
            tuple({chance.choice(closures).result}) if closures and chance.random() < 0.2 else ()
        )
        closures.append(cluster.schedule(_plan(chance), inputs))
        if chance.random() < 0.5:
            cluster.turn()
            until = cluster.world.now + chance.expovariate(20)
            cluster.world.run_until(lambda: False, until)
    cluster.queue.end_round()
    cluster.turn()
    assert cluster.run_until_drained(400.0), "it does not drain"
    return cluster


def _check_promises(cluster: Cluster, threads: int = 1) -> None:
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
        counts: dict[str, int] = {}
        for variable in plan.writes:
            owed[number, variable, counts.get(variable, 0)] = 1
            counts[variable] = counts.get(variable, 0) + 1
    assert cluster.store.applied == owed
    # Where closures run side by side, the place of the slowest counts.
    for elements in drawn.values() if threads == 1 else ():
        assert len(set(elements)) == len(elements), "an element came twice"


@pytest.mark.catalogue("2.8.15")
@pytest.mark.parametrize("threads", [1, 2])
def test_in_a_storm_all_closures_end_and_each_write_is_applied_once(threads: int) -> None:
    for seed in range(60):
        print("seed", seed)
        _check_promises(_run(seed, 60, threads=threads), threads)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_in_a_storm_staleness_keeps_its_bound(staleness: int) -> None:
    for seed in range(25):
        print("seed", seed)
        cluster = _run(1000 + seed, 30, staleness=staleness)
        _check_promises(cluster)
        assert cluster.worst_gap <= staleness


@pytest.mark.parametrize("round_size", [1, 2, 5])
def test_in_a_storm_rounds_are_of_closures_in_a_row_and_pushed_once(round_size: int) -> None:
    for seed in range(20):
        print("seed", seed)
        cluster = _run(2000 + seed, 33, round_size=round_size)
        _check_promises(cluster)
        rounds = [
            range(1 + start, 1 + min(start + round_size, 33)) for start in range(0, 33, round_size)
        ]
        wanted = [
            tuple(number for number in each if cluster.plans[number].steps) for each in rounds
        ]
        assert cluster.store.rounds == [each for each in wanted if each]
        assert cluster.store.found == [{place} for place in range(len(cluster.store.rounds))]


@pytest.mark.parametrize("round_size", [None, 3])
def test_in_a_storm_replicas_lose_no_write_and_double_none(round_size: int | None) -> None:
    losses = mistakes = 0
    for seed in range(20):
        print("seed", seed)
        cluster = _run(3000 + seed, 40, round_size=round_size, replicas=True)
        _check_promises(cluster)
        if round_size is not None:
            numbers = [number for each in cluster.store.rounds for number in each]
            assert numbers == [number for number in range(1, 41) if cluster.plans[number].steps]
        losses += cluster.servers.losses
        mistakes += cluster.servers.mistakes
    assert losses > 20
    assert mistakes > 20


@pytest.mark.catalogue("3.1.35")
def test_in_a_storm_errors_and_cancellations_leave_a_queue_that_can_be_used_again() -> None:
    for seed in range(40):
        print("seed", seed)
        staleness, round_size = random.Random(seed).choice([(None, None), (2, None), (None, 3)])
        cluster = Cluster(
            seed, staleness=staleness, round_size=round_size, settle_within=(0.0, 0.1)[seed % 2]
        )
        chance = random.Random(seed)
        cluster.storm(until=15.0, mean=chance.choice([0.3, 2.0]))
        num_raised = 0
        for _ in range(4):
            closures: list[Closure] = []
            while len(closures) < 25 and cluster.queue.failure is None:
                closure = cluster.schedule(_plan(chance, may_fail=True))
                closure.timeout = chance.choice([None, None, None, 2.0])
                closures.append(closure)
                if chance.random() < 0.1:
                    cluster.queue.cancel(chance.choice(closures), cluster.world.now)
                if chance.random() < 0.02:
                    cluster.add_worker(1)
                contacts = cluster.core.contacts
                staying = [worker for worker, each in contacts.items() if not each.is_leaving]
                if chance.random() < 0.02 and len(staying) > 1:
                    cluster.core.remove_worker(chance.choice(staying))
                cluster.turn()
                until = cluster.world.now + chance.expovariate(20)
                cluster.world.run_until(lambda: False, until)
            cluster.queue.end_round()
            cluster.turn()
            end = cluster.world.now + 200.0
            assert cluster.run_until_drained(end), "no end"
            failure = cluster.queue.take_failure()
            num_raised += failure is not None
            failed = [each.result.error for each in closures if each.result.error is not None]
            assert (failure is None) == all(isinstance(error, CancelledError) for error in failed)
        assert all(count == 1 for count in cluster.told.values())
        assert set(cluster.told) == set(cluster.plans)
        assert set(cluster.store.applied.values()) <= {1}
        in_rounds = [number for each in cluster.store.rounds for number in each]
        assert in_rounds == sorted(set(in_rounds))
        returned = [n for n, result in cluster.results.items() if result.error is None]
        owed = [n for n in returned if round_size is not None and cluster.plans[n].steps]
        assert in_rounds == owed
