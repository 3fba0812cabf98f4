"""What modes, keys and Python versions allow; nothing else knows the modes."""

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
    """One half of the data for each of two workers; a lost one is read again by whoever is free."""

    delivery_policy = "in_turn"
    extend_definition = StaticSharding.extend_definition

    def tasks_to_create(
        self, state: DispatcherState, iteration: JobIteration
    ) -> list[TaskAssignment]:
        tasks = state.running_tasks(iteration)
        free = [each for each in state.workers if each not in {task.worker_id for task in tasks}]
        taken = {
            task.mode_state.index for task in tasks if isinstance(task.mode_state, DatasetShard)
        }
        open_ = [half for half in range(2) if half not in taken]
        return [
            TaskAssignment(worker_id=worker_id, mode_state=DatasetShard(half, 2))
            for worker_id, half in zip(free, open_, strict=False)
        ]


def shards(scene: Scenario) -> dict[str, int]:
    """Return which shard each worker reads that has a task."""
    scene.check()
    (iteration,) = scene.state.iterations.values()
    return {
        task.worker_id: task.mode_state.index
        for task in scene.state.running_tasks(iteration)
        if isinstance(task.mode_state, DatasetShard)
    }


def test_a_mode_is_added_by_a_row(monkeypatch: pytest.MonkeyPatch, scene: Scenario) -> None:
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
    scene.split(4000, max_splits=3)
    before = scene.replay()
    monkeypatch.delitem(POLICIES, ShardingPolicy.DYNAMIC)

    assert scene.replay() == before
    scene.restart()
    scene.facts += scene.dispatcher.end_unsupported_iterations(scene.now)

    old, other = scene.state.iterations.values()
    assert old.finished
    assert old.failure_reason.endswith("and HINT; got DYNAMIC")
    assert not other.finished
    scene.settle("c", 4000, touched=((0, 3),))
    assert scene.heartbeat("c").failure_reason == old.failure_reason
    assert scene.dispatcher.end_unsupported_iterations(scene.now) == []
    assert scene.replay() == scene.state
    with pytest.raises(FailedPreconditionError, match="got DYNAMIC"):
        scene.open("e", job_name="new", processing_mode=DYNAMIC)


def test_a_journal_with_a_save_is_read_whatever_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scenario(keeps_journal=True)
    scene.register()
    scene.add_worker("w")
    scene.ask(saving())
    monkeypatch.delitem(POLICIES, ShardingPolicy.DYNAMIC)
    scene.restart()
    assert scene.dispatcher.end_unsupported_iterations(scene.now) == []
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


# --- which requests may be sent with whose keys ---------------------------------------------------


class Sent(Request):
    """A request without a wire."""

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


CLIENTS = {
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
def test_the_keys_of_a_client_do_what_clients_do(kind: type[msgspec.Struct]) -> None:
    request = Sent(example(kind), "client")
    allowed = filter_authorized([request]) == [request]
    assert allowed == (kind.__name__ in CLIENTS)
    assert allowed == (request.error is None)
    if not allowed:
        assert isinstance(request.error, UnauthenticatedError)
    for role in ("worker", None):
        other = Sent(example(kind), role)  # type: ignore[arg-type]
        assert filter_authorized([other]) == [other]


def test_refused_requests_do_not_keep_others_out() -> None:
    register = messages.RegisterWorker(worker_id="w", address="a:1")
    requests = [Sent(register, "client"), Sent(messages.Ping(), "client"), Sent(register, "worker")]
    assert filter_authorized(requests) == requests[1:]


# --- which workers get tasks of which datasets, by the Python versions of both --------------------


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
