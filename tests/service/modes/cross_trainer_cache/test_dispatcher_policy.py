"""Dispatcher policy of the cross-trainer cache: infinite copies, joining and leaving workers."""

from __future__ import annotations

import pytest

from headrace.errors import AlreadyExistsError
from headrace.service import messages
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario


def start_scene(scene: Scenario, *workers: str, mode: int = OFF) -> None:
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


def workers_with_copies(scene: Scenario) -> list[str]:
    """Return the workers that run a copy."""
    scene.check()
    return [task.worker_id for task in scene.heartbeat("c").tasks]


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_tasks_use_the_shared_delivery_policy(scene: Scenario, mode: int) -> None:
    start_scene(scene, "w", mode=mode)
    task = scene.ask(messages.GetTask(worker_id="w", task_id=4000))
    assert task.delivery_policy == "shared"
    assert task.assigns_splits == (mode == DYNAMIC)


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_workers_learn_that_a_trainer_has_departed(scene: Scenario, mode: int) -> None:
    start_scene(scene, "w", mode=mode)
    join(scene, "d", mode)
    scene.close("d")
    assert scene.worker_heartbeat_reply("w", 4000).departed_clients == ((4000, "d"),)
    scene.restart()
    scene.report_departed_client("d", 4000)
    assert scene.worker_heartbeat_reply("w", 4000).departed_clients == ()
    scene.check()


@pytest.mark.parametrize("address", ["v:1", "elsewhere:1"])
def test_a_restarted_worker_gets_a_new_copy_while_others_run(scene: Scenario, address: str) -> None:
    start_scene(scene, "v", "w")
    scene.lose("v")
    assert workers_with_copies(scene) == ["w"]
    scene.add_worker("v again", address)
    assert workers_with_copies(scene) == ["w", "v again"]


@pytest.mark.parametrize("num_reports", [True, False])
def test_the_iteration_outlives_draining_of_all_workers(scene: Scenario, num_reports: bool) -> None:
    start_scene(scene, "v")
    if num_reports:
        scene.drain_worker("v")
    scene.ask(
        messages.FinishTask(
            worker_id="v",
            task_id=4000,
            task_token=scene.state.tasks[4000].task_token,
            cut_short=True,
        )
    )
    # A dispatcher that was down at the first report learns of it only now.
    scene.drain_worker("v")
    scene.unregister_worker("v")
    assert workers_with_copies(scene) == []
    assert not scene.heartbeat("c").finished
    scene.add_worker("w")
    assert workers_with_copies(scene) == ["w"]


def test_after_all_copies_are_lost_another_attempt_starts(scene: Scenario) -> None:
    start_scene(scene, "v")
    scene.lose("v")
    scene.add_worker("w")
    (task,) = scene.heartbeat("c").tasks
    assert (task.worker_id, task.attempt) == ("w", 1)


def test_a_later_worker_joins_the_current_attempt(scene: Scenario) -> None:
    start_scene(scene, "v")
    scene.lose("v")
    scene.add_worker("w")
    scene.add_worker("x")
    found = [(task.worker_id, task.attempt) for task in scene.heartbeat("c").tasks]
    assert found == [("w", 1), ("x", 1)]


def test_a_copy_that_reached_its_end_ends_the_iteration(scene: Scenario) -> None:
    start_scene(scene, "v")
    scene.finish("v", 4000)
    assert scene.heartbeat("c").finished


def test_all_clients_of_a_job_use_a_cache_or_none_does(scene: Scenario) -> None:
    start_scene(scene, "v")
    with pytest.raises(
        AlreadyExistsError, match="Existing cross-trainer cache: <enabled>; got <disabled>"
    ):
        join(scene, "d", cross_trainer_cache=False)
    with pytest.raises(ValueError, match="Got empty `job_name`"):
        join(scene, "d", job_name=None)


def test_splits_that_a_trainer_did_not_consume_are_not_reassigned(scene: Scenario) -> None:
    start_scene(scene, "w", mode=DYNAMIC)
    join(scene, "d", DYNAMIC)
    task_token = scene.state.tasks[4000].task_token
    reply = scene.ask(
        messages.GetSplit(
            worker_id="w",
            task_id=4000,
            task_token=task_token,
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
            task_token=task_token,
            client_id="d",
            unacknowledged=(),
            possibly_lost=(),
        )
    )
    scene.check()
    (iteration,) = scene.state.iterations.values()
    assert (iteration.pool.next_split, iteration.pool.returned, iteration.missing_splits) == (
        reply.stop,
        (),
        [],
    )
