"""Who is alive, who is gone, and what nobody needs any more."""

from __future__ import annotations

import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Limits
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def begun(scene: Scenario, *workers: str, **opening: object) -> list[int]:
    """Register a dataset and workers, open an iteration; return its tasks."""
    scene.register()
    for worker_id in workers:
        scene.add_worker(worker_id)
    return [task.task_id for task in scene.open("c", **opening).tasks]


def test_a_silent_worker_is_lost_and_its_tasks_with_it(scene: Scenario) -> None:
    begun(scene, "v", "w")
    scene.now = 9.0
    scene.beat("w")
    assert scene.tick(0.9) == []
    assert scene.tick(0.2) == [updates.WorkerLost("v")]
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["w"]


def test_a_lost_worker_that_speaks_again_is_told_to_register(scene: Scenario) -> None:
    begun(scene, "w")
    scene.tick(11.0)
    with pytest.raises(NotFoundError, match="register again"):
        scene.beat("w", 4000)
    scene.add_worker("w anew", "w:1")
    assert scene.beat("w anew", 4000) == (4000,)


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_an_iteration_ends_when_its_last_running_task_is_lost(scene: Scenario, mode: int) -> None:
    tasks = begun(scene, "v", "w", processing_mode=mode)
    scene.finish("v", tasks[0])
    scene.now += 9.0
    scene.beat("v")
    assert scene.tick(2.0) == [updates.WorkerLost("w"), updates.IterationFinished(2000)]
    assert scene.heartbeat("c").finished


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_an_iteration_that_lost_all_tasks_before_any_end_waits(scene: Scenario, mode: int) -> None:
    begun(scene, "v", "w", processing_mode=mode)
    scene.tick(11.0)
    assert not scene.state.workers
    assert scene.heartbeat("c") == messages.ClientUpdate(tasks=(), finished=False)
    scene.add_worker("x")
    (task,) = scene.heartbeat("c").tasks
    scene.finish("x", task.task_id)
    assert scene.heartbeat("c").finished


def test_workers_lost_at_the_same_time_end_an_iteration_once(scene: Scenario) -> None:
    tasks = begun(scene, "u", "v", "w")
    scene.finish("u", tasks[0])
    facts = scene.tick(11.0)
    assert facts.count(updates.IterationFinished(2000)) == 1


def test_a_worker_that_a_client_cannot_reach_gets_less_time(scene: Scenario) -> None:
    begun(scene, "v", "w")
    scene.now = 1.0
    scene.ask(messages.ReportUnreachable(client_id="c", task_id=4000))
    assert scene.tick(0.9) == []
    assert scene.tick(0.2) == [updates.WorkerLost("v")]


def test_a_worker_that_was_silent_already_is_lost_on_the_report(scene: Scenario) -> None:
    begun(scene, "w")
    scene.now = 2.5
    scene.ask(messages.ReportUnreachable(client_id="c", task_id=4000))
    assert not scene.state.workers
    scene.ask(messages.ReportUnreachable(client_id="c", task_id=4000))


def test_a_suspect_that_speaks_is_no_suspect(scene: Scenario) -> None:
    begun(scene, "w")
    scene.ask(messages.ReportUnreachable(client_id="c", task_id=4000))
    scene.now = 1.0
    scene.beat("w")
    assert scene.tick(5.0) == []


def test_a_silent_client_leaves_and_its_own_job_goes(scene: Scenario) -> None:
    begun(scene, "w")
    for _ in range(31):
        scene.now += 10
        scene.beat("w")
        scene.tick()
    assert not scene.state.jobs
    with pytest.raises(NotFoundError, match="Unknown iteration client id"):
        scene.heartbeat("c")


def test_a_client_that_sends_heartbeats_stays(scene: Scenario) -> None:
    begun(scene, job_name="job")
    for _ in range(10):
        scene.now += 100
        scene.heartbeat("c")
        assert scene.tick() == []


def test_an_iteration_without_clients_is_collected_and_begins_afresh() -> None:
    scene = Scenario(gc_timeout=1.0)
    begun(scene, "w", job_name="job")
    scene.open("d", job_name="job")
    scene.close("c")
    assert scene.tick(2.0) == []
    scene.close("d")
    assert scene.tick(0.5) == []
    assert scene.tick(0.6) == [updates.IterationCollected(2000)]
    assert scene.beat("w", 4000) == (4000,)
    assert scene.open("c", job_name="job").iteration_id == 2001
    scene.check()


def test_a_dynamic_iteration_is_collected_only_if_asked_for() -> None:
    for gc_dynamic in (False, True):
        scene = Scenario(gc_timeout=1.0, gc_dynamic=gc_dynamic)
        begun(scene, "w", job_name="job", processing_mode=DYNAMIC)
        scene.close("c")
        scene.beat("w")
        assert bool(scene.tick(2.0)) == gc_dynamic
        scene.check()


def test_nothing_is_collected_where_that_is_switched_off() -> None:
    scene = Scenario(gc_timeout=None)
    begun(scene, job_name="job")
    scene.close("c")
    assert scene.tick(1e9) == []


def test_a_finished_iteration_is_forgotten_but_not_that_it_finished() -> None:
    scene = Scenario(gc_timeout=1.0)
    (task,) = begun(scene, "w", job_name="job")
    scene.finish("w", task)
    assert scene.tick(2.0) == []
    scene.close("c")
    assert scene.tick(2.0) == [updates.IterationForgotten(2000)]
    assert not scene.state.tasks
    opened = scene.open("d", job_name="job")
    assert (opened.iteration_id, opened.tasks, opened.finished) == (2000, (), True)
    scene.check()


def test_a_finished_task_stays_with_its_worker_while_clients_are_left(scene: Scenario) -> None:
    (task,) = begun(scene, "w", job_name="job")
    scene.finish("w", task)
    assert scene.beat("w", task) == ()
    scene.close("c")
    assert scene.beat("w", task) == (task,)


def test_after_a_restart_everyone_was_heard_from_just_now(scene: Scenario) -> None:
    begun(scene, "w", job_name="job")
    scene.now = 1000.0
    scene.restart()
    assert scene.tick(9.0) == []
    assert scene.tick(2.0) == [updates.WorkerLost("w")]


def test_limits_are_read_from_the_configuration() -> None:
    limits = Limits.of(
        DispatcherConfig(
            job_gc_check_interval_ms=50,
            job_gc_timeout_ms=-1,
            worker_timeout_ms=400,
            client_timeout_ms=0,
            gc_dynamic_sharding_jobs=True,
        )
    )
    assert limits == Limits(
        check_interval=0.05,
        gc_timeout=None,
        worker_timeout=0.4,
        client_timeout=0.001,
        heartbeat_interval=0.1,
        suspect_timeout=0.2,
        gc_dynamic=True,
    )
    assert Limits.of(DispatcherConfig()) == Limits()
