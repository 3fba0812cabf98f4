"""Exactly once: of a unit that was lost in part, what nobody has is dealt again."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.splits import validate_partial_splits
from headrace.service.element_sets import ALL_ORDINALS, END_ORDINAL
from tests.service.dispatcher.scenario import EXACTLY, OFF, Scenario


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """Three units, and a worker."""
    scene.register(3, has_element_ids=True)
    scene.add_worker("v")
    return scene


def settle(scene: Scenario, client_id: str, task_id: int, *received: Any, parts: Any = ()) -> None:
    scene.ask(
        messages.ReportDelivery(
            client_id=client_id, task_id=task_id, delivered=received, partial_splits=tuple(parts)
        )
    )
    scene.check()


def drop(scene: Scenario, client_id: str, task_id: int, **said: Any) -> None:
    worker_id = scene.state.tasks[task_id].worker_id
    scene.ask(
        messages.ReportDepartedClient(
            worker_id=worker_id,
            client_id=client_id,
            **{"unacknowledged": (), "possibly_lost": (), **said},
            **scene.shown(task_id),
        )
    )
    scene.check()


def lose_what_was_dealt(scene: Scenario, clients: str) -> None:
    """Let clients read what worker v is dealt, and lose v with it; worker w is there."""
    for client_id in clients:
        scene.open(client_id, **EXACTLY)
    scene.split(4000)
    scene.add_worker("w")
    scene.lose("v")


def test_what_did_not_come_of_a_unit_is_dealt_again_by_itself(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    assert scene.split(4000, max_splits=3) == (0, 2)
    scene.add_worker("w")
    scene.lose("v")
    settle(scene, "c", 4000, (1, 2), parts=[(0, ((0, 64), (100, END_ORDINAL)))])

    granted = scene.deal(4001)

    assert (granted.start, granted.stop, granted.ordinals) == (0, 1, ((64, 100),))
    assert scene.deal(4001, assignment_number=0) == granted, "asked again, the same"
    assert scene.split(4001) == (2, 3)
    scene.check()
    scene.restart()
    assert scene.deal(4001, assignment_number=1).ordinals == ()


def test_what_several_clients_have_together_is_whole(scene: Scenario) -> None:
    lose_what_was_dealt(scene, "ab")
    settle(scene, "a", 4000, parts=[(0, ((0, 3), (6, END_ORDINAL))), (1, ((0, 2),))])
    settle(scene, "b", 4000, parts=[(0, ((3, 6),)), (1, ((2, 4),))])
    granted = scene.deal(4001)
    assert (granted.start, granted.ordinals) == (1, ((4, END_ORDINAL),))
    assert scene.split(4001) == (2, 3)


def test_a_client_that_is_only_silent_is_waited_for(scene: Scenario) -> None:
    lose_what_was_dealt(scene, "ab")
    settle(scene, "a", 4000, parts=[(0, ((0, 3),))])
    until = scene.now + 60.0
    while scene.now < until:
        scene.tick(1.0)
        scene.beat("w")
        scene.heartbeat("a")
    assert scene.deal(4001).start == 2, "the unit that nobody had"
    settle(scene, "b", 4000, parts=[(0, ((3, END_ORDINAL),))])
    assert scene.split(4001) == (1, 2)


def test_what_a_dead_client_did_not_acknowledge_is_dealt_while_its_task_goes_on(
    scene: Scenario,
) -> None:
    for client_id in "ab":
        scene.open(client_id, **EXACTLY)
    scene.split(4000)
    scene.close("a")
    drop(
        scene,
        "a",
        4000,
        partially_unacknowledged=((0, ((4, 8),)),),
        partially_acknowledged=((0, ((0, 4),)),),
    )
    assert scene.deal(4000, assignment_number=1).ordinals == ((4, 8),)

    scene.add_worker("w")
    scene.lose("v")
    settle(scene, "b", 4000, parts=[(0, ((8, 9),))])

    (iteration,) = scene.state.iterations.values()
    assert iteration.pool.partial_splits == {0: ((4, 8), (9, END_ORDINAL))}
    assert iteration.pool.returned == ((1, 2),)


def test_what_a_client_that_leaves_says_it_used_comes_to_nobody(scene: Scenario) -> None:
    for client_id in "ab":
        scene.open(client_id, **EXACTLY)
    scene.split(4000)
    settle(scene, "a", 4000, parts=[(0, ((0, 5),))])
    scene.close("a")
    # The worker knows less: not all acknowledgements came.
    drop(
        scene,
        "a",
        4000,
        partially_unacknowledged=((0, ((2, 8),)),),
        partially_acknowledged=((0, ((0, 2),)),),
    )
    (iteration,) = scene.state.iterations.values()
    assert iteration.pool.partial_splits == {0: ((5, 8),)}


def test_a_unit_that_workers_get_on_with_is_not_suspected(scene: Scenario) -> None:
    scene.register(1, has_element_ids=True)
    scene.open("c", "1001", **EXACTLY)
    for death in range(8):
        name, task_id = "v" if not death else f"w{death}", 4000 + death
        granted = scene.deal(task_id)
        assert not granted.is_poison_candidate
        assert granted.ordinals == (((death, END_ORDINAL),) if death else ())
        scene.add_worker(f"w{death + 1}")
        scene.lose(name)
        settle(scene, "c", task_id, parts=[(0, ((death, death + 1),))])
    assert not scene.state.iterations[2000].pool.abandoned


def test_silence_of_workers_never_makes_a_split_poison(scene: Scenario) -> None:
    scene.register(1, has_element_ids=True)
    scene.open("c", "1001", **EXACTLY)
    for loss in range(8):
        name, task_id = "v" if not loss else f"w{loss}", 4000 + loss
        assert not scene.deal(task_id).is_poison_candidate
        scene.add_worker(f"w{loss + 1}")
        scene.lose(name, exited=False)
        settle(scene, "c", task_id)
    assert not scene.state.iterations[2000].pool.abandoned


def test_a_unit_that_kills_is_given_up_after_three_deaths_alone(scene: Scenario) -> None:
    scene.register(1, has_element_ids=True)
    scene.open("c", "1001", **EXACTLY)
    alone = []
    while not scene.state.iterations[2000].finished:
        death = len(alone)
        alone.append(scene.deal(4000 + death).is_poison_candidate)
        scene.add_worker(f"w{death + 1}")
        scene.lose(f"w{death}" if death else "v")
        # The first death was that of a worker that got on with it.
        settle(scene, "c", 4000 + death, parts=[] if death else [(0, ((0, 3),))])
    assert alone == [False, False, True, True, True]
    (lost,) = scene.heartbeat("c").lost
    assert (lost.splits, lost.abandoned) == (((0, 1),), True)


def test_a_client_that_has_not_got_its_last_elements_keeps_no_other_and_gets_them(
    scene: Scenario,
) -> None:
    for client_id in "ab":
        scene.open(client_id, **EXACTLY)
    while scene.split(4000) != (0, 0):
        pass
    scene.finish("v", 4000)
    for client_id in "ab":
        scene.heartbeat(client_id)
    assert scene.heartbeat("a").finished
    scene.close("a")
    scene.add_worker("w")
    drop(scene, "a", 4000, partially_acknowledged=((0, ALL_ORDINALS), (1, ALL_ORDINALS)))
    scene.lose("v")
    settle(scene, "b", 4000, parts=[(2, ((0, 1),))])

    update = scene.heartbeat("b")

    assert not update.finished
    (task,) = update.tasks
    assert scene.deal(task.task_id).ordinals == ((1, END_ORDINAL),)


def test_what_a_client_had_of_a_lost_task_and_did_not_use_is_dealt_again_when_it_goes(
    scene: Scenario,
) -> None:
    for client_id in "ab":
        scene.open(client_id, **EXACTLY)
    while scene.split(4000) != (0, 0):
        pass
    scene.add_worker("w")
    scene.lose("v")
    settle(scene, "a", 4000, (1, 3), parts=[(0, ((0, 4),))])
    settle(scene, "b", 4000, parts=[(0, ((4, END_ORDINAL),))])
    assert scene.deal(4001) == messages.GetSplitReply(start=0, stop=0)

    used: dict[str, Any] = {
        "delivered": ((1, 2),),
        "partial_splits": ((0, ((0, 3),)), (2, ((0, 1),))),
    }
    scene.ask(messages.ReportDelivery(client_id="a", task_id=4000, consumed=True, **used))
    scene.close("a")
    scene.check()

    (iteration,) = scene.state.iterations.values()
    assert iteration.pool.partial_splits == {0: ((3, 4),), 2: ((1, END_ORDINAL),)}
    assert iteration.pool.returned == ()
    scene.ask(
        messages.ReportDelivery(client_id="b", task_id=4000, delivered=((0, 3),), consumed=True)
    )
    assert not scene.state.tasks[4000].assigned.unacknowledged
    scene.check()


def test_all_is_said_to_be_done_with_the_end_of_a_task(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    while scene.split(4000) != (0, 0):
        pass
    scene.finish("v", 4000, num_done=3)
    scene.left("v")
    scene.check()
    update = scene.heartbeat("c")
    assert (update.finished, update.lost, update.reports_needed) == (True, (), ())


def test_a_dataset_whose_elements_have_no_origins_is_refused(scene: Scenario) -> None:
    dataset_id = scene.register(5)
    with pytest.raises(FailedPreconditionError, match="cannot be visited exactly once"):
        scene.open("c", dataset_id, **EXACTLY)
    with pytest.raises(
        FailedPreconditionError, match=r"with ShardingPolicy\.DYNAMIC alone; got OFF"
    ):
        scene.open("c", **{**EXACTLY, "processing_mode": OFF})


@pytest.mark.parametrize(
    "parts", [((7, ((0, 1),)),), ((0, ()),), ((0, ((3, 1),)),), ((0, ((0, 1),)), (0, ((1, 2),)))]
)
def test_parts_that_make_no_sense_are_refused(scene: Scenario, parts: Any) -> None:
    scene.open("c", **EXACTLY)
    scene.split(4000)
    with pytest.raises(ValueError, match="task 4000"):
        settle(scene, "c", 4000, parts=parts)


def test_of_units_that_are_done_nothing_is_kept_that_a_client_says(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4000, max_splits=1, num_done=1) == (1, 2)
    first, second = ((0, ((0, 1),)), (1, ((0, 1),)))
    assert validate_partial_splits(scene.state.tasks[4000], (first, second)) == (second,)


def test_what_is_lost_of_a_pass_that_failed_does_not_begin_it_again(scene: Scenario) -> None:
    scene.add_worker("w")
    scene.open("c", **EXACTLY)
    assert scene.split(4001, max_splits=1) == (0, 1)
    assert scene.split(4000, max_splits=1) == (1, 2)
    assert scene.split(4000, max_splits=1, num_done=1) == (2, 3)
    scene.fail("w", 4001)
    scene.finish("v", 4000)
    settle(scene, "c", 4001)
    scene.fail("v", 4002)
    # As a dispatcher wrote that did not offer this mode.
    assert scene.facts[-1] == events.IterationFinished(iteration_id=2000)
    scene.facts[-1] = events.IterationFinished(iteration_id=2000, failure_reason="not offered")
    scene.restart()
    scene.lose("v")
    settle(scene, "c", 4000)
    (iteration,) = scene.state.iterations.values()
    assert (iteration.finished, iteration.failure_reason) == (True, "not offered")


def test_a_worker_hears_that_origins_are_wanted(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    asked = messages.GetTask(worker_id="v", task_id=4000)
    assert scene.ask(asked).has_element_ids
    assert not any(isinstance(fact, events.SplitsAssigned) for fact in scene.facts)


def test_a_worker_cannot_hand_back_what_a_client_has(scene: Scenario) -> None:
    for client_id in "ab":
        scene.open(client_id, **EXACTLY)
    scene.split(4000, max_splits=2)
    used = messages.ReportDelivery(client_id="b", task_id=4000, delivered=((0, 1),), consumed=True)
    scene.ask(used)
    scene.leaving("v")

    scene.hand_back("v", 4000, (0, 2))

    (iteration,) = scene.state.iterations.values()
    assert iteration.pool.returned == ((1, 2),)
    scene.check()


def test_of_a_unit_that_was_dealt_in_part_a_client_that_goes_leaves_that_part(
    scene: Scenario,
) -> None:
    """The rest of it another client has."""
    lose_what_was_dealt(scene, "ab")
    settle(scene, "a", 4000, parts=[(0, ((0, 3),))])
    settle(scene, "b", 4000)
    assert scene.deal(4001, max_splits=1).ordinals == ((3, END_ORDINAL),)
    scene.add_worker("x")
    scene.lose("w")
    settle(scene, "a", 4001)
    settle(scene, "b", 4001, (0, 1))

    scene.close("b")

    (iteration,) = scene.state.iterations.values()
    assert (iteration.pool.partial_splits, iteration.pool.returned) == (
        {0: ((3, END_ORDINAL),)},
        ((1, 2),),
    )
    scene.check()


def test_two_clients_cannot_both_have_an_element(scene: Scenario) -> None:
    lose_what_was_dealt(scene, "abc")
    settle(scene, "a", 4000, parts=[(0, ((0, 3),))])
    settle(scene, "b", 4000, parts=[(0, ((2, END_ORDINAL),))])
    settle(scene, "c", 4000, (0, 1))
    for client_id in "bca":
        scene.close(client_id)
        scene.check()
