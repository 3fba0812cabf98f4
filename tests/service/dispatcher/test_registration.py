"""Datasets, their plans and workers become known."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from headrace.errors import AlreadyExistsError, DataLossError, NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.decision import PlanOffset
from tests.service.dispatcher.scenario import PLAN, Scenario, registration


def test_datasets_are_numbered_from_1000_and_equal_ones_are_two(scene: Scenario) -> None:
    assert [scene.register(), scene.register(), scene.register()] == ["1000", "1001", "1002"]


def test_numbers_pass_over_ids_that_were_chosen(scene: Scenario) -> None:
    scene.register(dataset_id="1000")
    scene.register(dataset_id="1002")
    assert [scene.register(), scene.register()] == ["1001", "1003"]


def test_the_same_dataset_under_a_chosen_id_is_registered_once(scene: Scenario) -> None:
    assert scene.register(dataset_id="mine") == scene.register(dataset_id="mine") == "mine"
    assert len(scene.state.datasets) == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("element_spec", b"other", "element spec"),
        ("cardinality", 7, "cardinality: 100; got 7"),
        ("compression", None, "compression: 'AUTO'; got None"),
        ("fingerprint", "other", "different plan"),
    ],
)
def test_a_different_dataset_under_a_taken_id_is_refused(
    scene: Scenario, field: str, value: Any, said: str
) -> None:
    scene.register(dataset_id="mine")
    with pytest.raises(AlreadyExistsError, match="should have the same structure") as caught:
        scene.register(dataset_id="mine", **{field: value})
    assert said in str(caught.value)


def test_what_is_known_of_a_dataset_can_be_asked(scene: Scenario) -> None:
    dataset_id = scene.register(positions=None)
    known = scene.ask(messages.GetDataset(dataset_id=dataset_id))
    assert known == messages.DatasetDescription(
        dataset_id="1000",
        fingerprint="fingerprint",
        element_spec=b"spec",
        cardinality=100,
        num_splits=None,
        digest=hashlib.sha256(PLAN).digest(),
        compression="AUTO",
    )


def test_an_unknown_dataset_is_refused_by_name(scene: Scenario) -> None:
    with pytest.raises(NotFoundError, match="Dataset id nope not found"):
        scene.ask(messages.GetDataset(dataset_id="nope"))


def test_a_dataset_whose_plan_is_not_here_is_not_registered(scene: Scenario) -> None:
    request = registration()
    wanted = messages.RegisterDatasetReply(dataset_id="", plan_needed=True)
    assert scene.ask(request) == wanted
    assert not scene.state.datasets
    scene.put_plan()
    assert scene.ask(request) == messages.RegisterDatasetReply(dataset_id="1000")


@pytest.mark.parametrize(
    "fields", [{"num_splits": -2}, {"num_splits": 1 << 61}, {"digest": b"short"}, {"digest": b""}]
)
def test_a_registration_that_makes_no_sense_is_refused(
    scene: Scenario, fields: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"positions=|digest has 32 bytes"):
        scene.ask(registration(**fields))


def test_a_worker_that_registers_again_keeps_its_tasks(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w")
    scene.open("c")
    facts = len(scene.facts)
    scene.add_worker("w")
    assert len(scene.facts) == facts
    scene.add_worker("w", tags=("COLOCATED",))
    assert scene.state.workers["w"].tags == ("COLOCATED",)
    assert scene.state.workers["w"].tasks == {4000}


def test_a_worker_at_an_old_ones_address_means_that_the_old_one_is_gone(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("old", "host:1")
    scene.open("c")
    scene.add_worker("new", "host:1")
    assert events.WorkerLost("old", "another worker began at its address") in scene.facts
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["new"]


def test_a_worker_that_moved_begins_again_at_its_new_address(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w", "host:1")
    scene.open("c")
    scene.add_worker("w", "host:2")
    (task,) = scene.heartbeat("c").tasks
    assert (task.task_id, task.worker_address) == (4001, "host:2")


def test_a_worker_is_asked_for_four_heartbeats_in_its_timeout() -> None:
    patient, strict = Scenario(), Scenario(worker_timeout=0.2, heartbeat_interval=0.05)
    assert patient.add_worker("w").heartbeat_interval == 0.5
    assert strict.add_worker("w").heartbeat_interval == 0.05


@pytest.mark.parametrize("address", ["", "nonsense", "host:port", "0.0.0.0:5050", "[::]:5050"])
def test_a_worker_that_nobody_could_reach_is_refused(scene: Scenario, address: str) -> None:
    scene.register()
    scene.open("c")
    with pytest.raises(ValueError, match="no client could read from it") as caught:
        scene.ask(messages.RegisterWorker(worker_id="w", address=address))
    assert f"address={address!r}" in str(caught.value)
    assert scene.heartbeat("c").tasks == ()


def test_a_worker_without_an_id_is_refused(scene: Scenario) -> None:
    with pytest.raises(ValueError, match="worker_id=''"):
        scene.ask(messages.RegisterWorker(worker_id="", address="host:1"))


# --- plans arrive and leave in parts --------------------------------------------------------------


LONG_PLAN = bytes(range(100))
DIGEST = hashlib.sha256(LONG_PLAN).digest()


def put(offset: int, stop: int) -> messages.PutPlan:
    return messages.PutPlan(
        digest=DIGEST, offset=offset, total_bytes=len(LONG_PLAN), chunk=LONG_PLAN[offset:stop]
    )


def test_a_plan_arrives_in_parts_and_is_one_fact(scene: Scenario) -> None:
    received = [scene.ask(put(start, start + 30)).received_bytes for start in (0, 30, 60, 90)]
    assert received == [30, 60, 90, 100]
    assert scene.facts[-1] == events.PlanStored(DIGEST, 100)
    assert scene.facts.count(scene.facts[-1]) == 1


def test_a_part_that_is_not_the_next_one_is_answered_with_where_to_go_on(scene: Scenario) -> None:
    assert scene.ask(put(30, 60)).received_bytes == 0
    scene.ask(put(0, 30))
    assert scene.ask(put(60, 90)).received_bytes == 30
    assert scene.ask(put(30, 60)).received_bytes == 60
    assert scene.ask(put(30, 60)).received_bytes == 60
    scene.restart()
    assert scene.ask(put(60, 90)).received_bytes == 0


def test_a_plan_that_is_here_is_not_taken_again(scene: Scenario) -> None:
    scene.ask(put(0, 100))
    facts = len(scene.facts)
    decision, _ = scene.dispatcher.handle(put(0, 30), scene.now)
    assert decision.reply == messages.PutPlanReply(received_bytes=100)
    assert decision.plan_to_store is None
    assert len(scene.facts) == facts


def test_a_plan_that_changed_on_its_way_is_refused_and_can_be_put_again(scene: Scenario) -> None:
    scene.ask(put(0, 50))
    with pytest.raises(DataLossError, match="it changed on its way"):
        scene.ask(msgspec.structs.replace(put(50, 100), chunk=b"x" * 50))
    assert scene.ask(put(0, 50)).received_bytes == 50
    assert scene.ask(put(50, 100)).received_bytes == 100


@pytest.mark.parametrize(
    "fields",
    [
        {"digest": b"short"},
        {"chunk": b""},
        {"chunk": b"x" * (messages.PLAN_CHUNK_BYTES + 1), "total_bytes": 1 << 30},
        {"offset": -1},
        {"offset": 90},
        {"total_bytes": 10},
        {"total_bytes": (1 << 64) - 1},
    ],
)
def test_a_part_that_makes_no_sense_is_refused(scene: Scenario, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"digest|part"):
        scene.ask(msgspec.structs.replace(put(0, 30), **fields))
    assert not scene.dispatcher.soft_state.uploads


def test_a_plan_is_handed_out_from_any_byte(scene: Scenario) -> None:
    scene.ask(put(0, 100))
    decision, _ = scene.dispatcher.handle(messages.GetPlan(digest=DIGEST, offset=40), scene.now)
    assert decision.plan_to_send == PlanOffset(DIGEST, 40)
    assert decision.reply == messages.GetPlanReply(chunk=b"", total_bytes=100)
    for offset in (-1, 100):
        with pytest.raises(ValueError, match="a plan of 100 bytes"):
            scene.ask(messages.GetPlan(digest=DIGEST, offset=offset))


def test_a_plan_that_is_not_here_is_refused_by_name(scene: Scenario) -> None:
    scene.ask(put(0, 30))
    with pytest.raises(NotFoundError, match=f"no plan is stored under {DIGEST.hex()}"):
        scene.ask(messages.GetPlan(digest=DIGEST))
