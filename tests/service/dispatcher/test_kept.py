"""A finished task whose worker is there is not lost to a client that missed an answer."""

from __future__ import annotations

from headrace.service import messages
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def unreachable(scene: Scenario, client_id: str, task_id: int) -> None:
    scene.ask(messages.ReportUnreachable(client_id=client_id, task_id=task_id, refused=False))


def begun(scene: Scenario, mode: int, units: int = 4) -> int:
    """Let two clients read one task on a worker; where units are dealt, all are dealt to it."""
    scene.register(units)
    scene.add_worker("w")
    scene.open("b", processing_mode=mode, job_name="job")
    task = scene.open("a", processing_mode=mode, job_name="job").tasks[0].task_id
    while mode == DYNAMIC and scene.split(task)[1] < units:
        pass
    return int(task)


def pass_time(scene: Scenario, seconds: int, *clients: str) -> None:
    for _ in range(seconds):
        scene.tick(1.0)
        scene.beat("w")
        for client_id in clients:
            scene.heartbeat(client_id)


def test_a_finished_task_is_kept_for_its_clients_while_its_worker_is_there(
    scene: Scenario,
) -> None:
    task = begun(scene, DYNAMIC)
    scene.finish("w", task)
    update = scene.heartbeat("a")
    assert (update.tasks, update.kept, update.finished) == ((), (task,), True)
    scene.restart()
    assert scene.heartbeat("a").kept == (task,)
    scene.lose("w")
    update = scene.heartbeat("a")
    assert (update.kept, update.settle) == ((), (task,))
    scene.check()


def test_a_finished_copy_is_kept_too_and_the_loss_of_its_worker_is_heard(scene: Scenario) -> None:
    task = begun(scene, OFF)
    scene.add_worker("v")
    scene.finish("w", task)
    update = scene.heartbeat("a")
    assert (len(update.tasks), update.kept, update.finished) == (1, (task,), False)
    scene.lose("w")
    later = scene.ask(messages.ClientHeartbeat(client_id="a", known=update.version))
    assert (later.same, later.kept) == (False, ())
    scene.check()


def test_of_a_copy_that_failed_the_loss_of_its_worker_is_heard(scene: Scenario) -> None:
    task = begun(scene, OFF)
    scene.fail("w", task)
    update = scene.heartbeat("a")
    assert (update.kept, update.finished) == ((task,), True)
    scene.lose("w")
    later = scene.ask(messages.ClientHeartbeat(client_id="a", known=update.version))
    assert (later.same, later.kept, later.finished) == (False, (), True)
    scene.check()


def test_a_copy_that_failed_is_kept_so_that_its_error_arrives(scene: Scenario) -> None:
    task = begun(scene, OFF)
    scene.fail("w", task)
    assert scene.heartbeat("a").kept == (task,)


def test_a_task_that_was_dealt_nothing_is_not_kept(scene: Scenario) -> None:
    task = begun(scene, DYNAMIC)
    scene.add_worker("v")
    assert len(scene.heartbeat("a").tasks) == 2
    scene.finish("v", task + 1)
    scene.finish("w", task)
    assert scene.heartbeat("a").kept == (task,)


def test_a_client_that_cannot_reach_the_worker_for_long_waits_no_more(scene: Scenario) -> None:
    task = begun(scene, DYNAMIC)
    scene.finish("w", task)
    known = scene.heartbeat("a").version
    for _ in range(int(scene.limits.reach_timeout) + 1):
        beat = scene.ask(messages.ClientHeartbeat(client_id="a", known=known))
        assert beat.same
        unreachable(scene, "a", task)
        pass_time(scene, 1, "b")
    given_up = scene.ask(messages.ClientHeartbeat(client_id="a", known=known))
    assert (given_up.same, given_up.kept, given_up.finished) == (False, (), True)
    assert scene.heartbeat("b").kept == (task,)


def test_a_client_that_others_wait_for_to_settle_is_named(scene: Scenario) -> None:
    task = begun(scene, DYNAMIC)
    scene.finish("w", task)
    scene.lose("w")
    scene.settle("a", task)
    update = scene.heartbeat("a")
    assert (update.finished, update.silent) == (False, ("b",))
