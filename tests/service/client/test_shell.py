"""The shell uses its session under the lock alone, whoever asks it what."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from headrace.counts import REGISTRY
from headrace.errors import CancelledError, UnavailableError
from headrace.service.client.actions import Delivery
from headrace.service.client.session import Session
from headrace.service.client.shell import Shell
from headrace.service.client.targets import Target
from headrace.service.messages import (
    GetElementsReply,
    OpenIterationReply,
    SkippedElements,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.session import RoundSession
from headrace.serving.connections import Answered
from headrace.transport.channel import Reply

TASK = TaskAddress(task_id=1, worker_id="w", worker_address="w:1", task_token="t")


class Watched(RoundSession):
    """A session that says when it is asked without the lock."""

    shell: Shell

    def __init__(self) -> None:
        super().__init__("c", "d:1", 4, 0.0, consumer=0, consumers=2)
        self.looks = 0

    @property
    def is_over(self) -> bool:
        assert self.shell._runner.lock._is_owned()  # type: ignore[attr-defined]
        self.looks += 1
        return super().is_over


def never(*arguments: Any) -> Any:
    raise AssertionError("nothing is connected")


def shell_of(session: Session | RoundSession) -> Shell:
    return Shell(
        session,
        dispatcher="d:1",
        connect_dispatcher=never,
        connect=never,
        settles=False,
        target=Target(),
    )


def test_whether_it_is_over_is_asked_under_the_lock() -> None:
    session = Watched()
    session.shell = shell = shell_of(session)
    session.fail(UnavailableError("gone"))
    assert shell.first() is None
    assert not shell.await_delivery()
    assert session.looks >= 3


def test_elements_that_were_gone_count_once_however_often_the_answer_comes() -> None:
    session = Session("c", "d:1", 16, 0.0, trainer_id="t")
    session.opened(OpenIterationReply(2000, (TASK,), 0, finished=False), 0.0)
    number = session.act(0.0).asks[0].number
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
        shell._take_answer(Answered(1, number, reply), 0.1)
    assert session.skipped == 100
    assert (REGISTRY.get_sample_value("headrace_elements_skipped_total") or 0.0) - before == 100


class Bell:
    """Counts how often the I/O thread is to look."""

    def __init__(self) -> None:
        self.rung = 0

    def wake(self) -> None:
        self.rung += 1


def test_what_is_taken_in_order_wakes_the_thread_only_where_few_answers_are_on_the_way() -> None:
    session = Session("c", "d:1", 16, 0.0, wants_all=True)
    session.opened(OpenIterationReply(2000, (TASK,), 0, finished=False), 0.0)
    numbers = [ask.number for ask in session.act(0.0).asks]
    assert len(numbers) == 3
    shell, bell = shell_of(session), Bell()
    shell._runner._connections = bell  # type: ignore[assignment]
    rung = []
    for first, number in enumerate(numbers):
        reply = Reply(
            1, GetElementsReply(first_element=first, num_elements=1, end_of_task=False), ()
        )
        shell._take_answer(Answered(1, number, reply), 0.1)
        assert len(shell.delivered()) == 1
        rung.append(bell.rung)
    assert rung == [0, 1, 2]


def test_the_thread_looks_at_once_when_other_tasks_may_be_asked() -> None:
    shell, bell = shell_of(Session("c", "d:1", 16, 0.0, wants_all=True)), Bell()
    shell._runner._connections = bell  # type: ignore[assignment]
    rung = []
    for allowed in ({1}, {1}, {1, 2}, None):
        shell.allow(allowed, None)
        rung.append(bell.rung)
    assert rung == [1, 1, 2, 3]


def test_a_wait_in_order_is_one_however_much_comes_of_what_is_later() -> None:
    session = Session("c", "d:1", 16, time.monotonic(), wants_all=True)
    shell = shell_of(session)

    def deliver() -> None:
        shell._deliveries.append(Delivery(TASK, 0, 1, "later"))
        shell._ring()

    begins = []
    for _ in range(3):
        threading.Timer(0.02, deliver).start()
        assert shell.await_delivery()
        begins.append(session._waiting._since)
        shell.delivered()
    assert begins[0] is not None
    assert begins == begins[:1] * 3
    assert session._waited == 0.0, "what goes on is counted in the end"
    shell.wait_no_more()
    assert session._waiting._since is None
    assert session._waited >= 0.06


def test_who_is_sent_away_waits_no_more() -> None:
    session = Session("c", "d:1", 16, time.monotonic(), wants_all=True)
    shell = shell_of(session)
    threading.Timer(0.02, shell.send_away).start()
    with pytest.raises(CancelledError):
        shell.await_delivery()
    assert session._waiting._since is None
