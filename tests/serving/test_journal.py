"""Tests of the journal: events survive a crash in order, and missing ones are detected."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import DataLossError, FailedPreconditionError, UnavailableError
from headrace.serving.blobs import BlobPart, BlobPosition
from headrace.serving.journal import Journal, MemoryJournal
from headrace.serving.sqlite_journal import SqliteJournal
from tests.serving.counting import FORMAT, Added, Count, apply

FILE = FORMAT.file_name
LOG = FILE + "-wal"
MARK = FILE + "-mark"
EVENTS = [Added(by) for by in range(1, 26)]
KEPT = Count(total=325, added=25)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal[Added, Count]]:
    """An empty journal in `tmp_path`."""
    journal = SqliteJournal(tmp_path, FORMAT, compact_after=10)
    journal.replay()
    yield journal
    journal.close()


@pytest.fixture(params=["file", "memory"])
def either(
    request: pytest.FixtureRequest, journal: SqliteJournal[Added, Count]
) -> Journal[Added, Count]:
    return journal if request.param == "file" else MemoryJournal(FORMAT, compact_after=10)


def read_again(directory: Path) -> Count:
    journal = SqliteJournal(directory, FORMAT)
    try:
        return journal.replay()
    finally:
        journal.close()


def rows(path: Path) -> int:
    database = sqlite3.connect(path)
    (count,) = database.execute("SELECT count(*) FROM events").fetchone()
    database.close()
    return int(count)


def test_empty_journal_replays_to_the_initial_state(journal: SqliteJournal[Added, Count]) -> None:
    journal.close()
    assert read_again(journal.path.parent) == Count()


def test_appended_events_are_replayed(journal: SqliteJournal[Added, Count]) -> None:
    for event in EVENTS:
        journal.append([event])
    journal.close()
    assert read_again(journal.path.parent) == KEPT


def test_events_of_one_call_are_one_record(journal: SqliteJournal[Added, Count]) -> None:
    journal.append(EVENTS)
    journal.append([])
    journal.close()
    assert read_again(journal.path.parent) == KEPT
    assert rows(journal.path) == 1


def test_snapshot_replaces_many_events(either: Journal[Added, Count]) -> None:
    state = either.replay()
    for event in EVENTS:
        either.append([event])
        apply(state, event)
        either.compact(state)
        assert either.replay() == state
    either.close()
    if isinstance(either, SqliteJournal):
        assert read_again(either.path.parent) == KEPT
        assert rows(either.path) == 5


def parts_of(blob: bytes, size: int, key: bytes = b"key") -> list[BlobPart]:
    return [BlobPart(key, at, blob[at : at + size]) for at in range(0, len(blob), size)]


def read(journal: Journal[Added, Count], key: bytes, total: int) -> bytes:
    blob = b""
    while len(blob) < total:
        blob += journal.read_blob(BlobPosition(key, len(blob)))
    return blob


def test_blobs_are_stored_and_read_in_parts(either: Journal[Added, Count]) -> None:
    blob = os.urandom(1000)
    for part in parts_of(blob, 300):
        either.append([], [part])
    assert read(either, b"key", 1000) == blob
    assert either.read_blob(BlobPosition(b"key", 350)) == blob[350:600]
    either.append([], parts_of(blob[:500], 500))
    assert read(either, b"key", 500) == blob[:500]


def test_unused_blobs_are_dropped(either: Journal[Added, Count]) -> None:
    either.append([], [*parts_of(b"whole", 2, b"a"), *parts_of(b"beginning of another", 2, b"b")])
    either.drop_blobs(except_for={b"a"})
    assert read(either, b"a", 5) == b"whole"
    with pytest.raises((DataLossError, KeyError)):
        either.read_blob(BlobPosition(b"b", 0))


def test_damaged_blob_is_reported(tmp_path: Path) -> None:
    with contextlib.closing(SqliteJournal(tmp_path, FORMAT)) as journal:
        journal.append([], parts_of(b"plan", 2))
    with contextlib.closing(sqlite3.connect(journal.path, isolation_level=None)) as database:
        database.execute("UPDATE blobs SET body = X'00' WHERE start = 2")
    with contextlib.closing(SqliteJournal(tmp_path, FORMAT)) as journal:
        assert journal.read_blob(BlobPosition(b"key", 0)) == b"pl"
        with pytest.raises(DataLossError, match="is damaged at byte 2"):
            journal.read_blob(BlobPosition(b"key", 2))
        with pytest.raises(DataLossError, match="is missing at byte 0"):
            journal.read_blob(BlobPosition(b"another", 0))


# --- ownership and file format ----------------------------------------------------------------


def test_directory_has_a_single_owner(journal: SqliteJournal[Added, Count], tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="in use by another counter"):
        SqliteJournal(tmp_path, FORMAT)
    code = """
