"""Plans arrive and leave in parts."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from headrace.errors import DataLossError, NotFoundError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import PlanPlace
from tests.service.dispatcher.scenario import Scenario

PLAN = bytes(range(100))
DIGEST = hashlib.sha256(PLAN).digest()


def put(offset: int, stop: int) -> messages.PutPlan:
    return messages.PutPlan(digest=DIGEST, offset=offset, total=len(PLAN), part=PLAN[offset:stop])


def test_a_plan_arrives_in_parts_and_is_one_fact(scene: Scenario) -> None:
    received = [scene.ask(put(start, start + 30)).received for start in (0, 30, 60, 90)]
    assert received == [30, 60, 90, 100]
    assert scene.facts[-1] == updates.PlanStored(DIGEST, 100)
    assert scene.facts.count(scene.facts[-1]) == 1


def test_a_part_that_is_not_the_next_one_is_answered_with_where_to_go_on(scene: Scenario) -> None:
    assert scene.ask(put(30, 60)).received == 0
    scene.ask(put(0, 30))
    assert scene.ask(put(60, 90)).received == 30
    assert scene.ask(put(30, 60)).received == 60
    assert scene.ask(put(30, 60)).received == 60
    scene.restart()
    assert scene.ask(put(60, 90)).received == 0


def test_a_plan_that_is_here_is_not_taken_again(scene: Scenario) -> None:
    scene.ask(put(0, 100))
    facts = len(scene.facts)
    decision, _ = scene.dispatcher.handle(put(0, 30), scene.now)
    assert decision.reply == messages.PlanReceived(received=100)
    assert decision.plan_to_store is None
    assert len(scene.facts) == facts


def test_a_plan_that_changed_on_its_way_is_refused_and_can_be_put_again(scene: Scenario) -> None:
    scene.ask(put(0, 50))
    with pytest.raises(DataLossError, match="it changed on its way"):
        scene.ask(msgspec.structs.replace(put(50, 100), part=b"x" * 50))
    assert scene.ask(put(0, 50)).received == 50
    assert scene.ask(put(50, 100)).received == 100


@pytest.mark.parametrize(
    "fields",
    [
        {"digest": b"short"},
        {"part": b""},
        {"part": b"x" * (messages.PLAN_PART_BYTES + 1), "total": 1 << 30},
        {"offset": -1},
        {"offset": 90},
        {"total": 10},
        {"total": (1 << 64) - 1},
    ],
)
def test_a_part_that_makes_no_sense_is_refused(scene: Scenario, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"digest|part"):
        scene.ask(msgspec.structs.replace(put(0, 30), **fields))
    assert not scene.dispatcher.presence.uploads


def test_a_plan_is_handed_out_from_any_byte(scene: Scenario) -> None:
    scene.ask(put(0, 100))
    decision, _ = scene.dispatcher.handle(messages.GetPlan(digest=DIGEST, offset=40), scene.now)
    assert decision.plan_to_send == PlanPlace(DIGEST, 40)
    assert decision.reply == messages.PlanBytes(part=b"", total=100)
    for offset in (-1, 100):
        with pytest.raises(ValueError, match="a plan of 100 bytes"):
            scene.ask(messages.GetPlan(digest=DIGEST, offset=offset))


def test_a_plan_that_is_not_here_is_refused_by_name(scene: Scenario) -> None:
    scene.ask(put(0, 30))
    with pytest.raises(NotFoundError, match=f"no plan is stored under {DIGEST.hex()}"):
        scene.ask(messages.GetPlan(digest=DIGEST))
