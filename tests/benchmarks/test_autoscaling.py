"""The scaling policy meets its targets in simulation, compared with a policy that knows the future.

Each case is deterministic; its seed is part of its name.
"""

from __future__ import annotations

import itertools
import math

import pytest

from benchmarks import autoscaling
from benchmarks.autoscaling_loads import LOADS, TARGET_LOADS, Load, SimulatedJob
from benchmarks.autoscaling_optimum import optimal_worker_seconds
from benchmarks.autoscaling_simulation import simulate

SEEDS = (1, 2, 3)
MAX_WAIT_RATIO = 0.02
MAX_COST = 1.3


def _run(load, seed):
    return simulate(load, autoscaling.headrace_policy(load), seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", TARGET_LOADS, ids=lambda load: load.name)
def test_policy_meets_both_targets(load, seed):
    outcome = _run(load, seed)
    assert outcome.wait_ratio < MAX_WAIT_RATIO
    assert outcome.worker_seconds <= MAX_COST * optimal_worker_seconds(load)


@pytest.mark.parametrize("load", LOADS[len(TARGET_LOADS) :], ids=lambda load: load.name)
def test_policy_limits_waits_on_other_loads(load):
    outcome = _run(load, seed=1)
    assert outcome.wait_ratio < MAX_WAIT_RATIO
    assert outcome.worker_seconds <= 1.4 * optimal_worker_seconds(load)


@pytest.mark.parametrize("need", [0.5, 2.9, 9.5, 24.0])
def test_constant_load_settles_without_oscillation(need):
    load = Load(name="constant", seconds=900.0, jobs=(SimulatedJob(demand=lambda now: need),))
    for seed in SEEDS:
        wanted = _run(load, seed).wanted
        late = [number for at, number in wanted if at > 300.0]
        assert len(late) <= 6
        assert all(need <= number <= 1.1 * need + 1.5 for number in late)
        assert wanted[-1][1] >= need


def test_pauses_shorter_than_the_stable_period_remove_at_most_the_reserve():
    load = next(load for load in LOADS if load.name == "pauses")
    assert all(number >= 8 for at, number in _run(load, seed=1).wanted if at > 60.0)


@pytest.mark.parametrize("num_splits", [1, 3, 20])
def test_last_splits_get_no_more_workers_than_splits_and_then_none(num_splits):
    job = SimulatedJob(demand=lambda now: 30.0, num_clients=16, num_splits=num_splits)
    load = Load(name="last splits", seconds=400.0, jobs=(job,))
    outcome = _run(load, seed=1)
    assert 1 <= outcome.max_workers <= num_splits
    assert outcome.wanted[-1][1] == 0


def test_consumers_that_no_worker_can_satisfy_get_bounded_growth():
    job = SimulatedJob(demand=lambda now: 1000.0, num_clients=32)
    load = Load(name="unlimited", seconds=40.0, jobs=(job,))
    for (_, before), (_, after) in itertools.pairwise(_run(load, seed=1).wanted):
        assert after <= math.ceil(4.0 * before / 0.95) + 1


def test_optimum_of_a_constant_load_is_its_workers():
    load = Load(
        name="constant",
        seconds=100.0,
        jobs=(SimulatedJob(demand=lambda now: 5.0),),
        start_seconds=(3.0, 5.0),
        drain_seconds=1.0,
    )
    # Five workers, each of which starts and drains once.
    assert optimal_worker_seconds(load, 0.0) == pytest.approx(5 * (100 + 4 + 1), rel=1e-3)
    # Waits for 2 % of the time save 2 % of the workers' time.
    assert optimal_worker_seconds(load) == pytest.approx(5 * (98 + 4 + 1), rel=1e-2)


def test_optimum_keeps_a_worker_through_a_gap_shorter_than_its_start():
    def with_gap(seconds):
        def demand(now):
            return 0.0 if 50.0 <= now < 50.0 + seconds else 1.0

        return Load(name="gap", seconds=200.0, jobs=(SimulatedJob(demand=demand),))

    cost = 6.5 + 2.0
    assert optimal_worker_seconds(with_gap(5.0), 0.0) == pytest.approx(200 + cost, rel=1e-3)
    assert optimal_worker_seconds(with_gap(100.0), 0.0) == pytest.approx(100 + 2 * cost, rel=1e-3)


def test_sufficient_fixed_workers_cause_no_wait_and_too_few_the_expected_one():
    load = Load(name="constant", seconds=600.0, jobs=(SimulatedJob(demand=lambda now: 8.0),))
    assert simulate(load, lambda service: 10, seed=1).wait_ratio < 0.001
    # Six of eight workers: a quarter of the time is a wait.
    outcome = simulate(load, lambda service: 6, seed=1)
    assert outcome.wait_ratio == pytest.approx(0.25, abs=0.03)
    assert outcome.worker_seconds == pytest.approx(6 * 599.5, rel=0.01)


def test_same_seed_gives_the_same_outcome():
    load = TARGET_LOADS[0]
    assert _run(load, seed=7) == _run(load, seed=7)
    assert _run(load, seed=7) != _run(load, seed=8)


def test_benchmark_prints_a_row_for_each_policy(capsys):
    assert autoscaling.main(["--seeds", "1", "--load", "step"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == list(autoscaling.POLICIES)
