"""The shell uses its session under the lock alone, whoever asks it what."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from headrace.errors import CancelledError, UnavailableError
from headrace.process_metrics import REGISTRY
from headrace.service.client.actions import ReceivedBatch
from headrace.service.client.read_session import ReadSession
from headrace.service.client.reader_runner import ReaderRunner
from headrace.service.client.target_workers import TargetWorkers
from headrace.service.messages import (
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

    shell: ReaderRunner

    def __init__(self) -> None:
        super().__init__("c", "d:1", 4, 0.0, consumer=0, num_consumers=2)
        self.looks = 0

    @property
    def is_finished(self) -> bool:
        assert self.shell._runner.lock._is_owned()  # type: ignore[attr-defined]
        self.looks += 1
        return super().is_finished


def never(*arguments: Any) -> Any:
    raise AssertionError("nothing is connected")


def shell_of(session: ReadSession | CoordinatedReadSession) -> ReaderRunner:
    return ReaderRunner(
        session,
        dispatcher="d:1",
        connect_dispatcher=never,
        connect=never,
        reports_consumption=False,
        target=TargetWorkers(),
    )


def test_whether_it_is_over_is_asked_under_the_lock() -> None:
    session = Watched()
    session.shell = shell = shell_of(session)
    session.fail(UnavailableError("gone"))
    assert shell.wait_for_batch() is None
    assert not shell.wait_for_change()
    assert session.looks >= 3


def test_elements_that_were_gone_count_once_however_often_the_answer_comes() -> None:
    session = ReadSession("c", "d:1", 16, 0.0, trainer_id="t")
    session.iteration_opened(OpenIterationReply(2000, (TASK,), 0, finished=False), 0.0)
    number = session.act(0.0).requests[0].request_number
    shell = shell_of(session)
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
        shell._worker_replied(ReplyReceived(1, number, reply), 0.1)
    assert session.skipped == 100
    assert (REGISTRY.get_sample_value("headrace_elements_skipped_total") or 0.0) - before == 100


class Bell:
    """Counts how often the I/O thread is to look."""

    def __init__(self) -> None:
        self.rung = 0

    def wake(self) -> None:
        self.rung += 1


def test_what_is_taken_in_order_wakes_the_thread_only_where_few_answers_are_on_the_way() -> None:
    session = ReadSession("c", "d:1", 16, 0.0, delivers_empty=True)
    session.iteration_opened(OpenIterationReply(2000, (TASK,), 0, finished=False), 0.0)
    numbers = [ask.request_number for ask in session.act(0.0).requests]
    assert len(numbers) == 3
    shell, bell = shell_of(session), Bell()
    shell._runner._connections = bell  # type: ignore[assignment]
    rung = []
    for first, number in enumerate(numbers):
        reply = Reply(
            1, GetElementsReply(first_element=first, num_elements=1, end_of_task=False), ()
        )
        shell._worker_replied(ReplyReceived(1, number, reply), 0.1)
        assert len(shell.take_all()) == 1
        rung.append(bell.rung)
    assert rung == [0, 1, 2]


def test_the_thread_looks_at_once_when_other_tasks_may_be_asked() -> None:
    shell, bell = shell_of(ReadSession("c", "d:1", 16, 0.0, delivers_empty=True)), Bell()
    shell._runner._connections = bell  # type: ignore[assignment]
    rung = []
    for allowed in ({1}, {1}, {1, 2}, None):
        shell.restrict_requests(allowed, None)
        rung.append(bell.rung)
    assert rung == [1, 1, 2, 3]


def test_a_wait_in_order_is_one_however_much_comes_of_what_is_later() -> None:
    session = ReadSession("c", "d:1", 16, time.monotonic(), delivers_empty=True)
    shell = shell_of(session)

    def deliver() -> None:
        shell._batches.append(ReceivedBatch(TASK, 0, 1, "later"))
        shell._wake_consumer()

    begins = []
    for _ in range(3):
        threading.Timer(0.02, deliver).start()
        assert shell.wait_for_change()
        begins.append(session._wait._started_at)
        shell.take_all()
    assert begins[0] is not None
    assert begins == begins[:1] * 3
    assert session._waited_seconds == 0.0, "what goes on is counted in the end"
    shell.end_wait()
    assert session._wait._started_at is None
    assert session._waited_seconds >= 0.06


def test_who_is_sent_away_waits_no_more() -> None:
    session = ReadSession("c", "d:1", 16, time.monotonic(), delivers_empty=True)
    shell = shell_of(session)
    threading.Timer(0.02, shell.interrupt_waiters).start()
    with pytest.raises(CancelledError):
        shell.wait_for_change()
    assert session._wait._started_at is None
