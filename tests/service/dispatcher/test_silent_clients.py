"""An iteration whose units are all done waits for a client that may be gone."""

from __future__ import annotations

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
