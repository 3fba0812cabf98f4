"""Slots of workers, and the shards of static policies."""

from __future__ import annotations

import pytest

from headrace.errors import AbortedError, FailedPreconditionError, NotFoundError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.events import SlotsConfigured
from headrace.service.dispatcher.slots import matches
from headrace.service.dispatcher.state import TaskPhase
from headrace.service.modes.static.records import DatasetShard
from tests.service.dispatcher.scenario import Scenario

DATA = ShardingPolicy.DATA


def scenario_with_slots(*patterns: str, **limits: float) -> Scenario:
    scenario = Scenario(**limits)
    event = SlotsConfigured(patterns=patterns)
    apply(scenario.state, event)
    scenario.events.append(event)
    return scenario


def shards(scenario: Scenario, phase: TaskPhase = TaskPhase.RUNNING) -> dict[int, str]:
    return {
        task.mode_state.index: task.worker_id
        for task in scenario.state.tasks.values()
        if task.phase is phase and isinstance(task.mode_state, DatasetShard)
    }


def finish(scenario: Scenario, task_id: int) -> None:
    scenario.finish(scenario.state.tasks[task_id].worker_id, task_id)


@pytest.mark.parametrize(
    ("pattern", "address", "expected"),
    [
        ("host:1", "host:1", True),
        ("host:1", "host:2", False),
        ("host", "host:2", True),
        ("host:%port%", "host:2", True),
        ("host:%port_worker%", "host:2", True),
        ("host:worker", "host:2", False),
        ("other:%port%", "host:2", False),
        ("localhost", "127.0.0.1:2", True),
        ("127.0.0.1:2", "localhost:2", True),
        ("localhost", "10.0.0.1:2", False),
        ("[fe80::1]:%port%", "[fe80::1]:7", True),
        ("[fe80::1]:8", "[fe80::1]:7", False),
    ],
)
def test_slot_pattern_matches_address(pattern: str, address: str, expected: bool) -> None:
    assert matches(pattern, address) is expected


def test_exact_address_takes_its_slot_and_others_go_in_order() -> None:
    scenario = scenario_with_slots("a", "b:5", "a", "b")
    for worker_id, address in [("w", "b:5"), ("x", "a:9"), ("y", "b:6"), ("z", "a:8")]:
        scenario.add_worker(worker_id, address)
    assert [slot.worker_id for slot in scenario.state.slots] == ["x", "w", "z", "y"]
    scenario.check()


