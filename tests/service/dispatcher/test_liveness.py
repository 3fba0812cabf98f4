"""Heartbeats, timeouts, and the removal of unused iterations."""

from __future__ import annotations

import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher import events
from headrace.service.dispatcher.limits import DispatcherLimits
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def without_reasons(applied: list[events.AnyEvent]) -> list[events.AnyEvent]:
    """Return events without the reasons of losses."""
    return [
        events.WorkerLost(event.worker_id) if isinstance(event, events.WorkerLost) else event
        for event in applied
    ]


def open_iteration(scene: Scenario, *workers: str, **opening: object) -> list[int]:
    """Register a dataset and workers, open an iteration; return its tasks."""
    scene.register()
    for worker_id in workers:
        scene.add_worker(worker_id)
    return [task.task_id for task in scene.open("c", **opening).tasks]


def test_silent_worker_is_lost_with_its_tasks(scene: Scenario) -> None:
    open_iteration(scene, "v", "w")
    assert scene.tick(9.0) == []
    scene.worker_heartbeat("w")
    assert scene.tick(0.9) == []
    assert without_reasons(scene.tick(0.2)) == [events.WorkerLost("v")]
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["w"]


def test_lost_worker_must_register_again(scene: Scenario) -> None:
    open_iteration(scene, "w")
    scene.tick(11.0)
    with pytest.raises(NotFoundError, match="register again"):
        scene.worker_heartbeat("w", 4000)
    scene.add_worker("w 2", "w:1")
    assert scene.worker_heartbeat("w 2", 4000) == (4000,)


def test_worker_whose_process_answers_pings_keeps_its_lease(
    scene: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    open_iteration(scene, "v", processing_mode=DYNAMIC)
    scene.split(4000, max_splits=3)
    scene.connections.seconds_silent["v"] = 4.0
    assert scene.tick(130.0) == []
    late = [each.getMessage() for each in caplog.records if "no heartbeat" in each.getMessage()]
    assert len(late) == 2, "one per minute"
    assert late[0].startswith("worker v:1: no heartbeat for 6")
    assert late[0].endswith("assigned splits: 0 to 2")
    scene.connections.seconds_silent["v"] = scene.limits.worker_timeout + 1
    assert events.WorkerLost("v") in without_reasons(scene.tick())


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_iteration_finishes_when_its_last_running_task_is_lost(scene: Scenario, mode: int) -> None:
    tasks = open_iteration(scene, "v", "w", processing_mode=mode)
    scene.finish("v", tasks[0])
    scene.tick(9.0)
    scene.worker_heartbeat("v")
    assert without_reasons(scene.tick(2.0)) == [
        events.WorkerLost("w"),
        events.IterationFinished(2000),
    ]
    assert scene.heartbeat("c").finished


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_iteration_that_lost_all_tasks_waits_for_a_worker(scene: Scenario, mode: int) -> None:
    open_iteration(scene, "v", "w", processing_mode=mode)
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


def test_worker_that_refuses_connections_is_lost_sooner(scene: Scenario) -> None:
    open_iteration(scene, "v", "w")
    assert scene.tick(0.5) == []
    scene.ask(report())
    assert scene.tick(0.5) == []
    assert without_reasons(scene.tick(0.3)) == [events.WorkerLost("v")]


def test_silent_worker_keeps_its_whole_timeout(scene: Scenario) -> None:
    open_iteration(scene, "v", "w")
    scene.ask(report(refused=False))
    assert scene.tick(9.9) == []
    assert events.WorkerLost("v") in without_reasons(scene.tick(0.2))


def test_heartbeat_clears_a_refused_connection(scene: Scenario) -> None:
    open_iteration(scene, "w")
    scene.ask(report())
    scene.tick(0.5)
    scene.worker_heartbeat("w")
    assert scene.tick(5.0) == []


def test_killed_worker_is_lost_within_little_more_than_a_second(scene: Scenario) -> None:
    limits = scene.limits
    assert limits.refused_worker_timeout + limits.tick_interval <= 1.25
    assert limits.heartbeat_interval * 2 <= limits.refused_worker_timeout


# --- many peers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peers", "worker_interval", "client_interval"),
    [(0, 0.5, 1.0), (100, 0.5, 1.0), (400, 2.0, 2.0), (1000, 2.5, 5.0), (10**6, 2.5, 5.0)],
)
def test_heartbeat_interval_grows_with_peers_within_timeouts(
    peers: int, worker_interval: float, client_interval: float
) -> None:
    limits = DispatcherLimits()
    assert (
        limits.interval_between_worker_heartbeats(peers)
        == worker_interval
        <= limits.worker_timeout / 4
    )
    assert (
        limits.interval_between_client_heartbeats(peers)
        == client_interval
        <= limits.client_timeout / 4
    )


