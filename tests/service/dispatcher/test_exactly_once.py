"""Exactly-once delivery: only the undelivered elements of lost splits are reassigned."""

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
    """A dataset with three splits, and a worker."""
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


def drop(scene: Scenario, client_id: str, task_id: int, **fields: Any) -> None:
    worker_id = scene.state.tasks[task_id].worker_id
    scene.ask(
        messages.ReportDepartedClient(
            worker_id=worker_id,
            client_id=client_id,
            **{"unacknowledged": (), "possibly_lost": (), **fields},
            **scene.task_fields(task_id),
        )
    )
    scene.check()


def lose_assigned_splits(scene: Scenario, clients: str) -> None:
    """Let clients read splits from worker v, then lose v; worker w is available."""
    for client_id in clients:
        scene.open(client_id, **EXACTLY)
    scene.split(4000)
    scene.add_worker("w")
    scene.lose("v")


def test_missing_elements_of_a_split_are_reassigned_alone(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    assert scene.split(4000, max_splits=3) == (0, 2)
    scene.add_worker("w")
    scene.lose("v")
    settle(scene, "c", 4000, (1, 2), parts=[(0, ((0, 64), (100, END_ORDINAL)))])

    reply = scene.get_split(4001)

    assert (reply.start, reply.stop, reply.ordinals) == (0, 1, ((64, 100),))
    assert scene.get_split(4001, assignment_number=0) == reply, (
        "a repeated request gets the same reply"
    )
    assert scene.split(4001) == (2, 3)
    scene.check()
    scene.restart()
    assert scene.get_split(4001, assignment_number=1).ordinals == ()


def test_split_received_by_several_clients_together_is_complete(scene: Scenario) -> None:
    lose_assigned_splits(scene, "ab")
    settle(scene, "a", 4000, parts=[(0, ((0, 3), (6, END_ORDINAL))), (1, ((0, 2),))])
    settle(scene, "b", 4000, parts=[(0, ((3, 6),)), (1, ((2, 4),))])
    reply = scene.get_split(4001)
    assert (reply.start, reply.ordinals) == (1, ((4, END_ORDINAL),))
    assert scene.split(4001) == (2, 3)


def test_report_of_a_silent_client_is_awaited(scene: Scenario) -> None:
    lose_assigned_splits(scene, "ab")
    settle(scene, "a", 4000, parts=[(0, ((0, 3),))])
    until = scene.now + 60.0
    while scene.now < until:
        scene.tick(1.0)
        scene.worker_heartbeat("w")
        scene.heartbeat("a")
    assert scene.get_split(4001).start == 2, "the split that no client received"
    settle(scene, "b", 4000, parts=[(0, ((3, END_ORDINAL),))])
    assert scene.split(4001) == (1, 2)


def test_unacknowledged_elements_are_reassigned_while_the_task_runs(
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
    assert scene.get_split(4000, assignment_number=1).ordinals == ((4, 8),)

    scene.add_worker("w")
    scene.lose("v")
    settle(scene, "b", 4000, parts=[(0, ((8, 9),))])

    (iteration,) = scene.state.iterations.values()
    assert iteration.pool.partial_splits == {0: ((4, 8), (9, END_ORDINAL))}
    assert iteration.pool.returned == ((1, 2),)


def test_elements_reported_as_consumed_are_not_reassigned(scene: Scenario) -> None:
    for client_id in "ab":
        scene.open(client_id, **EXACTLY)
    scene.split(4000)
    settle(scene, "a", 4000, parts=[(0, ((0, 5),))])
    scene.close("a")
    # The worker knows less: it has not received all acknowledgements.
    drop(
        scene,
        "a",
        4000,
        partially_unacknowledged=((0, ((2, 8),)),),
        partially_acknowledged=((0, ((0, 2),)),),
    )
    (iteration,) = scene.state.iterations.values()
    assert iteration.pool.partial_splits == {0: ((5, 8),)}


def test_split_with_progress_is_no_poison_candidate(scene: Scenario) -> None:
    scene.register(1, has_element_ids=True)
    scene.open("c", "1001", **EXACTLY)
    for death in range(8):
        name, task_id = "v" if not death else f"w{death}", 4000 + death
        reply = scene.get_split(task_id)
        assert not reply.is_poison_candidate
        assert reply.ordinals == (((death, END_ORDINAL),) if death else ())
        scene.add_worker(f"w{death + 1}")
        scene.lose(name)
        settle(scene, "c", task_id, parts=[(0, ((death, death + 1),))])
    assert not scene.state.iterations[2000].pool.abandoned


def test_silence_of_workers_never_makes_a_split_poison(scene: Scenario) -> None:
    scene.register(1, has_element_ids=True)
    scene.open("c", "1001", **EXACTLY)
    for loss in range(8):
        name, task_id = "v" if not loss else f"w{loss}", 4000 + loss
        assert not scene.get_split(task_id).is_poison_candidate
        scene.add_worker(f"w{loss + 1}")
        scene.lose(name, exited=False)
        settle(scene, "c", task_id)
    assert not scene.state.iterations[2000].pool.abandoned


def test_poison_split_is_abandoned_after_three_deaths_alone(scene: Scenario) -> None:
    scene.register(1, has_element_ids=True)
    scene.open("c", "1001", **EXACTLY)
    candidates = []
    while not scene.state.iterations[2000].finished:
        death = len(candidates)
        candidates.append(scene.get_split(4000 + death).is_poison_candidate)
        scene.add_worker(f"w{death + 1}")
        scene.lose(f"w{death}" if death else "v")
        # The first worker delivered elements of the split before it died.
        settle(scene, "c", 4000 + death, parts=[] if death else [(0, ((0, 3),))])
    assert candidates == [False, False, True, True, True]
    (lost,) = scene.heartbeat("c").lost
    assert (lost.splits, lost.abandoned) == (((0, 1),), True)


def test_client_missing_its_last_elements_gets_them_without_delaying_others(
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
    assert scene.get_split(task.task_id).ordinals == ((1, END_ORDINAL),)


def test_unconsumed_elements_of_a_lost_task_are_reassigned_on_departure(
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
    assert scene.get_split(4001) == messages.GetSplitReply(start=0, stop=0)

    consumed: dict[str, Any] = {
        "delivered": ((1, 2),),
        "partial_splits": ((0, ((0, 3),)), (2, ((0, 1),))),
    }
    scene.ask(messages.ReportDelivery(client_id="a", task_id=4000, consumed=True, **consumed))
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


def test_finish_request_reports_done_splits(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    while scene.split(4000) != (0, 0):
        pass
    scene.finish("v", 4000, num_done=3)
    scene.unregister_worker("v")
    scene.check()
    update = scene.heartbeat("c")
    assert (update.finished, update.lost, update.reports_needed) == (True, (), ())


def test_exactly_once_rejects_a_dataset_without_element_ids(scene: Scenario) -> None:
    dataset_id = scene.register(5)
    with pytest.raises(FailedPreconditionError, match="cannot be visited exactly once"):
        scene.open("c", dataset_id, **EXACTLY)
    with pytest.raises(
        FailedPreconditionError, match=r"requires ShardingPolicy\.DYNAMIC.*; got OFF"
    ):
        scene.open("c", **{**EXACTLY, "processing_mode": OFF})


@pytest.mark.parametrize(
    "parts", [((7, ((0, 1),)),), ((0, ()),), ((0, ((3, 1),)),), ((0, ((0, 1),)), (0, ((1, 2),)))]
)
def test_invalid_partial_splits_are_rejected(scene: Scenario, parts: Any) -> None:
    scene.open("c", **EXACTLY)
    scene.split(4000)
    with pytest.raises(ValueError, match="task 4000"):
        settle(scene, "c", 4000, parts=parts)


def test_reports_on_done_splits_are_ignored(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    assert scene.split(4000, max_splits=1) == (0, 1)
    assert scene.split(4000, max_splits=1, num_done=1) == (1, 2)
    first, second = ((0, ((0, 1),)), (1, ((0, 1),)))
    assert validate_partial_splits(scene.state.tasks[4000], (first, second)) == (second,)


def test_loss_does_not_reopen_an_abandoned_iteration(scene: Scenario) -> None:
    scene.add_worker("w")
    scene.open("c", **EXACTLY)
    assert scene.split(4001, max_splits=1) == (0, 1)
    assert scene.split(4000, max_splits=1) == (1, 2)
    assert scene.split(4000, max_splits=1, num_done=1) == (2, 3)
    scene.fail("w", 4001)
    scene.finish("v", 4000)
    settle(scene, "c", 4001)
    scene.fail("v", 4002)
    # As journaled by a dispatcher that does not support this mode.
    assert scene.events[-1] == events.IterationFinished(iteration_id=2000)
    scene.events[-1] = events.IterationFinished(iteration_id=2000, failure_reason="unsupported")
    scene.restart()
    scene.lose("v")
    settle(scene, "c", 4000)
    (iteration,) = scene.state.iterations.values()
    assert (iteration.finished, iteration.failure_reason) == (True, "unsupported")


def test_task_definition_requests_element_ids(scene: Scenario) -> None:
    scene.open("c", **EXACTLY)
    request = messages.GetTask(worker_id="v", task_id=4000)
    assert scene.ask(request).has_element_ids
    assert not any(isinstance(event, events.SplitsAssigned) for event in scene.events)


def test_received_splits_cannot_be_returned(scene: Scenario) -> None:
    for client_id in "ab":
        scene.open(client_id, **EXACTLY)
    scene.split(4000, max_splits=2)
    consumed = messages.ReportDelivery(
        client_id="b", task_id=4000, delivered=((0, 1),), consumed=True
    )
    scene.ask(consumed)
    scene.drain_worker("v")

    scene.return_splits("v", 4000, (0, 2))

    (iteration,) = scene.state.iterations.values()
    assert iteration.pool.returned == ((1, 2),)
    scene.check()


def test_departed_client_returns_only_its_part_of_a_partial_split(
    scene: Scenario,
) -> None:
    """Another client has received the other elements of the split."""
    lose_assigned_splits(scene, "ab")
    settle(scene, "a", 4000, parts=[(0, ((0, 3),))])
    settle(scene, "b", 4000)
    assert scene.get_split(4001, max_splits=1).ordinals == ((3, END_ORDINAL),)
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


def test_contradictory_reports_of_clients_keep_invariants(scene: Scenario) -> None:
    lose_assigned_splits(scene, "abc")
    settle(scene, "a", 4000, parts=[(0, ((0, 3),))])
    settle(scene, "b", 4000, parts=[(0, ((2, END_ORDINAL),))])
    settle(scene, "c", 4000, (0, 1))
    for client_id in "bca":
        scene.close(client_id)
        scene.check()
