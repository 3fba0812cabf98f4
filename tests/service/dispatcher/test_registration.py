"""Registration of datasets, plans and workers."""

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


def test_datasets_are_numbered_from_1000(scene: Scenario) -> None:
    assert [scene.register(), scene.register(), scene.register()] == ["1000", "1001", "1002"]


def test_dataset_numbers_skip_chosen_ids(scene: Scenario) -> None:
    scene.register(dataset_id="1000")
    scene.register(dataset_id="1002")
    assert [scene.register(), scene.register()] == ["1001", "1003"]


def test_same_dataset_under_a_chosen_id_is_registered_once(scene: Scenario) -> None:
    assert scene.register(dataset_id="mine") == scene.register(dataset_id="mine") == "mine"
    assert len(scene.state.datasets) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("element_spec", b"other", "element spec"),
        ("cardinality", 7, "cardinality: 100; got 7"),
        ("compression", None, "compression: 'AUTO'; got None"),
        ("fingerprint", "other", "the plans differ"),
    ],
)
def test_different_dataset_under_an_existing_id_is_rejected(
    scene: Scenario, field: str, value: Any, message: str
) -> None:
    scene.register(dataset_id="mine")
    with pytest.raises(AlreadyExistsError, match="should have the same structure") as caught:
        scene.register(dataset_id="mine", **{field: value})
    assert message in str(caught.value)


def test_get_dataset_returns_its_description(scene: Scenario) -> None:
    dataset_id = scene.register(num_splits=None)
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


STEPS = (
    messages.PlanStep("gather at train.py:1"),
    messages.PlanStep("gather at train.py:2"),
    messages.PlanStep("zip at train.py:3", (0, 1)),
)


def test_steps_of_the_plan_are_kept(scene: Scenario) -> None:
    dataset_id = scene.register(plan_steps=STEPS)
    assert scene.ask(messages.GetDataset(dataset_id=dataset_id)).plan_steps == STEPS
    encoded = msgspec.msgpack.encode(scene.state.datasets[dataset_id])
    assert msgspec.msgpack.decode(encoded)["plan_steps"][2] == ["zip at train.py:3", [0, 1]]


def test_peers_without_steps_of_plans_can_be_decoded() -> None:
    request = msgspec.msgpack.decode(msgspec.msgpack.encode(registration(plan_steps=STEPS)))
    del request["plan_steps"]
    encoded = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(encoded, type=messages.RegisterDataset) == registration()


@pytest.mark.parametrize(
    "steps",
    [
        (messages.PlanStep("a", (0,)),),
        (messages.PlanStep("a"), messages.PlanStep("b", (1,))),
        (messages.PlanStep("a", (-1,)),),
        (messages.PlanStep("a" * 201),),
        (messages.PlanStep("a"), messages.PlanStep("b", (0,) * 201)),
        (messages.PlanStep("a"),) * 201,
    ],
)
def test_invalid_steps_of_a_plan_are_rejected(
    scene: Scenario, steps: tuple[messages.PlanStep, ...]
) -> None:
    scene.put_plan()
    with pytest.raises(ValueError, match="plan_steps"):
        scene.ask(registration(plan_steps=steps))
    assert not scene.state.datasets


def test_unknown_dataset_is_rejected(scene: Scenario) -> None:
    with pytest.raises(NotFoundError, match="Dataset id nope not found"):
        scene.ask(messages.GetDataset(dataset_id="nope"))


def test_dataset_without_a_stored_plan_is_not_registered(scene: Scenario) -> None:
    request = registration()
    expected = messages.RegisterDatasetReply(dataset_id="", plan_needed=True)
    assert scene.ask(request) == expected
    assert not scene.state.datasets
    scene.put_plan()
    assert scene.ask(request) == messages.RegisterDatasetReply(dataset_id="1000")


