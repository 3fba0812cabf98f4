"""Delivery of a task that writes files: reports to the dispatcher, and the end of the task."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import FailedPreconditionError, HeadraceError
from headrace.service.messages import (
    CommitFiles,
    FailTask,
    FinishTask,
    GetSplit,
    GetTask,
    ReturnSplits,
    SaveDestination,
    SavedFile,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from headrace.service.worker.pending_actions import WorkerActions
from headrace.service.worker.result_batch import ResultBatch
from tests.service.worker.core_driver import INTERVAL, UNREACHABLE, CoreDriver, definition

ONE, TWO = SavedFile(0, 5, 100, "{}"), SavedFile(1, 5, 100, "{}")


class Writing(CoreDriver):
    """A worker core with a task that writes files."""

    def begin_writing(self, task_id: int = 1) -> int:
        self.register()
        self.pass_time(INTERVAL)
        self.reply(
            WorkerHeartbeat,
            WorkerHeartbeatReply((), dispatcher_id="first", tasks_to_start=(task_id,)),
        )
        order = SaveDestination("0" * 16, "/saved", b"")
        task = definition(task_id, assigns_splits=True)
        self.define_task(
            msgspec.structs.replace(task, delivery_policy="files", save_destination=order)
        )
        return self.starts[-1].producer

    def says(self) -> list[tuple[int, tuple[SavedFile, ...], int]]:
        return [
            (each.report_number, each.files, each.num_done) for each in self.calls_of(CommitFiles)
        ]


def files(*found: SavedFile, done: int) -> ResultBatch:
    return ResultBatch(first_element=0, files=found, done_to=done, delivered_end=done)


def test_a_task_without_clients_starts_with_a_heartbeat_reply() -> None:
    worker = Writing()
    worker.begin_writing()
    assert len(worker.calls_of(GetTask)) == 1
    worker.pass_time(INTERVAL)
    worker.reply(
        WorkerHeartbeat, WorkerHeartbeatReply((), dispatcher_id="first", tasks_to_start=(1,))
    )
    assert len(worker.calls_of(GetTask)) == len(worker.starts) == 1


def test_file_reports_are_resent_until_confirmed_one_at_a_time() -> None:
    worker = Writing()
    producer = worker.begin_writing()
    worker.need_splits(producer)
    worker.grant_splits(0, 8)
    worker.produce(producer, files(ONE, done=2), files(TWO, done=4))
    assert worker.says() == [(0, (ONE,), 2)]
    worker.reply(CommitFiles, UNREACHABLE)
    worker.pass_time(2.0)
    assert set(worker.says()[1:]) == {(0, (ONE,), 2)}
    worker.acknowledge(CommitFiles)
    assert worker.says()[-1] == (1, (TWO,), 4)
    worker.acknowledge(CommitFiles)
    worker.need_splits(producer)
    assert worker.calls_of(GetSplit)[-1].num_done == 4


def test_a_producer_waits_while_three_reports_are_unconfirmed() -> None:
    worker = Writing()
    producer = worker.begin_writing()
    worker.need_splits(producer)
    worker.grant_splits(0, 8)
    resumed: list[int] = []
    for number in range(3):
        resumed += worker.produce(
            producer, files(SavedFile(number, 1, 1, "{}"), done=number)
        ).resumes
    assert resumed == [producer] * 2
    assert worker.acknowledge(CommitFiles).resumes == [producer]


def test_the_end_is_reported_after_the_last_files_and_empty_splits() -> None:
    worker = Writing()
    producer = worker.begin_writing()
    worker.need_splits(producer)
    worker.grant_splits(0, 8)
    worker.produce(producer, files(ONE, done=5))
    worker.end_producer(producer)
    assert worker.calls_of(FinishTask) == []
    worker.acknowledge(CommitFiles)
    assert worker.says() == [(0, (ONE,), 5), (1, (), 8)]
    worker.acknowledge(CommitFiles)
    assert len(worker.calls_of(FinishTask)) == 1


def test_a_deferred_task_resumes_its_producer() -> None:
    worker = Writing()
    producer = worker.begin_writing()
    worker.need_splits(producer)
    actions: WorkerActions[str] = worker.grant_splits(0, 0, wait=True)
    assert actions.deferrals == [producer]


def test_a_precondition_error_of_the_dispatcher_ends_the_task() -> None:
    worker = Writing()
    producer = worker.begin_writing()
    worker.produce(producer, files(ONE, done=0))
    actions = worker.reply(CommitFiles, FailedPreconditionError("the task is lost"))
    assert actions.cancellations == [producer]
    assert worker.calls_of(FailTask) == []


def test_files_rejected_by_the_dispatcher_fail_the_task() -> None:
    worker = Writing()
    producer = worker.begin_writing()
    worker.produce(producer, files(ONE, done=0))
    worker.reply(CommitFiles, HeadraceError("no"))
    assert "the dispatcher rejected its files" in worker.calls_of(FailTask)[-1].reason


def test_a_stopping_worker_returns_splits_that_are_in_no_file() -> None:
    worker = Writing()
    producer = worker.begin_writing()
    worker.need_splits(producer)
    worker.grant_splits(10, 18)
    worker.produce(producer, files(ONE, done=5))
    worker.acknowledge(CommitFiles)
    worker.core.stop(worker.now)
    worker.act()
    assert [each.splits for each in worker.calls_of(ReturnSplits)] == [((5, 8),)]


def test_a_client_request_is_rejected() -> None:
    worker = Writing()
    worker.begin_writing()
    request = worker.request()
    with pytest.raises(FailedPreconditionError, match="has no clients"):
        raise worker.replies[request]
