"""In order, what a slow task holds is dealt to one that has nothing to do, once."""

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
    """Four units and two workers: the first holds unit 0, the second has done the others."""
    scene.register(4, has_element_ids=True)
    scene.add_worker("v")
    scene.add_worker("w")
    return scene


def deal_all(scene: Scenario) -> None:
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


def test_an_idle_task_is_dealt_what_another_is_slow_with_and_the_slow_one_is_let_go(
    scene: Scenario,
) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    assert scene.get_split(4001, num_done=3).wait, "the other may yet be slow"
    wait(scene, 1.5)
    assert scene.get_split(4001, num_done=3).wait
    assert scene.events[-1] == events.SplitsReassigned(task_id=4000, splits=((0, 1),))
    scene.check()
    assert scene.split(4001, num_done=3) == (0, 1)
    scene.finish("w", 4001, num_done=4)
    assert any(isinstance(fact, events.TaskLost) for fact in scene.events)
    assert scene.state.iterations[2000].finished
    assert scene.heartbeat("c").lost == ()
    scene.check()


def test_a_unit_is_dealt_to_a_second_task_and_not_to_a_third(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5)
    scene.get_split(4001, num_done=3)
    assert scene.split(4001, num_done=3) == (0, 1)
    scene.add_worker("x")
    wait(scene, 5.0)
    assert scene.get_split(4002).wait
    assert scene.state.iterations[2000].pool.num_unassigned == 0
    # The slow one is lost: the other has its unit.
    scene.lose("v")
    assert scene.state.iterations[2000].pool.num_unassigned == 0
    # The other is lost: it is dealt again.
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
def test_who_gets_on_is_not_slow(scene: Scenario, slow_done: int) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5)
    scene.get_split(4000, num_done=slow_done)
    scene.get_split(4001, num_done=3)
    returned = [fact for fact in scene.events if isinstance(fact, events.SplitsReassigned)]
    assert len(returned) == 1 - slow_done


def test_tasks_that_wait_for_each_other_are_to_give_all_that_they_hold(scene: Scenario) -> None:
    # Of some plans that a unit was the last is known only when its steps have ended.
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4001, max_splits=2) == (1, 2)
    assert scene.split(4001, max_splits=2) == (2, 3)
    assert scene.split(4001, max_splits=2, num_done=1) == (3, 4)
    for task_id, done in ((4000, 0), (4001, 2)):
        granted = scene.get_split(task_id, num_done=done)
        assert (granted.wait, granted.flush) == (True, True)
    assert scene.get_split(4000, num_done=1).wait
    assert not scene.get_split(4001, num_done=3).wait, "nothing is with another"


def taken_over(scene: Scenario) -> list[tuple[int, Any]]:
    facts = [fact for fact in scene.events if isinstance(fact, events.SplitsReassigned)]
    return [(fact.task_id, fact.splits) for fact in facts]


def test_of_two_slow_tasks_the_one_with_the_oldest_unit_is_backed_first(scene: Scenario) -> None:
    scene.add_worker("x")
    scene.open("c", **IN_ORDER)
    assert scene.split(4001, max_splits=1) == (0, 1)
    assert scene.split(4000, max_splits=1) == (1, 2)
    assert scene.split(4002, max_splits=1) == (2, 3)
    assert scene.split(4002, max_splits=1, num_done=1) == (3, 4)
    scene.get_split(4002, num_done=2)
    wait(scene, 1.5, "vwx")
    scene.get_split(4002, num_done=2)
    assert taken_over(scene) == [(4001, ((0, 1),))]


def test_where_units_take_long_who_needs_thrice_as_long_is_slow(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4001, max_splits=1) == (1, 2)
    wait(scene, 10.0)
    # Both got on: a unit takes 10 s with each.
    assert scene.split(4001, max_splits=1, num_done=1) == (2, 3)
    assert scene.split(4000, max_splits=1, num_done=1) == (3, 4)
    wait(scene, 10.0)
    scene.get_split(4001, num_done=2)
    wait(scene, 10.0)
    scene.get_split(4001, num_done=2)
    assert taken_over(scene) == []
    wait(scene, 60.0)
    scene.get_split(4001, num_done=2)
    assert taken_over(scene) == [(4000, ((1, 2),))]


