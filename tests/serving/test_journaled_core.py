"""Tests of `JournaledCore`: requests are decided, journaled, applied and answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import HeadraceError, NotFoundError, UnavailableError
from headrace.serving.journal import Journal, MemoryJournal
from headrace.serving.journaled_core import JournaledCore
from headrace.serving.sqlite_journal import SqliteJournal
from headrace.testing import ManualClock
from tests.serving.counting import (
    FORMAT,
    Add,
    Added,
    Count,
    Decision,
    Get,
    Put,
    RecordedRequest,
    Total,
    begin,
)

Core = JournaledCore[Added, Count, Decision]


def ask(core: Core, *requests: msgspec.Struct) -> list[Any]:
    pending = [RecordedRequest(request) for request in requests]
    core.handle(pending)
    return [each.answer for each in pending]


class Disk(MemoryJournal[Added, Count]):
    """A journal that records its input, and whose disk can be full."""

    def __init__(self) -> None:
        super().__init__(FORMAT)
        self.is_full = False
        self.kept: list[list[int]] = []

    def append(self, events: Sequence[Added], blobs: Any = ()) -> None:
        if self.is_full and (events or blobs):
            raise UnavailableError("the disk is full")
        super().append(events, blobs)
        if events:
            self.kept.append([event.by for event in events])

    def close(self) -> None:
        """Record the events."""


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def core(disk: Disk, clock: ManualClock) -> Core:
    return JournaledCore(disk, begin, owner="counter", clock=clock)


@pytest.fixture(params=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal[Added, Count]]:
    journal = SqliteJournal(tmp_path, FORMAT) if request.param == "file" else MemoryJournal(FORMAT)
    yield journal
    journal.close()


def test_pending_requests_are_journaled_together_before_any_reply(core: Core, disk: Disk) -> None:
    seen: list[list[list[int]]] = []

    class Watched(RecordedRequest):
        def reply(self, message: msgspec.Struct, buffers: object = ()) -> None:
            super().reply(message)
            seen.append(list(disk.kept))

    requests = [Watched(Add(by)) for by in (1, 2, 3)]
    core.handle(requests)
    assert [each.answer.total for each in requests] == [101, 103, 106]
    assert seen == [[[100], [1, 2, 3]]] * 3


def test_core_replays_the_journal_once(disk: Disk, clock: ManualClock) -> None:
    for total in (101, 102, 103):
        core = JournaledCore(disk, begin, owner="counter", clock=clock)
        assert ask(core, Add(1)) == [Total(total)]
        core.close()
    assert disk.kept == [[100], [1], [1], [1]]


def test_refused_request_affects_only_its_caller(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    refused, answered = ask(core, Add(0), Add(5))
    assert type(refused) is NotFoundError
    assert answered == Total(105)
    assert caplog.text == ""


@pytest.mark.parametrize("by", [-1, 666])
def test_internal_error_fails_only_its_request(
    journal: Journal[Added, Count], caplog: pytest.LogCaptureFixture, by: int
) -> None:
    core = JournaledCore(journal, begin, owner="counter")
    with caplog.at_level(logging.ERROR):
        before, failed, after = ask(core, Add(1), Add(by), Add(2))
    assert (before, after) == (Total(101), Total(103))
    assert type(failed) is HeadraceError
    assert "internal error in the counter: KeyError during Add" in str(failed)
    assert journal.replay() == Count(total=103, added=3)
    (record,) = caplog.records
    assert f"the counter failed at Add(by={by})" in record.getMessage()
    core.close()


def test_events_that_cannot_be_journaled_are_not_applied(
    core: Core, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.is_full = True
    with pytest.raises(UnavailableError, match="disk is full"):
        ask(core, Add(1), Add(2))
    assert core.state_machine is None
    disk.is_full = False
    assert ask(core, Add(4)) == [Total(104)]
    assert core.state_machine is not None
    assert core.state_machine.state == disk.replay()


def test_unusable_journal_is_logged_at_once_and_then_periodically(
    core: Core, disk: Disk, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk.is_full = True

    def said() -> int:
        with caplog.at_level(logging.ERROR):
            for _ in range(5):
                with pytest.raises(UnavailableError):
                    ask(core, Add(1))
        return sum("the disk is full" in record.getMessage() for record in caplog.records)

    assert [said(), said()] == [1, 1]
    clock.advance(61.0)
    assert said() == 2


def test_decisions_use_the_clock_of_the_core(core: Core, disk: Disk, clock: ManualClock) -> None:
    for _ in range(25):
        clock.advance(1.0)
        core.tick()
    assert disk.kept == [[100], [1000], [1000]]
    disk.is_full = True
    clock.advance(10.0)
    with pytest.raises(UnavailableError):
        core.tick()
    disk.is_full = False
    assert ask(core, Add(1)) == [Total(2101)]


def test_blobs_are_stored_read_and_dropped_when_unused(
    journal: Journal[Added, Count], clock: ManualClock
) -> None:
    core = JournaledCore(journal, begin, owner="counter", clock=clock)
    ask(core, Put(b"key", b"value"))
    assert ask(core, Get(b"key")) == [Total(0, b"value")]
    clock.advance(1.0)
    core.tick()
    assert ask(core, Get(b"key")) == [Total(0, b"value")]
    clock.advance(10.0)
    core.tick()
    (gone,) = ask(core, Get(b"key"))
    assert isinstance(gone, Exception)
    core.close()


def test_events_are_counted_after_they_are_journaled(disk: Disk, clock: ManualClock) -> None:
    kept: list[Added] = []
    core = JournaledCore(disk, begin, owner="counter", clock=clock, on_journaled=kept.extend)
    ask(core, Add(1), Add(666), Add(2))
    disk.is_full = True
    with pytest.raises(UnavailableError):
        ask(core, Add(3))
    assert [event.by for event in kept] == [1, 2]


def test_closed_core_refuses_requests(core: Core, clock: ManualClock) -> None:
    core.close()
    assert ask(core, Add(1)) == [None]
    clock.advance(100.0)
    core.tick()


def test_maintenance_ticks_until_the_core_is_closed(disk: Disk) -> None:
    ticked = threading.Semaphore(0)
    core = JournaledCore(
        disk, begin, owner="counter", on_journaled=lambda facts: ticked.release(), clock=lambda: 0.0
    )
    keeper = threading.Thread(target=core.maintain, args=(0.001,))
    keeper.start()
    for _ in range(3):
        assert ticked.acquire(timeout=20)
    core.close()
    keeper.join()
