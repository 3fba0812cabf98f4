"""An iteration whose units are all done waits for a client that may be gone."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


def test_a_worker_that_joins_while_a_silent_client_is_waited_for_gets_no_task(
    scene: Scenario,
) -> None:
    scene.register(3)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.tick(1.0)
    scene.heartbeat("one")
    done = 0
    while done < 3:
        start, stop = scene.split(task.task_id, done=done)
        done += stop - start
    scene.finish("a", task.task_id)
    assert not scene.heartbeat("one").finished
    scene.add_worker("b")
    scene.check()
    assert len(scene.state.tasks) == 1
    assert scene.heartbeat("two").finished


def test_who_counts_as_gone_joins_no_second_time_for_workers_refuse_it(scene: Scenario) -> None:
    scene.register(100)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.close("one")
    with pytest.raises(FailedPreconditionError, match=r"one closed .* iterate over the dataset"):
        scene.open("one", processing_mode=DYNAMIC, job_name="job")
    scene.check()
    scene.restart()
    with pytest.raises(FailedPreconditionError, match="does not know this reader any more"):
        scene.open("one", processing_mode=DYNAMIC, job_name="job")
    assert scene.open("three", processing_mode=DYNAMIC, job_name="job").tasks == (task,)


def test_who_left_and_asks_again_after_the_end_hears_that_it_is_over(scene: Scenario) -> None:
    scene.register(1)
    scene.add_worker("a")
    for client in ("one", "two"):
        task = scene.open(client, processing_mode=DYNAMIC, job_name="job").tasks[0]
    scene.close("one")
    scene.drop("one", task.task_id)
    scene.split(task.task_id, done=0)
    scene.split(task.task_id, done=1)
    scene.finish("a", task.task_id)
    scene.tick(1.0)
    assert scene.heartbeat("two").finished
    assert scene.open("one", processing_mode=DYNAMIC, job_name="job").finished
    assert not [each.left for each in scene.state.iterations.values() if each.left]
