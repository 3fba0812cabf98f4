"""What a worker does with a task follows from names in its definition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.plan.serialize import dump_plan
from headrace.service.dispatcher.modes import OFFERED
from headrace.service.messages import FailTask, TaskDefinition
from headrace.service.worker import ways
from headrace.service.worker.first_come import FirstCome
from headrace.service.worker.hand_out import HandOut
from headrace.service.worker.opening import open_plan
from headrace.service.worker.ways import hand_out_of
from tests.service.worker.driving import Driven, definition


def changed(**fields: Any) -> TaskDefinition:
    return msgspec.structs.replace(definition(), **fields)


def test_a_worker_knows_all_that_a_dispatcher_offers() -> None:
    plain = hr.Dataset.range(4)
    hinted = plain.shard(hr.service.SHARD_HINT, 0)
    for policy in OFFERED.values():
        task = changed(hand_out=policy.hand_out, part=policy.part, shard=0, of=1)
        assert isinstance(hand_out_of(task, None), HandOut)
        if policy.part != "files":  # a range has none
            plan = (hinted if policy.part == "hints" else plain).plan
            open_plan(dump_plan(plan), task, None, worker="h:1").close()


def test_a_way_to_hand_out_is_added_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LastCome(FirstCome[Any]):
        pass

    monkeypatch.setitem(ways._HAND_OUTS, "last_come", lambda task, bounds: LastCome(bounds))
    assert isinstance(hand_out_of(changed(hand_out="last_come"), None), LastCome)
    assert type(hand_out_of(changed(), None)) is FirstCome


def test_a_task_of_a_kind_that_is_not_known_fails_and_its_clients_hear_why() -> None:
    worker = Driven().registered()
    request = worker.ask()
    worker.defines(changed(hand_out="unheard of"))
    content = worker.answers[request]
    assert isinstance(content, FailedPreconditionError)
    assert "'unheard of', which this worker does not know" in str(content)
    (failed,) = worker.of(FailTask)
    assert "it cannot be started" in failed.reason
    assert worker.starts == []


def test_a_part_of_a_plan_that_is_not_known_is_refused_by_name() -> None:
    plan = dump_plan(hr.Dataset.range(4).plan)
    task = changed(part="unheard of", shard=0, of=1)
    with pytest.raises(FailedPreconditionError, match="'unheard of', which this worker does not"):
        open_plan(plan, task, None, worker="h:1")
