"""Load of the service, and when the scaling policy is evaluated."""

from __future__ import annotations

import pytest

from headrace.service.dispatcher.decision import DecisionContext
from headrace.service.dispatcher.service_load import measure_load
from headrace.service.dispatcher.worker_scaling import ScalingPolicy, ServiceLoad
from headrace.service.messages import (
    WAITING_FOR_CLIENTS,
    ClientHeartbeat,
    GetStatus,
    TaskActivity,
    WorkerHeartbeat,
)
from headrace.service.modes.distributed_save.requests import ReportDirectory

from .scenario import DYNAMIC, OFF, Scenario, saving


@pytest.fixture
def reading(scene: Scenario) -> Scenario:
    """A job of 100 splits that client "c" reads from task 4000 on worker "w"."""
    scene.register(num_splits=100)
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, job_name="training")
    return scene


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[ServiceLoad]:
    """The loads that a policy was asked about, which wants seven workers."""
    loads: list[ServiceLoad] = []

    def decide(self, load, state):
        loads.append(load)
        return 7, state

    monkeypatch.setattr(ScalingPolicy, "decide", decide)
    return loads


def load_of(scene: Scenario) -> ServiceLoad:
    context = DecisionContext(scene.now, scene.dispatcher.soft_state, scene.limits)
    return measure_load(scene.state, context)


def wanted_workers(scene: Scenario) -> int:
    return scene.ask(GetStatus()).wanted_workers


def report(scene: Scenario, seconds: int, *, client_waits: float, task_waits: float) -> None:
    """Report each second that client and task waited for these fractions of the time."""
    for step in range(1, seconds + 1):
        scene.now += 1.0
        activity = TaskActivity(
            task_id=4000,
            elements=50 * step,
            bytes=400 * step,
            buffered_batches=3,
            client_wait_seconds=task_waits * step,
        )
        scene.ask(WorkerHeartbeat(worker_id="w", tasks=(4000,), activity=(activity,)))
        scene.ask(
            ClientHeartbeat(
                client_id="c",
                elements=50 * step,
                wait_seconds=client_waits * step,
                buffered_batches=2,
            )
        )


def test_the_load_of_a_job_sums_its_tasks_and_averages_its_clients(reading):
    reading.split(4000, 10)
    report(reading, 30, client_waits=0.5, task_waits=0.25)
    load = load_of(reading)
    assert (load.now, load.num_workers) == (reading.now, 1)
    (job,) = load.jobs
    (iteration_id,) = reading.state.iterations
    assert (job.iteration_id, job.num_clients, job.ready_batches) == (iteration_id, 1, 5)
    assert job.remaining_splits == 100
    assert job.client_wait_ratio == pytest.approx(0.5, abs=0.1)
    assert job.busy_workers == pytest.approx(0.75, abs=0.1)
    assert job.elements_per_second == pytest.approx(50, rel=0.15)


def test_a_client_without_reports_does_not_wait_and_halves_the_mean(reading):
    report(reading, 30, client_waits=1.0, task_waits=0.0)
    reading.open("d", processing_mode=DYNAMIC, job_name="training")
    (job,) = load_of(reading).jobs
    assert job.num_clients == 2
    assert job.client_wait_ratio == pytest.approx(0.5, abs=0.05)


def test_a_task_blocked_on_clients_is_not_busy_although_it_reports_nothing(reading):
    activity = TaskActivity(task_id=4000, elements=1, bytes=8, waiting_for=WAITING_FOR_CLIENTS)
    reading.ask(WorkerHeartbeat(worker_id="w", tasks=(4000,), activity=(activity,)))
    reading.now += 5.0
    (job,) = load_of(reading).jobs
    assert job.busy_workers == 0.0


def test_jobs_without_clients_and_draining_workers_do_not_count(reading):
    reading.add_worker("v")
    reading.drain_worker("v")
    assert load_of(reading).num_workers == 1
    reading.close("c")
    assert load_of(reading).jobs == ()


def test_without_splits_the_number_of_remaining_ones_is_unknown(scene):
    scene.register(num_splits=None)
    scene.add_worker("w")
    scene.open("c", processing_mode=OFF)
    (job,) = load_of(scene).jobs
    assert job.remaining_splits is None


def test_a_save_is_starved_unless_its_tasks_wait():
    scene = Scenario(keeps_journal=True)
    scene.register(num_splits=100)
    scene.add_worker("w")
    scene.ask(saving())
    scene.ask(ReportDirectory(save_id="0" * 16, outcome="opened"))
    (job,) = load_of(scene).jobs
    assert (job.num_clients, job.client_wait_ratio) == (0, 1.0)
    (task_id,) = scene.state.tasks
    activity = TaskActivity(task_id=task_id, elements=1, bytes=8, waiting_for=WAITING_FOR_CLIENTS)
    scene.ask(WorkerHeartbeat(worker_id="w", tasks=(task_id,), activity=(activity,)))
    scene.now += 5.0
    (job,) = load_of(scene).jobs
    assert (job.client_wait_ratio, job.busy_workers) == (0.0, 0.0)


def test_the_policy_is_evaluated_once_per_second_and_its_result_reported(reading, evaluated):
    reading.tick(10.0)
    assert 8 <= len(evaluated) <= 11
    assert wanted_workers(reading) == 7


def test_the_policy_does_not_notice_pauses_of_the_dispatcher(reading, evaluated):
    reading.tick(5.0)
    reading.pause(1000.0)
    reading.tick(5.0)
    times = [load.now for load in evaluated]
    assert times[-1] < 20.0
    assert times == sorted(times)


def test_after_a_restart_the_workers_stay_until_their_load_is_known(reading, evaluated):
    reading.add_worker("v")
    reading.restart()
    assert wanted_workers(reading) == 2
    reading.tick(3.0)
    assert not evaluated
    reading.heartbeat("c")
    activities = {"w": 4000, "v": 4001}
    for worker_id, task_id in activities.items():
        activity = TaskActivity(task_id=task_id, elements=1, bytes=8)
        reading.ask(WorkerHeartbeat(worker_id=worker_id, tasks=(task_id,), activity=(activity,)))
    reading.tick(1.0)
    assert evaluated
    assert wanted_workers(reading) == 7


def test_a_peer_that_never_reports_delays_the_policy_for_ten_seconds(reading, evaluated):
    reading.restart()
    reading.tick(9.0)
    assert not evaluated
    reading.tick(2.0)
    assert evaluated
