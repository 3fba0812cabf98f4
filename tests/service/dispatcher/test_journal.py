"""Facts are kept, in order, across a crash."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from headrace.errors import DataLossError, FailedPreconditionError
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.decision import PlanPart, PlanPlace
from headrace.service.dispatcher.invariants import validate
from headrace.service.dispatcher.journal import FORMAT, open_journal
from headrace.service.dispatcher.state import DispatcherState, Readers, TaskPhase
from headrace.service.dispatcher.updates import (
    FilesSaved,
    RoundsOpened,
    SaveBegun,
    SaveClosed,
    SaveFailed,
    SaveOpened,
    SlotsConfigured,
    Update,
)
from headrace.serving.journal import Journal, MemoryJournal
from headrace.serving.sqlite_journal import SqliteJournal
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


def reopened(work_dir: Path) -> DispatcherState:
    journal = SqliteJournal(work_dir, FORMAT)
    try:
        return journal.replay()
    finally:
        journal.close()


@pytest.mark.parametrize("compact_after", [10, 1000])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_facts_of_every_kind_and_snapshots_of_them_are_read_again(
    tmp_path: Path, scene: Scenario, kind: str, compact_after: int
) -> None:
    journal: Journal[Update, DispatcherState]
    if kind == "file":
        journal = SqliteJournal(tmp_path, FORMAT, compact_after=compact_after)
    else:
        journal = MemoryJournal(FORMAT, compact_after=compact_after)
    state = journal.replay()
    for fact in scene.facts:
        journal.append([fact])
        apply(state, fact)
        journal.compact(state)
    assert journal.replay() == scene.state
    journal.close()
    if kind == "file":
        assert reopened(tmp_path) == scene.state


def test_plans_of_a_dispatcher_are_kept_beside_its_facts(tmp_path: Path) -> None:
    config = DispatcherConfig(work_dir=tmp_path, fault_tolerant_mode=True)
    for journal in (open_journal(config), open_journal(DispatcherConfig())):
        journal.append([], [PlanPart(b"digest", 0, b"pl"), PlanPart(b"digest", 2, b"an")])
        assert journal.read_blob(PlanPlace(b"digest", 3)) == b"n"
        journal.close()
    assert (tmp_path / FORMAT.file_name).exists()


# --- facts are for ever ----------------------------------------------------------------------


def test_facts_that_were_ever_written_still_mean_the_same() -> None:
    """The file was written when format 2 began, by the scenario above; it must never change."""
    golden = json.loads((Path(__file__).parent / "journal_format_2.json").read_text())
    facts = msgspec.msgpack.decode(base64.b64decode(golden["facts"]), type=list[Update])
    state = DispatcherState()
    for fact in facts:
        apply(state, fact)
    validate(state)
    saves = {SaveBegun, SaveOpened, FilesSaved, SaveFailed, SaveClosed}
    added_later = {SlotsConfigured, RoundsOpened} | saves
    assert {type(fact) for fact in facts} == set(get_args(Update)) - added_later
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
    assert 4011 not in state.tasks
    (missing,) = state.iterations[2005].missing
    assert (missing.client_id, missing.units) == ("h", ((2, 3), (6, 7)))
    assert state.iterations[2005].returned == ((3, 5), (7, 10))
    assert state.datasets.keys() == {"1000", "1001", "1002", "1004"}
    assert not state.datasets["1004"].anonymous
    assert state.tasks[4013].lasted
    assert (state.incarnation, state.next_task, state.next_job) == ("run", 4014, 5007)
    snapshot = msgspec.msgpack.decode(base64.b64decode(golden["snapshot"]), type=DispatcherState)
    assert snapshot == state


def test_a_work_dir_has_one_dispatcher(tmp_path: Path) -> None:
    with (
        contextlib.closing(SqliteJournal(tmp_path, FORMAT)),
        pytest.raises(FailedPreconditionError, match="another dispatcher uses the journal"),
    ):
        SqliteJournal(tmp_path, FORMAT)


def test_a_journal_of_version_1_is_refused_by_name(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FORMAT.file_name)
    database.execute("CREATE TABLE facts (number INTEGER PRIMARY KEY)")
    database.execute("PRAGMA user_version = 1")
    database.close()
    with pytest.raises(FailedPreconditionError, match=r"has format 1, .* reads format 2") as caught:
        SqliteJournal(tmp_path, FORMAT)
    assert "register everything again" in str(caught.value)


def test_overwritten_pages_never_give_another_state(tmp_path: Path, scene: Scenario) -> None:
    journal = SqliteJournal(tmp_path, FORMAT)
    journal.replay()
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
            assert reopened(tmp_path) == scene.state, f"seed {seed}"


WRITER = """
import pathlib, sys
from headrace.service.dispatcher.journal import FORMAT
from headrace.serving.sqlite_journal import SqliteJournal
from tests.service.dispatcher.scenario import DYNAMIC, Scenario
journal = SqliteJournal(pathlib.Path(sys.argv[1]), FORMAT, compact_after=40)
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
        journal = SqliteJournal(tmp_path, FORMAT)
        state = journal.replay()
        journal.close()
        validate(state)
        kept = state.tasks[4000]
        # One more may have been kept than was said, never one less.
        assert kept.grants - 1 - said[-1][0] in (0, 1), f"seed {seed}: {said[-1]} {kept}"
        for number, start, stop in said:
            assert start == expected or number == 0, f"seed {seed}"
            assert stop - start == number % 7 + 1
            expected = stop
        expected = kept.last[1]
