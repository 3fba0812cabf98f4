"""Who is alive, who is gone, and what nobody needs any more."""

from __future__ import annotations

import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.limits import Limits
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def begun(scene: Scenario, *workers: str, **opening: object) -> list[int]:
    """Register a dataset and workers, open an iteration; return its tasks."""
    scene.register()
    for worker_id in workers:
        scene.add_worker(worker_id)
    return [task.task_id for task in scene.open("c", **opening).tasks]


def test_a_silent_worker_is_lost_and_its_tasks_with_it(scene: Scenario) -> None:
    begun(scene, "v", "w")
    assert scene.tick(9.0) == []
    scene.beat("w")
    assert scene.tick(0.9) == []
    assert scene.tick(0.2) == [updates.WorkerLost("v")]
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["w"]


def test_a_lost_worker_that_speaks_again_must_register(scene: Scenario) -> None:
    begun(scene, "w")
    scene.tick(11.0)
    with pytest.raises(NotFoundError, match="register again"):
        scene.beat("w", 4000)
    scene.add_worker("w 2", "w:1")
    assert scene.beat("w 2", 4000) == (4000,)


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_an_iteration_ends_when_its_last_running_task_is_lost(scene: Scenario, mode: int) -> None:
    tasks = begun(scene, "v", "w", processing_mode=mode)
    scene.finish("v", tasks[0])
    scene.tick(9.0)
    scene.beat("v")
    assert scene.tick(2.0) == [updates.WorkerLost("w"), updates.IterationFinished(2000)]
    assert scene.heartbeat("c").finished


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_an_iteration_that_lost_all_tasks_before_any_end_waits(scene: Scenario, mode: int) -> None:
    begun(scene, "v", "w", processing_mode=mode)
    scene.tick(11.0)
    assert not scene.state.workers
    update = scene.heartbeat("c")
    assert (update.tasks, update.finished) == ((), False)
    scene.add_worker("x")
    (task,) = scene.heartbeat("c").tasks
    scene.finish("x", task.task_id)
    assert scene.heartbeat("c").finished


def test_workers_lost_at_the_same_time_end_an_iteration_once(scene: Scenario) -> None:
    tasks = begun(scene, "u", "v", "w")
    scene.finish("u", tasks[0])
    facts = scene.tick(11.0)
    assert facts.count(updates.IterationFinished(2000)) == 1


def report(task_id: int = 4000, *, refused: bool = True) -> messages.ReportUnreachable:
    return messages.ReportUnreachable(client_id="c", task_id=task_id, refused=refused)


def test_a_worker_that_refuses_connections_gets_less_time(scene: Scenario) -> None:
    begun(scene, "v", "w")
    assert scene.tick(0.5) == []
    scene.ask(report())
    assert scene.tick(0.5) == []
    assert scene.tick(0.3) == [updates.WorkerLost("v")]


def test_a_worker_that_is_only_silent_has_its_whole_timeout(scene: Scenario) -> None:
    begun(scene, "v", "w")
    scene.ask(report(refused=False))
    assert scene.tick(9.9) == []
    assert updates.WorkerLost("v") in scene.tick(0.2)


def test_a_report_alone_loses_nobody_but_the_next_look_does(scene: Scenario) -> None:
    begun(scene, "w")
    assert scene.tick(5.0) == []
    scene.ask(report())
    assert scene.state.workers
    assert scene.tick(0.1) == [updates.WorkerLost("w")]
    scene.ask(report())


def test_a_suspect_that_speaks_is_no_suspect(scene: Scenario) -> None:
    begun(scene, "w")
    scene.ask(report())
    scene.tick(0.5)
    scene.beat("w")
    assert scene.tick(5.0) == []


def test_from_a_kill_to_the_loss_is_little_more_than_a_second(scene: Scenario) -> None:
    limits = scene.limits
    assert limits.suspect_timeout + limits.tick_interval <= 1.25
    assert limits.heartbeat_interval * 2 <= limits.suspect_timeout


# --- the dispatcher's own pauses -------------------------------------------------------------


def test_a_paused_dispatcher_loses_nobody(scene: Scenario) -> None:
    begun(scene, "v", "w", job_name="job")
    assert scene.tick(9.8) == []
    for seconds in (15.0, 3600.0):
        assert scene.pause(seconds) == []
        assert scene.tick(scene.limits.tick_interval / 2) == []
        # By now everybody's words that came during the pause were heard.
        for worker_id in ("v", "w"):
            scene.beat(worker_id)
        scene.heartbeat("c")
        assert scene.tick(9.8) == []


def test_a_pause_is_not_counted_as_silence_but_what_was_silence_before_is(scene: Scenario) -> None:
    begun(scene, "v", job_name="job")
    scene.tick(6.0)
    scene.pause(100.0)
    assert scene.tick(3.5) == []
    assert scene.tick(1.0) == [updates.WorkerLost("v")]


def test_a_worker_that_died_during_a_pause_is_lost_after_its_timeout(scene: Scenario) -> None:
    begun(scene, "v", "w")
    scene.pause(100.0)
    scene.beat("w")
    assert scene.tick(9.0) == []
    scene.beat("w")
    assert scene.tick(1.5) == [updates.WorkerLost("v")]


def test_a_suspect_is_not_lost_by_a_pause(scene: Scenario) -> None:
    begun(scene, "w")
    scene.ask(report())
    assert scene.pause(30.0) == []
    scene.beat("w")
    assert scene.tick(9.0) == []


def test_a_pause_collects_no_iteration() -> None:
    scene = Scenario(gc_timeout=5.0)
    begun(scene, "w", job_name="job")
    scene.close("c")
    scene.tick(3.0)
    assert scene.pause(60.0) == []
    assert scene.tick(1.5) == []
    assert scene.tick(1.0) == [updates.IterationCollected(2000)]


def test_a_tick_that_is_a_little_late_is_no_pause(scene: Scenario) -> None:
    begun(scene, "w")
    for _ in range(21):
        scene.now += 2 * scene.limits.tick_interval
        scene.facts += scene.dispatcher.tick(scene.now)
    assert not scene.state.workers


def test_a_silent_client_leaves_and_its_own_job_goes(scene: Scenario) -> None:
    begun(scene, "w")
    for _ in range(31):
        scene.tick(9.9)
        scene.beat("w")
    assert not scene.state.jobs
    with pytest.raises(NotFoundError, match="Unknown iteration client id"):
        scene.heartbeat("c")


def test_a_client_that_sends_heartbeats_stays(scene: Scenario) -> None:
    begun(scene, job_name="job")
    for _ in range(10):
        assert scene.tick(100.0) == []
        scene.heartbeat("c")


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
    assert scene.tick(1e4) == []


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
