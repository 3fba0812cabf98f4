"""Which tasks are for a client, of those that the dispatcher lists."""

from __future__ import annotations

import pytest

from headrace.errors import FailedPreconditionError
from headrace.service.client.heartbeat_schedule import describe_missing
from headrace.service.client.task_selector import TaskSelector
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


def test_auto_skips_tagged_workers_and_ends_with_its_own() -> None:
    target = TaskSelector("AUTO")
    assert target.select_initial(opened(task(1), task(2, "Colocated"))).tasks == (task(1),)
    assert target.skipped_workers == ("h:2",)
    reply = target.select(update(task(2, "Colocated")))
    assert (reply.tasks, reply.finished) == ((), True)


def test_auto_waits_until_it_has_read_a_task() -> None:
    target = TaskSelector("AUTO")
    reply = target.select_initial(opened(task(2, "COLOCATED")))
    assert (reply.tasks, reply.finished) == ((), False)
    message = describe_missing("d:1", 0.0, (), (), 0.0, target.skipped_workers)
    assert "the only workers (h:2) run in other processes and have the tag COLOCATED" in message


def test_any_and_readers_without_tags_read_all() -> None:
    for target in (TaskSelector("ANY"), TaskSelector("AUTO", uses_tags=False)):
        assert len(target.select(update(task(1), task(2, "COLOCATED"))).tasks) == 2


def test_local_without_a_local_worker_is_an_error() -> None:
    with pytest.raises(FailedPreconditionError, match="no local worker is found"):
        TaskSelector("LOCAL").select_initial(opened(task(1)))


def test_an_unchanged_update_is_returned_as_is() -> None:
    same = ClientHeartbeatReply(tasks=(), finished=False, unchanged=True)
    assert TaskSelector("AUTO").select(same) is same
    assert TaskSelector("LOCAL").select(same) is same
