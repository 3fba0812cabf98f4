"""What a worker does with a task follows from names in its definition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.errors import FailedPreconditionError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.modes import OFFERED
from headrace.service.messages import FailTask, TaskDefinition
from headrace.service.worker import ways
from headrace.service.worker.first_come import FirstCome
from headrace.service.worker.hand_out import HandOut
from headrace.service.worker.ways import hand_out_of, mode_of
from tests.service.worker.driving import Driven, definition


def changed(**fields: Any) -> TaskDefinition:
    return msgspec.structs.replace(definition(), **fields)


def test_units_mean_the_same_on_every_worker_and_copies_are_shuffled_differently() -> None:
    seeds = {
        mode: {mode_of(task).seed(task, worker_id) for worker_id in ("v", "w")}
        for mode in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
        for task in [changed(processing_mode=int(mode), seed=7)]
    }
    assert seeds[ShardingPolicy.DYNAMIC] == {7}
    assert len(seeds[ShardingPolicy.OFF]) == 2


def test_a_worker_knows_all_that_a_dispatcher_offers() -> None:
    for mode, policy in OFFERED.items():
        task = changed(processing_mode=mode, hand_out=policy.hand_out)
        assert mode_of(task).deals == policy.deals
        assert isinstance(hand_out_of(task, None), HandOut)


def test_a_way_to_hand_out_is_added_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LastCome(FirstCome[Any]):
        pass

    monkeypatch.setitem(ways._HAND_OUTS, "last_come", LastCome)
    assert isinstance(hand_out_of(changed(hand_out="last_come"), None), LastCome)
    assert type(hand_out_of(changed(), None)) is FirstCome


@pytest.mark.parametrize("fields", [{"processing_mode": 17}, {"hand_out": "unheard of"}])
def test_a_task_of_a_kind_that_is_not_known_fails_and_its_clients_hear_why(
    fields: dict[str, Any],
) -> None:
    worker = Driven().registered()
    request = worker.ask()
    worker.defines(changed(**fields))
    content = worker.answers[request]
    assert isinstance(content, FailedPreconditionError)
    assert f"{next(iter(fields.values()))!r}, which this worker does not know" in str(content)
    (failed,) = worker.of(FailTask)
    assert "it cannot be started" in failed.reason
    assert worker.starts == []
