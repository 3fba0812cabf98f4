"""What the dispatcher's log says of a task that is given up fits why it was."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.service.dispatcher.events import TaskLost
from headrace.service.dispatcher.losses import log_message
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


def said_of(scene: Scenario) -> Iterator[str]:
    scene.register(4)
    scene.add_worker("v")
    scene.open("c", processing_mode=DYNAMIC)
    assert scene.split(4000, max_splits=1) == (0, 1)
    for reason in ("it was slow", "none could reach it; is v:1 an address that clients can reach?"):
        text = log_message(scene.state, TaskLost(task_id=4000, reason=reason))
        assert text is not None
        yield text


def test_a_slow_worker_is_not_said_to_be_out_of_reach(scene: Scenario) -> None:
    slow, unreached = said_of(scene)
    assert slow.endswith("on the worker at v:1 is given up: it was slow")
    assert unreached.endswith("is v:1 an address that clients can reach?")
