"""The core with its journal: durability, internal errors and invalid events."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import DataLossError, HeadraceError, NotFoundError, UnavailableError
from headrace.service import messages
from headrace.service.dispatcher import dispatcher as dispatcher_module
from headrace.service.dispatcher import events
from headrace.service.dispatcher.apply import InvalidEventError, apply
from headrace.service.dispatcher.core import FORMAT, DispatcherCore
from headrace.service.dispatcher.decision import DispatcherDecision, PlanOffset
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.state import DispatcherState
from headrace.serving.journal import Journal, MemoryJournal
from headrace.serving.sqlite_journal import SqliteJournal
from headrace.testing import ManualClock
from headrace.transport.channel import Request
from tests.service.dispatcher.scenario import PLAN, Scenario, opening, registration

AnyJournal = Journal[events.AnyEvent, DispatcherState]


class RecordingRequest(Request):
    """A request that records its reply."""

    def __init__(self, message: msgspec.Struct) -> None:
        self.message, self.buffers, self.peer = message, (), "test"
        self.answer: Any = None

    def reply(self, message: msgspec.Struct, buffers: object = ()) -> None:
        assert self.answer is None
        self.answer = message

    def fail(self, error: Exception) -> None:
        assert self.answer is None
        self.answer = error


def ask(core: DispatcherCore, *requests: msgspec.Struct) -> list[Any]:
    sent = [RecordingRequest(request) for request in requests]
    core.handle(sent)
    return [each.answer for each in sent]


def worker(worker_id: str) -> messages.RegisterWorker:
    return messages.RegisterWorker(worker_id=worker_id, address=f"{worker_id}:1")


def start_core(journal: AnyJournal) -> DispatcherCore:
    return DispatcherCore(journal, DispatcherLimits())


@pytest.fixture(params=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyJournal]:
    journal = SqliteJournal(tmp_path, FORMAT) if request.param == "file" else MemoryJournal(FORMAT)
    yield journal
    journal.close()


def test_dispatcher_id_is_kept_as_long_as_the_journal(tmp_path: Path) -> None:
    dispatcher_ids = []
    for _ in range(2):
        core = start_core(SqliteJournal(tmp_path, FORMAT))
        (status,) = ask(core, messages.GetStatus())
        dispatcher_ids.append(status.dispatcher_id)
        core.close()
    for _ in range(2):
        core = start_core(MemoryJournal(FORMAT))
        (registered,) = ask(core, worker("w"))
        dispatcher_ids.append(registered.dispatcher_id)
        core.close()
    assert dispatcher_ids[0] == dispatcher_ids[1]
    assert len(set(dispatcher_ids)) == 3


def _contradict(state: Any, request: Any, context: Any) -> DispatcherDecision:
    return DispatcherDecision(
        events=(
            events.WorkerRegistered(worker_id="partial", address="partial:1", tags=()),
            events.TaskFinished(task_id=77),
        )
    )


def _crash(state: Any, request: Any, context: Any) -> DispatcherDecision:
    raise KeyError("a bug")


@pytest.mark.parametrize("decider", [_contradict, _crash])
def test_internal_error_fails_only_its_own_request(
    journal: AnyJournal,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    decider: Any,
) -> None:
    core = start_core(journal)
    ask(core, worker("u"))
    monkeypatch.setitem(dispatcher_module._DECIDERS, messages.GetTask, decider)
    bad = messages.GetTask(worker_id="u", task_id=77)
    with caplog.at_level(logging.ERROR):
        before, failed, after, status = ask(
            core, worker("v"), bad, worker("w"), messages.GetStatus()
        )
    assert isinstance(before, messages.RegisterWorkerReply)
    assert isinstance(after, messages.RegisterWorkerReply)
    assert type(failed) is HeadraceError
    assert "during GetTask" in str(failed)
    assert [each.worker_id for each in status.workers] == ["u", "v", "w"]
    assert core.num_workers() == 3
    assert "GetTask" in caplog.text
    assert ("task_id 77: not found" in caplog.text) == (decider is _contradict)


def test_rejected_requests_are_not_logged_as_errors(
    journal: AnyJournal, caplog: pytest.LogCaptureFixture
) -> None:
    core = start_core(journal)
    rejected = ask(
        core, messages.GetDataset(dataset_id="x"), messages.RegisterWorker(worker_id="", address="")
    )
    assert [type(each) for each in rejected] == [NotFoundError, ValueError]
    assert caplog.text == ""


class FullJournal(MemoryJournal[events.AnyEvent, DispatcherState]):
    """A journal whose disk may be full."""

    is_full = False

    def append(self, events: Any, blobs: Any = ()) -> None:
        if self.is_full and (events or blobs):
            raise UnavailableError("the journal /somewhere/journal cannot be written: disk is full")
        super().append(events, blobs)


def test_tick_reports_a_journal_that_cannot_be_written(
    caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    journal = FullJournal(FORMAT)
    core = DispatcherCore(journal, DispatcherLimits(), clock=clock)
    ask(core, worker("v"))
    journal.is_full = True

    def pass_time() -> None:
        for _ in range(100):
            clock.advance(0.25)
            core.tick()

    with caplog.at_level(logging.ERROR), pytest.raises(UnavailableError):
        pass_time()
    (record,) = caplog.records
    assert "disk is full" in record.getMessage()
    core.close()


def test_heartbeat_reply_reports_a_journal_that_cannot_be_written() -> None:
    journal = FullJournal(FORMAT)
    core = DispatcherCore(journal, DispatcherLimits())
    digest = hashlib.sha256(PLAN).digest()
    plan = messages.PutPlan(digest=digest, offset=0, total_bytes=len(PLAN), chunk=PLAN)
    ask(core, worker("v"), plan, registration(), opening("c"))
    heartbeat = messages.ClientHeartbeat(client_id="c")
    journal.is_full = True
    with pytest.raises(UnavailableError):
        ask(core, worker("w"))
    (update,) = ask(core, heartbeat)
    assert "disk is full" in update.journal_problem
    journal.is_full = False
    ask(core, worker("w"))
    (update,) = ask(core, heartbeat)
    assert update.journal_problem == ""
    core.close()


def test_plan_is_stored_and_read_in_chunks(journal: AnyJournal) -> None:
    core = start_core(journal)
    digest = bytes.fromhex("88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589")
    chunks = [
        messages.PutPlan(
            digest=digest, offset=offset, total_bytes=4, chunk=b"abcd"[offset : offset + 2]
        )
        for offset in (0, 2)
    ]
    assert [each.received_bytes for each in ask(core, *chunks)] == [2, 4]
    first, second = ask(
        core, messages.GetPlan(digest=digest), messages.GetPlan(digest=digest, offset=2)
    )
    assert (first, second) == (
        messages.GetPlanReply(chunk=b"ab", total_bytes=4),
        messages.GetPlanReply(chunk=b"cd", total_bytes=4),
    )


def test_incomplete_plan_without_new_chunks_is_removed(
    journal: AnyJournal, clock: ManualClock
) -> None:
    limits = DispatcherLimits(client_timeout=30.0)
    core = DispatcherCore(journal, limits, clock=clock)
    digest = hashlib.sha256(b"plan").digest()
    first = messages.PutPlan(digest=digest, offset=0, total_bytes=4, chunk=b"pl")
    last = messages.PutPlan(digest=digest, offset=2, total_bytes=4, chunk=b"x")

    def pass_time(seconds: float) -> None:
        until = clock() + seconds
        while clock() < until:
            clock.advance(limits.tick_interval)
            core.tick()

    ask(core, first)
    pass_time(29.0)
    assert journal.read_blob(PlanOffset(digest, 0)) == b"pl"
    # No client could send a chunk while this process was stopped.
    clock.advance(1000.0)
    core.tick()
    core.tick()
    assert journal.read_blob(PlanOffset(digest, 0)) == b"pl"
    pass_time(31.0)
    with pytest.raises((DataLossError, KeyError)):
        journal.read_blob(PlanOffset(digest, 0))
    (reply,) = ask(core, last)
    assert reply.received_bytes == 0
    core.close()


# --- events that contradict the state ---------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (events.TaskFinished(4001), "task_id 4001: DispatcherTask("),
        (events.TaskFinished(99), "task_id 99: not found"),
        (events.SplitsAssigned(4000, 0, 0, 5), "assignment_number is not the next one"),
        (events.SplitsAssigned(4000, 1, 0, 5), "already assigned"),
        (events.SplitsAssigned(4000, 1, 7, 9), "unassigned splits are skipped"),
        (events.SplitsReturned(4000, ((0, 9),)), "not assigned to the task"),
        (events.SplitsReassigned(4000, ((0, 1),)), "without exactly-once delivery"),
        (events.WorkerLost("unknown"), "worker_id unknown: not found"),
        (events.WorkerRegistered("x", "v:1", ()), "belongs to another worker"),
        (events.IterationFinished(2000), "running tasks"),
        (events.IterationDiscarded(2000), "the iteration has clients"),
        (events.ClientJoined("c", 2000), "already reads an iteration"),
        (events.DispatcherStarted("again", b""), "already has an id"),
        (
            events.JobCreated(5007, "j", None, "1000", messages.JobOptions(processing_mode=0)),
            "not the next number",
        ),
    ],
)
def test_invalid_event_raises_error_with_details(event: events.AnyEvent, message: str) -> None:
    scene = Scenario()
    scene.register(100)
    scene.add_worker("v")
    scene.add_worker("w")
    scene.open("c", processing_mode=1, job_name="job")
    scene.split(4000, max_splits=5)
    scene.finish("w", 4001)
    with pytest.raises(InvalidEventError, match=type(event).__name__) as caught:
        apply(scene.state, event)
    assert message in str(caught.value)
