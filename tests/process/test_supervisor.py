"""Tests of restart decisions with a manual clock."""

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
class FakeChild:
    """Fake child process, as a `ProcessSet` uses it."""

    exit_code: int | None = None
    stop_requested: bool = False
    stop_signaled: bool = False
    ready_message: str | None = None
    says: list[str] = field(default_factory=list)
    is_buried: bool = False

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def read_messages(self) -> None:
        for word in self.says:
            if word == "leaving":
                self.stop_requested = self.stop_signaled = True
            else:
                self.ready_message = word

    def reap(self) -> None:
        self.is_buried = True


class FakeSpawner:
    """Spawns fake children, and fails on request."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.refuses = False

    def spawn(self, command: ChildCommand) -> ChildProcess:
        if self.refuses:
            raise OSError("no more processes")
        self.children.append(FakeChild())
        return cast(ChildProcess, self.children[-1])


@pytest.fixture
def spawner() -> FakeSpawner:
    return FakeSpawner()


def make_process_set(spawner: FakeSpawner, **options: Any) -> ProcessSet:
    processes = ProcessSet(spawn=spawner.spawn, **options)
    processes.add(COMMAND, 0.0)
    return processes


def test_restart_delay_doubles_up_to_30_seconds() -> None:
    assert [restart_delay(n) for n in (0, 1, 2, 3, 4, 20, 5000)] == [0.5, 0.5, 1, 2, 4, 30, 30]


def test_ready_process_is_reported_once(spawner: FakeSpawner) -> None:
    processes = make_process_set(spawner)
    spawner.children[0].says.append("127.0.0.1:7")
    [event] = processes.poll(1.0)
    assert isinstance(event, ProcessReady)
    assert event.child.ready_message == "127.0.0.1:7"
    assert processes.poll(2.0) == []


@pytest.mark.parametrize("code", [0, 1, 2, 143, -9, -11])
def test_process_that_was_ready_is_restarted_after_any_exit(
    spawner: FakeSpawner, code: int
) -> None:
    processes = make_process_set(spawner)
    spawner.children[0].says.append("here")
    processes.poll(1.0)
    spawner.children[0].exit_code = code
    [event] = processes.poll(2.0)
    assert isinstance(event, ProcessExited)
    assert event.restart_in == 0.5
    assert spawner.children[0].is_buried
    assert processes.next_restart_at() == 2.5
    assert processes.poll(2.4) == []
    assert len(spawner.children) == 1
    processes.poll(2.5)
    assert len(spawner.children) == 2


def test_process_that_ends_between_two_polls_counts_as_ready(spawner: FakeSpawner) -> None:
    processes = make_process_set(spawner)
    spawner.children[0].says.append("here")
    spawner.children[0].exit_code = 1
    ready, ended = processes.poll(1.0)
    assert isinstance(ready, ProcessReady)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in == 0.5


@pytest.mark.parametrize("code", [0, 1, 143, -15])
def test_process_stopped_by_a_signal_is_not_restarted(spawner: FakeSpawner, code: int) -> None:
    processes = make_process_set(spawner)
    spawner.children[0].says += ["here", "leaving"]
    spawner.children[0].exit_code = code
    [_, ended] = processes.poll(1.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in is None
    assert processes.is_empty


def test_process_stopped_by_a_signal_is_restarted_on_request(spawner: FakeSpawner) -> None:
    processes = make_process_set(spawner, restarts_signaled=True)
    spawner.children[0].says += ["here", "leaving"]
    spawner.children[0].exit_code = 0
    [_, ended] = processes.poll(1.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in == 0.5
    processes.poll(1.5)
    spawner.children[1].stop_requested = True  # by this process
    spawner.children[1].exit_code = 0
    [ended] = processes.poll(2.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in is None


def test_process_never_ready_is_restarted_after_a_crash_only(
    spawner: FakeSpawner,
) -> None:
    processes = make_process_set(spawner, retries=lambda code: code not in (0, 1, 2))
    spawner.children[0].exit_code = -9
    [ended] = processes.poll(1.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in == 0.5
    processes.poll(1.5)
    spawner.children[1].exit_code = 1
    [ended] = processes.poll(2.0)
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in is None
    assert processes.is_empty


def test_repeated_crashes_increase_the_delay_and_a_long_run_resets_it(
    spawner: FakeSpawner,
) -> None:
    processes = make_process_set(spawner)
    now, delays = 0.0, []
    for life in (1.0, 1.0, 1.0, 1.0, 61.0, 1.0):
        spawner.children[-1].says.append("here")
        now += life
        spawner.children[-1].exit_code = 1
        ended = processes.poll(now)[-1]
        assert isinstance(ended, ProcessExited)
        assert ended.restart_in is not None
        delays.append(ended.restart_in)
        now += ended.restart_in
        processes.poll(now)
    assert delays == [0.5, 1.0, 2.0, 4.0, 0.5, 1.0]


def test_process_set_without_restarts_reports_exits(spawner: FakeSpawner) -> None:
    processes = make_process_set(spawner, restarts=False)
    spawner.children[0].says.append("here")
    spawner.children[0].exit_code = -9
    ended = processes.poll(1.0)[-1]
    assert isinstance(ended, ProcessExited)
    assert ended.restart_in is None


def test_failed_start_of_a_process_is_retried_later(spawner: FakeSpawner) -> None:
    processes = make_process_set(spawner)
    spawner.children[0].says.append("here")
    spawner.children[0].exit_code = -9
    processes.poll(1.0)
    spawner.refuses = True
    [refused] = processes.poll(1.5)
    assert isinstance(refused, ProcessStartFailed)
    assert refused.restart_in == 1.0
    spawner.refuses = False
    assert processes.poll(2.4) == []
    processes.poll(2.5)
    assert len(spawner.children) == 2


def test_active_commands_are_ready_ones_by_age_and_then_starting_ones(
    spawner: FakeSpawner,
) -> None:
    processes = ProcessSet(spawn=spawner.spawn)
    oldest, crashing, starting, asked = (processes.add(COMMAND, float(at)) for at in range(4))
    for child in spawner.children[:2]:
        child.says = ["address"]
    spawner.children[3].stop_requested = True
    processes.poll(4.0)
    assert processes.active == [oldest, crashing, starting]
    spawner.children[1].exit_code = 1
    processes.poll(5.0)
    # It waits for its restart; then it is the newest.
    assert processes.active == [oldest, crashing, starting]
    assert crashing.child is None
    processes.poll(10.0)
    assert processes.active == [oldest, starting, crashing]
    spawner.children[-1].says = spawner.children[2].says = ["address"]
    processes.poll(11.0)
    assert processes.active == [oldest, starting, crashing]
    assert asked not in processes.active
