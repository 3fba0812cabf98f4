"""Which workers get tasks of which datasets, by the Python versions of both."""

from __future__ import annotations

import pytest

from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.updates import SlotsConfigured
from headrace.versions import Versions
from tests.service.dispatcher.scenario import DYNAMIC, OFF, Scenario

OLD, NEW = Versions("1.0", "3.11"), Versions("1.0", "3.12")
REFUSED = r"Python 3\.11, and these workers run another minor version: new:1 \(Python 3\.12\)"


def scenario(*patterns: str) -> Scenario:
    """Return a dispatcher with a dataset that Python 3.11 registered."""
    scene = Scenario()
    if patterns:
        fact = SlotsConfigured(patterns=patterns)
        apply(scene.state, fact)
        scene.facts.append(fact)
    scene.register(versions=OLD)
    return scene


def workers_with_tasks(scene: Scenario) -> set[str]:
    return {task.worker_id for task in scene.state.tasks.values()}


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_only_workers_of_the_client_s_version_get_tasks(mode: ShardingPolicy) -> None:
    scene = scenario()
    scene.add_worker("new", versions=NEW)
    scene.add_worker("old", versions=OLD)
    scene.open("c", processing_mode=mode)
    scene.add_worker("newer", versions=NEW)
    assert workers_with_tasks(scene) == {"old"}
    scene.check()


def test_client_is_refused_where_no_worker_can_run_its_functions() -> None:
    scene = scenario()
    scene.add_worker("new", versions=NEW)
    with pytest.raises(FailedPreconditionError, match=REFUSED):
        scene.open("c")
    scene.add_worker("old", versions=OLD)
    assert len(scene.open("c").tasks) == 1


def test_client_hears_that_workers_came_back_with_another_version() -> None:
    scene = scenario()
    scene.open("c", processing_mode=DYNAMIC)
    scene.heartbeat("c")
    scene.restart()
    scene.add_worker("new", versions=NEW)
    with pytest.raises(FailedPreconditionError, match=REFUSED):
        scene.heartbeat("c")


def test_every_slot_must_be_held_by_a_worker_of_the_version() -> None:
    scene = scenario("old:1", "new:1")
    scene.add_worker("old", versions=OLD)
    scene.add_worker("new", versions=NEW)
    with pytest.raises(FailedPreconditionError, match=REFUSED):
        scene.open("c", processing_mode=ShardingPolicy.DATA)


def test_dataset_of_an_older_version_is_named_when_it_is_registered_again() -> None:
    scene = scenario()
    scene.register(versions=OLD, dataset_id="mine")
    with pytest.raises(AlreadyExistsError, match=r"registered by Python 3\.11; got 3\.12"):
        scene.register(versions=NEW, dataset_id="mine")


def test_status_has_the_versions_of_workers() -> None:
    scene = scenario()
    scene.add_worker("old", versions=OLD)
    scene.add_worker("new", versions=NEW)
    found = scene.ask(messages.GetStatus())
    assert [worker.versions for worker in found.workers] == [OLD, NEW]
