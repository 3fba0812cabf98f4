"""Requests are decided, kept and answered; an error of the dispatcher's own does no harm."""

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


class Asked(Request):
    """A request whose answer is kept."""

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
    asked = [Asked(request) for request in requests]
    core.handle(asked)
    return [each.answer for each in asked]


def worker(worker_id: str) -> messages.RegisterWorker:
    return messages.RegisterWorker(worker_id=worker_id, address=f"{worker_id}:1")


def started(journal: AnyJournal) -> DispatcherCore:
    return DispatcherCore(journal, DispatcherLimits())


@pytest.fixture(params=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyJournal]:
    journal = SqliteJournal(tmp_path, FORMAT) if request.param == "file" else MemoryJournal(FORMAT)
    yield journal
    journal.close()


def test_an_incarnation_lasts_as_long_as_the_journal(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        core = started(SqliteJournal(tmp_path, FORMAT))
        (status,) = ask(core, messages.GetStatus())
        seen.append(status.dispatcher_id)
        core.close()
    for _ in range(2):
        core = started(MemoryJournal(FORMAT))
        (registered,) = ask(core, worker("w"))
        seen.append(registered.dispatcher_id)
        core.close()
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def _contradict(state: Any, request: Any, moment: Any) -> DispatcherDecision:
    return DispatcherDecision(
        events=(
            events.WorkerRegistered(worker_id="half", address="half:1", tags=()),
            events.TaskFinished(task_id=77),
        )
    )


def _crash(state: Any, request: Any, moment: Any) -> DispatcherDecision:
    raise KeyError("a bug")


@pytest.mark.parametrize("decider", [_contradict, _crash])
def test_an_error_of_the_dispatchers_own_costs_only_the_request_that_met_it(
    journal: AnyJournal,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    decider: Any,
) -> None:
    core = started(journal)
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
    assert ("task_id 77: not known" in caplog.text) == (decider is _contradict)


def test_refusals_are_no_errors_of_the_dispatchers_own(
    journal: AnyJournal, caplog: pytest.LogCaptureFixture
) -> None:
    core = started(journal)
    refused = ask(
        core, messages.GetDataset(dataset_id="x"), messages.RegisterWorker(worker_id="", address="")
    )
    assert [type(each) for each in refused] == [NotFoundError, ValueError]
    assert caplog.text == ""


class FullJournal(MemoryJournal[events.AnyEvent, DispatcherState]):
    """A journal whose disk can be full."""

    is_full = False

    def append(self, events: Any, blobs: Any = ()) -> None:
        if self.is_full and (events or blobs):
            raise UnavailableError("the journal /somewhere/journal cannot be written: disk is full")
        super().append(events, blobs)


def test_a_journal_that_cannot_be_written_is_noticed_without_anyone_asking(
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


def test_clients_hear_that_the_journal_cannot_be_written() -> None:
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


def test_parts_of_a_plan_are_put_and_fetched(journal: AnyJournal) -> None:
    core = started(journal)
    digest = bytes.fromhex("88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589")
    parts = [
        messages.PutPlan(digest=digest, offset=at, total_bytes=4, chunk=b"abcd"[at : at + 2])
        for at in (0, 2)
    ]
    assert [each.received_bytes for each in ask(core, *parts)] == [2, 4]
    first, second = ask(
        core, messages.GetPlan(digest=digest), messages.GetPlan(digest=digest, offset=2)
    )
    assert (first, second) == (
        messages.GetPlanReply(chunk=b"ab", total_bytes=4),
        messages.GetPlanReply(chunk=b"cd", total_bytes=4),
    )


def test_a_plan_that_stops_arriving_is_forgotten(journal: AnyJournal, clock: ManualClock) -> None:
    limits = DispatcherLimits(client_timeout=30.0)
    core = DispatcherCore(journal, limits, clock=clock)
    digest = hashlib.sha256(b"plan").digest()
    first = messages.PutPlan(digest=digest, offset=0, total_bytes=4, chunk=b"pl")
    rest = messages.PutPlan(digest=digest, offset=2, total_bytes=4, chunk=b"x")

    def pass_time(seconds: float) -> None:
        until = clock() + seconds
        while clock() < until:
            clock.advance(limits.tick_interval)
            core.tick()

    ask(core, first)
    pass_time(29.0)
    assert journal.read_blob(PlanOffset(digest, 0)) == b"pl"
    # Nobody could put anything while this process was stopped.
    clock.advance(1000.0)
    core.tick()
    core.tick()
    assert journal.read_blob(PlanOffset(digest, 0)) == b"pl"
    pass_time(31.0)
    with pytest.raises((DataLossError, KeyError)):
        journal.read_blob(PlanOffset(digest, 0))
    (answer,) = ask(core, rest)
    assert answer.received_bytes == 0
    core.close()


# --- facts that contradict the state ---------------------------------------------------------


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (events.TaskFinished(4001), "task_id 4001: DispatcherTask("),
        (events.TaskFinished(99), "task_id 99: not known"),
        (events.SplitsAssigned(4000, 0, 0, 5), "not the task's next grant"),
        (events.SplitsAssigned(4000, 1, 0, 5), "dealt already"),
        (events.SplitsAssigned(4000, 1, 7, 9), "leaves units out"),
        (events.SplitsReturned(4000, ((0, 9),)), "never dealt"),
        (events.SplitsReassigned(4000, ((0, 1),)), "would count twice"),
        (events.WorkerLost("nobody"), "worker_id nobody: not known"),
        (events.WorkerRegistered("x", "v:1", ()), "another worker's"),
        (events.IterationFinished(2000), "running tasks"),
        (events.IterationDiscarded(2000), "clients read it"),
        (events.ClientJoined("c", 2000), "reads an iteration already"),
        (events.DispatcherStarted("again", b""), "only once"),
        (
            events.JobCreated(5007, "j", None, "1000", messages.JobOptions(processing_mode=0)),
            "not the next one",
        ),
    ],
)
def test_a_fact_that_contradicts_the_state_is_refused_with_its_story(
    fact: events.AnyEvent, said: str
) -> None:
    scene = Scenario()
    scene.register(100)
    scene.add_worker("v")
    scene.add_worker("w")
    scene.open("c", processing_mode=1, job_name="job")
    scene.split(4000, max_splits=5)
    scene.finish("w", 4001)
    with pytest.raises(InvalidEventError, match=type(fact).__name__) as caught:
        apply(scene.state, fact)
    assert said in str(caught.value)