import pathlib, sys
from headrace.serving.sqlite_journal import SqliteJournal
from tests.serving.counting import FORMAT
SqliteJournal(pathlib.Path(sys.argv[1]), FORMAT)
"""
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "in use by another counter" in other.stderr
    journal.close()
    SqliteJournal(tmp_path, FORMAT).close()


def test_file_that_is_not_a_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database, but long enough to be one" * 100)
    with pytest.raises(DataLossError, match=FILE):
        SqliteJournal(tmp_path, FORMAT)


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ("", "is a file, but the counter's journal requires"),
        ("deeper", "cannot create the directory .*Not a"),
    ],
)
def test_directory_that_cannot_be_created_is_named(tmp_path: Path, inside: str, said: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FailedPreconditionError, match=said) as caught:
        SqliteJournal(tmp_path / "file" / inside, FORMAT)
    assert str(tmp_path / "file" / inside) in str(caught.value)


def test_journal_of_another_format_is_refused(
    journal: SqliteJournal[Added, Count], tmp_path: Path
) -> None:
    journal.close()
    database = sqlite3.connect(journal.path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(
        FailedPreconditionError, match=r"has format 99, .* reads format 7: .* begin"
    ):
        SqliteJournal(tmp_path, FORMAT)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE events SET body = X'00' WHERE number = 3", "record 3"),
        ("UPDATE events SET checksum = 1 WHERE number = 2", "record 2"),
        ("DELETE FROM events WHERE number = 4", "record 4 is missing"),
        (
            "DELETE FROM events WHERE number > 20",
            "up to 25 were written, but those after 20 are missing",
        ),
        ("DELETE FROM events", "up to 25 were written, but those after 0 are missing"),
        ("DROP TABLE events", "no such table"),
    ],
)
def test_damage_is_reported_with_its_location(
    journal: SqliteJournal[Added, Count], tmp_path: Path, damage: str, said: str
) -> None:
    for event in EVENTS:
        journal.append([event])
    journal.close()
    database = sqlite3.connect(journal.path, isolation_level=None)
    database.execute(damage)
    database.close()
    for _ in range(2):
        with pytest.raises(DataLossError, match=said) as caught:
            read_again(tmp_path)
        assert str(journal.path) in str(caught.value)
        assert "or begin to count again" in str(caught.value)


def test_failed_write_changes_nothing(journal: SqliteJournal[Added, Count]) -> None:
    journal.append(EVENTS[:3])
    journal._database.execute("PRAGMA query_only = ON")
    with pytest.raises(UnavailableError, match="cannot write journal"):
        journal.append(EVENTS[3:])
    journal._database.execute("PRAGMA query_only = OFF")
    journal.append(EVENTS[3:])
    journal.close()
    assert read_again(journal.path.parent) == KEPT


def test_full_disk_fails_writes_and_loses_nothing(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path, FORMAT)
    journal.replay()
    journal.append(EVENTS[:3])
    (pages,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UnavailableError, match="full"):
        journal.append(EVENTS[3:], [BlobPart(b"key", 0, bytes(100_000))])
    journal.append(EVENTS[3:])
    journal.close()
    assert read_again(tmp_path) == KEPT


NO_ROOM = """
import resource, sys
from pathlib import Path
from tests.serving.test_journal import FORMAT
from headrace.serving.sqlite_journal import SqliteJournal

resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
SqliteJournal(Path(sys.argv[1]), FORMAT)
"""


def test_full_disk_at_creation_is_not_reported_as_damage(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "UnavailableError" in made.stderr
    assert "free disk space" in made.stderr
    assert not (tmp_path / f"{LOG}-damaged").exists()


# --- high-water mark --------------------------------------------------------------------------


def begun(directory: Path) -> None:
    """Write 25 records to a directory, all of them in the log, as after a kill."""
    source = directory / "source"
    journal = SqliteJournal(source, FORMAT)
    journal.replay()
    for event in EVENTS:
        journal.append([event])
    for name in (FILE, LOG, MARK):
        shutil.copy(source / name, directory / name)
    journal.close()


def test_truncated_log_is_refused_until_the_mark_is_deleted(tmp_path: Path) -> None:
    begun(tmp_path)
    log = tmp_path / LOG
    os.truncate(log, log.stat().st_size * 2 // 3)
    for _ in range(2):
        with pytest.raises(DataLossError, match="records up to 25 were written") as caught:
            read_again(tmp_path)
    assert f"delete {tmp_path / MARK}" in str(caught.value)
    (tmp_path / MARK).unlink()
    assert 0 < read_again(tmp_path).added < 25


def flip_a_bit(log: Path) -> None:
    found = bytearray(log.read_bytes())
    found[len(found) // 2] ^= 1
    log.write_bytes(found)


def cut(log: Path) -> None:
    os.truncate(log, log.stat().st_size * 2 // 3)


def scribble_at_its_head(log: Path) -> None:
    found = bytearray(log.read_bytes())
    found[:64] = b"x" * 64
    log.write_bytes(found)


@pytest.mark.parametrize("damage", [flip_a_bit, cut, scribble_at_its_head])
def test_damaged_log_is_saved_unchanged(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    begun(tmp_path)
    damage(tmp_path / LOG)
    found = (tmp_path / LOG).read_bytes()
    for _ in range(2):
        with pytest.raises(DataLossError, match="records up to 25 were written") as caught:
            read_again(tmp_path)
        assert f"was saved in {tmp_path / LOG}-damaged" in str(caught.value)
        assert (tmp_path / f"{LOG}-damaged").read_bytes() == found


def test_missing_log_is_not_reported_as_saved(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / LOG).unlink()
    with pytest.raises(DataLossError) as caught:
        read_again(tmp_path)
    assert "was saved in" not in str(caught.value)
    assert not (tmp_path / f"{LOG}-damaged").exists()


def test_logs_of_two_failures_are_saved_separately(tmp_path: Path) -> None:
    for name in (f"{LOG}-damaged", f"{LOG}-damaged-2"):
        begun(tmp_path)
        os.truncate(tmp_path / LOG, 1000)
        with pytest.raises(DataLossError, match=f"was saved in {tmp_path / name}$"):
            read_again(tmp_path)
        for file in (FILE, MARK):
            (tmp_path / file).unlink()
        shutil.rmtree(tmp_path / "source")


def test_log_next_to_a_file_that_is_not_a_journal_is_saved(tmp_path: Path) -> None:
    begun(tmp_path)
    os.truncate(tmp_path / LOG, 100)
    found = (tmp_path / LOG).read_bytes()
    (tmp_path / FILE).write_bytes(b"this is no database, but long enough to be one" * 100)
    with pytest.raises(DataLossError, match="was saved in"):
        SqliteJournal(tmp_path, FORMAT)
    assert (tmp_path / f"{LOG}-damaged").read_bytes() == found


@pytest.mark.parametrize("taken", [[LOG], [FILE], [FILE, LOG]])
def test_missing_files_are_detected(tmp_path: Path, taken: list[str]) -> None:
    begun(tmp_path)
    for name in taken:
        (tmp_path / name).unlink()
    with pytest.raises(DataLossError, match="records up to 25 were written, but those after 0 are"):
        read_again(tmp_path)


def test_copy_without_a_mark_is_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path)
    (tmp_path / MARK).unlink()
    assert read_again(tmp_path) == KEPT
    (record,) = caplog.records
    assert "cannot detect whether records after 25 are missing" in record.getMessage()
    caplog.clear()
    assert read_again(tmp_path) == KEPT
    assert caplog.records == []


def test_records_beyond_the_mark_are_valid(tmp_path: Path) -> None:
    begun(tmp_path)
    mark = (tmp_path / "source" / MARK).read_bytes()
    journal = SqliteJournal(tmp_path, FORMAT)
    journal.replay()
    journal.append([Added(1)])
    journal.close()
    (tmp_path / MARK).write_bytes(mark)
    assert read_again(tmp_path) == Count(total=326, added=26)


def test_unwritable_mark_does_not_fail_appends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / MARK).mkdir()
    journal = SqliteJournal(tmp_path, FORMAT)
    journal.replay()
    journal.append(EVENTS)
    journal.close()
    assert read_again(tmp_path) == KEPT
    assert "cannot use the high-water mark" in caplog.text


WRITER = """
import pathlib, sys
from headrace.serving.blobs import BlobPart
from headrace.serving.sqlite_journal import SqliteJournal
from tests.serving.counting import FORMAT, Added, apply
journal = SqliteJournal(pathlib.Path(sys.argv[1]), FORMAT, compact_after=40)
state = journal.replay()
while True:
    number = state.added + 1
    # Now and then something large, so that the log is moved into the file and begun again.
    blobs = [BlobPart(b"%d" % (number % 9), 0, bytes(400_000))] if number % 13 == 0 else []
    journal.append([Added(number)], blobs)
    apply(state, Added(number))
    journal.compact(state)
    print(number, flush=True)