def test_short_timeouts_do_not_change_heartbeat_intervals() -> None:
    limits = DispatcherLimits(worker_timeout=0.1, client_timeout=0.1)
    assert limits.interval_between_worker_heartbeats(10_000) == limits.heartbeat_interval
    assert limits.interval_between_client_heartbeats(10_000) == limits.client_heartbeat_interval


def many_workers() -> Scenario:
    """Six workers, too many for two heartbeats per second each."""
    scene = Scenario(max_heartbeats_per_second=3.0, worker_timeout=100.0)
    open_iteration(scene, *"uvwxyz")
    return scene


def test_heartbeat_replies_carry_the_interval() -> None:
    scene = many_workers()
    assert scene.worker_heartbeat_reply("u").heartbeat_interval == pytest.approx(2.0)
    assert scene.heartbeat("c").heartbeat_interval == 1.0
    known = scene.heartbeat("c").version
    for client_id in "defgh":
        scene.open(client_id, processing_mode=OFF)
    new_task = scene.ask(messages.ClientHeartbeat(client_id="c", known_version=known))
    assert new_task.unchanged
    assert new_task.heartbeat_interval == pytest.approx(2.0)


def test_heartbeats_of_many_peers_are_aligned() -> None:
    few, many = Scenario(), many_workers()
    open_iteration(few, "u")
    times = set()
    for number in range(40):
        assert few.worker_heartbeat_reply("u").heartbeat_interval == 0.5
        interval = many.worker_heartbeat_reply("uvwxyz"[number % 6]).heartbeat_interval
        assert 2.0 <= interval + 1e-9 < 2.051
        times.add(round(many.now + interval, 6))
        few.tick(0.01)
        many.tick(0.01)
    assert 8 <= len(times) <= 10


@pytest.mark.parametrize("restarts", [False, True])
def test_refusing_worker_is_lost_after_two_missed_heartbeats(
    restarts: bool,
) -> None:
    scene = many_workers()
    scene.worker_heartbeat("u")
    if restarts:
        scene.restart()
    scene.ask(report())
    assert scene.tick(3.9) == []
    assert without_reasons(scene.tick(0.3)) == [events.WorkerLost("u")]


def test_refusing_worker_keeps_its_interval_when_others_leave() -> None:
    scene = many_workers()
    scene.worker_heartbeat("u")
    for worker_id in "vwxyz":
        scene.ask(messages.UnregisterWorker(worker_id=worker_id))
    scene.ask(report())
    assert scene.tick(3.9) == []
    scene.worker_heartbeat("u")
    scene.ask(report())
    assert events.WorkerLost("u") in without_reasons(scene.tick(1.3))


# --- the dispatcher's own pauses -------------------------------------------------------------


