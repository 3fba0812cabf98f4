"""The runner uses its session only under the lock."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from headrace.errors import CancelledError, UnavailableError
from headrace.process_metrics import REGISTRY
from headrace.service.client.actions import ReceivedBatch
from headrace.service.client.read_session import ReadSession
from headrace.service.client.reader_runner import ReaderRunner
from headrace.service.client.task_selector import TaskSelector
from headrace.service.messages import (
    ClientHeartbeatReply,
    GetElementsReply,
    OpenIterationReply,
    SkippedElements,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.coordinated_session import CoordinatedReadSession
from headrace.serving.connections import ReplyReceived
from headrace.transport.channel import Reply

TASK = TaskAddress(task_id=1, worker_id="w", worker_address="w:1", task_token="t")


class Watched(CoordinatedReadSession):
    """A session that says when it is asked without the lock."""

    runner: ReaderRunner

    def __init__(self) -> None:
        super().__init__("c", "d:1", 4, 0.0, consumer=0, num_consumers=2)
        self.looks = 0

    @property
    def is_finished(self) -> bool:
        assert self.runner._runner.lock._is_owned()  # type: ignore[attr-defined]
        self.looks += 1
        return super().is_finished


def never(*arguments: Any) -> Any:
    raise AssertionError("nothing is connected")


def shell_of(
    session: ReadSession | CoordinatedReadSession, target_workers: str = "ANY"
) -> ReaderRunner:
    return ReaderRunner(
        session,
        dispatcher="d:1",
        connect_dispatcher=never,
        connect_worker=never,
        reports_consumption=False,
        task_selector=TaskSelector(target_workers),
    )


def test_is_finished_is_read_under_the_lock() -> None:
    session = Watched()
    session.runner = runner = shell_of(session)
    session.fail(UnavailableError("gone"))
    assert runner.wait_for_batch() is None
    assert not runner.wait_for_change()
    assert session.looks >= 3


def test_skipped_elements_of_duplicate_replies_count_once() -> None:
    session = ReadSession("c", "d:1", 16, 0.0, trainer_id="t")
    session.iteration_opened(OpenIterationReply(2000, (TASK,), 0, finished=False), 0.0)
    number = session.act(0.0).requests[0].request_number
    runner = shell_of(session)
    before = REGISTRY.get_sample_value("headrace_elements_skipped_total") or 0.0
    reply = Reply(
        1,
        GetElementsReply(
            first_element=100,
            num_elements=1,
            end_of_task=False,
            mode_data=SkippedElements(count=100),
        ),
        (),
    )
    for _ in range(3):
        runner._worker_replied(ReplyReceived(1, number, reply), 0.1)
    assert session.skipped == 100
    assert (REGISTRY.get_sample_value("headrace_elements_skipped_total") or 0.0) - before == 100


@pytest.mark.parametrize("target_workers", ["LOCAL", "ANY"])
@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_local_reader_fails_at_the_end_if_a_shard_was_not_read(
    target_workers: str, is_delivered: bool
) -> None:
    first = msgspec.structs.replace(TASK, shard_index=3)
    second = msgspec.structs.replace(first, task_id=2, worker_address="w:2")
    session = ReadSession("c", "d:1", 16, 0.0, has_shards=True)
    runner = shell_of(session, target_workers)
    session.iteration_opened(OpenIterationReply(2000, (first,), 0, finished=False), 0.0)
    session.act(0.0)
    session.worker_replied(1, 0, CancelledError("stopped"), None, 0.1)
    session.update_received(ClientHeartbeatReply(tasks=(second,), finished=True), 0.2)
    assert runner.failure is None  # another worker reads the shard again
    ended = GetElementsReply(first_element=0, num_elements=0, end_of_task=True)
    for request in session.act(0.2).requests:
        reply = ended if is_delivered else CancelledError("stopped")
        session.worker_replied(2, request.request_number, reply, None, 0.3)
    assert session.is_finished
    if is_delivered or target_workers == "ANY":
        assert runner.failure is None
    else:
        assert "the workers at w:1 and w:2 in this process stopped before" in str(runner.failure)


class Bell:
    """Counts how often the I/O thread is to look."""

    def __init__(self) -> None:
        self.rung = 0

    def wake(self) -> None:
        self.rung += 1


def test_taking_batches_wakes_the_thread_only_if_few_are_pending() -> None:
    session = ReadSession("c", "d:1", 16, 0.0, delivers_empty=True)
    session.iteration_opened(OpenIterationReply(2000, (TASK,), 0, finished=False), 0.0)
    numbers = [ask.request_number for ask in session.act(0.0).requests]
    assert len(numbers) == 3
    runner, bell = shell_of(session), Bell()
    runner._runner._connections = bell  # type: ignore[assignment]
    rung = []
    for first, number in enumerate(numbers):
        reply = Reply(
            1, GetElementsReply(first_element=first, num_elements=1, end_of_task=False), ()
        )
        runner._worker_replied(ReplyReceived(1, number, reply), 0.1)
        assert len(runner.take_all()) == 1
        rung.append(bell.rung)
    assert rung == [0, 1, 2]


def test_changed_restrictions_wake_the_thread() -> None:
    runner, bell = shell_of(ReadSession("c", "d:1", 16, 0.0, delivers_empty=True)), Bell()
    runner._runner._connections = bell  # type: ignore[assignment]
    rung = []
    for allowed in ({1}, {1}, {1, 2}, None):
        runner.restrict_requests(allowed, None)
        rung.append(bell.rung)
    assert rung == [1, 1, 2, 3]


def test_an_ordered_wait_continues_while_later_elements_arrive() -> None:
    session = ReadSession("c", "d:1", 16, time.monotonic(), delivers_empty=True)
    runner = shell_of(session)

    def deliver() -> None:
        runner._batches.append(ReceivedBatch(TASK, 0, 1, "later"))
        runner._wake_consumer()

    begins = []
    for _ in range(3):
        threading.Timer(0.02, deliver).start()
        assert runner.wait_for_change()
        begins.append(session._wait._started_at)
        runner.take_all()
    assert begins[0] is not None
    assert begins == begins[:1] * 3
    assert session._waited_seconds == 0.0, "what goes on is counted in the end"
    runner.end_wait()
    assert session._wait._started_at is None
    assert session._waited_seconds >= 0.06


def test_interrupted_waiters_stop_waiting() -> None:
    session = ReadSession("c", "d:1", 16, time.monotonic(), delivers_empty=True)
    runner = shell_of(session)
    threading.Timer(0.02, runner.interrupt_waiters).start()
    with pytest.raises(CancelledError):
        runner.wait_for_change()
    assert session._wait._started_at is None
