"""Who is alive, who is gone, and what nobody needs any more."""

from __future__ import annotations

import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher import events
from headrace.service.dispatcher.limits import DispatcherLimits
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def nameless(facts: list[events.AnyEvent]) -> list[events.AnyEvent]:
    """Return facts without the reasons of losses."""
    return [
        events.WorkerLost(fact.worker_id) if isinstance(fact, events.WorkerLost) else fact
        for fact in facts
    ]


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
    assert nameless(scene.tick(0.2)) == [events.WorkerLost("v")]
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["w"]


def test_a_lost_worker_that_speaks_again_must_register(scene: Scenario) -> None:
    begun(scene, "w")
    scene.tick(11.0)
    with pytest.raises(NotFoundError, match="register again"):
        scene.beat("w", 4000)
    scene.add_worker("w 2", "w:1")
    assert scene.beat("w 2", 4000) == (4000,)


def test_worker_whose_process_answers_pings_keeps_its_lease(
    scene: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    begun(scene, "v", processing_mode=DYNAMIC)
    scene.split(4000, max_splits=3)
    scene.processes.silent["v"] = 4.0
    assert scene.tick(130.0) == []
    late = [each.getMessage() for each in caplog.records if "no heartbeat" in each.getMessage()]
    assert len(late) == 2, "one for each minute"
    assert late[0].startswith("the worker at v:1 has sent no heartbeat for 6")
    assert late[0].endswith("it holds splits 0 to 2")
    scene.processes.silent["v"] = scene.limits.worker_timeout + 1
    assert events.WorkerLost("v") in nameless(scene.tick())


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_an_iteration_ends_when_its_last_running_task_is_lost(scene: Scenario, mode: int) -> None:
    tasks = begun(scene, "v", "w", processing_mode=mode)
    scene.finish("v", tasks[0])
    scene.tick(9.0)
    scene.beat("v")
    assert nameless(scene.tick(2.0)) == [events.WorkerLost("w"), events.IterationFinished(2000)]
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


def report(task_id: int = 4000, *, refused: bool = True) -> messages.ReportUnreachable:
    return messages.ReportUnreachable(client_id="c", task_id=task_id, connection_refused=refused)


def test_a_worker_that_refuses_connections_gets_less_time(scene: Scenario) -> None:
    begun(scene, "v", "w")
    assert scene.tick(0.5) == []
    scene.ask(report())
    assert scene.tick(0.5) == []
    assert nameless(scene.tick(0.3)) == [events.WorkerLost("v")]


def test_a_worker_that_is_only_silent_has_its_whole_timeout(scene: Scenario) -> None:
    begun(scene, "v", "w")
    scene.ask(report(refused=False))
    assert scene.tick(9.9) == []
    assert events.WorkerLost("v") in nameless(scene.tick(0.2))


def test_a_suspect_that_speaks_is_no_suspect(scene: Scenario) -> None:
    begun(scene, "w")
    scene.ask(report())
    scene.tick(0.5)
    scene.beat("w")
    assert scene.tick(5.0) == []


def test_from_a_kill_to_the_loss_is_little_more_than_a_second(scene: Scenario) -> None:
    limits = scene.limits
    assert limits.refused_worker_timeout + limits.tick_interval <= 1.25
    assert limits.heartbeat_interval * 2 <= limits.refused_worker_timeout


# --- many of them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peers", "of_workers", "of_clients"),
    [(0, 0.5, 1.0), (100, 0.5, 1.0), (400, 2.0, 2.0), (1000, 2.5, 5.0), (10**6, 2.5, 5.0)],
)
def test_many_peers_are_asked_to_speak_less_often_within_their_timeouts(
    peers: int, of_workers: float, of_clients: float
) -> None:
    limits = DispatcherLimits()
    assert (
        limits.interval_between_worker_heartbeats(peers) == of_workers <= limits.worker_timeout / 4
    )
    assert (
        limits.interval_between_client_heartbeats(peers) == of_clients <= limits.client_timeout / 4
    )


def test_timeouts_that_are_shorter_than_the_usual_intervals_change_nothing() -> None:
    limits = DispatcherLimits(worker_timeout=0.1, client_timeout=0.1)
    assert limits.interval_between_worker_heartbeats(10_000) == limits.heartbeat_interval
    assert limits.interval_between_client_heartbeats(10_000) == limits.client_heartbeat_interval


def crowd() -> Scenario:
    """Six workers, which are too many to speak twice a second."""
    scene = Scenario(max_heartbeats_per_second=3.0, worker_timeout=100.0)
    begun(scene, *"uvwxyz")
    return scene


