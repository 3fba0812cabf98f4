"""The dispatcher's journal: replay, golden journals, damage and crashes."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from headrace.errors import DataLossError, FailedPreconditionError
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.core import FORMAT, open_journal
from headrace.service.dispatcher.decision import PlanChunk, PlanOffset
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.invariants import validate
from headrace.service.dispatcher.state import DispatcherState, IterationReaders, TaskPhase
from headrace.service.modes.coordinated_reads.events import coordinated_task
from headrace.serving.journal import Journal, MemoryJournal
from headrace.serving.sqlite_journal import SqliteJournal
from tests.service.dispatcher.golden_journal import SCENARIOS, dynamic, load_golden
from tests.service.dispatcher.scenario import Scenario


@pytest.fixture
def scene() -> Scenario:
    """A scenario with events of many kinds."""
    return dynamic()


def reopen(work_dir: Path) -> DispatcherState:
    journal = SqliteJournal(work_dir, FORMAT)
    try:
        return journal.replay()
    finally:
        journal.close()


@pytest.mark.parametrize("compact_after", [10, 1000])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_journal_replays_events_and_snapshots(
    tmp_path: Path, scene: Scenario, kind: str, compact_after: int
) -> None:
    journal: Journal[AnyEvent, DispatcherState]
    if kind == "file":
        journal = SqliteJournal(tmp_path, FORMAT, compact_after=compact_after)
    else:
        journal = MemoryJournal(FORMAT, compact_after=compact_after)
    state = journal.replay()
    for event in scene.events:
        journal.append([event])
        apply(state, event)
        journal.compact(state)
    assert journal.replay() == scene.state
    journal.close()
    if kind == "file":
        assert reopen(tmp_path) == scene.state


def test_journal_stores_plans(tmp_path: Path) -> None:
    config = DispatcherConfig(work_dir=tmp_path, fault_tolerant_mode=True)
    for journal in (open_journal(config), open_journal(DispatcherConfig())):
        journal.append([], [PlanChunk(b"digest", 0, b"pl"), PlanChunk(b"digest", 2, b"an")])
        assert journal.read_blob(PlanOffset(b"digest", 3)) == b"n"
        journal.close()
    assert (tmp_path / FORMAT.file_name).exists()


# --- golden journals ----------------------------------------------------------------------


GOLDEN = load_golden()


def replay(events: list[AnyEvent]) -> DispatcherState:
    state = DispatcherState()
    for event in events:
        apply(state, event)
    validate(state)
    return state


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_events_still_produce_their_state(name: str) -> None:
    """The file has format 3; the journals in it must never change."""
    encoded, snapshot = GOLDEN[name]
    state = replay(FORMAT.decode_events(encoded))
    assert state == FORMAT.decode_state(snapshot)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_fields_are_still_read(name: str) -> None:
    encoded, snapshot = GOLDEN[name]
    written = msgspec.msgpack.decode(encoded)
    known = msgspec.msgpack.decode(msgspec.msgpack.encode(FORMAT.decode_events(encoded)))
    for old, new in zip(written, known, strict=True):
        assert contains(old, new), f"{old} is read as {new}"
    state = msgspec.msgpack.decode(snapshot, strict=False)
    now = msgspec.msgpack.decode(msgspec.msgpack.encode(FORMAT.decode_state(snapshot)))
    assert contains(state, now)


def contains(old: Any, new: Any) -> bool:
    """Return whether `new` contains everything in `old`; it may have additional fields."""
    if isinstance(old, dict):
        return old.keys() <= new.keys() and all(contains(old[key], new[key]) for key in old)
    if isinstance(old, list):
        if not any(isinstance(each, dict | list) for each in old):
            return sorted(old, key=str) == sorted(new, key=str)  # may have been a set
        return len(old) == len(new) and all(map(contains, old, new))
    return bool(old == new)


def test_golden_journals_cover_every_event_kind() -> None:
    """A new kind of event needs a scenario in `golden_journal`."""
    kinds = {
        type(event) for encoded, _ in GOLDEN.values() for event in FORMAT.decode_events(encoded)
    }
    assert kinds == set(get_args(AnyEvent))


@pytest.mark.parametrize("name", SCENARIOS)
def test_golden_journals_match_their_scenarios(name: str) -> None:
    events = SCENARIOS[name]().events
    assert {type(event) for event in events} == {
        type(event) for event in FORMAT.decode_events(GOLDEN[name][0])
    }


def test_golden_dynamic_journal_has_the_expected_state() -> None:
    state = replay(FORMAT.decode_events(GOLDEN["dynamic"][0]))
    iteration, left, failed = state.iterations[2000], state.tasks[4000], state.tasks[4001]
    assert (iteration.epoch, iteration.seed, iteration.finished) == ((0, 3), -5, True)
    assert iteration.pool.next_split == 110
    assert iteration.pool.returned == ((4, 5), (10, 12), (49, 64), (66, 86), (88, 108))
    assert iteration.pool.recovered == ((4, 5), (49, 54), (76, 86), (88, 108))
    assert (left.phase, left.address, left.is_unavailable) == (TaskPhase.FINISHED, "v:1", True)
    splits = left.assigned
    assert (
        splits.num_assignments,
        splits.last_assignment,
        splits.num_assigned,
        splits.num_done,
    ) == (5, (88, 108), 100, 4)
    assert splits.runs == [(4, 20), (22, 42), (44, 64), (66, 86), (88, 108)]
    assert splits.returned == ((4, 5), (10, 12), (45, 100))
    assert (splits.delivered, splits.partially_delivered) == (((5, 40),), ((5, 45),))
    assert (failed.phase, failed.reason) == (TaskPhase.FAILED, "no memory")
    assert (failed.assigned.partially_delivered, failed.worker_id) == (((0, 10),), "w")
    assert state.workers["w"].tags == ("COLOCATED",)


def test_other_golden_journals_have_the_expected_state() -> None:
    states = {name: replay(FORMAT.decode_events(encoded)) for name, (encoded, _) in GOLDEN.items()}
    (poisoned,) = states["exactly_once"].iterations.values()
    assert (poisoned.pool.exactly_once, poisoned.pool.abandoned) == (True, ((1, 2),))
    (job,) = states["coordinated_reads"].jobs.values()
    assert (job.name, job.options.num_consumers, job.options.remainder) == ("rounds", 2, "pad")
    assert job.options.cost_fn_digest in states["coordinated_reads"].plan_sizes
    task = states["coordinated_reads"].tasks[4000]
    assert coordinated_task(task.mode_state).received_rounds == 3
    assert (task.assigned.delivered, task.assigned.partially_delivered) == (((0, 3),), ((0, 4),))
    one, two = states["saves"].saves.values()
    assert (one.is_closed, one.num_files, one.error) == (True, 4, "")
    assert (two.is_closed, two.num_files, two.error, two.error_class) == (
        True,
        0,
        "no space left",
        "OSError",
    )
    assert [slot.pattern for slot in states["static"].slots] == ["v:1", "w:1"]
    old = states["garbage_collection"]
    assert old.jobs[old.jobs_by_name["finished"]].finished_epochs == {
        (0,): IterationReaders("c", 1)
    }
    (missing,) = old.iterations[2002].missing_splits
    assert (missing.client_id, missing.splits) == ("f", ((1, 2),))
    assert 4002 not in old.tasks
    assert old.datasets.keys() == {"1001"}
    assert not old.datasets["1001"].anonymous


def test_work_dir_has_one_dispatcher(tmp_path: Path) -> None:
    with (
        contextlib.closing(SqliteJournal(tmp_path, FORMAT)),
        pytest.raises(FailedPreconditionError, match="in use by another dispatcher"),
    ):
        SqliteJournal(tmp_path, FORMAT)


@pytest.mark.parametrize("version", [1, 2])
def test_journal_of_older_format_is_rejected(tmp_path: Path, version: int) -> None:
    database = sqlite3.connect(tmp_path / FORMAT.file_name)
    database.execute("CREATE TABLE events (number INTEGER PRIMARY KEY)")
    database.execute(f"PRAGMA user_version = {version}")
    database.close()
    refused = rf"has format {version}, .* reads format 3"
    with pytest.raises(FailedPreconditionError, match=refused) as caught:
        SqliteJournal(tmp_path, FORMAT)
    assert "register all datasets again" in str(caught.value)


def test_damaged_journal_never_produces_another_state(tmp_path: Path, scene: Scenario) -> None:
    journal = SqliteJournal(tmp_path, FORMAT)
    journal.replay()
    for event in scene.events:
        journal.append([event])
    journal.close()
    whole = journal.path.read_bytes()
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(30):
        start = rng.randrange(len(whole))
        damaged = whole[:start] + rng.randbytes(64) + whole[start + 64 :]
        journal.path.write_bytes(damaged)
        # Either rejected or unharmed.
        with contextlib.suppress(DataLossError, FailedPreconditionError):
            assert reopen(tmp_path) == scene.state, f"seed {seed}"


WRITER = """
import pathlib, sys
from headrace.service.dispatcher.core import FORMAT
from headrace.serving.sqlite_journal import SqliteJournal
from tests.service.dispatcher.scenario import DYNAMIC, Scenario
journal = SqliteJournal(pathlib.Path(sys.argv[1]), FORMAT, compact_after=40)
scene = Scenario()
kept = journal.replay()
if not kept.datasets:
    scene.register(num_splits=-1)
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, job_name="job")
    journal.append(scene.events)
