"""Counters of the activity that workers and clients report."""

from __future__ import annotations

import msgspec
import pytest

from headrace.service import messages
from headrace.service.dispatcher.activity import increase
from headrace.service.messages import (
    ClientHeartbeat,
    GetStatus,
    StepSeconds,
    TaskActivity,
    WorkerHeartbeat,
)

from .scenario import DYNAMIC, OFF


@pytest.fixture
def reading(scene):
    """A job of 100 splits that client "c" reads from task 4000 on worker "w"."""
    scene.register(num_splits=100)
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, job_name="training")
    return scene


def report_activity(scene, worker_id, *activities):
    tasks = tuple(each.task_id for each in activities)
    scene.ask(WorkerHeartbeat(worker_id=worker_id, tasks=tasks, activity=activities))


def task_activity(task_id, elements, **fields):
    return TaskActivity(task_id=task_id, elements=elements, bytes=elements * 8, **fields)


def status(scene):
    return scene.ask(GetStatus())


def iteration_status(scene):
    (job,) = status(scene).jobs
    (found,) = job.iterations
    return found


@pytest.mark.parametrize(
    ("after", "before", "growth"),
    [
        (5, 3, 2),
        (3, 5, 0),
        (1.5, 1.0, 0.5),
        (1.0, 1.5, 0.0),
        (1 << 63, 0, 0),
        (float("nan"), 0.0, 0.0),
        (float("inf"), 0.0, 0.0),
    ],
)
def test_increase_ignores_impossible_values(after, before, growth):
    found = increase(after, before)
    assert (found, type(found)) == (growth, type(growth))


def test_worker_activity_counts_for_task_worker_iteration_and_job(reading):
    reading.now += 1.0
    report_activity(reading, "w", task_activity(4000, 100, buffered_batches=2, buffered_bytes=64))
    found = status(reading)
    (worker,), (job,) = found.workers, found.jobs
    (iteration,) = job.iterations
    (task,) = iteration.tasks
    for each in (worker, job, iteration):
        assert (each.elements, each.bytes) == (100, 800)
    assert (task.elements, task.buffered_batches, task.buffered_bytes) == (100, 2, 64)
    assert (worker.buffered_batches, worker.buffered_bytes) == (2, 64)
    assert worker.elements_per_second > 0
    assert iteration.bytes_per_second == pytest.approx(8 * iteration.elements_per_second)


def test_repeated_report_counts_once(reading):
    for _ in range(3):
        report_activity(
            reading, "w", task_activity(4000, 100, buffered_batches=2, buffered_bytes=64)
        )
    (worker,) = status(reading).workers
    assert (worker.elements, worker.buffered_batches) == (100, 2)


def test_rate_falls_without_new_reports_and_total_stays(reading):
    report_activity(reading, "w", task_activity(4000, 100))
    reading.now += 1.0
    before = iteration_status(reading).elements_per_second
    reading.worker_heartbeat("w", 4000)
    reading.now += 20.0
    reading.worker_heartbeat("w", 4000)
    found = iteration_status(reading)
    assert found.elements == 100
    assert found.elements_per_second < before / 10


def test_step_times_of_tasks_are_summed_and_sorted(reading):
    reading.add_worker("v")
    for worker_id, task_id in (("w", 4000), ("v", 4001)):
        steps = (
            StepSeconds(step="gather", seconds=1.0),
            StepSeconds(step="map at train.py:3", seconds=4.0),
        )
        report_activity(reading, worker_id, task_activity(task_id, 1, steps=steps))
    steps = iteration_status(reading).steps
    assert [(each.step, each.seconds) for each in steps] == [
        ("map at train.py:3", 8.0),
        ("gather", 2.0),
    ]


def test_client_wait_is_reported_in_seconds_and_as_ratio(reading):
    for step in range(1, 11):
        reading.now += 1.0
        reading.ask(
            ClientHeartbeat(
                client_id="c", elements=10 * step, wait_seconds=0.5 * step, buffered_batches=3
            )
        )
    found = iteration_status(reading)
    (client,) = found.clients
    assert (client.elements, client.wait_seconds, client.buffered_batches) == (100, 5.0, 3)
    assert client.wait_ratio == pytest.approx(0.5, abs=0.1)
    assert client.elements_per_second == pytest.approx(10.0, rel=0.2)
    assert found.wait_seconds == status(reading).jobs[0].wait_seconds == 5.0


def test_split_counts_add_up_and_give_progress_and_remaining_time(reading):
    reading.split(4000, max_splits=20)
    reading.now += 10.0
    reading.get_split(4000, max_splits=20, num_done=20)
    found = iteration_status(reading)
    assert found.num_splits == 100
    assert found.splits_in_progress + found.splits_unassigned + 20 == 100
    assert found.splits_assigned == 20 + found.splits_in_progress
    assert found.progress == pytest.approx(0.2)
    assert found.remaining_seconds == pytest.approx(40.0)


def test_progress_of_a_copy_follows_its_elements(scene):
    scene.register(num_splits=None)
    scene.add_worker("w")
    scene.open("c", processing_mode=OFF)
    scene.now += 5.0
    report_activity(scene, "w", task_activity(4000, 25))
    found = iteration_status(scene)
    assert found.num_splits is None
    assert found.progress == pytest.approx(0.25)
    assert found.remaining_seconds == pytest.approx(15.0)


