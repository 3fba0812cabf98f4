"""Log messages of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.service.dispatcher.events import TaskLost, WorkerLost
from headrace.service.dispatcher.losses import log_message
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


def log_messages(scene: Scenario) -> Iterator[str]:
    scene.register(4)
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC)
    assert scene.split(4000, max_splits=1) == (0, 1)
    for reason in ("it was slow", "none could reach it; is v:1 an address that clients can reach?"):
        text = log_message(scene.state, TaskLost(task_id=4000, reason=reason))
        assert text is not None
        yield text


def test_log_message_of_a_lost_task_gives_the_reason(scene: Scenario) -> None:
    slow, unreachable = log_messages(scene)
    assert slow.endswith("on worker v:1 lost: it was slow")
    assert unreachable.endswith("is v:1 an address that clients can reach?")


def test_log_message_of_a_lost_worker_counts_its_running_tasks(scene: Scenario) -> None:
    scene.register(4)
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC)
    reason = "connection refused, no heartbeat for 1 s"
    assert log_message(scene.state, WorkerLost("v", reason)) == (
        "worker v:1 lost: connection refused, no heartbeat for 1 s; 1 running task lost. A "
        "restarted process registers as a new worker."
    )
