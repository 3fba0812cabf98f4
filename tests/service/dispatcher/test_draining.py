"""Workers that leave on their own, tasks that fail, and who goes on with what is left."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def begun(scene: Scenario, *workers: str, positions: int = 100, mode: int = DYNAMIC) -> list[int]:
    scene.register(positions)
    for worker_id in workers:
        scene.add_worker(worker_id)
    opened = scene.open("c", processing_mode=mode, job_name="job")
    return [task.task_id for task in opened.tasks]


def deal_all(scene: Scenario, task: int) -> None:
    """Let a task be dealt all that is left, and do it."""
    while scene.split(task, num_done=scene.state.tasks[task].assigned.num_assigned) != (0, 0):
        pass


def running(scene: Scenario) -> dict[str, int]:
    return {task.worker_id: task.task_id for task in scene.heartbeat("c").tasks}


def test_a_leaving_worker_gets_no_new_task_and_no_new_units(scene: Scenario) -> None:
    first, _ = begun(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.leaving("v")
    scene.leaving("v")
    assert scene.split(first) == (0, 0)
    other = scene.open("d", processing_mode=DYNAMIC)
    assert [task.worker_id for task in other.tasks] == ["w"]
    assert scene.beat("v", first) == ()


def test_a_worker_that_delivered_and_left_takes_nothing_with_it(scene: Scenario) -> None:
    first, second = begun(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.leaving("v")
    scene.finish("v", first)
    scene.left("v")
    scene.left("v")
    scene.settle("c", first, (0, 10))
    deal_all(scene, second)
    scene.finish("w", second)
    update = scene.heartbeat("c")
    assert (update.finished, update.lost) == (True, ())


@pytest.mark.parametrize("positions", [2, 100])
def test_a_leaving_worker_alone_does_not_end_what_is_not_dealt(
    positions: int, scene: Scenario
) -> None:
    (task,) = begun(scene, "v", positions=positions)
    units = scene.split(task, max_splits=10)
    scene.leaving("v")
    scene.finish("v", task)
    scene.left("v")
    scene.settle("c", task, units)
    assert not scene.heartbeat("c").finished
    scene.add_worker("w")
    deal_all(scene, running(scene)["w"])
    scene.finish("w", running(scene)["w"])
    assert scene.heartbeat("c").finished


def test_a_drained_copy_ends_there(scene: Scenario) -> None:
    (task,) = begun(scene, "v", mode=OFF)
    scene.leaving("v")
    scene.finish("v", task)
    scene.left("v")
    assert scene.heartbeat("c").finished


def test_units_that_come_back_after_the_others_finished_go_to_new_tasks(scene: Scenario) -> None:
    first, second = begun(scene, "v", "w", positions=4)
    scene.split(first, max_splits=2)
    deal_all(scene, second)
    scene.finish("w", second)
    scene.leaving("v")
    assert running(scene) == {"v": first}
    scene.hand_back("v", first, (0, 1))
    again = running(scene)["w"]
    assert again != second
    scene.finish("v", first)
    assert not scene.heartbeat("c").finished
    assert scene.split(again) == (0, 1)
    assert scene.split(again, num_done=1) == (0, 0)
    scene.finish("w", again)
    assert scene.heartbeat("c").finished


def test_what_a_worker_left_without_delivering_is_lost_and_said(scene: Scenario) -> None:
    first, second = begun(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.leaving("v")
    scene.hand_back("v", first, (6, 10))
    scene.left("v")
    scene.settle("c", first, (0, 4), touched=((0, 6),))
    deal_all(scene, second)
    scene.finish("w", second)
    (lost,) = scene.heartbeat("c").lost
    assert (lost.worker_address, lost.splits, lost.num_splits) == ("v:1", ((4, 6),), 2)


def test_a_leaving_worker_must_be_known_and_one_that_left_is_forgotten(scene: Scenario) -> None:
    with pytest.raises(NotFoundError, match="worker v is not registered"):
        scene.leaving("v")
    scene.add_worker("v")
    scene.leaving("v")
    assert scene.state.workers["v"].draining
    scene.restart()
    assert scene.state.workers["v"].draining
    scene.left("v")
    assert not scene.state.workers
    assert scene.add_worker("v 2", "v:1").dispatcher_id == "run"


# --- tasks that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_an_iteration_whose_only_task_failed_is_over(scene: Scenario, mode: int) -> None:
    (task,) = begun(scene, "v", mode=mode)
    scene.fail("v", task)
    scene.fail("v", task)
    assert scene.heartbeat("c").finished
    assert scene.state.tasks[task].reason == "a bug"


def test_what_a_failed_task_had_and_what_nobody_could_take_is_said(scene: Scenario) -> None:
    (task,) = begun(scene, "v")
    scene.split(task, max_splits=10)
    scene.fail("v", task)
    assert scene.heartbeat("c").reports_needed == (task,)
    scene.settle("c", task, (0, 7), touched=((0, 9),))
    update = scene.heartbeat("c")
    assert [lost.splits for lost in update.lost] == [((7, 9),), ((9, 100),)]
    assert sum(lost.num_splits for lost in update.lost) == 93


def test_others_go_on_after_one_task_failed(scene: Scenario) -> None:
    first, second = begun(scene, "v", "w")
    scene.split(first, max_splits=10)
    scene.fail("v", first)
    assert running(scene) == {"w": second}
    scene.settle("c", first, (0, 4))
    assert scene.split(second) == (4, 10)
    deal_all(scene, second)
    scene.finish("w", second)
    assert scene.heartbeat("c").lost == ()
    assert scene.heartbeat("c").finished


def test_a_worker_that_failed_at_it_is_not_asked_again(scene: Scenario) -> None:
    first, second = begun(scene, "v", "w", positions=4)
    scene.split(first, max_splits=2)
    scene.fail("w", second)
    scene.leaving("v")
    scene.hand_back("v", first, (0, 1))
    scene.finish("v", first)
    # Units are left, but the only worker that stays would fail at them again.
    assert scene.facts[-1] == events.IterationFinished(2000)
    update = scene.heartbeat("c")
    assert update.finished
    assert [(lost.splits, lost.num_splits) for lost in update.lost] == [(((0, 4),), 4)]


def test_a_registration_that_comes_again_after_its_worker_left_makes_no_worker(
    scene: Scenario,
) -> None:
    scene.register(100)
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC)
    scene.left("w")
    with pytest.raises(FailedPreconditionError, match="worker w has left"):
        scene.add_worker("w")
    scene.left("never came")  # the one that overtook it
    with pytest.raises(FailedPreconditionError, match="worker never came has left"):
        scene.add_worker("never came")
    assert scene.state.workers == {}
    scene.tick(scene.limits.client_timeout + 2.0)
    assert scene.dispatcher.soft_state.unregistered_workers == {}


@pytest.mark.parametrize("said_before", [True, False])
@pytest.mark.parametrize("visitation", ["at_most_once", "exactly_once"])
def test_what_was_not_dealt_when_the_only_worker_left_is_dealt_to_the_next(
    scene: Scenario, visitation: str, said_before: bool
) -> None:
    scene.register(4, has_element_ids=True)
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC, visitation=visitation)
    assert scene.split(4000, max_splits=1) == (0, 1)
    if said_before:
        scene.leaving("v")
    scene.finish("v", 4000, cut_short=True, num_done=1, num_assigned=1)
    # Perhaps only now: the dispatcher was away when it was said first.
    scene.leaving("v")
    scene.left("v")
    assert not scene.state.iterations[2000].finished
    scene.add_worker("w")
    assert scene.split(4001, max_splits=3) == (1, 3)
    scene.check()
