"""What a processing mode means follows from one place; nothing else knows the modes."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.modes import OFFERED
from headrace.service.dispatcher.policy import Post
from headrace.service.dispatcher.slots import check_slots_may_change
from headrace.service.dispatcher.state import DispatcherState, Iteration
from headrace.service.dispatcher.updates import SlotsConfigured
from headrace.service.modes.no_sharding.policy import Copies
from headrace.service.modes.static.policy import Static
from headrace.service.modes.static.records import Shard
from tests.service.dispatcher.scenario import DYNAMIC, STARTED, Scenario, saving


class Halves(Copies):
    """One half of the data for each of two workers; a lost one is read again by whoever is free."""

    hand_out = "in_turn"
    definition = Static.definition

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        tasks = state.running_tasks(iteration)
        free = [each for each in state.workers if each not in {task.worker_id for task in tasks}]
        taken = {task.mode.index for task in tasks if isinstance(task.mode, Shard)}
        open_ = [half for half in range(2) if half not in taken]
        return [
            Post(worker_id=worker_id, mode=Shard(half, 2))
            for worker_id, half in zip(free, open_, strict=False)
        ]


def shards(scene: Scenario) -> dict[str, int]:
    """Return which shard each worker reads that has a task."""
    scene.check()
    (iteration,) = scene.state.iterations.values()
    return {
        task.worker_id: task.mode.index
        for task in scene.state.running_tasks(iteration)
        if isinstance(task.mode, Shard)
    }


def test_a_mode_is_added_by_a_row(monkeypatch: pytest.MonkeyPatch, scene: Scenario) -> None:
    monkeypatch.setitem(OFFERED, ShardingPolicy.DATA, Halves())
    scene.register(None)
    for worker_id in ("u", "v", "w"):
        scene.add_worker(worker_id)
    opened = scene.open("c", processing_mode=ShardingPolicy.DATA)
    assert [task.worker_id for task in opened.tasks] == ["u", "v"]
    assert shards(scene) == {"u": 0, "v": 1}
    definition = scene.ask(messages.GetTask(worker_id="v", task_id=opened.tasks[1].task_id))
    assert (definition.shard, definition.of, definition.hand_out) == (1, 2, "in_turn")

    scene.lose("u")
    assert shards(scene) == {"v": 1, "w": 0}
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["v", "w"]


def test_a_mode_without_a_row_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, scene: Scenario
) -> None:
    monkeypatch.delitem(OFFERED, ShardingPolicy.HINT)
    scene.register()
    with pytest.raises(FailedPreconditionError, match=r"offers .* and FILE_OR_DATA; got HINT"):
        scene.open("c", processing_mode=ShardingPolicy.HINT)


def test_tasks_of_a_new_iteration_follow_from_it(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w")
    scene.open("c")
    assert [type(fact).__name__ for fact in scene.facts[-4:]] == [
        "JobCreated",
        "IterationCreated",
        "TaskCreated",
        "ClientJoined",
    ]


def test_consumers_of_rounds_and_trainers_that_share_are_not_both(scene: Scenario) -> None:
    dataset_id = scene.register(5)
    terms = {"job_name": "j", "num_consumers": 2, "consumer_index": 0}
    with pytest.raises(FailedPreconditionError, match="does not go with coordinated reads"):
        scene.open("c", dataset_id, cross_trainer_cache=True, **terms)


def test_a_journal_of_what_is_offered_no_more_is_read_and_its_iteration_given_up(
    monkeypatch: pytest.MonkeyPatch, scene: Scenario
) -> None:
    """Facts mean what they meant: whatever a later version offers, it goes on with the others."""
    scene.register()
    scene.add_worker("w")
    scene.open("c", job_name="old", processing_mode=DYNAMIC)
    scene.open("d", job_name="other")
    scene.split(4000, want=3)
    before = scene.replay()
    monkeypatch.delitem(OFFERED, ShardingPolicy.DYNAMIC)

    assert scene.replay() == before
    scene.restart()
    scene.facts += scene.dispatcher.end_unoffered(scene.now)

    old, other = scene.state.iterations.values()
    assert old.finished
    assert old.failed.endswith("and HINT; got DYNAMIC")
    assert not other.finished
    scene.settle("c", 4000, touched=((0, 3),))
    assert scene.heartbeat("c").failed == old.failed
    assert scene.dispatcher.end_unoffered(scene.now) == []
    assert scene.replay() == scene.state
    with pytest.raises(FailedPreconditionError, match="got DYNAMIC"):
        scene.open("e", job_name="new", processing_mode=DYNAMIC)


def test_a_journal_with_a_save_is_read_whatever_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scenario(keeps_journal=True)
    scene.register()
    scene.add_worker("w")
    scene.ask(saving())
    monkeypatch.delitem(OFFERED, ShardingPolicy.DYNAMIC)
    scene.restart()
    assert scene.dispatcher.end_unoffered(scene.now) == []
    scene.check()


def test_a_list_of_workers_may_change_before_anybody_has_a_share_of_it(scene: Scenario) -> None:
    scene.facts = [STARTED, SlotsConfigured(patterns=("v:1",))]
    scene.restart()
    scene.register()
    scene.open("c", job_name="shares", processing_mode=ShardingPolicy.DATA)
    check_slots_may_change(scene.state, ["w:1"])
    scene.facts.append(SlotsConfigured(patterns=("w:1",)))
    scene.restart()
    scene.add_worker("w")
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["w"]
