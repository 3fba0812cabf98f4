"""Who is started again, when, and who is not: on a clock that is written by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from headrace.process.child import ChildCommand, ChildProcess
from headrace.process.supervisor import (
    ProcessExited,
    ProcessReady,
    ProcessSet,
    ProcessStartFailed,
    restart_delay,
)

COMMAND = ChildCommand(arguments=("-c", ""), environment={})


@dataclass(eq=False)
class Pretended:
    """What a family sees of a child."""

    exit_code: int | None = None
    stop_requested: bool = False
    ready_message: str | None = None
    says: list[str] = field(default_factory=list)
    is_buried: bool = False

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def read_messages(self) -> None:
        for word in self.says:
            if word == "leaving":
                self.stop_requested = True
            else:
                self.ready_message = word

    def reap(self) -> None:
        self.is_buried = True


class Nursery:
    """Spawns pretended children, and refuses where it is asked to."""

    def __init__(self) -> None:
        self.children: list[Pretended] = []
        self.refuses = False

    def spawn(self, command: ChildCommand) -> ChildProcess:
        if self.refuses:
            raise OSError("no more processes")
        self.children.append(Pretended())
        return cast(ChildProcess, self.children[-1])


@pytest.fixture
def nursery() -> Nursery:
    return Nursery()


def family_of(nursery: Nursery, **options: Any) -> ProcessSet:
    family = ProcessSet(spawn=nursery.spawn, **options)
    family.add(COMMAND, 0.0)
    return family


def test_the_delay_doubles_up_to_half_a_minute() -> None:
    assert [restart_delay(n) for n in (0, 1, 2, 3, 4, 20, 5000)] == [0.5, 0.5, 1, 2, 4, 30, 30]


def test_one_that_says_that_it_is_ready_is_reported_once(nursery: Nursery) -> None:
    family = family_of(nursery)
    nursery.children[0].says.append("127.0.0.1:7")
    [event] = family.poll(1.0)
    assert isinstance(event, ProcessReady)
    assert event.child.ready_message == "127.0.0.1:7"
    assert family.poll(2.0) == []


@pytest.mark.parametrize("code", [0, 1, 2, 143, -9, -11])
def test_one_that_was_ready_is_started_again_however_it_ended(nursery: Nursery, code: int) -> None:
    family = family_of(nursery)
    nursery.children[0].says.append("here")
    family.poll(1.0)
    nursery.children[0].exit_code = code
    [event] = family.poll(2.0)
    assert isinstance(event, ProcessExited)
    assert event.restart_in == 0.5
    assert nursery.children[0].is_buried
    assert family.next_restart_at() == 2.5
    assert family.poll(2.4) == []
    assert len(nursery.children) == 1
    family.poll(2.5)
    assert len(nursery.children) == 2


def test_one_that_becomes_ready_and_ends_between_two_looks_was_ready(nursery: Nursery) -> None:
    family = family_of(nursery)
    nursery.children[0].says.append("here")
    nursery.children[0].exit_code = 1
    ready, ended = family.poll(1.0)
    assert isinstance(ready, ProcessReady)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in == 0.5


@pytest.mark.parametrize("code", [0, 1, 143, -15])
def test_one_that_says_that_a_signal_asked_it_is_not_started_again(
    nursery: Nursery, code: int
) -> None:
    family = family_of(nursery)
    nursery.children[0].says += ["here", "leaving"]
    nursery.children[0].exit_code = code
    [_, ended] = family.poll(1.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in is None
    assert family.is_empty


def test_one_that_never_was_ready_is_started_again_where_its_code_is_no_answer(
    nursery: Nursery,
) -> None:
    family = family_of(nursery, retries=lambda code: code not in (0, 1, 2))
    nursery.children[0].exit_code = -9
    [ended] = family.poll(1.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in == 0.5
    family.poll(1.5)
    nursery.children[1].exit_code = 1
    [ended] = family.poll(2.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in is None
    assert family.is_empty


def test_deaths_in_a_row_wait_longer_each_time_and_a_good_life_makes_up_for_them(
    nursery: Nursery,
) -> None:
    family = family_of(nursery)
    now, delays = 0.0, []
    for life in (1.0, 1.0, 1.0, 1.0, 61.0, 1.0):
        nursery.children[-1].says.append("here")
        now += life
        nursery.children[-1].exit_code = 1
        ended = family.poll(now)[-1]
        assert isinstance(ended, ProcessExited)
        assert ended.restart_in is not None
        delays.append(ended.restart_in)
        now += ended.restart_in
        family.poll(now)
    assert delays == [0.5, 1.0, 2.0, 4.0, 0.5, 1.0]


def test_a_family_that_restarts_nobody_reports_the_end_all_the_same(nursery: Nursery) -> None:
    family = family_of(nursery, restarts=False)
    nursery.children[0].says.append("here")
    nursery.children[0].exit_code = -9
    ended = family.poll(1.0)[-1]
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in is None


def test_a_process_that_the_system_refuses_is_tried_again_later(nursery: Nursery) -> None:
    family = family_of(nursery)
    nursery.children[0].says.append("here")
    nursery.children[0].exit_code = -9
    family.poll(1.0)
    nursery.refuses = True
    [refused] = family.poll(1.5)
    assert isinstance(refused, ProcessStartFailed)
    assert refused.restart_in == 1.0
    nursery.refuses = False
    assert family.poll(2.4) == []
    family.poll(2.5)
    assert len(nursery.children) == 2
