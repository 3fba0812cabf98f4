"""Selection of policies, authorization by keys, and Python versions."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
import pytest

from headrace.errors import AlreadyExistsError, FailedPreconditionError, UnauthenticatedError
from headrace.service import messages
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.authorization import filter_authorized
from headrace.service.dispatcher.events import SlotsConfigured
from headrace.service.dispatcher.policy import TaskAssignment
from headrace.service.dispatcher.policy_selection import POLICIES
from headrace.service.dispatcher.slots import check_slots_may_change
from headrace.service.dispatcher.state import DispatcherState, JobIteration
from headrace.service.modes.no_sharding.policy import NoSharding
from headrace.service.modes.static.policy import StaticSharding
from headrace.service.modes.static.records import DatasetShard
from headrace.transport.channel import Request
from headrace.versions import Versions
from tests.service.dispatcher.scenario import DYNAMIC, OFF, STARTED, Scenario, saving


class Halves(NoSharding):
    """One half of the data for each of two workers; a free worker takes over a lost half."""

    delivery_policy = "in_turn"
    extend_definition = StaticSharding.extend_definition

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        tasks = state.running_tasks(iteration)
        free = [each for each in state.workers if each not in {task.worker_id for task in tasks}]
        read = {
            task.mode_state.index for task in tasks if isinstance(task.mode_state, DatasetShard)
        }
        unread = [half for half in range(2) if half not in read]
        return [
            TaskAssignment(worker_id=worker_id, mode_state=DatasetShard(half, 2))
            for worker_id, half in zip(free, unread, strict=False)
        ]


def shards(scene: Scenario) -> dict[str, int]:
    """Return the shard that each worker with a task reads."""
    scene.check()
    (iteration,) = scene.state.iterations.values()
    return {
        task.worker_id: task.mode_state.index
        for task in scene.state.running_tasks(iteration)
        if isinstance(task.mode_state, DatasetShard)
    }


def test_mode_is_added_by_a_table_entry(monkeypatch: pytest.MonkeyPatch, scene: Scenario) -> None:
    monkeypatch.setitem(POLICIES, ShardingPolicy.DATA, Halves())
    scene.register(None)
    for worker_id in ("u", "v", "w"):
        scene.add_worker(worker_id)
    opened = scene.open("c", processing_mode=ShardingPolicy.DATA)
    assert [task.worker_id for task in opened.tasks] == ["u", "v"]
    assert shards(scene) == {"u": 0, "v": 1}
    definition = scene.ask(messages.GetTask(worker_id="v", task_id=opened.tasks[1].task_id))
    assert (definition.shard_index, definition.num_shards, definition.delivery_policy) == (
        1,
        2,
        "in_turn",
    )

    scene.lose("u")
    assert shards(scene) == {"v": 1, "w": 0}
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["v", "w"]


def test_cross_trainer_cache_excludes_coordinated_reads(scene: Scenario) -> None:
    dataset_id = scene.register(5)
    options = {"job_name": "j", "num_consumers": 2, "consumer_index": 0}
    with pytest.raises(FailedPreconditionError, match="cannot be combined with coordinated reads"):
        scene.open("c", dataset_id, cross_trainer_cache=True, **options)


def test_journal_with_an_unsupported_mode_is_read_and_abandoned(
    monkeypatch: pytest.MonkeyPatch, scene: Scenario
) -> None:
    """Events keep their meaning, and iterations in other modes continue."""
    scene.register()
    scene.add_worker("w")
    scene.open("c", job_name="old", processing_mode=DYNAMIC)
    scene.open("d", job_name="other")
    scene.split(4000, max_splits=3)
    before = scene.replay()
    monkeypatch.delitem(POLICIES, ShardingPolicy.DYNAMIC)

    assert scene.replay() == before
    scene.restart()
    scene.events += scene.dispatcher.end_unsupported_iterations(scene.now)

    old, other = scene.state.iterations.values()
    assert old.finished
    assert old.failure_reason.endswith("and HINT; got DYNAMIC")
    assert not other.finished
    scene.report_delivery("c", 4000, partially_delivered=((0, 3),))
    assert scene.heartbeat("c").failure_reason == old.failure_reason
    assert scene.dispatcher.end_unsupported_iterations(scene.now) == []
    assert scene.replay() == scene.state
    with pytest.raises(FailedPreconditionError, match="got DYNAMIC"):
        scene.open("e", job_name="new", processing_mode=DYNAMIC)


def test_journal_with_a_save_is_read_without_dynamic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scenario(keeps_journal=True)
    scene.register()
    scene.add_worker("w")
    scene.ask(saving())
    monkeypatch.delitem(POLICIES, ShardingPolicy.DYNAMIC)
    scene.restart()
    assert scene.dispatcher.end_unsupported_iterations(scene.now) == []
    scene.check()


def test_slots_may_change_before_shards_are_assigned(scene: Scenario) -> None:
    scene.events = [STARTED, SlotsConfigured(patterns=("v:1",))]
    scene.restart()
    scene.register()
    scene.open("c", job_name="shards", processing_mode=ShardingPolicy.DATA)
    check_slots_may_change(scene.state, ["w:1"])
    scene.events.append(SlotsConfigured(patterns=("w:1",)))
    scene.restart()
    scene.add_worker("w")
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["w"]


# --- authorization by keys ----------------------------------------------------


class FakeRequest(Request):
    """A request without a connection."""

    def __init__(self, message: msgspec.Struct, role: Literal["worker", "client"] | None) -> None:
        self.message, self.role = message, role
        self.error: Exception | None = None

    def reply(self, message: msgspec.Struct, buffers: Any = ()) -> None:
        raise AssertionError("answered")

    def fail(self, error: Exception) -> None:
        self.error = error


def example(kind: type[msgspec.Struct]) -> msgspec.Struct:
    values: dict[Any, Any] = {int: 1, bool: False, bytes: b"", str: ""}
    fields = {
        field.name: values.get(field.type, ())
        for field in msgspec.structs.fields(kind)
        if field.required
    }
    return kind(**fields)


CLIENT_REQUESTS = {
    "Ping",
    "RegisterDataset",
    "PutPlan",
    "GetDataset",
    "GetPlan",
    "OpenIteration",
    "ClientHeartbeat",
    "ReportDelivery",
    "CloseIteration",
    "ReportUnreachable",
    "ContributeCheckpoint",
    "GetStatus",
    "StartSave",
    "GetSaveStatus",
}


@pytest.mark.parametrize("kind", get_args(messages.DispatcherRequest), ids=lambda k: k.__name__)
def test_client_keys_allow_client_requests_only(kind: type[msgspec.Struct]) -> None:
    request = FakeRequest(example(kind), "client")
    allowed = filter_authorized([request]) == [request]
    assert allowed == (kind.__name__ in CLIENT_REQUESTS)
    assert allowed == (request.error is None)
    if not allowed:
        assert isinstance(request.error, UnauthenticatedError)
    for role in ("worker", None):
        other = FakeRequest(example(kind), role)  # type: ignore[arg-type]
        assert filter_authorized([other]) == [other]


def test_rejected_requests_do_not_affect_others() -> None:
    register = messages.RegisterWorker(worker_id="w", address="a:1")
    requests = [
        FakeRequest(register, "client"),
        FakeRequest(messages.Ping(), "client"),
        FakeRequest(register, "worker"),
    ]
    assert filter_authorized(requests) == requests[1:]


# --- Python versions of workers and datasets ------------------------------------------------------


OLD, NEW = Versions("1.0", "3.11"), Versions("1.0", "3.12")
REJECTED = r"Python 3\.11, but these workers run another minor version: new:1 \(Python 3\.12\)"


def scenario_with_dataset(*patterns: str) -> Scenario:
    """Return a dispatcher with a dataset that a Python 3.11 client registered."""
    scene = Scenario()
    if patterns:
        event = SlotsConfigured(patterns=patterns)
        apply(scene.state, event)
        scene.events.append(event)
    scene.register(versions=OLD)
    return scene


def workers_with_tasks(scene: Scenario) -> set[str]:
    return {task.worker_id for task in scene.state.tasks.values()}


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_only_workers_of_the_clients_python_version_get_tasks(mode: ShardingPolicy) -> None:
    scene = scenario_with_dataset()
    scene.add_worker("new", versions=NEW)
    scene.add_worker("old", versions=OLD)
    scene.open("c", processing_mode=mode)
    scene.add_worker("newer", versions=NEW)
    assert workers_with_tasks(scene) == {"old"}
    scene.check()


def test_client_is_rejected_if_no_worker_can_run_its_functions() -> None:
    scene = scenario_with_dataset()
    scene.add_worker("new", versions=NEW)
    with pytest.raises(FailedPreconditionError, match=REJECTED):
        scene.open("c")
    scene.add_worker("old", versions=OLD)
    assert len(scene.open("c").tasks) == 1


def test_heartbeat_fails_if_workers_return_with_another_version() -> None:
    scene = scenario_with_dataset()
    scene.open("c", processing_mode=DYNAMIC)
    scene.heartbeat("c")
    scene.restart()
    scene.add_worker("new", versions=NEW)
    with pytest.raises(FailedPreconditionError, match=REJECTED):
        scene.heartbeat("c")


def test_slot_held_by_a_worker_of_another_version_is_rejected() -> None:
    scene = scenario_with_dataset("old:1", "new:1")
    scene.add_worker("old", versions=OLD)
    scene.add_worker("new", versions=NEW)
    with pytest.raises(FailedPreconditionError, match=REJECTED):
        scene.open("c", processing_mode=ShardingPolicy.DATA)


def test_registering_with_another_python_version_is_rejected() -> None:
    scene = scenario_with_dataset()
    scene.register(versions=OLD, dataset_id="mine")
    with pytest.raises(AlreadyExistsError, match=r"Python version: 3\.11; got 3\.12"):
        scene.register(versions=NEW, dataset_id="mine")


def test_status_has_the_versions_of_workers() -> None:
    scene = scenario_with_dataset()
    scene.add_worker("old", versions=OLD)
    scene.add_worker("new", versions=NEW)
    found = scene.ask(messages.GetStatus())
    assert [worker.versions for worker in found.workers] == [OLD, NEW]
