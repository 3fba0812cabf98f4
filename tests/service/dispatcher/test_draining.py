"""Draining workers and failed tasks, and the recovery of their splits."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def open_iteration(
    scene: Scenario, *workers: str, positions: int = 100, mode: int = DYNAMIC
) -> list[int]:
    scene.register(positions)
    for worker_id in workers:
        scene.add_worker(worker_id)
    opened = scene.open("c", processing_mode=mode, job_name="job")
    return [task.task_id for task in opened.tasks]


def finish_all_splits(scene: Scenario, task: int) -> None:
    """Assign all remaining splits to a task, which finishes them."""
    while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
        pass


def running(scene: Scenario) -> dict[str, int]:
    return {task.worker_id: task.task_id for task in scene.heartbeat("c").tasks}


def test_draining_worker_gets_no_new_task_and_no_new_splits(scene: Scenario) -> None:
    first, _ = open_iteration(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.drain_worker("v")
    scene.drain_worker("v")
    assert scene.split(first) == (0, 0)
    other = scene.open("d", processing_mode=DYNAMIC)
    assert [task.worker_id for task in other.tasks] == ["w"]
    assert scene.worker_heartbeat("v", first) == ()


def test_worker_that_delivered_and_left_loses_nothing(scene: Scenario) -> None:
    first, second = open_iteration(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.drain_worker("v")
    scene.finish("v", first)
    scene.unregister_worker("v")
    scene.unregister_worker("v")
    scene.report_delivery("c", first, (0, 10))
    finish_all_splits(scene, second)
    scene.finish("w", second)
    update = scene.heartbeat("c")
    assert (update.finished, update.lost) == (True, ())


@pytest.mark.parametrize("positions", [2, 100])
def test_sole_draining_worker_does_not_finish_unassigned_splits(
    positions: int, scene: Scenario
) -> None:
    (task,) = open_iteration(scene, "v", positions=positions)
    splits = scene.split(task, max_splits=10)
    scene.drain_worker("v")
    scene.finish("v", task)
    scene.unregister_worker("v")
    scene.report_delivery("c", task, splits)
    assert not scene.heartbeat("c").finished
    scene.add_worker("w")
    finish_all_splits(scene, running(scene)["w"])
    scene.finish("w", running(scene)["w"])
    assert scene.heartbeat("c").finished


def test_iteration_finishes_with_a_drained_copy(scene: Scenario) -> None:
    (task,) = open_iteration(scene, "v", mode=OFF)
    scene.drain_worker("v")
    scene.finish("v", task)
    scene.unregister_worker("v")
    assert scene.heartbeat("c").finished


def test_splits_returned_after_other_tasks_finished_get_new_tasks(scene: Scenario) -> None:
    first, second = open_iteration(scene, "v", "w", positions=4)
    scene.split(first, max_splits=2)
    finish_all_splits(scene, second)
    scene.finish("w", second)
    scene.drain_worker("v")
    assert running(scene) == {"v": first}
    scene.return_splits("v", first, (0, 1))
    new_task = running(scene)["w"]
    assert new_task != second
    scene.finish("v", first)
    assert not scene.heartbeat("c").finished
    assert scene.split(new_task) == (0, 1)
    assert scene.split(new_task, num_done=1) == (0, 0)
    scene.finish("w", new_task)
    assert scene.heartbeat("c").finished


def test_undelivered_splits_of_a_departed_worker_are_reported_lost(scene: Scenario) -> None:
    first, second = open_iteration(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.drain_worker("v")
    scene.return_splits("v", first, (6, 10))
    scene.unregister_worker("v")
    scene.report_delivery("c", first, (0, 4), partially_delivered=((0, 6),))
    finish_all_splits(scene, second)
    scene.finish("w", second)
    (lost,) = scene.heartbeat("c").lost
    assert (lost.worker_address, lost.splits, lost.num_splits) == ("v:1", ((4, 6),), 2)


def test_unknown_worker_cannot_drain_and_departed_one_is_removed(scene: Scenario) -> None:
    with pytest.raises(NotFoundError, match="worker v is not registered"):
        scene.drain_worker("v")
    scene.add_worker("v")
    scene.drain_worker("v")
    assert scene.state.workers["v"].draining
    scene.restart()
    assert scene.state.workers["v"].draining
    scene.unregister_worker("v")
    assert not scene.state.workers
    assert scene.add_worker("v 2", "v:1").dispatcher_id == "run"


# --- tasks that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_iteration_finishes_if_its_only_task_failed(scene: Scenario, mode: int) -> None:
    (task,) = open_iteration(scene, "v", mode=mode)
    scene.fail("v", task)
    scene.fail("v", task)
    assert scene.heartbeat("c").finished
    assert scene.state.tasks[task].reason == "a bug"


def test_losses_include_splits_of_a_failed_task_and_unassigned_ones(scene: Scenario) -> None:
    (task,) = open_iteration(scene, "v")
    scene.split(task, max_splits=10)
    scene.fail("v", task)
    assert scene.heartbeat("c").reports_needed == (task,)
    scene.report_delivery("c", task, (0, 7), partially_delivered=((0, 9),))
    update = scene.heartbeat("c")
    assert [lost.splits for lost in update.lost] == [((7, 9),), ((9, 100),)]
    assert sum(lost.num_splits for lost in update.lost) == 93


def test_other_tasks_continue_after_one_failed(scene: Scenario) -> None:
    first, second = open_iteration(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.fail("v", first)
    assert running(scene) == {"w": second}
    scene.report_delivery("c", first, (0, 4))
    assert scene.split(second) == (4, 10)
    finish_all_splits(scene, second)
    scene.finish("w", second)
    assert scene.heartbeat("c").lost == ()
    assert scene.heartbeat("c").finished


def test_worker_whose_task_failed_gets_no_new_task(scene: Scenario) -> None:
    first, second = open_iteration(scene, "v", "w", positions=4)
    scene.split(first, max_splits=2)
    scene.fail("w", second)
    scene.drain_worker("v")
    scene.return_splits("v", first, (0, 1))
    scene.finish("v", first)
    # Splits are unassigned, but the only remaining worker would fail new_task.
    assert scene.events[-1] == events.IterationFinished(2000)
    update = scene.heartbeat("c")
    assert update.finished
    assert [(lost.splits, lost.num_splits) for lost in update.lost] == [(((0, 4),), 4)]


def test_delayed_registration_of_a_departed_worker_is_rejected(
    scene: Scenario,
) -> None:
    scene.register(100)
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC)
    scene.unregister_worker("w")
    with pytest.raises(FailedPreconditionError, match="worker w has unregistered"):
        scene.add_worker("w")
    scene.unregister_worker("delayed")  # this request overtook the registration
    with pytest.raises(FailedPreconditionError, match="worker delayed has unregistered"):
        scene.add_worker("delayed")
    assert scene.state.workers == {}
    scene.tick(scene.limits.client_timeout + 2.0)
    assert scene.dispatcher.soft_state.unregistered_workers == {}


@pytest.mark.parametrize("is_draining", [True, False])
@pytest.mark.parametrize("visitation", ["at_most_once", "exactly_once"])
def test_unassigned_splits_go_to_the_next_worker(
    scene: Scenario, visitation: str, is_draining: bool
) -> None:
    scene.register(4, has_element_ids=True)
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC, visitation=visitation)
    assert scene.split(4000, max_splits=1) == (0, 1)
    if is_draining:
        scene.drain_worker("v")
    scene.finish("v", 4000, cut_short=True, num_done=1, num_assigned=1)
    # The first request may have been lost while the dispatcher was down.
    scene.drain_worker("v")
    scene.unregister_worker("v")
    assert not scene.state.iterations[2000].finished
    scene.add_worker("w")
    assert scene.split(4001, max_splits=3) == (1, 3)
    scene.check()