else:
    scene.dispatcher.state = kept
    scene.dispatcher.soft_state = type(scene.dispatcher.soft_state).from_state(kept, 0.0)
state = scene.state
task = state.tasks[4000]
number = task.assigned.num_assignments
while True:
    before = len(scene.events)
    split = scene.split(4000, max_splits=number % 7 + 1, num_done=task.assigned.num_assigned)
    journal.append(scene.events[before:])
    journal.compact(state)
    print(number, *split, flush=True)
    number += 1
"""


@pytest.mark.heavy
def test_killed_process_loses_no_reported_event(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    expected = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(rng.randrange(1, 150))]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines()
        writer.stdout.close()
        writer.wait()
        printed = [tuple(map(int, line.split())) for line in lines if len(line.split()) == 3]
        journal = SqliteJournal(tmp_path, FORMAT)
        state = journal.replay()
        journal.close()
        validate(state)
        kept = state.tasks[4000]
        # The journal may contain one more assignment than was printed, never one less.
        assert kept.assigned.num_assignments - 1 - printed[-1][0] in (0, 1), (
            f"seed {seed}: {printed[-1]} {kept}"
        )
        for number, start, stop in printed:
            assert start == expected or number == 0, f"seed {seed}"
            assert stop - start == number % 7 + 1
            expected = stop
        expected = kept.assigned.last_assignment[1]


def test_index_of_failed_tasks_is_rebuilt_for_older_snapshots() -> None:
    scene = Scenario()
    scene.add_worker("w")
    (task,) = scene.open("c", scene.register()).tasks
    scene.fail("w", task.task_id)
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(scene.state))
    assert snapshot["workers"]["w"].pop("failed_tasks") == [task.task_id]
    assert FORMAT.decode_state(msgspec.msgpack.encode(snapshot)) == scene.state
