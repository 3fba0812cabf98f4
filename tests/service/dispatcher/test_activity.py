"""What workers and clients say of their work adds up, and is forgotten with what it is about."""

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
    """A job of 100 units that client "c" reads from worker "w", in task 4000."""
    scene.register(positions=100)
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, job_name="training")
    return scene


def work(scene, worker_id, *activity):
    tasks = tuple(each.task_id for each in activity)
    scene.ask(WorkerHeartbeat(worker_id=worker_id, tasks=tasks, activity=activity))


def made(task_id, elements, **fields):
    return TaskActivity(task_id=task_id, elements=elements, bytes=elements * 8, **fields)


def status(scene):
    return scene.ask(GetStatus())


def passed(scene):
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
def test_a_sum_grows_by_what_can_be_and_by_nothing_else(after, before, growth):
    found = increase(after, before)
    assert (found, type(found)) == (growth, type(growth))


def test_what_a_worker_made_shows_at_its_task_worker_pass_and_job(reading):
    reading.now += 1.0
    work(reading, "w", made(4000, 100, buffered_batches=2, buffered_bytes=64))
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


def test_a_report_that_comes_twice_counts_once(reading):
    for _ in range(3):
        work(reading, "w", made(4000, 100, buffered_batches=2, buffered_bytes=64))
    (worker,) = status(reading).workers
    assert (worker.elements, worker.buffered_batches) == (100, 2)


def test_what_nobody_reported_again_still_counts_and_its_rate_falls(reading):
    work(reading, "w", made(4000, 100))
    reading.now += 1.0
    before = passed(reading).elements_per_second
    reading.beat("w", 4000)
    reading.now += 20.0
    reading.beat("w", 4000)
    found = passed(reading)
    assert found.elements == 100
    assert found.elements_per_second < before / 10


def test_steps_of_all_tasks_add_up_and_the_longest_comes_first(reading):
    reading.add_worker("v")
    for worker_id, task_id in (("w", 4000), ("v", 4001)):
        stages = (
            StepSeconds(step="gather", seconds=1.0),
            StepSeconds(step="map at train.py:3", seconds=4.0),
        )
        work(reading, worker_id, made(task_id, 1, steps=stages))
    stages = passed(reading).steps
    assert [(each.step, each.seconds) for each in stages] == [
        ("map at train.py:3", 8.0),
        ("gather", 2.0),
    ]


def test_a_client_s_wait_shows_as_seconds_and_as_a_part_of_the_time(reading):
    for step in range(1, 11):
        reading.now += 1.0
        reading.ask(
            ClientHeartbeat(
                client_id="c", elements=10 * step, wait_seconds=0.5 * step, buffered_batches=3
            )
        )
    found = passed(reading)
    (client,) = found.clients
    assert (client.elements, client.wait_seconds, client.buffered_batches) == (100, 5.0, 3)
    assert client.wait_ratio == pytest.approx(0.5, abs=0.1)
    assert client.elements_per_second == pytest.approx(10.0, rel=0.2)
    assert found.wait_seconds == status(reading).jobs[0].wait_seconds == 5.0


def test_units_in_hand_and_left_add_up_to_all_and_give_progress_and_time_left(reading):
    reading.split(4000, max_splits=20)
    reading.now += 10.0
    reading.deal(4000, max_splits=20, num_done=20)
    found = passed(reading)
    assert found.num_splits == 100
    assert found.splits_in_progress + found.splits_unassigned + 20 == 100
    assert found.splits_assigned == 20 + found.splits_in_progress
    assert found.progress == pytest.approx(0.2)
    assert found.remaining_seconds == pytest.approx(40.0)


def test_a_copy_s_progress_is_that_of_its_elements(scene):
    scene.register(positions=None)
    scene.add_worker("w")
    scene.open("c", processing_mode=OFF)
    scene.now += 5.0
    work(scene, "w", made(4000, 25))
    found = passed(scene)
    assert found.num_splits is None
    assert found.progress == pytest.approx(0.25)
    assert found.remaining_seconds == pytest.approx(15.0)


def test_a_task_that_stands_still_for_clients_says_so_for_as_long_as_it_does(reading):
    work(reading, "w", made(4000, 9, waiting_for="clients", client_wait_seconds=0.2))
    reading.now += 5.0
    (task,) = passed(reading).tasks
    assert (task.waiting_for, task.client_wait_ratio, task.split_wait_ratio) == ("clients", 1, 0)


def test_lost_workers_are_counted_and_the_last_are_named(reading):
    work(reading, "w", made(4000, 9))
    reading.lose("w")
    found = status(reading)
    assert found.workers_lost == 1
    (lost,) = found.recently_lost_workers
    assert lost.address == "w:1"
    assert "not heard of" in lost.reason
    assert not found.workers


def test_a_worker_that_leaves_is_not_lost(reading):
    reading.left("w")
    assert status(reading).workers_lost == 0


def test_a_report_of_somebody_unknown_changes_nothing(reading):
    work(reading, "w", made(4711, 50))
    reading.add_worker("v")
    work(reading, "v", made(4000, 50))
    assert passed(reading).elements == 0


def test_what_is_forgotten_is_forgotten_here_but_what_its_job_has_done_stays(reading):
    work(reading, "w", made(4000, 100, buffered_batches=1, buffered_bytes=8))
    reading.split(4000, max_splits=100)
    reading.finish("w", 4000)
    reading.heartbeat("c")
    reading.close("c")
    reading.tick(reading.limits.gc_timeout + 30)
    activity = reading.dispatcher.soft_state.activity
    assert not activity.tasks.keys() - reading.state.tasks.keys()
    assert activity.iterations.keys() == reading.state.iterations.keys()
    assert not activity.clients


def test_after_a_restart_counting_begins_again(reading):
    work(reading, "w", made(4000, 100))
    reading.restart()
    reading.now += 1.0
    found = status(reading)
    assert passed(reading).elements == 0
    assert found.uptime_seconds == 1.0


def test_rates_after_a_restart_are_of_what_was_done_since(reading):
    def report(elements, seconds):
        stages = (StepSeconds(step="map", seconds=seconds),)
        work(reading, "w", made(4000, elements, steps=stages))
        reading.ask(ClientHeartbeat(client_id="c", elements=elements, wait_seconds=seconds))

    report(5000, 300.0)
    reading.restart()
    reading.now += 1.0
    report(5000, 300.0)
    found = passed(reading)
    assert (found.elements, found.elements_per_second) == (5000, 0.0)
    assert [stage.busy_threads for stage in found.steps] == [0.0]
    reading.now += 1.0
    report(5014, 302.0)
    found = passed(reading)
    assert found.elements == 5014
    assert 0.0 < found.elements_per_second < 16.0
    assert 0.0 < found.steps[0].busy_threads < 2.5
    (client,) = found.clients
    assert 0.0 < client.elements_per_second < 16.0


def test_a_status_can_be_written_as_json_and_read_again(reading):
    work(reading, "w", made(4000, 100, steps=(StepSeconds(step="map", seconds=1.0),)))
    found = status(reading)
    written = msgspec.json.encode(found)
    assert msgspec.json.decode(written, type=messages.DispatcherStatus) == found