@pytest.mark.parametrize(
    "fields", [{"num_splits": -2}, {"num_splits": 1 << 61}, {"digest": b"short"}, {"digest": b""}]
)
def test_invalid_registration_is_rejected(scene: Scenario, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_splits must be|must have 32 bytes"):
        scene.ask(registration(**fields))


def test_worker_that_registers_again_keeps_its_tasks(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w")
    scene.open("c")
    num_events = len(scene.events)
    scene.add_worker("w")
    assert len(scene.events) == num_events
    scene.add_worker("w", tags=("COLOCATED",))
    assert scene.state.workers["w"].tags == ("COLOCATED",)
    assert scene.state.workers["w"].tasks == {4000}


def test_worker_at_the_address_of_another_replaces_it(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("old", "host:1")
    scene.open("c")
    scene.add_worker("new", "host:1")
    assert (
        events.WorkerLost("old", "another worker registered with the same address or id")
        in scene.events
    )
    assert [task.worker_id for task in scene.heartbeat("c").tasks] == ["new"]


def test_worker_at_a_new_address_gets_new_tasks(scene: Scenario) -> None:
    scene.register()
    scene.add_worker("w", "host:1")
    scene.open("c")
    scene.add_worker("w", "host:2")
    (task,) = scene.heartbeat("c").tasks
    assert (task.task_id, task.worker_address) == (4001, "host:2")


def test_worker_sends_four_heartbeats_per_timeout() -> None:
    default, short = Scenario(), Scenario(worker_timeout=0.2, heartbeat_interval=0.05)
    assert default.add_worker("w").heartbeat_interval == 0.5
    assert short.add_worker("w").heartbeat_interval == 0.05


@pytest.mark.parametrize("address", ["", "nonsense", "host:port", "0.0.0.0:5050", "[::]:5050"])
def test_worker_with_an_unreachable_address_is_rejected(scene: Scenario, address: str) -> None:
    scene.register()
    scene.open("c")
    with pytest.raises(ValueError, match="clients could not connect to it") as caught:
        scene.ask(messages.RegisterWorker(worker_id="w", address=address))
    assert f"address={address!r}" in str(caught.value)
    assert scene.heartbeat("c").tasks == ()


def test_worker_without_an_id_is_rejected(scene: Scenario) -> None:
    with pytest.raises(ValueError, match="worker_id must not be empty"):
        scene.ask(messages.RegisterWorker(worker_id="", address="host:1"))


# --- plans are sent in chunks ---------------------------------------------------------------------


LONG_PLAN = bytes(range(100))
DIGEST = hashlib.sha256(LONG_PLAN).digest()


def put(offset: int, stop: int) -> messages.PutPlan:
    return messages.PutPlan(
        digest=DIGEST, offset=offset, total_bytes=len(LONG_PLAN), chunk=LONG_PLAN[offset:stop]
    )


def test_plan_in_chunks_produces_one_event(scene: Scenario) -> None:
    received = [scene.ask(put(start, start + 30)).received_bytes for start in (0, 30, 60, 90)]
    assert received == [30, 60, 90, 100]
    assert scene.events[-1] == events.PlanStored(DIGEST, 100)
    assert scene.events.count(scene.events[-1]) == 1


def test_unexpected_chunk_gets_the_expected_offset(scene: Scenario) -> None:
    assert scene.ask(put(30, 60)).received_bytes == 0
    scene.ask(put(0, 30))
    assert scene.ask(put(60, 90)).received_bytes == 30
    assert scene.ask(put(30, 60)).received_bytes == 60
    assert scene.ask(put(30, 60)).received_bytes == 60
    scene.restart()
    assert scene.ask(put(60, 90)).received_bytes == 0


def test_stored_plan_is_not_stored_again(scene: Scenario) -> None:
    scene.ask(put(0, 100))
    num_events = len(scene.events)
    decision, _ = scene.dispatcher.handle(put(0, 30), scene.now)
    assert decision.reply == messages.PutPlanReply(received_bytes=100)
    assert decision.plan_to_store is None
    assert len(scene.events) == num_events


def test_damaged_plan_is_rejected_and_can_be_sent_again(scene: Scenario) -> None:
    scene.ask(put(0, 50))
    with pytest.raises(DataLossError, match="damaged in transit"):
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
def test_invalid_chunk_is_rejected(scene: Scenario, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"digest|chunk"):
        scene.ask(msgspec.structs.replace(put(0, 30), **fields))
    assert not scene.dispatcher.soft_state.uploads


def test_plan_is_sent_from_any_offset(scene: Scenario) -> None:
    scene.ask(put(0, 100))
    decision, _ = scene.dispatcher.handle(messages.GetPlan(digest=DIGEST, offset=40), scene.now)
    assert decision.plan_to_send == PlanOffset(DIGEST, 40)
    assert decision.reply == messages.GetPlanReply(chunk=b"", total_bytes=100)
    for offset in (-1, 100):
        with pytest.raises(ValueError, match=r"offset must be in \[0, 100\)"):
            scene.ask(messages.GetPlan(digest=DIGEST, offset=offset))


def test_unknown_plan_is_rejected(scene: Scenario) -> None:
    scene.ask(put(0, 30))
    with pytest.raises(NotFoundError, match=f"no plan is stored under digest {DIGEST.hex()}"):
        scene.ask(messages.GetPlan(digest=DIGEST))