def test_heartbeats_say_how_often_to_speak() -> None:
    scene = crowd()
    assert scene.beaten("u").heartbeat_interval == pytest.approx(2.0)
    assert scene.heartbeat("c").heartbeat_interval == 1.0
    known = scene.heartbeat("c").version
    for client_id in "defgh":
        scene.open(client_id, processing_mode=OFF)
    again = scene.ask(messages.ClientHeartbeat(client_id="c", known_version=known))
    assert again.unchanged
    assert again.heartbeat_interval == pytest.approx(2.0)


def test_heartbeats_of_many_come_some_at_a_time_and_those_of_few_when_they_do() -> None:
    few, many = Scenario(), crowd()
    begun(few, "u")
    moments = set()
    for number in range(40):
        assert few.beaten("u").heartbeat_interval == 0.5
        interval = many.beaten("uvwxyz"[number % 6]).heartbeat_interval
        assert 2.0 <= interval + 1e-9 < 2.051
        moments.add(round(many.now + interval, 6))
        few.tick(0.01)
        many.tick(0.01)
    assert 8 <= len(moments) <= 10


@pytest.mark.parametrize("restarts", [False, True])
def test_a_suspect_of_many_is_lost_after_two_of_the_heartbeats_that_it_was_asked_for(
    restarts: bool,
) -> None:
    scene = crowd()
    scene.beat("u")
    if restarts:
        scene.restart()
    scene.ask(report())
    assert scene.tick(3.9) == []
    assert nameless(scene.tick(0.3)) == [events.WorkerLost("u")]


def test_a_suspect_that_was_asked_for_few_heartbeats_keeps_its_time_when_others_leave() -> None:
    scene = crowd()
    scene.beat("u")
    for worker_id in "vwxyz":
        scene.ask(messages.UnregisterWorker(worker_id=worker_id))
    scene.ask(report())
    assert scene.tick(3.9) == []
    scene.beat("u")
    scene.ask(report())
    assert events.WorkerLost("u") in nameless(scene.tick(1.3))


# --- the dispatcher's own pauses -------------------------------------------------------------


def test_a_silence_is_called_a_silence(scene: Scenario) -> None:
    (task,) = begun(scene, "v", processing_mode=DYNAMIC)
    scene.split(task, max_splits=5)
    facts = scene.tick(10.5)
    assert events.WorkerLost("v", "it was not heard of for 10 s", timed_out=True) in facts
    scene.add_worker("v2", "v:1")
    scene.settle("c", task, touched=((0, 2),))
    (again,) = scene.heartbeat("c").tasks
    while scene.split(
        again.task_id, num_done=scene.state.tasks[again.task_id].assigned.num_assigned
    ) != (0, 0):
        pass
    scene.finish("v2", again.task_id)
    (lost,) = scene.heartbeat("c").lost
    assert (lost.num_splits, lost.reason) == (2, "it was not heard of for 10 s")
    with pytest.raises(NotFoundError, match="register again"):
        scene.beat("v", task)


def keep_reporting(scene: Scenario, seconds: int, *reports: tuple[str, int]) -> None:
    """Let everybody live for a while, and clients say again and again whom they cannot reach."""
    for _ in range(seconds):
        scene.tick(1.0)
        for worker_id in [*scene.state.workers]:
            scene.beat(worker_id)
        for client_id in [*scene.state.clients]:
            scene.heartbeat(client_id)
        for client_id, task_id in reports:
            scene.ask(
                messages.ReportUnreachable(
                    client_id=client_id, task_id=task_id, connection_refused=True
                )
            )


def test_a_copy_on_a_worker_that_lives_and_that_no_client_reaches_is_given_up_and_named(
    scene: Scenario,
) -> None:
    first, second = begun(scene, "v", "w")
    scene.finish("v", first)
    keep_reporting(scene, 59, ("c", second))
    assert not scene.heartbeat("c").finished
    keep_reporting(scene, 3, ("c", second))
    update = scene.heartbeat("c")
    assert update.finished
    (lost,) = update.lost
    assert (lost.worker_address, lost.is_copy, lost.num_splits) == ("w:1", True, 0)
    assert "none of its clients could reach it for 60 s" in lost.reason
    assert scene.beat("w", second) == (second,)


def test_units_on_a_worker_that_no_client_reaches_go_to_others(scene: Scenario) -> None:
    first, second = begun(scene, "v", "w", processing_mode=DYNAMIC)
    assert scene.split(first, max_splits=5) == (0, 5)
    keep_reporting(scene, 62, ("c", first))
    assert scene.heartbeat("c").reports_needed == (first,)
    scene.settle("c", first)
    assert scene.split(second, max_splits=5) == (0, 5)


