"""AUTOTUNE finds the number of threads for simulated functions, and changes no element."""

from __future__ import annotations

import heapq
import logging
import threading
import time

import pytest

import headrace as hr
from headrace.execution.thread_tuning import MAX_THREADS, MIN_THREADS, ThreadTuner, _Phase

Dataset = hr.Dataset
CORES = 2


def simulate(tuner, now, seconds, call, spare_seconds=0.0):
    """Run calls for `seconds`.

    `call(threads)` returns wall and processor time of one call, and the delay by the lock.
    """
    end = now.value + seconds
    threads = [now.value] * tuner.threads
    while now.value < end:
        heapq.heapify(threads)
        begin = heapq.heappop(threads)
        wall, cpu, delay = call(tuner.threads)
        tuner.add_lock_delay(delay)
        now.value = max(now.value, begin + wall)
        changed = tuner.observe(begin, begin + wall, cpu, 1)
        threads.append(begin + wall + spare_seconds)
        if changed:
            threads = [now.value] * tuner.threads


class Now:
    value = 0.0

    def __call__(self):
        return self.value


def waits(threads):
    return 0.002, 0.00002, 0.0


def waits_long(threads):
    return 0.5, 0.00002, 0.0


def releases_the_lock(threads):
    return 0.001 * max(1.0, threads / CORES), 0.001, 0.0001


def holds_the_lock(threads):
    return 0.001 * threads * (1.0 if threads == 1 else 1.1), 0.001, 0.005 * (threads - 1)


def waits_half_of_the_time(threads):
    return max(0.002, 0.001 * threads / CORES), 0.001, 0.0001


def waits_while_others_hold_the_lock(threads):
    return 0.02, 0.0002, 0.006


def waits_for_another_lock(threads):
    return 0.001 * threads, 0.0001, 0.0


@pytest.mark.parametrize(
    ("call", "fewest", "most"),
    [
        (waits, MAX_THREADS, MAX_THREADS),
        (waits_long, MAX_THREADS, MAX_THREADS),
        (releases_the_lock, CORES, CORES),
        (holds_the_lock, MIN_THREADS, MIN_THREADS),
        (waits_half_of_the_time, 4, 4),
        (waits_while_others_hold_the_lock, MAX_THREADS, MAX_THREADS),
        (waits_for_another_lock, MIN_THREADS, MIN_THREADS),
    ],
)
def test_number_of_threads_fits_the_function(call, fewest, most):
    now = Now()
    tuner = ThreadTuner("map", CORES, clock=now)
    simulate(tuner, now, 8.0, call)
    while tuner._phase is not _Phase.HOLDING:
        simulate(tuner, now, 0.05, call)
    assert fewest <= tuner.threads <= most


def test_functions_that_compute_use_all_cores():
    now = Now()
    tuner = ThreadTuner("map", 8, clock=now)
    simulate(tuner, now, 1.0, lambda threads: (0.001, 0.001, 0.0))
    assert tuner.threads == 8


def test_idle_threads_are_not_increased():
    now = Now()
    tuner = ThreadTuner("map", CORES, clock=now)
    simulate(tuner, now, 5.0, waits, spare_seconds=0.01)
    assert tuner.threads == MIN_THREADS


def test_threads_adapt_to_a_function_that_changes():
    now = Now()
    tuner = ThreadTuner("map", CORES, clock=now)
    simulate(tuner, now, 1.0, holds_the_lock)
    simulate(tuner, now, 60.0, waits)
    assert tuner.threads == MAX_THREADS
    simulate(tuner, now, 300.0, holds_the_lock)
    assert tuner.threads == MIN_THREADS


def test_limits_are_kept():
    now = Now()
    tuner = ThreadTuner("interleave", CORES, min_threads=2, max_threads=5, clock=now)
    simulate(tuner, now, 2.0, waits)
    assert tuner.threads == 5
    simulate(tuner, now, 300.0, holds_the_lock)
    assert tuner.threads >= 2


def test_the_first_choice_is_logged_once(caplog):
    now = Now()
    tuner = ThreadTuner("map (train.py:5)", CORES, clock=now)
    with caplog.at_level(logging.INFO, "headrace"):
        simulate(tuner, now, 20.0, waits)
    assert [record.message for record in caplog.records] == [
        "map (train.py:5): AUTOTUNE uses 16 threads"
    ]


def sleep(x):
    time.sleep(0.002)
    return x


@pytest.mark.parametrize("deterministic", [None, False])
def test_elements_do_not_depend_on_tuning(deterministic):
    dataset = Dataset.range(600).map(sleep, hr.AUTOTUNE, deterministic=deterministic)
    with dataset.iterate(stats=True) as iterator:
        found = [int(next(iterator)) for _ in range(400)]
        state = iterator.get_state()
        stats = iterator.stats()
    mapping = next(step for step in stats.steps if step.name == "map")
    assert mapping.num_parallel_calls > 1
    assert sum(thread.name == "headrace-map" for thread in threading.enumerate()) == 0
    restored = iter(Dataset.range(600).map(sleep, 3, deterministic=deterministic))
    restored.set_state(state)
    rest = [int(x) for x in restored]
    if deterministic is None:
        assert found + rest == list(range(600))
    assert sorted(found + rest) == list(range(600))


def test_interleave_uses_more_threads_for_datasets_that_wait():
    dataset = Dataset.range(16).interleave(
        lambda x: Dataset.range(40).map(sleep), cycle_length=8, num_parallel_calls=hr.AUTOTUNE
    )
    fixed = Dataset.range(16).interleave(
        lambda x: Dataset.range(40).map(sleep), cycle_length=8, num_parallel_calls=2
    )
    with iter(dataset) as iterator:
        found = []
        most = 0
        for element in iterator:
            found.append(int(element))
            names = [thread.name for thread in threading.enumerate()]
            most = max(most, names.count("headrace-interleave"))
    assert most > 2
    assert found == [int(x) for x in fixed]


def test_autotuned_interleave_reads_consumers_that_wait_for_each_other():
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:

        def consumer(index):
            distribute = hr.service.distribute(
                "parallel_epochs",
                cluster.target,
                job_name="job",
                num_consumers=4,
                consumer_index=int(index),
            )
            return Dataset.range(40).batch(2).repeat().apply(distribute)

        dataset = Dataset.range(4).interleave(
            consumer, cycle_length=4, num_parallel_calls=hr.AUTOTUNE
        )
        assert len(list(dataset.take(24))) == 24
