"""Slots: which worker has which share, and who takes its place."""

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


def slotted(*patterns: str, **limits: float) -> Scenario:
    scenario = Scenario(**limits)
    fact = SlotsConfigured(patterns=patterns)
    apply(scenario.state, fact)
    scenario.facts.append(fact)
    return scenario


def shares(scenario: Scenario, phase: TaskPhase = TaskPhase.RUNNING) -> dict[int, str]:
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
def test_an_address_fits_a_slot(pattern: str, address: str, expected: bool) -> None:
    assert matches(pattern, address) is expected


def test_slots_are_taken_in_order_and_exact_ones_by_their_own() -> None:
    scenario = slotted("a", "b:5", "a", "b")
    for worker_id, address in [("w", "b:5"), ("x", "a:9"), ("y", "b:6"), ("z", "a:8")]:
        scenario.add_worker(worker_id, address)
    assert [slot.worker_id for slot in scenario.state.slots] == ["x", "w", "z", "y"]
    scenario.check()


def test_each_slot_has_its_shard_also_of_a_worker_that_joins_later() -> None:
    scenario = slotted("a", "b")
    scenario.add_worker("late?", "b:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    assert shares(scenario) == {1: "late?"}
    scenario.add_worker("w", "a:1")
    assert shares(scenario) == {1: "late?", 0: "w"}
    task = scenario.ask(messages.GetTask(worker_id="w", task_id=max(scenario.state.tasks)))
    assert (task.shard_index, task.num_shards) == (0, 2)
    scenario.check()


def test_a_pass_ends_when_every_shard_was_read() -> None:
    scenario = slotted("a", "b")
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


def test_the_shard_of_a_lost_worker_waits_for_the_one_that_takes_its_slot() -> None:
    scenario = slotted("a", "b")
    scenario.add_worker("w", "a:1")
    scenario.add_worker("x", "b:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    first = min(scenario.state.tasks)
    finish(scenario, max(scenario.state.tasks))
    for _ in range(40):
        scenario.tick(0.5)
        scenario.beat("x")
        scenario.heartbeat("c")
    assert "w" not in scenario.state.workers
    scenario.settle("c", first)
    assert not scenario.heartbeat("c").finished
    scenario.add_worker("again", "a:7")
    assert shares(scenario) == {0: "again"}
    again = max(scenario.state.tasks)
    assert scenario.state.tasks[again].attempt == 1
    finish(scenario, again)
    update = scenario.heartbeat("c")
    assert update.finished
    assert not update.lost
    scenario.check()


def test_a_worker_that_starts_again_at_its_address_has_its_slot_again() -> None:
    scenario = slotted("a", "a")
    scenario.add_worker("w", "a:1")
    scenario.add_worker("x", "a:2")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    scenario.add_worker("again", "a:1")
    assert shares(scenario) == {0: "again", 1: "x"}
    scenario.check()


def test_one_too_many_waits_a_lease_and_is_refused_when_all_were_heard() -> None:
    scenario = slotted("a:%port%")
    scenario.add_worker("w", "a:1")
    with pytest.raises(AbortedError, match=r"waits .*`worker_addresses=\['a:%port%'\]`"):
        scenario.add_worker("x", "a:2")
    for _ in range(22):
        scenario.tick(0.5)
        scenario.beat("w")
    with pytest.raises(FailedPreconditionError, match="other workers are already running"):
        scenario.add_worker("x", "a:2")
    scenario.check()


def test_one_that_waits_takes_a_slot_whose_worker_fell_silent() -> None:
    scenario = slotted("a:%port%")
    scenario.add_worker("w", "a:1")
    with pytest.raises(AbortedError):
        scenario.add_worker("x", "a:2")
    scenario.tick(11.0)
    scenario.add_worker("x", "a:2")
    assert [slot.worker_id for slot in scenario.state.slots] == ["x"]
    scenario.check()


def test_who_fits_no_slot_is_refused_at_once() -> None:
    scenario = slotted("a:%port%")
    with pytest.raises(FailedPreconditionError, match="is not configured"):
        scenario.add_worker("x", "b:2")
    scenario.check()


def test_without_slots_static_policies_are_refused_and_workers_are_not() -> None:
    scenario = Scenario()
    scenario.add_worker("w")
    dataset_id = scenario.register()
    with pytest.raises(NotFoundError, match="not in the workers list"):
        scenario.open("c", dataset_id, processing_mode=DATA)


def test_slots_outlive_a_restart() -> None:
    scenario = slotted("a", "b")
    scenario.add_worker("w", "a:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    scenario.restart()
    assert [slot.worker_id for slot in scenario.state.slots] == ["w", ""]
    scenario.add_worker("x", "b:1")
    assert shares(scenario) == {0: "w", 1: "x"}
    scenario.check()


def test_a_shard_that_kills_its_workers_is_given_up_when_the_others_are_read() -> None:
    scenario = slotted("a", "b")
    scenario.add_worker("x", "b:1")
    for number in range(3):
        scenario.add_worker(f"w{number}", "a:1")  # at its address: the one before is gone
        if not number:
            scenario.open("c", scenario.register(), processing_mode=DATA)
    scenario.add_worker("w3", "a:1")
    assert shares(scenario) == {1: "x"}
    assert not scenario.heartbeat("c").finished
    scenario.finish("x", next(iter(scenario.state.workers["x"].tasks)))
    for task_id in scenario.heartbeat("c").reports_needed:
        scenario.settle("c", task_id)
    update = scenario.heartbeat("c")
    assert update.finished
    assert "Share 0 was given up" in update.failure_reason
    assert "a:1" in update.failure_reason
    scenario.check()


def test_workers_that_leave_do_not_count_as_killed() -> None:
    scenario = slotted("a")
    scenario.add_worker("w0", "a:1")
    scenario.open("c", scenario.register(), processing_mode=DATA)
    for number in range(5):
        scenario.ask(messages.UnregisterWorker(worker_id=f"w{number}"))
        scenario.add_worker(f"w{number + 1}", "a:1")
    assert shares(scenario) == {0: "w5"}
    scenario.check()