def test_a_worker_that_one_client_reaches_keeps_its_tasks(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("v")
    for client_id in "cd":
        scene.open(client_id, processing_mode=OFF, job_name="job")
    keep_reporting(scene, 100, ("c", 4000))
    assert [task.task_id for task in scene.heartbeat("c").tasks] == [4000]
    # Reports with long gaps between them are of single connections.
    for _ in range(5):
        keep_reporting(scene, 1, ("c", 4000), ("d", 4000))
        keep_reporting(scene, 35)
    assert [task.task_id for task in scene.heartbeat("c").tasks] == [4000]


def test_a_pause_of_the_dispatcher_is_no_time_in_which_nobody_was_reached(
    scene: Scenario,
) -> None:
    (task,) = begun(scene, "v")
    keep_reporting(scene, 10, ("c", task))
    scene.pause(1000.0)
    keep_reporting(scene, 10, ("c", task))
    assert [each.task_id for each in scene.heartbeat("c").tasks] == [task]


def test_of_copies_that_were_all_lost_those_of_the_last_attempt_count(scene: Scenario) -> None:
    begun(scene, "v")
    scene.lose("v")
    scene.add_worker("w")
    (again,) = scene.heartbeat("c").tasks
    scene.finish("w", again.task_id)
    update = scene.heartbeat("c")
    assert (update.finished, update.lost) == (True, ())


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
    assert nameless(scene.tick(1.0)) == [events.WorkerLost("v")]


def test_a_tick_that_is_a_little_late_is_no_pause(scene: Scenario) -> None:
    begun(scene, "w")
    for _ in range(21):
        scene.now += 2 * scene.limits.tick_interval
        scene.facts += scene.dispatcher.tick(scene.now)
    assert not scene.state.workers


@pytest.mark.catalogue("OP32")
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


@pytest.mark.catalogue("OP27", "OP28", "OP31")
def test_an_iteration_without_clients_is_collected_and_begins_afresh() -> None:
    scene = Scenario(gc_timeout=1.0)
    begun(scene, "w", job_name="job")
    scene.open("d", job_name="job")
    scene.close("c")
    assert scene.tick(2.0) == []
    scene.close("d")
    assert scene.tick(0.5) == []
    assert scene.tick(0.6) == [events.IterationDiscarded(2000)]
    assert scene.beat("w", 4000) == (4000,)
    assert scene.open("c", job_name="job").iteration_id == 2001
    scene.check()


@pytest.mark.catalogue("OP29", "OP30")
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
    assert scene.tick(400.0) == []


def test_a_finished_iteration_is_forgotten_but_not_that_it_finished() -> None:
    scene = Scenario(gc_timeout=1.0)
    (task,) = begun(scene, "w", job_name="job")
    scene.finish("w", task)
    assert scene.tick(2.0) == []
    scene.close("c")
    assert scene.tick(2.0) == [events.IterationForgotten(2000)]
    assert not scene.state.tasks
    opened = scene.open("d", job_name="job")
    assert (opened.tasks, opened.finished) == ((), True)
    scene.check()


def test_a_finished_task_stays_with_its_worker_while_clients_are_left(scene: Scenario) -> None:
    (task,) = begun(scene, "w", job_name="job")
    scene.finish("w", task)
    assert scene.beat("w", task) == ()
    scene.close("c")
    assert scene.beat("w", task) == (task,)


@pytest.mark.catalogue("OP33")
def test_after_a_restart_everyone_was_heard_from_just_now(scene: Scenario) -> None:
    begun(scene, "w", job_name="job")
    scene.now = 1000.0
    scene.restart()
    assert scene.tick(9.0) == []
    assert nameless(scene.tick(2.0)) == [events.WorkerLost("w")]


def test_limits_are_read_from_the_configuration() -> None:
    limits = DispatcherLimits.from_config(
        DispatcherConfig(
            job_gc_check_interval_ms=50,
            job_gc_timeout_ms=-1,
            worker_timeout_ms=400,
            client_timeout_ms=0,
            gc_dynamic_sharding_jobs=True,
        )
    )
    assert limits == DispatcherLimits(
        check_interval=0.05,
        gc_timeout=None,
        dataset_timeout=None,
        worker_timeout=0.4,
        client_timeout=0.001,
        heartbeat_interval=0.1,
        refused_worker_timeout=0.2,
        gc_dynamic=True,
    )
    assert DispatcherLimits.from_config(DispatcherConfig()) == DispatcherLimits()
