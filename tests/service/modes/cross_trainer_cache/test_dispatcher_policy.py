"""Where trainers share what workers make, copies have no end, and workers come and go."""

from __future__ import annotations

import pytest

from headrace.errors import AlreadyExistsError
from headrace.service import messages
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def begun(scene: Scenario, *workers: str, mode: int = OFF) -> None:
    scene.register()
    for worker_id in workers:
        scene.add_worker(worker_id)
    join(scene, "c", mode)


def join(scene: Scenario, client_id: str, mode: int = OFF, **fields: object) -> None:
    scene.open(
        client_id,
        **{
            "processing_mode": mode,
            "job_name": "job",
            "cross_trainer_cache": True,
            **fields,
        },
    )


def copies(scene: Scenario) -> list[str]:
    """Return the workers that make a copy now."""
    scene.check()
    return [task.worker_id for task in scene.heartbeat("c").tasks]


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_workers_hand_out_what_they_make_to_each_trainer(scene: Scenario, mode: int) -> None:
    begun(scene, "w", mode=mode)
    task = scene.ask(messages.GetTask(worker_id="w", task_id=4000))
    assert task.delivery_policy == "shared"
    assert task.assigns_splits == (mode == DYNAMIC)


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_workers_hear_that_a_trainer_is_gone_for_which_they_keep_elements(
    scene: Scenario, mode: int
) -> None:
    begun(scene, "w", mode=mode)
    join(scene, "d", mode)
    scene.close("d")
    assert scene.worker_heartbeat_reply("w", 4000).departed_clients == ((4000, "d"),)
    scene.restart()
    scene.report_departed_client("d", 4000)
    assert scene.worker_heartbeat_reply("w", 4000).departed_clients == ()
    scene.check()


@pytest.mark.parametrize("address", ["v:1", "elsewhere:1"])
def test_a_worker_that_starts_again_has_a_copy_again_while_others_run(
    scene: Scenario, address: str
) -> None:
    begun(scene, "v", "w")
    scene.lose("v")
    assert copies(scene) == ["w"]
    scene.add_worker("v again", address)
    assert copies(scene) == ["w", "v again"]


@pytest.mark.parametrize("said_before", [True, False])
def test_the_iteration_outlives_all_workers_that_were_asked_to_leave(
    scene: Scenario, said_before: bool
) -> None:
    begun(scene, "v")
    if said_before:
        scene.drain_worker("v")
    scene.ask(
        messages.FinishTask(
            worker_id="v",
            task_id=4000,
            task_token=scene.state.tasks[4000].task_token,
            cut_short=True,
        )
    )
    # Perhaps only now, where the dispatcher was away when it was said first.
    scene.drain_worker("v")
    scene.unregister_worker("v")
    assert copies(scene) == []
    assert not scene.heartbeat("c").finished
    scene.add_worker("w")
    assert copies(scene) == ["w"]


def test_where_all_copies_are_lost_the_next_is_another_attempt(scene: Scenario) -> None:
    begun(scene, "v")
    scene.lose("v")
    scene.add_worker("w")
    (task,) = scene.heartbeat("c").tasks
    assert (task.worker_id, task.attempt) == ("w", 1)


def test_a_worker_that_comes_later_joins_the_attempt_that_is_under_way(scene: Scenario) -> None:
    begun(scene, "v")
    scene.lose("v")
    scene.add_worker("w")
    scene.add_worker("x")
    found = [(task.worker_id, task.attempt) for task in scene.heartbeat("c").tasks]
    assert found == [("w", 1), ("x", 1)]


def test_a_copy_that_ended_by_itself_ends_the_iteration(scene: Scenario) -> None:
    begun(scene, "v")
    scene.finish("v", 4000)
    assert scene.heartbeat("c").finished


def test_a_job_is_read_with_a_cache_by_all_or_by_none(scene: Scenario) -> None:
    begun(scene, "v")
    with pytest.raises(
        AlreadyExistsError, match="Existing cross-trainer cache: <enabled>; got <disabled>"
    ):
        join(scene, "d", cross_trainer_cache=False)
    with pytest.raises(ValueError, match="Got empty `job_name`"):
        join(scene, "d", job_name=None)


def test_what_a_trainer_did_not_use_is_not_dealt_again(scene: Scenario) -> None:
    begun(scene, "w", mode=DYNAMIC)
    join(scene, "d", DYNAMIC)
    ticket = scene.state.tasks[4000].task_token
    granted = scene.ask(
        messages.GetSplit(
            worker_id="w",
            task_id=4000,
            task_token=ticket,
            assignment_number=0,
            max_splits=3,
            num_done=0,
        )
    )
    scene.ask(messages.CloseIteration(client_id="d"))
    scene.ask(
        messages.ReportDepartedClient(
            worker_id="w",
            task_id=4000,
            task_token=ticket,
            client_id="d",
            unacknowledged=(),
            possibly_lost=(),
        )
    )
    scene.check()
    (iteration,) = scene.state.iterations.values()
    assert (iteration.pool.next_split, iteration.pool.returned, iteration.missing_splits) == (
        granted.stop,
        (),
        [],
    )