def test_who_holds_something_itself_takes_nothing_over(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.get_split(4001, num_done=2)
    wait(scene, 1.5)
    assert scene.get_split(4001, num_done=2).wait
    assert taken_over(scene) == []
    scene.get_split(4001, num_done=3)
    assert taken_over(scene) == [(4000, ((0, 1),))]


def test_who_is_dealt_something_after_it_had_nothing_to_do_is_not_slow_at_once(
    scene: Scenario,
) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.get_split(4000, num_done=1)
    wait(scene, 30.0)
    scene.return_splits("w", 4001, (2, 3))
    assert scene.split(4000, num_done=1) == (3, 4)
    assert scene.dispatcher.soft_state.last_progress[4000] == scene.now


def test_who_says_again_that_it_did_nothing_is_slow_all_the_same(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    dealt_at = scene.now
    wait(scene, 1.5)
    assert scene.split(4000, max_splits=1, num_done=0) == (1, 2)
    assert scene.dispatcher.soft_state.last_progress[4000] == dealt_at


def test_a_pause_of_the_dispatcher_makes_nobody_slow(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.get_split(4001, num_done=3)
    scene.pause(60.0)
    scene.get_split(4001, num_done=3)
    assert taken_over(scene) == []


def test_with_an_iteration_it_is_forgotten_who_got_on_with_it(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5)
    scene.get_split(4001, num_done=3)
    presence = scene.dispatcher.soft_state
    assert presence.last_progress.keys() == presence.reported_done.keys() == {4000, 4001}
    assert presence.reassigned_splits == {2000: ((0, 1),)}
    scene.close("c")
    scene.tick(scene.limits.gc_timeout + 60.0)
    assert not scene.state.tasks
    assert (presence.last_progress, presence.reported_done, presence.reassigned_splits) == (
        {},
        {},
        {},
    )


def test_what_a_leaving_worker_handed_back_may_yet_be_taken_over(scene: Scenario) -> None:
    scene.add_worker("x")
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.drain_worker("v")
    scene.return_splits("v", 4000, (0, 1))
    assert scene.split(4002) == (0, 1)
    scene.get_split(4001, num_done=3)
    wait(scene, 1.5, "wx")
    scene.get_split(4001, num_done=3)
    assert taken_over(scene) == [(4002, ((0, 1),))]


def test_a_leaving_worker_that_handed_back_all_is_finished_and_not_slow(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.drain_worker("v")
    scene.return_splits("v", 4000, (0, 1))
    assert scene.split(4001, num_done=3) == (0, 1)
    scene.finish("w", 4001, num_done=4)
    assert events.TaskFinished(task_id=4000) in scene.events
    assert not any(isinstance(fact, events.TaskLost) for fact in scene.events)


def test_in_any_order_nothing_is_dealt_twice(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC, visitation="exactly_once")
    deal_all(scene)
    wait(scene, 30.0)
    assert not scene.get_split(4001, num_done=3).wait
    assert not any(isinstance(fact, events.SplitsReassigned) for fact in scene.events)


def test_a_worker_that_is_silent_is_slow_for_a_dispatcher_that_began_again(
    scene: Scenario,
) -> None:
    scene.open("c", **IN_ORDER)
    deal_all(scene)
    scene.restart()
    assert scene.get_split(4001, num_done=3).wait
    wait(scene, 1.5)
    scene.get_split(4001, num_done=3)
    assert scene.events[-1] == events.SplitsReassigned(task_id=4000, splits=((0, 1),))


def test_what_was_read_before_a_place_says_nothing_of_how_long_units_take(
    scene: Scenario,
) -> None:
    scene.register(1004, has_element_ids=True, fingerprint="long")
    scene.open(
        "c",
        "1001",
        **IN_ORDER | {"num_splits": 1004, "first_split": 1000, "start_position_id": "there"},
    )
    assert scene.split(4000, max_splits=1) == (1000, 1001)
    assert scene.split(4001, max_splits=1) == (1001, 1002)
    wait(scene, 10.0)
    for done in (1, 2):
        assert scene.split(4001, max_splits=1, num_done=done) == (1001 + done, 1002 + done)
        wait(scene, 10.0)
    scene.get_split(4000, num_done=1)
    assert scene.get_split(4001, num_done=3).wait is False
    (work,) = scene.dispatcher.soft_state.activity.iterations.values()
    assert work.initially_done == 1000


# --- a client that waits ------------------------------------------------------------------------


@pytest.fixture
def waiting(scene: Scenario) -> Scenario:
    """Ten units: the first is with the first worker, which is slow; the second has given two."""
    scene.register(10, has_element_ids=True, fingerprint="ten")
    scene.open("c", "1001", **IN_ORDER | {"num_splits": 10})
    assert scene.split(4000, max_splits=1) == (0, 1)
    for done in range(3):
        assert scene.split(4001, max_splits=1, num_done=done) == (1 + done, 2 + done)
    return scene


def test_while_there_is_more_to_deal_a_client_that_waits_has_a_slow_unit_taken_over(
    waiting: Scenario,
) -> None:
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4000,), "it may yet come"
    wait(waiting, 1.5)
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4001,), "it will be dealt it"
    assert waiting.events[-1] == events.SplitsReassigned(task_id=4000, splits=((0, 1),))
    waiting.check()
    assert waiting.split(4001, num_done=2) == (0, 1)
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4001,)
    waiting.check()


def test_to_a_client_that_knows_all_else_helpers_are_said_too(waiting: Scenario) -> None:
    known = waiting.heartbeat("c").version
    update = waiting.heartbeat("c", known_version=known, wanted_split=0)
    assert (update.unchanged, update.urgent_tasks) == (True, (4000,))
    wait(waiting, 1.5)
    update = waiting.heartbeat("c", known_version=known, wanted_split=0)
    assert update.urgent_tasks == (4001,)


def test_nobody_is_asked_for_more_where_no_client_waits(waiting: Scenario) -> None:
    wait(waiting, 30.0)
    assert waiting.heartbeat("c").urgent_tasks == ()
    assert taken_over(waiting) == []


@pytest.mark.parametrize("unit", [4, 9, 10, 1 << 70])
def test_of_a_unit_that_nobody_holds_nothing_is_taken_over(waiting: Scenario, unit: int) -> None:
    wait(waiting, 30.0)
    assert waiting.heartbeat("c", wanted_split=unit).urgent_tasks == ()
    assert taken_over(waiting) == []


def test_a_unit_that_a_client_waits_for_is_taken_over_once(waiting: Scenario) -> None:
    waiting.add_worker("x")
    wait(waiting, 1.5)
    waiting.heartbeat("c", wanted_split=0)
    assert waiting.split(4001, num_done=2, max_splits=1) == (0, 1)
    wait(waiting, 30.0, "vwx")
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4001,)
    assert taken_over(waiting) == [(4000, ((0, 1),))]


