"""No sharding: each worker that joins reads a copy, whatever happened to other copies."""

from __future__ import annotations

import pytest

from headrace.service import messages
from headrace.service.client.data_loss import describe_loss
from headrace.service.dispatcher import events
from headrace.service.dispatcher.state import TaskPhase
from tests.service.dispatcher.scenario import OFF, Scenario


def start_scene(scene: Scenario, *workers: str) -> None:
    scene.register()
    for worker_id in workers:
        scene.add_worker(worker_id)
    scene.open("c", processing_mode=OFF, job_name="job")


def workers_with_copies(scene: Scenario) -> list[str]:
    """Return the workers that run a copy."""
    scene.check()
    return [task.worker_id for task in scene.heartbeat("c").tasks]


@pytest.mark.parametrize("address", ["v:1", "elsewhere:1"])
@pytest.mark.parametrize("action", ["lost", "left", "cut"])
def test_workers_that_join_after_a_loss_get_copies(
    scene: Scenario, address: str, action: str
) -> None:
    start_scene(scene, "v", "w")
    if action == "lost":
        scene.lose("v")
    elif action == "left":
        scene.unregister_worker("v")
    else:
        scene.drain_worker("v")
        scene.finish("v", 4000, cut_short=True)
        scene.unregister_worker("v")
    for worker_id, place in (("v again", address), ("x", "x:1"), ("y", "y:1")):
        scene.add_worker(worker_id, place)
    assert workers_with_copies(scene) == ["w", "v again", "x", "y"]
    scene.restart()
    assert workers_with_copies(scene) == ["w", "v again", "x", "y"]
    for number in range(4):
        assert not scene.heartbeat("c").finished
        scene.finish(workers_with_copies(scene)[0], 4001 + number)
    update = scene.heartbeat("c")
    assert (update.finished, update.failure_reason) == (True, "")
    scene.add_worker("late")
    assert workers_with_copies(scene) == []


def test_a_worker_that_registers_again_restarts_its_copy(scene: Scenario) -> None:
    start_scene(scene, "v", "w")
    scene.add_worker("v again", "v:1")
    assert workers_with_copies(scene) == ["w", "v again"]


def test_an_unreachable_worker_gets_no_second_copy(scene: Scenario) -> None:
    start_scene(scene, "v", "w")
    for _ in range(70):
        scene.tick(1.0)
        scene.worker_heartbeat("v")
        scene.worker_heartbeat("w")
        scene.ask(messages.ReportUnreachable(client_id="c", task_id=4000, connection_refused=False))
        scene.heartbeat("c")
    assert scene.state.tasks[4000].phase is TaskPhase.LOST
    assert workers_with_copies(scene) == ["w"]


def test_a_worker_restarted_after_its_copy_ended_gets_no_second_copy(
    scene: Scenario,
) -> None:
    start_scene(scene, "u", "v", "w")
    scene.drain_worker("u")
    scene.finish("u", 4000)
    scene.unregister_worker("u")
    scene.fail("v", 4001)
    scene.add_worker("u again", "u:1")
    scene.add_worker("v again", "v:1")
    assert workers_with_copies(scene) == ["w"]
    scene.add_worker("late")
    assert workers_with_copies(scene) == ["w", "late"]


def test_copies_restart_once_all_are_lost(scene: Scenario) -> None:
    start_scene(scene, "v", "w")
    scene.lose("v")
    scene.lose("w")
    scene.add_worker("x")
    assert workers_with_copies(scene) == ["x"]
    assert scene.heartbeat("c").tasks[0].attempt == 1
    scene.add_worker("w again", "w:1")
    assert workers_with_copies(scene) == ["x", "w again"]
    scene.restart()
    assert workers_with_copies(scene) == ["x", "w again"]


@pytest.mark.parametrize("same_address", [True, False])
def test_a_dataset_that_kills_every_worker_fails_after_three_attempts(
    scene: Scenario, same_address: bool
) -> None:
    start_scene(scene)
    for number in range(3):
        assert not scene.heartbeat("c").finished
        scene.add_worker(f"w{number}", "host:1" if same_address else f"host:{number + 1}")
        assert workers_with_copies(scene) == [f"w{number}"]
        scene.lose(f"w{number}")
    update = scene.heartbeat("c")
    assert update.finished
    assert (
        "all 3 workers with a copy of the dataset were lost, the last 3 within a minute"
        in update.failure_reason
    )
    delay = scene.open("late", processing_mode=OFF, job_name="job")
    assert (delay.failure_reason, delay.finished_by) == (update.failure_reason, "")
    scene.add_worker("x")
    assert workers_with_copies(scene) == []
    scene.restart()
    assert scene.heartbeat("c").failure_reason == update.failure_reason


def test_the_total_number_of_copies_is_bounded_if_workers_keep_dying(scene: Scenario) -> None:
    start_scene(scene, "w0", "w1")
    alive, num_started = ["w0", "w1"], 2
    while not scene.heartbeat("c").finished:
        scene.lose(alive.pop(0))
        alive.append(f"w{num_started}")
        scene.add_worker(alive[-1])
        num_started += 1
    num_copies = [event for event in scene.events if isinstance(event, events.TaskCreated)]
    assert len(num_copies) == 7
    assert "the last 7 within a minute of their start" in scene.heartbeat("c").failure_reason


def test_stable_copies_may_be_lost_any_number_of_times(scene: Scenario) -> None:
    start_scene(scene)
    for number in range(8):
        scene.add_worker(f"w{number}", "host:1")
        for _ in range(62 if number % 2 else 1):
            scene.tick(1.0)
            scene.worker_heartbeat(f"w{number}")
            scene.heartbeat("c")
        scene.lose(f"w{number}")
        assert not scene.heartbeat("c").finished
    for number in range(2):
        scene.add_worker(f"x{number}", "host:1")
        scene.lose(f"x{number}")
    assert not scene.heartbeat("c").finished
    scene.add_worker("last", "host:1")
    scene.lose("last")
    assert scene.heartbeat("c").finished


def test_a_copy_cut_short_by_draining_is_reported_as_lost(scene: Scenario) -> None:
    start_scene(scene, "v", "w")
    scene.drain_worker("v")
    scene.finish("v", 4000, cut_short=True)
    scene.unregister_worker("v")
    scene.finish("w", 4001)
    scene.restart()
    update = scene.heartbeat("c")
    assert update.finished
    (lost,) = update.lost
    assert (lost.worker_address, lost.is_copy, lost.reason) == (
        "v:1",
        True,
        "worker draining",
    )
    assert describe_loss(update.lost) == [
        "this epoch lacks the rest of the dataset copies of lost workers: v:1: worker draining"
    ]


def test_a_copy_that_ended_before_its_worker_left_is_complete(scene: Scenario) -> None:
    start_scene(scene, "v", "w")
    scene.drain_worker("v")
    scene.finish("v", 4000)
    scene.unregister_worker("v")
    scene.finish("w", 4001)
    assert scene.heartbeat("c").lost == ()
