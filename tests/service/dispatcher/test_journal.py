"""Facts are kept, in order, across a crash."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import DataLossError, FailedPreconditionError, UnavailableError
from headrace.service.dispatcher.journal import FILE_NAME, MemoryJournal, SqliteJournal
from headrace.service.dispatcher.state import DispatcherState
from tests.service.dispatcher.scenario import DYNAMIC, Scenario, registration


@pytest.fixture
def scene(scene: Scenario) -> Scenario:
    """Facts of every kind that a day brings."""
    scene.register(sizes=(1000, 5))
    scene.add_worker("v")
    scene.add_worker("w", tags=("COLOCATED",))
    scene.open("c", processing_mode=DYNAMIC, job_name="job")
    for number in range(5):
        scene.split(4000, number)
    scene.finish("v", 4000)
    scene.open("d")
    scene.close("d")
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
        state.apply(fact)
        journal.compact(state)
    assert reopened(journal) == scene.state
    with sqlite3.connect(journal.path) as database:
        (records,) = database.execute("SELECT count(*) FROM facts").fetchone()
        assert records == len(scene.facts) % 10
    database.close()


def test_plans_are_kept_once_and_handed_out(journal: SqliteJournal, scene: Scenario) -> None:
    plan = os.urandom(1000)
    decision = scene.dispatcher.decide(registration(token="new", plan=plan), 0.0)
    (fact,) = decision.updates
    for kept in (journal, MemoryJournal()):
        kept.append([fact], [plan, plan])
        assert kept.read_plan(fact.plan) == plan  # type: ignore[union-attr]
    with pytest.raises(DataLossError, match="missing"):
        journal.read_plan(b"no digest of anything")


def test_a_journal_in_memory_keeps_no_facts(scene: Scenario) -> None:
    journal = MemoryJournal()
    journal.append(scene.facts)
    assert journal.replay() == DispatcherState()
    journal.close()


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
scene.dispatcher.state = journal.replay()
state = scene.state
if not state.datasets:
    scene.register(sizes=(-1,))
    scene.add_worker("w")
    scene.open("c", processing_mode=DYNAMIC, job_name="job")
    journal.append(scene.facts)
number = state.tasks[4000].grants[0].number + 1 if state.tasks[4000].grants else 0
while True:
    before = len(scene.facts)
    split = scene.split(4000, number, want=number % 7 + 1)
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
        kept = state.tasks[4000].grants[0]
        # One more may have been kept than was said, never one less.
        assert kept.number - said[-1][0] in (0, 1), f"seed {seed}: {said[-1]} {kept}"
        for number, start, stop in said:
            assert start == expected or number == 0, f"seed {seed}"
            assert stop - start == number % 7 + 1
            expected = stop
        expected = kept.stop