def test_of_several_that_may_be_dealt_it_the_one_that_got_on_last_is_asked(
    waiting: Scenario,
) -> None:
    waiting.add_worker("x")
    assert waiting.split(4002, max_splits=1) == (4, 5)
    waiting.tick(0.25)
    assert waiting.split(4002, max_splits=1, num_done=1) == (5, 6)
    wait(waiting, 1.5, "vwx")
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4002,)


def test_what_the_only_worker_is_slow_with_nobody_takes_over(scene: Scenario) -> None:
    scene.lose("w")
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    wait(scene, 30.0, "v")
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == (4000,)
    assert taken_over(scene) == []


def test_in_any_order_a_client_waits_for_no_unit(scene: Scenario) -> None:
    scene.open("c", processing_mode=DYNAMIC, visitation="exactly_once")
    assert scene.split(4000, max_splits=1) == (0, 1)
    wait(scene, 30.0)
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == ()
    assert taken_over(scene) == []


def test_before_any_unit_is_done_nobody_is_slow(scene: Scenario) -> None:
    scene.open("c", **IN_ORDER)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4001, max_splits=1) == (1, 2)
    wait(scene, 60.0)
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == (4000,)
    assert taken_over(scene) == []
    assert scene.split(4001, max_splits=1, num_done=1) == (2, 3)
    wait(scene, 400.0)  # a unit takes 60 s with each of two
    assert scene.heartbeat("c", wanted_split=0).urgent_tasks == (4001,)


def test_a_leaving_worker_is_not_asked_for_what_it_will_not_be_dealt(waiting: Scenario) -> None:
    waiting.add_worker("x")
    assert waiting.split(4002, max_splits=1) == (4, 5)
    waiting.tick(0.25)
    waiting.get_split(4001, num_done=3)
    wait(waiting, 1.5, "vwx")
    waiting.drain_worker("w")
    assert waiting.heartbeat("c", wanted_split=0).urgent_tasks == (4002,)