def test_late_worker_reads_the_shard_of_its_slot() -> None:
    scenario = scenario_with_slots("a", "b")
    scenario.add_worker("late?", "b:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    assert shards(scenario) == {1: "late?"}
    scenario.add_worker("w", "a:1")
    assert shards(scenario) == {1: "late?", 0: "w"}
    task = scenario.ask(messages.GetTask(worker_id="w", task_id=max(scenario.state.tasks)))
    assert (task.shard_index, task.num_shards) == (0, 2)
    scenario.check()


def test_iteration_finishes_when_every_shard_was_read() -> None:
    scenario = scenario_with_slots("a", "b")
    scenario.add_worker("w", "a:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    finish(scenario, min(scenario.state.tasks))
    assert not scenario.heartbeat("c").finished
    scenario.add_worker("x", "b:1")
    finish(scenario, max(scenario.state.tasks))
    update = scenario.heartbeat("c")
    assert update.finished
    assert not update.lost
    scenario.check()


def test_shard_of_a_lost_worker_waits_for_the_next_slot_holder() -> None:
    scenario = scenario_with_slots("a", "b")
    scenario.add_worker("w", "a:1")
    scenario.add_worker("x", "b:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    first = min(scenario.state.tasks)
    finish(scenario, max(scenario.state.tasks))
    for _ in range(40):
        scenario.tick(0.5)
        scenario.worker_heartbeat("x")
        scenario.heartbeat("c")
    assert "w" not in scenario.state.workers
    scenario.report_delivery("c", first)
    assert not scenario.heartbeat("c").finished
    scenario.add_worker("restarted", "a:7")
    assert shards(scenario) == {0: "restarted"}
    new_task = max(scenario.state.tasks)
    assert scenario.state.tasks[new_task].attempt == 1
    finish(scenario, new_task)
    update = scenario.heartbeat("c")
    assert update.finished
    assert not update.lost
    scenario.check()


def test_worker_restarted_at_its_address_takes_its_slot_again() -> None:
    scenario = scenario_with_slots("a", "a")
    scenario.add_worker("w", "a:1")
    scenario.add_worker("x", "a:2")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    scenario.add_worker("restarted", "a:1")
    assert shards(scenario) == {0: "restarted", 1: "x"}
    scenario.check()


def test_surplus_worker_waits_one_timeout_and_is_then_rejected() -> None:
    scenario = scenario_with_slots("a:%port%")
    scenario.add_worker("w", "a:1")
    with pytest.raises(AbortedError, match=r"wait for a slot of worker_addresses=\['a:%port%'\]"):
        scenario.add_worker("x", "a:2")
    for _ in range(22):
        scenario.tick(0.5)
        scenario.worker_heartbeat("w")
    with pytest.raises(FailedPreconditionError, match="other workers are already running"):
        scenario.add_worker("x", "a:2")
    scenario.check()


def test_waiting_worker_takes_the_slot_of_a_lost_one() -> None:
    scenario = scenario_with_slots("a:%port%")
    scenario.add_worker("w", "a:1")
    with pytest.raises(AbortedError):
        scenario.add_worker("x", "a:2")
    scenario.tick(11.0)
    scenario.add_worker("x", "a:2")
    assert [slot.worker_id for slot in scenario.state.slots] == ["x"]
    scenario.check()


def test_worker_without_a_matching_slot_is_rejected_at_once() -> None:
    scenario = scenario_with_slots("a:%port%")
    with pytest.raises(FailedPreconditionError, match="is not configured"):
        scenario.add_worker("x", "b:2")
    scenario.check()


def test_static_sharding_without_slots_is_rejected() -> None:
    scenario = Scenario()
    scenario.add_worker("w")
    dataset_id = scenario.register()
    with pytest.raises(NotFoundError, match="not in the workers list"):
        scenario.open("c", dataset_id, processing_mode=DATA)


def test_slots_survive_a_restart() -> None:
    scenario = scenario_with_slots("a", "b")
    scenario.add_worker("w", "a:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    scenario.restart()
    assert [slot.worker_id for slot in scenario.state.slots] == ["w", ""]
    scenario.add_worker("x", "b:1")
    assert shards(scenario) == {0: "w", 1: "x"}
    scenario.check()


def test_poison_shard_is_abandoned_when_the_others_are_read() -> None:
    scenario = scenario_with_slots("a", "b")
    scenario.add_worker("x", "b:1")
    for number in range(3):
        scenario.add_worker(f"w{number}", "a:1")  # at the same address: replaces the previous one
        if not number:
            scenario.open("c", scenario.register(), processing_mode=DATA)
    scenario.add_worker("w3", "a:1")
    assert shards(scenario) == {1: "x"}
    assert not scenario.heartbeat("c").finished
    scenario.finish("x", next(iter(scenario.state.workers["x"].tasks)))
    for task_id in scenario.heartbeat("c").reports_needed:
        scenario.report_delivery("c", task_id)
    update = scenario.heartbeat("c")
    assert update.finished
    assert "Shard 0 was abandoned" in update.failure_reason
    assert "a:1" in update.failure_reason
    scenario.check()


def test_departed_workers_do_not_count_as_killed() -> None:
    scenario = scenario_with_slots("a")
    scenario.add_worker("w0", "a:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    for number in range(5):
        scenario.ask(messages.UnregisterWorker(worker_id=f"w{number}"))
        scenario.add_worker(f"w{number + 1}", "a:1")
    assert shards(scenario) == {0: "w5"}
    scenario.check()