"""


def kill_a_writer(directory: Path, records: int) -> int:
    """Write `records` records in a process, and kill it; return the last one that it reported."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(records)]
    writer.send_signal(signal.SIGKILL)
    lines += [line for line in writer.stdout.read().splitlines(keepends=True) if line[-1] == "\n"]
    writer.stdout.close()
    writer.wait()
    return int(lines[-1])


def take(log: Path, chance: random.Random) -> None:
    log.unlink()


def cut(log: Path, chance: random.Random) -> None:
    os.truncate(log, chance.randrange(log.stat().st_size))


def overwrite(log: Path, chance: random.Random) -> None:
    whole, length = log.read_bytes(), chance.choice([1, 64, 4096])
    start = chance.randrange(len(whole))
    log.write_bytes(whole[:start] + chance.randbytes(length) + whole[start + length :])


def leave_out(log: Path, chance: random.Random) -> None:
    whole = log.read_bytes()
    start = chance.randrange(len(whole))
    log.write_bytes(whole[:start] + whole[start + chance.choice([1, 512, 4120]) :])


def tear(log: Path, chance: random.Random) -> None:
    with log.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 5000)))


DAMAGES: list[Callable[[Path, random.Random], None]] = [take, cut, cut, overwrite, leave_out, tear]


@pytest.mark.heavy
def test_damage_to_the_log_of_a_killed_process_is_never_silent(
    tmp_path: Path,
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    work_dir, refused, accepted = tmp_path / "work", 0, 0
    for run in range(3):
        said = kill_a_writer(work_dir, chance.randrange(1, 200))
        for number, damage in enumerate(DAMAGES * 3):
            copy = tmp_path / f"copy {run} {number}"
            shutil.copytree(work_dir, copy)
            damage(copy / LOG, chance)
            try:
                state = read_again(copy)
            except (DataLossError, FailedPreconditionError):
                assert damage is not tear, f"seed {seed}: nothing that was kept is damaged"
                refused += 1
            else:
                # One record more than reported may have been written, but never one less.
                assert state.added - said in (0, 1), f"seed {seed}, {damage.__name__}"
                assert state.total == state.added * (state.added + 1) // 2
                accepted += 1
            shutil.rmtree(copy)
        assert read_again(work_dir).added - said in (0, 1), f"seed {seed}"
    assert refused >= 3, f"seed {seed}"
    assert accepted >= 9, f"seed {seed}"


# --- forks -----------------------------------------------------------------------------------

FORKED = """
import os, pathlib, sys
from headrace.serving.sqlite_journal import SqliteJournal
from tests.serving.counting import FORMAT, Added
journal = SqliteJournal(pathlib.Path(sys.argv[1]), FORMAT)
journal.replay()
journal.append([Added(1)])
child = os.fork()
if child == 0:
    if sys.argv[2] == "close":
        journal.close()
    elif sys.argv[2] == "drop":
        del journal
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
journal.append([Added(2)])
print(sorted(os.listdir(sys.argv[1])), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("end", ["close", "drop", "exit"])
def test_exit_of_a_forked_child_leaves_the_journal_intact(tmp_path: Path, end: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path), end],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert LOG in ended.stdout
    assert read_again(tmp_path) == Count(total=3, added=2)
