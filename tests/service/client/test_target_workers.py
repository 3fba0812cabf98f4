"""Which tasks are for a client, of those that the dispatcher lists."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError
from headrace.service.client.heartbeat_schedule import describe_missing
from headrace.service.client.target_workers import TargetWorkers
from headrace.service.messages import ClientHeartbeatReply, OpenIterationReply, TaskAddress


def task(number: int, *tags: str) -> TaskAddress:
    return TaskAddress(
        task_id=number,
        worker_id=f"w{number}",
        worker_address=f"h:{number}",
        task_token="t",
        tags=tags,
    )


def update(*tasks: TaskAddress) -> ClientHeartbeatReply:
    return ClientHeartbeatReply(tasks=tasks, finished=False)


def opened(*tasks: TaskAddress) -> OpenIterationReply:
    return OpenIterationReply(iteration_id=1, tasks=tasks, seed=0, finished=False)


def test_auto_passes_over_tagged_workers_and_is_over_when_its_own_are() -> None:
    target = TargetWorkers("AUTO")
    assert target.select_opened(opened(task(1), task(2, "Colocated"))).tasks == (task(1),)
    assert target.skipped_workers == ("h:2",)
    heard = target.select(update(task(2, "Colocated")))
    assert (heard.tasks, heard.finished) == ((), True)


def test_auto_waits_while_it_has_read_nothing() -> None:
    target = TargetWorkers("AUTO")
    heard = target.select_opened(opened(task(2, "COLOCATED")))
    assert (heard.tasks, heard.finished) == ((), False)
    said = describe_missing("d:1", 0.0, (), (), 0.0, target.skipped_workers)
    assert "the only workers (h:2) run in other processes and have the tag COLOCATED" in said


def test_any_and_who_does_not_heed_tags_read_all() -> None:
    for target in (TargetWorkers("ANY"), TargetWorkers("AUTO", uses_tags=False)):
        assert len(target.select(update(task(1), task(2, "COLOCATED"))).tasks) == 2


def test_local_without_a_worker_here_is_an_error() -> None:
    with pytest.raises(FailedPreconditionError, match="no local worker is found"):
        TargetWorkers("LOCAL").select_opened(opened(task(1)))


def test_an_update_that_says_nothing_new_stays_as_it_is() -> None:
    same = ClientHeartbeatReply(tasks=(), finished=False, unchanged=True)
    assert TargetWorkers("AUTO").select(same) is same
    assert TargetWorkers("LOCAL").select(same) is same
