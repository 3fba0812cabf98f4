"""Speculative execution: splits of a straggler are reassigned to an idle task, once."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.service import messages
from headrace.service.dispatcher import events
from tests.service.dispatcher.scenario import DYNAMIC, Scenario

IN_ORDER: dict[str, Any] = {
    "processing_mode": DYNAMIC,
    "visitation": "exactly_once",
    "ordered": True,
    "partition_mode": "ordered",
    "exclusive_reason": "the order",
    "num_splits": 4,
}


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """Return a scenario with a dataset of four splits and two workers."""
    scene.register(4, has_element_ids=True)
    scene.add_worker("v")
    scene.add_worker("w")
    return scene


def assign_all(scene: Scenario) -> None:
    assert scene.split(4000, max_splits=1) == (0, 1)
    for done in range(3):
        assert scene.split(4001, max_splits=1, num_done=done) == (1 + done, 2 + done)


def wait(scene: Scenario, seconds: float, workers: str = "vw") -> None:
    until = scene.now + seconds
    while scene.now < until:
        scene.tick(0.25)
        for worker_id in workers:
            scene.worker_heartbeat(worker_id)
        for client_id in scene.state.clients:
            scene.heartbeat(client_id)


def test_splits_of_a_straggler_are_reassigned_to_an_idle_task(
    scene: Scenario,
) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    assert scene.get_split(4001, num_done=3).wait, "the other task may become slow"
    wait(scene, 1.5)
    assert scene.get_split(4001, num_done=3).wait
    assert scene.events[-1] == events.SplitsReassigned(task_id=4000, splits=((0, 1),))
    scene.check()
    assert scene.split(4001, num_done=3) == (0, 1)
    scene.finish("w", 4001, num_done=4)
    assert any(isinstance(event, events.TaskLost) for event in scene.events)
    assert scene.state.iterations[2000].finished
    assert scene.heartbeat("c").lost == ()
    scene.check()


def test_a_split_is_assigned_to_a_second_task_and_not_to_a_third(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5)
    scene.get_split(4001, num_done=3)
    assert scene.split(4001, num_done=3) == (0, 1)
    scene.add_worker("x")
    wait(scene, 5.0)
    assert scene.get_split(4002).wait
    assert scene.state.iterations[2000].pool.num_unassigned == 0
    # The slow task is lost; the other one holds its split.
    scene.lose("v")
    assert scene.state.iterations[2000].pool.num_unassigned == 0
    # The other task is lost, too: the split is assigned again.
    scene.lose("w")
    for task_id in (4000, 4001):
        scene.ask(
            messages.ReportDelivery(
                client_id="c", task_id=task_id, delivered=(), partially_delivered=()
            )
        )
    assert scene.state.iterations[2000].pool.returned[0] == (0, 1)
    scene.check()


@pytest.mark.parametrize("slow_done", [0, 1])
def test_a_task_that_makes_progress_is_no_straggler(scene: Scenario, slow_done: int) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5)
    scene.get_split(4000, num_done=slow_done)
    scene.get_split(4001, num_done=3)
    returned = [event for event in scene.events if isinstance(event, events.SplitsReassigned)]
    assert len(returned) == 1 - slow_done


def test_tasks_that_wait_for_each_other_are_told_to_flush(scene: Scenario) -> None:
    # In some plans the last split is known to be the last only after its steps have ended.
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4001, max_splits=2) == (1, 2)
    assert scene.split(4001, max_splits=2) == (2, 3)
    assert scene.split(4001, max_splits=2, num_done=1) == (3, 4)
    for task_id, done in ((4000, 0), (4001, 2)):
        granted = scene.get_split(task_id, num_done=done)
        assert (granted.wait, granted.flush) == (True, True)
    assert scene.get_split(4000, num_done=1).wait
    assert not scene.get_split(4001, num_done=3).wait, "no other task holds splits"


def reassigned_splits(scene: Scenario) -> list[tuple[int, Any]]:
    found = [event for event in scene.events if isinstance(event, events.SplitsReassigned)]
    return [(event.task_id, event.splits) for event in found]


def test_of_two_stragglers_the_one_with_the_oldest_split_is_first(scene: Scenario) -> None:
    scene.add_worker("x")
    scene.open("c", **IN_ORDER)
    assert scene.split(4001, max_splits=1) == (0, 1)
    assert scene.split(4000, max_splits=1) == (1, 2)
    assert scene.split(4002, max_splits=1) == (2, 3)
    assert scene.split(4002, max_splits=1, num_done=1) == (3, 4)
    scene.get_split(4002, num_done=2)
    wait(scene, 1.5, "vwx")
    scene.get_split(4002, num_done=2)
    assert reassigned_splits(scene) == [(4001, ((0, 1),))]


def test_a_straggler_takes_three_times_the_usual_split_duration(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4001, max_splits=1) == (1, 2)
    wait(scene, 10.0)
    # Both made progress: a split takes each of them 10 s.
    assert scene.split(4001, max_splits=1, num_done=1) == (2, 3)
    assert scene.split(4000, max_splits=1, num_done=1) == (3, 4)
    wait(scene, 10.0)
    scene.get_split(4001, num_done=2)
    wait(scene, 10.0)
    scene.get_split(4001, num_done=2)
    assert reassigned_splits(scene) == []
    wait(scene, 60.0)
    scene.get_split(4001, num_done=2)
    assert reassigned_splits(scene) == [(4000, ((1, 2),))]


def test_a_task_with_unfinished_splits_gets_no_straggler_splits(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.get_split(4001, num_done=2)
    wait(scene, 1.5)
    assert scene.get_split(4001, num_done=2).wait
    assert reassigned_splits(scene) == []
    scene.get_split(4001, num_done=3)
    assert reassigned_splits(scene) == [(4000, ((0, 1),))]


def test_idle_time_before_an_assignment_does_not_count(
    scene: Scenario,
) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.get_split(4000, num_done=1)
    wait(scene, 30.0)
    scene.return_splits("w", 4001, (2, 3))
    assert scene.split(4000, num_done=1) == (3, 4)
    assert scene.dispatcher.soft_state.last_progress[4000] == scene.now


def test_repeating_the_same_num_done_is_no_progress(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assigned_at = scene.now
    wait(scene, 1.5)
    assert scene.split(4000, max_splits=1, num_done=0) == (1, 2)
    assert scene.dispatcher.soft_state.last_progress[4000] == assigned_at


def test_a_pause_of_the_dispatcher_makes_no_straggler(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.get_split(4001, num_done=3)
    scene.pause(60.0)
    scene.get_split(4001, num_done=3)
    assert reassigned_splits(scene) == []


def test_progress_records_are_removed_with_their_iteration(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5)
    scene.get_split(4001, num_done=3)
    soft_state = scene.dispatcher.soft_state
    assert soft_state.last_progress.keys() == soft_state.reported_done.keys() == {4000, 4001}
    assert soft_state.reassigned_splits == {2000: ((0, 1),)}
    scene.close("c")
    scene.tick(scene.limits.gc_timeout + 60.0)
    assert not scene.state.tasks
    assert (soft_state.last_progress, soft_state.reported_done, soft_state.reassigned_splits) == (
        {},
        {},
        {},
    )


def test_splits_returned_by_a_draining_worker_can_be_reassigned_once_more(scene: Scenario) -> None:
    scene.add_worker("x")
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.drain_worker("v")
    scene.return_splits("v", 4000, (0, 1))
    assert scene.split(4002) == (0, 1)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5, "wx")
    scene.get_split(4001, num_done=3)
    assert reassigned_splits(scene) == [(4002, ((0, 1),))]


def test_a_draining_worker_that_returned_all_splits_is_finished(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.drain_worker("v")
    scene.return_splits("v", 4000, (0, 1))
    assert scene.split(4001, num_done=3) == (0, 1)
    scene.finish("w", 4001, num_done=4)
    assert events.TaskFinished(task_id=4000) in scene.events
    assert not any(isinstance(event, events.TaskLost) for event in scene.events)


def test_unordered_reading_has_no_speculative_execution(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC, visitation="exactly_once")
    assign_all(scene)
    wait(scene, 30.0)
    assert not scene.get_split(4001, num_done=3).wait
    assert not any(isinstance(event, events.SplitsReassigned) for event in scene.events)


def test_a_restarted_dispatcher_detects_a_silent_straggler(
    scene: Scenario,
) -> None:
    scene.open("c", **IN_ORDER)
    assign_all(scene)
    scene.restart()
    assert scene.get_split(4001, num_done=3).wait
    wait(scene, 1.5)
    scene.get_split(4001, num_done=3)
    assert scene.events[-1] == events.SplitsReassigned(task_id=4000, splits=((0, 1),))


def test_splits_before_the_start_position_do_not_affect_the_usual_duration(
    scene: Scenario,
) -> None:
    scene.register(1004, has_element_ids=True, fingerprint="long")
    scene.open(
        "c",
        "1001",
        **IN_ORDER | {"num_splits": 1004, "first_split": 1000, "start_position_id": "position"},
    )
    assert scene.split(4000, max_splits=1) == (1000, 1001)
    assert scene.split(4001, max_splits=1) == (1001, 1002)
    wait(scene, 10.0)
    for done in (1, 2):
        assert scene.split(4001, max_splits=1, num_done=done) == (1001 + done, 1002 + done)
        wait(scene, 10.0)
    scene.get_split(4000, num_done=1)
    assert scene.get_split(4001, num_done=3).wait is False
    (activity,) = scene.dispatcher.soft_state.activity.iterations.values()
    assert activity.initially_done == 1000


# --- clients that wait for a split ----------------------------------------------------------------


@pytest.fixture
def waiting(scene: Scenario) -> Scenario:
    """Return a scenario of ten splits: one worker is slow with split 0, the other did two."""
    scene.register(10, has_element_ids=True, fingerprint="ten")
    scene.open("c", "1001", **IN_ORDER | {"num_splits": 10})
    assert scene.split(4000, max_splits=1) == (0, 1)
    for done in range(3):
        assert scene.split(4001, max_splits=1, num_done=done) == (1 + done, 2 + done)
    return scene


def test_an_awaited_split_is_reassigned_while_other_splits_remain(
    waiting: Scenario,
) -> None:
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4000,), (
        "the task may still deliver it"
    )
    wait(waiting, 1.5)
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4001,), (
        "the split will be assigned to this task"
    )
    assert waiting.events[-1] == events.SplitsReassigned(task_id=4000, splits=((0, 1),))
    waiting.check()
    assert waiting.split(4001, num_done=2) == (0, 1)
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4001,)
    waiting.check()


def test_unchanged_heartbeat_replies_contain_urgent_tasks(waiting: Scenario) -> None:
    known = waiting.heartbeat("c").version
    update = waiting.heartbeat("c", known_version=known, wanted_split=0)
    assert (update.unchanged, update.urgent_tasks) == (True, (4000,))
    wait(waiting, 1.5)
    update = waiting.heartbeat("c", known_version=known, wanted_split=0)
    assert update.urgent_tasks == (4001,)


def test_no_task_is_urgent_while_no_client_waits(waiting: Scenario) -> None:
    wait(waiting, 30.0)
    assert waiting.heartbeat("c").urgent_tasks == ()
    assert reassigned_splits(waiting) == []


@pytest.mark.parametrize("split", [4, 9, 10, 1 << 70])
def test_a_split_that_no_task_holds_is_not_reassigned(waiting: Scenario, split: int) -> None:
    wait(waiting, 30.0)
    assert waiting.heartbeat("c", wanted_split=split).urgent_tasks == ()
    assert reassigned_splits(waiting) == []


def test_an_awaited_split_is_reassigned_once(waiting: Scenario) -> None:
    waiting.add_worker("x")
    wait(waiting, 1.5)
    waiting.heartbeat("c", wanted_split=0)
    assert waiting.split(4001, num_done=2, max_splits=1) == (0, 1)
    wait(waiting, 30.0, "vwx")
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4001,)
    assert reassigned_splits(waiting) == [(4000, ((0, 1),))]


def test_the_task_with_the_latest_progress_is_urgent(
    waiting: Scenario,
) -> None:
    waiting.add_worker("x")
    assert waiting.split(4002, max_splits=1) == (4, 5)
    waiting.tick(0.25)
    assert waiting.split(4002, max_splits=1, num_done=1) == (5, 6)
    wait(waiting, 1.5, "vwx")
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4002,)


def test_splits_of_the_only_worker_are_not_reassigned(scene: Scenario) -> None:
    scene.lose("w")
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    wait(scene, 30.0, "v")
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == (4000,)
    assert reassigned_splits(scene) == []


def test_unordered_clients_have_no_awaited_split(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC, visitation="exactly_once")
    assert scene.split(4000, max_splits=1) == (0, 1)
    wait(scene, 30.0)
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == ()
    assert reassigned_splits(scene) == []


def test_no_task_is_a_straggler_before_a_split_is_done(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4001, max_splits=1) == (1, 2)
    wait(scene, 60.0)
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == (4000,)
    assert reassigned_splits(scene) == []
    assert scene.split(4001, max_splits=1, num_done=1) == (2, 3)
    wait(scene, 400.0)  # a split takes each of the two tasks 60 s
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == (4001,)


def test_a_draining_worker_is_not_urgent_for_returned_splits(waiting: Scenario) -> None:
    waiting.add_worker("x")
    assert waiting.split(4002, max_splits=1) == (4, 5)
    waiting.tick(0.25)
    waiting.get_split(4001, num_done=3)
    wait(waiting, 1.5, "vwx")
    waiting.drain_worker("w")
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4002,)
