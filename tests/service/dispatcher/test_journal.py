"""Facts are kept, in order, across a crash."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from headrace.errors import DataLossError, FailedPreconditionError, UnavailableError
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.decision import PlanPart, PlanPlace
from headrace.service.dispatcher.journal import FILE_NAME, Journal, MemoryJournal, SqliteJournal
from headrace.service.dispatcher.state import DispatcherState, Readers, TaskPhase
from headrace.service.dispatcher.updates import Update
from tests.service.dispatcher.scenario import DYNAMIC, Scenario


def a_day(scene: Scenario) -> None:
    scene.register(positions=1000)
    for worker_id in ("v", "w", "x"):
        scene.add_worker(worker_id, tags=("COLOCATED",) if worker_id == "w" else ())
    scene.open("c", processing_mode=DYNAMIC, job_name="job", pass_number=(0, 3), seed=-5)
    for number in range(5):
        scene.split(4000, want=20, done=number)
        scene.split(4001, want=2)
    scene.leaving("v")
    scene.hand_back("v", 4000, (10, 12), (50, 70))
    scene.finish("v", 4000)
    scene.left("v")
    scene.settle("c", 4000, (5, 40), touched=((5, 45),))
    scene.fail("w", 4001, "no memory")
    scene.lose("x")
    scene.open("d")
    scene.finish("w", 4003)
    scene.close("d")


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """Facts of every kind that a day brings."""
    a_day(scene)
    return scene


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    """An empty journal in `tmp_path`."""
    journal = SqliteJournal(tmp_path, compact_after=10)
    journal.replay()
    yield journal
    journal.close()


def reopened(journal: SqliteJournal) -> DispatcherState:
    journal.close()
    again = SqliteJournal(journal.path.parent)
    try:
        return again.replay()
    finally:
        again.close()


def test_an_empty_journal_is_an_empty_state(journal: SqliteJournal) -> None:
    assert reopened(journal) == DispatcherState()


def test_what_was_appended_is_there_again(journal: SqliteJournal, scene: Scenario) -> None:
    for fact in scene.facts:
        journal.append([fact])
    assert reopened(journal) == scene.state


def test_facts_of_one_call_are_one_record(journal: SqliteJournal, scene: Scenario) -> None:
    journal.append(scene.facts)
    journal.append([])
    assert reopened(journal) == scene.state
    with sqlite3.connect(journal.path) as database:
        assert database.execute("SELECT count(*) FROM facts").fetchone() == (1,)
    database.close()


def test_a_snapshot_takes_the_place_of_many_facts(journal: SqliteJournal, scene: Scenario) -> None:
    state = DispatcherState()
    for fact in scene.facts:
        journal.append([fact])
        apply(state, fact)
        journal.compact(state)
    assert reopened(journal) == scene.state
    with sqlite3.connect(journal.path) as database:
        (records,) = database.execute("SELECT count(*) FROM facts").fetchone()
        assert records == len(scene.facts) % 10
    database.close()


def parts_of(plan: bytes, size: int, digest: bytes = b"digest") -> list[PlanPart]:
    return [PlanPart(digest, at, plan[at : at + size]) for at in range(0, len(plan), size)]


def read(journal: Journal, digest: bytes, total: int) -> bytes:
    plan = b""
    while len(plan) < total:
        plan += journal.read_plan(PlanPlace(digest, len(plan)))
    return plan


@pytest.fixture(params=["file", "memory"])
def either(request: pytest.FixtureRequest, journal: SqliteJournal) -> Journal:
    return journal if request.param == "file" else MemoryJournal(compact_after=10)


def test_plans_are_kept_in_parts_and_handed_out(either: Journal) -> None:
    plan = os.urandom(1000)
    for part in parts_of(plan, 300):
        either.append([], [part])
    assert read(either, b"digest", 1000) == plan
    assert either.read_plan(PlanPlace(b"digest", 350)) == plan[350:600]
    either.append([], parts_of(plan[:500], 500))
    assert read(either, b"digest", 500) == plan[:500]


def test_plans_that_nobody_knows_are_dropped(either: Journal) -> None:
    either.append([], [*parts_of(b"whole", 2, b"a"), *parts_of(b"beginning of another", 2, b"b")])
    either.drop_plans(except_for={b"a"})
    assert read(either, b"a", 5) == b"whole"
    with pytest.raises((DataLossError, KeyError)):
        either.read_plan(PlanPlace(b"b", 0))


def test_a_damaged_plan_is_reported(journal: SqliteJournal) -> None:
    journal.append([], parts_of(b"plan", 2))
    journal._database.execute("UPDATE plans SET body = X'00' WHERE start = 2")
    assert journal.read_plan(PlanPlace(b"digest", 0)) == b"pl"
    with pytest.raises(DataLossError, match="is damaged at byte 2"):
        journal.read_plan(PlanPlace(b"digest", 2))
    with pytest.raises(DataLossError, match="is missing at byte 0"):
        journal.read_plan(PlanPlace(b"another", 0))


def test_a_journal_in_memory_keeps_facts_while_the_process_lives(scene: Scenario) -> None:
    journal = MemoryJournal(compact_after=10)
    state = DispatcherState()
    for fact in scene.facts:
        journal.append([fact])
        apply(state, fact)
        journal.compact(state)
        assert journal.replay() == state
    journal.close()


# --- facts are for ever ----------------------------------------------------------------------


def test_facts_that_were_ever_written_still_mean_the_same() -> None:
    """The file was written when format 2 began, by the scenario above; it must never change."""
    golden = json.loads((Path(__file__).parent / "journal_format_2.json").read_text())
    facts = msgspec.msgpack.decode(base64.b64decode(golden["facts"]), type=list[Update])
    state = DispatcherState()
    for fact in facts:
        apply(state, fact)
    state.validate()
    assert {type(fact) for fact in facts} == set(get_args(Update))
    iteration, left, failed = state.iterations[2000], state.tasks[4000], state.tasks[4001]
    assert (iteration.pass_number, iteration.seed, iteration.finished) == ((0, 3), -5, True)
    assert iteration.next == 110
    assert iteration.returned == ((4, 5), (10, 12), (49, 64), (66, 86), (88, 108))
    assert iteration.recovered == ((4, 5), (49, 54), (76, 86), (88, 108))
    assert (left.phase, left.address, left.gone) == (TaskPhase.FINISHED, "v:1", True)
    assert (left.grants, left.last, left.dealt, left.done) == (5, (88, 108), 100, 4)
    assert left.runs == [(4, 20), (22, 42), (44, 64), (66, 86), (88, 108)]
    assert left.returned == ((4, 5), (10, 12), (45, 100))
    assert (left.received, left.touched) == (((5, 40),), ((5, 45),))
    assert (failed.phase, failed.reason) == (TaskPhase.FAILED, "no memory")
    assert (failed.touched, failed.worker_id) == (((0, 10),), "w")
    deadly = state.iterations[2004]
    assert (deadly.next, deadly.given_up, deadly.returned) == (1, ((0, 1),), ())
    assert state.workers["w"].tags == ("COLOCATED",)
    assert state.jobs[5002].forgotten == {(0,): Readers("e", 1)}
    assert (state.incarnation, state.next_task, state.next_job) == ("run", 4010, 5005)
    snapshot = msgspec.msgpack.decode(base64.b64decode(golden["snapshot"]), type=DispatcherState)
    assert snapshot == state


def test_a_work_dir_has_one_dispatcher(journal: SqliteJournal, tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="another dispatcher uses the journal"):
        SqliteJournal(tmp_path)
    code = "import sys, pathlib; from headrace.service.dispatcher.journal import SqliteJournal\n"
    code += "SqliteJournal(pathlib.Path(sys.argv[1]))"
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "another dispatcher uses the journal" in other.stderr
    journal.close()
    SqliteJournal(tmp_path).close()


def test_a_file_that_is_no_journal_is_reported_by_name(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"this is no database, but long enough to be one" * 100)
    with pytest.raises(DataLossError, match=FILE_NAME):
        SqliteJournal(tmp_path)


def test_a_journal_of_another_version_is_refused(journal: SqliteJournal, tmp_path: Path) -> None:
    journal.close()
    database = sqlite3.connect(journal.path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(FailedPreconditionError, match="has format 99"):
        SqliteJournal(tmp_path)


def test_a_journal_of_version_1_is_refused_by_name(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE_NAME)
    database.execute("CREATE TABLE facts (number INTEGER PRIMARY KEY)")
    database.execute("PRAGMA user_version = 1")
    database.close()
    with pytest.raises(FailedPreconditionError, match=r"has format 1, .* reads format 2") as caught:
        SqliteJournal(tmp_path)
    assert "register everything again" in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE facts SET body = X'00' WHERE number = 3", "record 3"),
        ("UPDATE facts SET checksum = 1 WHERE number = 2", "record 2"),
        ("DELETE FROM facts WHERE number = 4", "record 4 is missing"),
        ("DROP TABLE facts", "no such table"),
    ],
)
def test_damage_is_reported_with_its_place(
    journal: SqliteJournal, scene: Scenario, damage: str, said: str
) -> None:
    for fact in scene.facts:
        journal.append([fact])
    journal.close()
    database = sqlite3.connect(journal.path, isolation_level=None)
    database.execute(damage)
    database.close()
    with pytest.raises(DataLossError, match=said) as caught:
        reopened(journal)
    assert str(journal.path) in str(caught.value)


def test_overwritten_pages_never_give_another_state(
    journal: SqliteJournal, scene: Scenario
) -> None:
    for fact in scene.facts:
        journal.append([fact])
    journal.close()
    whole = journal.path.read_bytes()
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(30):
        start = chance.randrange(len(whole))
        damaged = whole[:start] + chance.randbytes(64) + whole[start + 64 :]
        journal.path.write_bytes(damaged)
        # Refused, or unharmed: never taken for something else.
        with contextlib.suppress(DataLossError, FailedPreconditionError):
            assert reopened(journal) == scene.state, f"seed {seed}"


def test_what_cannot_be_written_was_not_written(journal: SqliteJournal, scene: Scenario) -> None:
    journal.append(scene.facts[:3])
    journal._database.execute("PRAGMA query_only = ON")
    with pytest.raises(UnavailableError, match="cannot be written"):
        journal.append(scene.facts[3:])
    journal._database.execute("PRAGMA query_only = OFF")
    journal.append(scene.facts[3:])
    assert reopened(journal) == scene.state


WRITER = """
import pathlib, sys
from headrace.service.dispatcher.journal import SqliteJournal
from tests.service.dispatcher.scenario import DYNAMIC, Scenario
journal = SqliteJournal(pathlib.Path(sys.argv[1]), compact_after=40)
scene = Scenario()
kept = journal.replay()
if not kept.datasets:
    scene.register(positions=-1)
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, job_name="job")
    journal.append(scene.facts)
else:
    scene.dispatcher.state = kept
    scene.dispatcher.presence = type(scene.dispatcher.presence).of(kept, 0.0)
state = scene.state
task = state.tasks[4000]
number = task.grants
while True:
    before = len(scene.facts)
    split = scene.split(4000, want=number % 7 + 1, done=task.dealt)
    journal.append(scene.facts[before:])
    journal.compact(state)
    print(number, *split, flush=True)
    number += 1
"""


@pytest.mark.heavy
def test_a_process_killed_at_any_instant_kept_all_that_it_said(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    expected = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(chance.randrange(1, 150))]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines()
        writer.stdout.close()
        writer.wait()
        said = [tuple(map(int, line.split())) for line in lines if len(line.split()) == 3]
        journal = SqliteJournal(tmp_path)
        state = journal.replay()
        journal.close()
        state.validate()
        kept = state.tasks[4000]
        # One more may have been kept than was said, never one less.
        assert kept.grants - 1 - said[-1][0] in (0, 1), f"seed {seed}: {said[-1]} {kept}"
        for number, start, stop in said:
            assert start == expected or number == 0, f"seed {seed}"
            assert stop - start == number % 7 + 1
            expected = stop
        expected = kept.last[1]