def test_loss_by_timeout_names_the_missing_heartbeats(scene: Scenario) -> None:
    (task,) = open_iteration(scene, "v", processing_mode=DYNAMIC)
    scene.split(task, max_splits=5)
    applied = scene.tick(10.5)
    assert events.WorkerLost("v", "no heartbeat for 10 s", timed_out=True) in applied
    scene.add_worker("v2", "v:1")
    scene.report_delivery("c", task, partially_delivered=((0, 2),))
    (new_task,) = scene.heartbeat("c").tasks
    while scene.split(
        new_task.task_id, num_done=scene.state.tasks[new_task.task_id].assigned.num_assigned
    ) != (0, 0):
        pass
    scene.finish("v2", new_task.task_id)
    (lost,) = scene.heartbeat("c").lost
    assert (lost.num_splits, lost.reason) == (2, "no heartbeat for 10 s")
    with pytest.raises(NotFoundError, match="register again"):
        scene.worker_heartbeat("v", task)


def keep_reporting(scene: Scenario, seconds: int, *reports: tuple[str, int]) -> None:
    """Send heartbeats of all peers for a while, with reports about unreachable tasks."""
    for _ in range(seconds):
        scene.tick(1.0)
        for worker_id in [*scene.state.workers]:
            scene.worker_heartbeat(worker_id)
        for client_id in [*scene.state.clients]:
            scene.heartbeat(client_id)
        for client_id, task_id in reports:
            scene.ask(
                messages.ReportUnreachable(
                    client_id=client_id, task_id=task_id, connection_refused=True
                )
            )


def test_copy_on_a_live_worker_unreachable_for_clients_is_lost(
    scene: Scenario,
) -> None:
    first, second = open_iteration(scene, "v", "w")
    scene.finish("v", first)
    keep_reporting(scene, 59, ("c", second))
    assert not scene.heartbeat("c").finished
    keep_reporting(scene, 3, ("c", second))
    update = scene.heartbeat("c")
    assert update.finished
    (lost,) = update.lost
    assert (lost.worker_address, lost.is_copy, lost.num_splits) == ("w:1", True, 0)
    assert "no client could connect to its worker for 60 s" in lost.reason
    assert scene.worker_heartbeat("w", second) == (second,)


def test_splits_of_an_unreachable_worker_are_reassigned(scene: Scenario) -> None:
    first, second = open_iteration(scene, "v", "w", processing_mode=DYNAMIC)
    assert scene.split(first, max_splits=5) == (0, 5)
    keep_reporting(scene, 62, ("c", first))
    assert scene.heartbeat("c").reports_needed == (first,)
    scene.report_delivery("c", first)
    assert scene.split(second, max_splits=5) == (0, 5)


