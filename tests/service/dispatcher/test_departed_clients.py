"""Departed and expired clients: recovery of their splits, and tasks kept for the others."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


@pytest.fixture
def task(scene: Scenario) -> int:
    """Clients a and b read 20 splits from one worker; ten are assigned."""
    scene.register(20)
    scene.add_worker("v")
    scene.open("a", processing_mode=DYNAMIC, job_name="job")
    scene.open("b", processing_mode=DYNAMIC, job_name="job")
    assert scene.split(4000, max_splits=10) == (0, 10)
    return 4000


def finish(scene: Scenario, task: int) -> None:
    finish_as(scene, "v", task)


def finish_as(scene: Scenario, worker_id: str, task: int) -> None:
    while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
        pass
    scene.finish(worker_id, task)


def test_worker_is_asked_about_departed_clients_until_it_reports(
    scene: Scenario, task: int
) -> None:
    assert scene.worker_heartbeat_reply("v", task).departed_clients == ()
    scene.close("a")
    assert scene.worker_heartbeat_reply("v", task).departed_clients == ((task, "a"),)
    scene.restart()
    assert scene.worker_heartbeat_reply("v", task).departed_clients == ((task, "a"),)
    scene.report_departed_client("a", task)
    assert scene.worker_heartbeat_reply("v", task).departed_clients == ()
    num_events = len(scene.events)
    scene.report_departed_client("a", task)
    assert len(scene.events) == num_events


def test_splits_sent_only_to_a_departed_client_are_reassigned(scene: Scenario, task: int) -> None:
    scene.close("a")
    scene.report_departed_client("a", task, (2, 4), (6, 7))
    assert scene.events[-1] == events.DepartedClientReported(task, "a", ((2, 4), (6, 7)), ())
    assert scene.split(task) == (2, 4)
    assert scene.split(task) == (6, 7)
    assert scene.split(task)[0] == 10
    finish(scene, task)
    assert scene.heartbeat("b").finished
    assert scene.heartbeat("b").lost == ()


def test_splits_partly_sent_to_others_are_lost_with_the_client(scene: Scenario, task: int) -> None:
    scene.close("a")
    scene.report_departed_client("a", task, (2, 4), lost=((4, 6),))
    assert scene.split(task) == (2, 4)
    finish(scene, task)
    update = scene.heartbeat("b")
    assert update.finished
    assert update.lost == (
        messages.LostSplits(
            worker_address="v:1", task_id=task, splits=((4, 6),), num_splits=2, client_id="a"
        ),
    )


def test_elements_consumed_before_departure_are_not_reassigned(scene: Scenario, task: int) -> None:
    """The client was sent splits 2 to 7 and consumed 2, 3 and a part of 4."""
    scene.report_delivery("a", task, (2, 4), partially_delivered=((2, 5),))
    scene.close("a")
    scene.report_departed_client("a", task, (2, 8))
    assert scene.events[-1] == events.DepartedClientReported(task, "a", ((5, 8),), ((4, 5),))


def test_acknowledged_splits_are_not_reassigned_after_a_later_loss(
    scene: Scenario, task: int
) -> None:
    scene.close("a")
    scene.add_worker("w")
    scene.report_departed_client(
        "a", task, (6, 7), delivered=((1, 3), (4, 5)), partially_delivered=((1, 6),)
    )
    scene.restart()
    scene.lose("v")
    scene.report_delivery("b", task, (0, 1))
    other = scene.state.iterations[2000].tasks[-1]
    assigned = [scene.split(other, max_splits=1) for _ in range(5)]
    assert assigned == [(6, 7), (7, 8), (8, 9), (9, 10), (10, 11)]
    finish_as(scene, "w", other)
    (lost,) = scene.heartbeat("b").lost
    assert lost.splits == ((3, 4), (5, 6)), "completely received splits are not missing"


def test_expired_client_is_handled_like_one_that_closed(scene: Scenario, task: int) -> None:
    for _ in range(301):
        scene.tick(1.0)
        scene.worker_heartbeat("v")
        scene.heartbeat("b")
    assert scene.worker_heartbeat_reply("v", task).departed_clients == ((task, "a"),)


def test_iteration_waits_for_the_report_on_a_departed_client(scene: Scenario, task: int) -> None:
    scene.close("a")
    while not (reply := scene.get_split(task, num_done=0)).wait:
        assert reply.start < reply.stop
    scene.finish("v", task)
    assert not scene.heartbeat("b").finished
    assert scene.worker_heartbeat("v", task) == ()
    scene.report_departed_client("a", task, (3, 4))
    (new_task,) = scene.heartbeat("b").tasks
    assert scene.split(new_task.task_id) == (3, 4)
    assert scene.split(new_task.task_id) == (0, 0)
    scene.finish("v", new_task.task_id)
    assert scene.heartbeat("b").finished


def test_end_waits_for_a_silent_client_and_names_it(scene: Scenario, task: int) -> None:
    scene.heartbeat("a")
    finish_after(scene, task, silence=3.0)
    update = scene.heartbeat("b")
    assert not update.finished
    assert update.awaited_clients == ("a",)
    # It was only paused and sends heartbeats new_task.
    scene.heartbeat("a")
    scene.tick(0.5)
    assert scene.heartbeat("b").finished


def test_unacknowledged_splits_of_a_dead_client_go_to_others(scene: Scenario, task: int) -> None:
    finish_after(scene, task, silence=3.0)
    for _ in range(301):
        scene.tick(1.0)
        scene.worker_heartbeat("v", task)
        assert not scene.heartbeat("b").finished
    scene.report_departed_client("a", task, (18, 20))
    (new_task,) = scene.heartbeat("b").tasks
    assert [scene.split(new_task.task_id) for _ in range(2)] == [(18, 19), (19, 20)]


def finish_after(scene: Scenario, task: int, silence: float) -> None:
    """Finish the task after `silence` seconds without heartbeats of client a.

    The splits that a holds are not done.
    """
    while (reply := scene.get_split(task, num_done=0)).start < reply.stop:
        pass
    for _ in range(int(silence)):
        scene.tick(1.0)
        scene.worker_heartbeat("v", task)
        scene.heartbeat("b")
    scene.finish("v", task)


def test_unacknowledged_splits_after_the_end_are_lost(scene: Scenario, task: int) -> None:
    while (reply := scene.get_split(task, num_done=0)).start < reply.stop:
        pass
    scene.finish("v", task)
    assert scene.heartbeat("b").finished
    scene.close("a")
    scene.report_departed_client("a", task, (18, 20))
    assert scene.events[-1] == events.DepartedClientReported(task, "a", (), ((18, 20),))
    assert [lost.client_id for lost in scene.heartbeat("b").lost] == ["a"]


def test_returned_or_done_splits_are_not_reassigned_twice(scene: Scenario, task: int) -> None:
    scene.close("a")
    scene.return_splits("v", task, (8, 10))
    scene.split(task, max_splits=1, num_done=3)
    scene.report_departed_client("a", task, (0, 4), (7, 9))
    assert scene.events[-1] == events.DepartedClientReported(task, "a", ((3, 4), (7, 8)), ())


def test_worker_without_splits_is_not_asked_about_clients(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("v")
    scene.open("a", processing_mode=OFF, job_name="job")
    scene.open("b", processing_mode=OFF, job_name="job")
    scene.close("a")
    assert scene.worker_heartbeat_reply("v", 4000).departed_clients == ()


def test_only_the_worker_of_a_task_may_report_its_clients(scene: Scenario, task: int) -> None:
    scene.add_worker("w")
    scene.close("a")
    with pytest.raises(NotFoundError, match="belongs to worker v"):
        scene.ask(
            messages.ReportDepartedClient(
                worker_id="w",
                client_id="a",
                unacknowledged=(),
                possibly_lost=(),
                **scene.task_fields(task),
            )
        )
    scene.report_departed_client("a", task)


# --- iterations that wait for a silent client -----------------------------------------------------


def test_worker_joining_while_a_silent_client_is_awaited_gets_no_task(
    scene: Scenario,
) -> None:
    scene.register(3)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.tick(1.0)
    scene.heartbeat("one")
    done = 0
    while done < 3:
        start, stop = scene.split(task.task_id, num_done=done)
        done += stop - start
    scene.finish("a", task.task_id)
    assert not scene.heartbeat("one").finished
    scene.add_worker("b")
    scene.check()
    assert len(scene.state.tasks) == 1
    assert scene.heartbeat("two").finished


def test_departed_client_cannot_rejoin(scene: Scenario) -> None:
    scene.register(100)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.close("one")
    with pytest.raises(FailedPreconditionError, match=r"one has left .* Iterate over the dataset"):
        scene.open("one", processing_mode=DYNAMIC, job_name="job")
    scene.check()
    scene.restart()
    with pytest.raises(FailedPreconditionError, match="client one has left this iteration"):
        scene.open("one", processing_mode=DYNAMIC, job_name="job")
    assert scene.open("three", processing_mode=DYNAMIC, job_name="job").tasks == (task,)


def test_departed_client_may_rejoin_a_finished_iteration(scene: Scenario) -> None:
    scene.register(1)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.close("one")
    scene.report_departed_client("one", task.task_id)
    scene.split(task.task_id, num_done=0)
    scene.split(task.task_id, num_done=1)
    scene.finish("a", task.task_id)
    scene.tick(1.0)
    assert scene.heartbeat("two").finished
    assert scene.open("one", processing_mode=DYNAMIC, job_name="job").finished
    assert not [
        each.departed_clients for each in scene.state.iterations.values() if each.departed_clients
    ]


# --- redelivery of finished tasks to clients that missed a reply ----------------------------------


def unreachable(scene: Scenario, client_id: str, task_id: int) -> None:
    scene.ask(
        messages.ReportUnreachable(client_id=client_id, task_id=task_id, connection_refused=False)
    )


def open_with_two_clients(scene: Scenario, mode: int, splits: int = 4) -> int:
    """Let two clients read one task on a worker, which gets all splits if there are any."""
    scene.register(splits)
    scene.add_worker("w")
    scene.open("b", processing_mode=mode, job_name="job")
    task = scene.open("a", processing_mode=mode, job_name="job").tasks[0].task_id
    while mode == DYNAMIC and scene.split(task)[1] < splits:
        pass
    return int(task)


def pass_time(scene: Scenario, seconds: int, *clients: str) -> None:
    for _ in range(seconds):
        scene.tick(1.0)
        scene.worker_heartbeat("w")
        for client_id in clients:
            scene.heartbeat(client_id)


def test_finished_task_is_redeliverable_while_its_worker_lives(
    scene: Scenario,
) -> None:
    task = open_with_two_clients(scene, DYNAMIC)
    scene.finish("w", task)
    update = scene.heartbeat("a")
    assert (update.tasks, update.redeliverable, update.finished) == ((), (task,), True)
    scene.restart()
    assert scene.heartbeat("a").redeliverable == (task,)
    scene.lose("w")
    update = scene.heartbeat("a")
    assert (update.redeliverable, update.reports_needed) == ((), (task,))
    scene.check()


def test_loss_of_the_worker_of_a_finished_copy_is_reported(scene: Scenario) -> None:
    task = open_with_two_clients(scene, OFF)
    scene.add_worker("v")
    scene.finish("w", task)
    update = scene.heartbeat("a")
    assert (len(update.tasks), update.redeliverable, update.finished) == (1, (task,), False)
    scene.lose("w")
    later = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=update.version))
    assert (later.unchanged, later.redeliverable) == (False, ())
    scene.check()


def test_loss_of_the_worker_of_a_failed_copy_is_reported(scene: Scenario) -> None:
    task = open_with_two_clients(scene, OFF)
    scene.fail("w", task)
    update = scene.heartbeat("a")
    assert (update.redeliverable, update.finished) == ((task,), True)
    scene.lose("w")
    later = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=update.version))
    assert (later.unchanged, later.redeliverable, later.finished) == (False, (), True)
    scene.check()


def test_task_without_assigned_splits_is_not_redeliverable(scene: Scenario) -> None:
    task = open_with_two_clients(scene, DYNAMIC)
    scene.add_worker("v")
    assert len(scene.heartbeat("a").tasks) == 2
    scene.finish("v", task + 1)
    scene.finish("w", task)
    assert scene.heartbeat("a").redeliverable == (task,)


def test_unreachable_task_stops_being_redeliverable_for_its_client(scene: Scenario) -> None:
    task = open_with_two_clients(scene, DYNAMIC)
    scene.finish("w", task)
    known = scene.heartbeat("a").version
    for _ in range(int(scene.limits.unreachable_timeout) + 1):
        beat = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=known))
        assert beat.unchanged
        unreachable(scene, "a", task)
        pass_time(scene, 1, "b")
    reply_ = scene.ask(messages.ClientHeartbeat(client_id="a", known_version=known))
    assert (reply_.unchanged, reply_.redeliverable, reply_.finished) == (False, (), True)
    assert scene.heartbeat("b").redeliverable == (task,)


def test_client_with_a_missing_report_is_named(scene: Scenario) -> None:
    task = open_with_two_clients(scene, DYNAMIC)
    scene.finish("w", task)
    scene.lose("w")
    scene.report_delivery("a", task)
    update = scene.heartbeat("a")
    assert (update.finished, update.awaited_clients) == (False, ("b",))
