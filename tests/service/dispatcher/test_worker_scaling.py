"""The scaling policy on single loads, and properties that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.service.dispatcher.worker_scaling import (
    JobLoad,
    ScalingPolicy,
    ScalingState,
    ServiceLoad,
)

POLICY = ScalingPolicy()
LONG = int(3 * POLICY.stable_seconds)


def _job(busy: float, wait: float = 0.0, **fields: int) -> JobLoad:
    default = JobLoad(
        iteration_id=1,
        elements_per_second=100.0 * busy,
        client_wait_ratio=wait,
        busy_workers=busy,
        ready_batches=100,
        num_clients=4,
    )
    return replace(default, **fields)


def _decide(
    loads: Iterable[tuple[int, tuple[JobLoad, ...]]], state: ScalingState, now: float = 0.0
) -> tuple[list[int], ScalingState]:
    """Evaluate one load per second: the number of workers, and the jobs."""
    wanted = []
    for n, (num_workers, jobs) in enumerate(loads):
        value, state = POLICY.decide(ServiceLoad(now + n, num_workers, jobs), state)
        wanted.append(value)
    return wanted, state


def test_no_worker_is_wanted_without_jobs():
    wanted, _ = _decide([(0, ()), (5, ())] * 50, ScalingState())
    assert set(wanted) == {0}


def test_first_job_gets_a_worker_at_once():
    wanted, _ = _decide([(0, (_job(0.0, 1.0),))] * LONG, ScalingState())
    assert set(wanted) == {1}


def test_workers_are_wanted_in_proportion_to_the_time_clients_compute():
    # 4 busy workers, and clients that wait 60 % of the time, need 10 workers.
    wanted, _ = _decide([(4, (_job(4.0, 0.6),))] * LONG, ScalingState())
    assert wanted[-1] == 11
    assert wanted == sorted(wanted)


def test_nothing_changes_while_a_higher_utilization_causes_no_wait():
    wanted, state = _decide([(10, (_job(9.8),))] * LONG, ScalingState())
    assert set(wanted) == {10}
    # Workers are added before clients wait, if nothing is ready.
    wanted, _ = _decide([(10, (_job(9.8, ready_batches=0),))], state, now=LONG)
    assert wanted == [11]


def test_idle_workers_are_removed_by_half_after_a_stable_period():
    wanted, _ = _decide([(16, (_job(1.5),))] * (2 * LONG), ScalingState())
    assert list(dict.fromkeys(wanted)) == [16, 8, 4, 2]
    assert wanted.count(16) >= POLICY.stable_seconds
    assert wanted.count(8) == wanted.count(4) == POLICY.removal_seconds


def test_declining_need_removes_workers_rarely():
    # 30 to 5 workers within two minutes.
    loads = [(30, (_job(30.0 - 25.0 * min(1.0, n / 120)),)) for n in range(3 * LONG)]
    wanted, _ = _decide(loads, ScalingState())
    assert wanted == sorted(wanted, reverse=True)
    assert wanted[-1] == 6
    assert len(set(wanted)) <= 2 + 120 / POLICY.removal_seconds


@pytest.mark.parametrize("pause", [5, 20, int(POLICY.stable_seconds) - 5])
def test_pause_of_the_consumers_removes_no_worker(pause):
    busy, state = _decide([(10, (_job(9.0),))] * LONG, ScalingState())
    paused, state = _decide([(10, (_job(0.0),))] * pause, state, now=LONG)
    between_epochs, state = _decide([(10, ())] * 3, state, now=LONG + pause)
    assert set(busy + paused + between_epochs) == {10}


def test_all_workers_are_released_when_no_job_came_for_a_stable_period():
    _, state = _decide([(10, (_job(9.0),))] * LONG, ScalingState())
    wanted, _ = _decide([(10, ())] * LONG, state, now=LONG)
    assert set(wanted) == {10, 0}
    assert wanted[-1] == 0
    assert wanted.count(10) <= POLICY.stable_seconds + 1


def test_finished_iteration_needs_no_worker():
    wanted, _ = _decide([(0, (_job(0.0, 1.0, remaining_splits=0),))] * LONG, ScalingState())
    assert set(wanted) == {0}


def test_restarted_dispatcher_keeps_the_workers_that_return():
    loads = [(min(n, 12), (_job(min(n, 12) * 0.9),)) for n in range(LONG)]
    wanted, _ = _decide(loads, ScalingState())
    assert all(value >= workers for value, (workers, _) in zip(wanted[:40], loads, strict=False))


def test_wait_before_a_worker_was_added_does_not_count():
    # The mean over the last seconds still has the wait for the first worker.
    decays = [2.718281828 ** (-n / 5.0) for n in range(20)]
    _, state = _decide([(0, (_job(0.0, 1.0),))] * 10, ScalingState())
    wanted, _ = _decide([(1, (_job(0.8, wait),)) for wait in decays], state, now=10)
    assert set(wanted) == {1}


def test_workers_that_do_not_help_are_not_added():
    # Clients wait although workers wait for them: the connection between them is the bottleneck.
    wanted, _ = _decide([(10, (_job(2.0, 0.7),))] * LONG, ScalingState())
    assert wanted[-1] < 10


def test_jobs_that_share_busy_workers_are_not_counted_twice():
    jobs = (_job(10.0), _job(10.0, iteration_id=2))
    wanted, _ = _decide([(10, jobs)] * LONG, ScalingState())
    assert max(wanted) <= 11


LOADS = st.builds(
    _job,
    busy=st.floats(0.0, 40.0),
    wait=st.floats(0.0, 1.0),
    iteration_id=st.integers(1, 3),
    ready_batches=st.integers(0, 50),
    num_clients=st.integers(1, 8),
    remaining_splits=st.none() | st.integers(0, 50),
)
JOBS = st.lists(LOADS, max_size=3, unique_by=lambda job: job.iteration_id).map(tuple)
HISTORIES = st.lists(st.tuples(st.integers(0, 40), JOBS), max_size=30)


@given(HISTORIES, st.integers(1, 40), JOBS)
def test_growth_is_bounded(history, num_workers, jobs):
    _, state = _decide(history, ScalingState())
    (wanted,), _ = _decide([(num_workers, jobs)], state, now=len(history))
    busy = sum(job.busy_workers for job in jobs)
    bound = POLICY.max_growth * busy / POLICY.target_utilization + 1
    assert 0 <= wanted <= max(state.wanted, num_workers, bound)


@given(HISTORIES, st.integers(1, 40), LOADS, st.floats(0.0, 1.0))
def test_more_wait_never_wants_fewer_workers(history, num_workers, job, wait):
    _, state = _decide(history, ScalingState())
    more = replace(job, client_wait_ratio=max(wait, job.client_wait_ratio))
    (low,), _ = _decide([(num_workers, (job,))], state, now=len(history))
    (high,), _ = _decide([(num_workers, (more,))], state, now=len(history))
    assert low <= high


@given(HISTORIES, st.integers(1, 40), LOADS, st.floats(0.0, 40.0))
def test_busier_workers_never_want_fewer_workers(history, num_workers, job, busy):
    _, state = _decide(history, ScalingState())
    more = replace(job, busy_workers=max(busy, job.busy_workers))
    (low,), _ = _decide([(num_workers, (job,))], state, now=len(history))
    (high,), _ = _decide([(num_workers, (more,))], state, now=len(history))
    assert low <= high


@given(HISTORIES, st.integers(1, 20))
def test_no_more_workers_are_added_than_splits_remain(history, splits):
    state = ScalingState()
    for now, (_, jobs) in enumerate(history):
        limited = tuple(replace(job, remaining_splits=splits) for job in jobs)
        before = state.wanted
        wanted, state = POLICY.decide(ServiceLoad(float(now), before, limited), state)
        assert wanted <= max(before, splits * len(limited))


@pytest.mark.parametrize("busy", [0.7, 4.0, 9.5, 38.0])
@pytest.mark.parametrize("seed", range(3))
def test_noise_rarely_changes_the_workers_of_a_constant_load(busy, seed):
    random = Random(seed)
    workers = int(busy / POLICY.target_utilization) + 1
    loads = [(workers, (_job(busy * random.uniform(0.97, 1.03)),)) for _ in range(600)]
    wanted, _ = _decide(loads, ScalingState())
    assert max(wanted) - min(wanted) <= 1 + 0.05 * workers
    assert sum(a != b for a, b in pairwise(wanted)) <= 12