def test_worker_reachable_for_one_client_keeps_its_tasks(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("v")
    for client_id in "cd":
        scene.open(client_id, processing_mode=OFF, job_name="job")
    keep_reporting(scene, 100, ("c", 4000))
    assert [task.task_id for task in scene.heartbeat("c").tasks] == [4000]
    # Reports with long gaps between them describe single failed connections.
    for _ in range(5):
        keep_reporting(scene, 1, ("c", 4000), ("d", 4000))
        keep_reporting(scene, 35)
    assert [task.task_id for task in scene.heartbeat("c").tasks] == [4000]


def test_pause_of_the_dispatcher_does_not_count_as_unreachable_time(
    scene: Scenario,
) -> None:
    (task,) = open_iteration(scene, "v")
    keep_reporting(scene, 10, ("c", task))
    scene.pause(1000.0)
    keep_reporting(scene, 10, ("c", task))
    assert [each.task_id for each in scene.heartbeat("c").tasks] == [task]


def test_only_copies_of_the_last_attempt_count_as_lost(scene: Scenario) -> None:
    open_iteration(scene, "v")
    scene.lose("v")
    scene.add_worker("w")
    (new_task,) = scene.heartbeat("c").tasks
    scene.finish("w", new_task.task_id)
    update = scene.heartbeat("c")
    assert (update.finished, update.lost) == (True, ())


def test_paused_dispatcher_declares_no_peer_lost(scene: Scenario) -> None:
    open_iteration(scene, "v", "w", job_name="job")
    assert scene.tick(9.8) == []
    for seconds in (15.0, 3600.0):
        assert scene.pause(seconds) == []
        assert scene.tick(scene.limits.tick_interval / 2) == []
        # The heartbeats that were sent during the pause have arrived by now.
        for worker_id in ("v", "w"):
            scene.worker_heartbeat(worker_id)
        scene.heartbeat("c")
        assert scene.tick(9.8) == []


def test_silence_before_a_pause_still_counts(scene: Scenario) -> None:
    open_iteration(scene, "v", job_name="job")
    scene.tick(6.0)
    scene.pause(100.0)
    assert scene.tick(3.5) == []
    assert without_reasons(scene.tick(1.0)) == [events.WorkerLost("v")]


def test_slightly_late_tick_is_no_pause(scene: Scenario) -> None:
    open_iteration(scene, "w")
    for _ in range(21):
        scene.now += 2 * scene.limits.tick_interval
        scene.events += scene.dispatcher.tick(scene.now)
    assert not scene.state.workers


@pytest.mark.catalogue("OP32")
def test_silent_client_expires_with_its_unnamed_job(scene: Scenario) -> None:
    open_iteration(scene, "w")
    for _ in range(31):
        scene.tick(9.9)
        scene.worker_heartbeat("w")
    assert not scene.state.jobs
    with pytest.raises(NotFoundError, match="Unknown iteration client id"):
        scene.heartbeat("c")


def test_client_that_sends_heartbeats_does_not_expire(scene: Scenario) -> None:
    open_iteration(scene, job_name="job")
    for _ in range(10):
        assert scene.tick(100.0) == []
        scene.heartbeat("c")


@pytest.mark.catalogue("OP27", "OP28", "OP31")
def test_iteration_without_clients_is_discarded_and_restarts() -> None:
    scene = Scenario(gc_timeout=1.0)
    open_iteration(scene, "w", job_name="job")
    scene.open("d", job_name="job")
    scene.close("c")
    assert scene.tick(2.0) == []
    scene.close("d")
    assert scene.tick(0.5) == []
    assert scene.tick(0.6) == [events.IterationDiscarded(2000)]
    assert scene.worker_heartbeat("w", 4000) == (4000,)
    assert scene.open("c", job_name="job").iteration_id == 2001
    scene.check()


@pytest.mark.catalogue("OP29", "OP30")
def test_dynamic_iteration_is_discarded_only_with_gc_dynamic() -> None:
    for gc_dynamic in (False, True):
        scene = Scenario(gc_timeout=1.0, gc_dynamic=gc_dynamic)
        open_iteration(scene, "w", job_name="job", processing_mode=DYNAMIC)
        scene.close("c")
        scene.worker_heartbeat("w")
        assert bool(scene.tick(2.0)) == gc_dynamic
        scene.check()


def test_no_iteration_is_discarded_without_gc_timeout() -> None:
    scene = Scenario(gc_timeout=None)
    open_iteration(scene, job_name="job")
    scene.close("c")
    assert scene.tick(400.0) == []


def test_job_remembers_that_a_removed_iteration_finished() -> None:
    scene = Scenario(gc_timeout=1.0)
    (task,) = open_iteration(scene, "w", job_name="job")
    scene.finish("w", task)
    assert scene.tick(2.0) == []
    scene.close("c")
    assert scene.tick(2.0) == [events.IterationForgotten(2000)]
    assert not scene.state.tasks
    opened = scene.open("d", job_name="job")
    assert (opened.tasks, opened.finished) == ((), True)
    scene.check()


def test_finished_task_stays_on_its_worker_while_clients_read(scene: Scenario) -> None:
    (task,) = open_iteration(scene, "w", job_name="job")
    scene.finish("w", task)
    assert scene.worker_heartbeat("w", task) == ()
    scene.close("c")
    assert scene.worker_heartbeat("w", task) == (task,)


@pytest.mark.catalogue("OP33")
def test_restart_renews_all_leases(scene: Scenario) -> None:
    open_iteration(scene, "w", job_name="job")
    scene.now = 1000.0
    scene.restart()
    assert scene.tick(9.0) == []
    assert without_reasons(scene.tick(2.0)) == [events.WorkerLost("w")]


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