def test_blocked_task_reports_a_wait_ratio_of_one(reading):
    report_activity(
        reading, "w", task_activity(4000, 9, waiting_for="clients", client_wait_seconds=0.2)
    )
    reading.now += 5.0
    (task,) = iteration_status(reading).tasks
    assert (task.waiting_for, task.client_wait_ratio, task.split_wait_ratio) == ("clients", 1, 0)


def test_lost_workers_are_counted_and_listed(reading):
    report_activity(reading, "w", task_activity(4000, 9))
    reading.lose("w")
    found = status(reading)
    assert found.workers_lost == 1
    (lost,) = found.recently_lost_workers
    assert lost.address == "w:1"
    assert "no heartbeat for" in lost.reason
    assert not found.workers


def test_departed_worker_is_not_counted_as_lost(reading):
    reading.unregister_worker("w")
    assert status(reading).workers_lost == 0


def test_report_on_an_unknown_task_changes_nothing(reading):
    report_activity(reading, "w", task_activity(4711, 50))
    reading.add_worker("v")
    report_activity(reading, "v", task_activity(4000, 50))
    assert iteration_status(reading).elements == 0


def test_counters_of_removed_records_are_removed(reading):
    report_activity(reading, "w", task_activity(4000, 100, buffered_batches=1, buffered_bytes=8))
    reading.split(4000, max_splits=100)
    reading.finish("w", 4000)
    reading.heartbeat("c")
    reading.close("c")
    reading.tick(reading.limits.gc_timeout + 30)
    activity = reading.dispatcher.soft_state.activity
    assert not activity.tasks.keys() - reading.state.tasks.keys()
    assert activity.iterations.keys() == reading.state.iterations.keys()
    assert not activity.clients


def test_counters_start_at_zero_after_a_restart(reading):
    report_activity(reading, "w", task_activity(4000, 100))
    reading.restart()
    reading.now += 1.0
    found = status(reading)
    assert iteration_status(reading).elements == 0
    assert found.uptime_seconds == 1.0


def test_rates_after_a_restart_ignore_earlier_work(reading):
    def report(elements, seconds):
        steps = (StepSeconds(step="map", seconds=seconds),)
        report_activity(reading, "w", task_activity(4000, elements, steps=steps))
        reading.ask(ClientHeartbeat(client_id="c", elements=elements, wait_seconds=seconds))

    report(5000, 300.0)
    reading.restart()
    reading.now += 1.0
    report(5000, 300.0)
    found = iteration_status(reading)
    assert (found.elements, found.elements_per_second) == (5000, 0.0)
    assert [step.busy_threads for step in found.steps] == [0.0]
    reading.now += 1.0
    report(5014, 302.0)
    found = iteration_status(reading)
    assert found.elements == 5014
    assert 0.0 < found.elements_per_second < 16.0
    assert 0.0 < found.steps[0].busy_threads < 2.5
    (client,) = found.clients
    assert 0.0 < client.elements_per_second < 16.0


def test_status_round_trips_through_json(reading):
    report_activity(
        reading, "w", task_activity(4000, 100, steps=(StepSeconds(step="map", seconds=1.0),))
    )
    found = status(reading)
    written = msgspec.json.encode(found)
    assert msgspec.json.decode(written, type=messages.DispatcherStatus) == found


def test_processor_use_of_a_worker_is_in_its_status(reading):
    def beat(cpu_seconds):
        reading.ask(
            WorkerHeartbeat(
                worker_id="w",
                tasks=(),
                cores=4.0,
                cpu_seconds=cpu_seconds,
                machine_cpu_seconds=3 * cpu_seconds,
            )
        )

    beat(100.0)
    (worker,) = status(reading).workers
    # The time before the first report says nothing about the present.
    assert (worker.cores, worker.cpu_seconds, worker.busy_cores) == (4.0, 100.0, 0.0)
    reading.now += 1.0
    beat(100.5)
    (worker,) = status(reading).workers
    assert (worker.cpu_seconds, worker.machine_cpu_seconds) == (100.5, 301.5)
    assert worker.busy_cores > 0


def test_a_worker_without_processor_use_has_none_in_its_status(reading):
    reading.ask(WorkerHeartbeat(worker_id="w", tasks=()))
    (worker,) = status(reading).workers
    assert (worker.cores, worker.cpu_seconds) == (0.0, 0.0)


def test_positions_and_threads_of_steps_and_ages_of_reports_are_in_the_status(reading):
    step = StepSeconds(step="map at train.py:1", seconds=2.0, position=1, threads=4)
    report_activity(reading, "w", task_activity(4000, 10, steps=(step,), client_wait_seconds=0.5))
    reading.now += 2.0
    found = iteration_status(reading)
    assert [(each.position, each.threads) for each in found.steps] == [(1, 4)]
    (task,) = found.tasks
    assert (task.client_wait_seconds, task.seconds_since_report) == (0.5, 2.0)
    (client,) = found.clients
    assert client.seconds_since_report is None  # it has not reported yet
