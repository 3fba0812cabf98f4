"""Tests of consistent copies of a journal while it is written."""

from __future__ import annotations

import sqlite3

import pytest

from headrace.errors import DataLossError, FailedPreconditionError, NotFoundError
from headrace.serving import journal_copy
from headrace.serving.journal_copy import JournalCopy
from headrace.serving.sqlite_journal import SqliteJournal

from .counting import FORMAT, Added, Count


@pytest.fixture
def journal(tmp_path):
    with_few_facts = SqliteJournal(tmp_path, FORMAT, compact_after=10)
    yield with_few_facts
    with_few_facts.close()


def read(directory):
    with JournalCopy(directory, FORMAT) as copy:
        number, state = copy.first_state()
        facts = [fact for _, facts in copy.records() for fact in facts]
        for fact in facts:
            FORMAT.apply(state, fact)
        return number, state, facts


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_journal_can_be_copied_while_its_owner_writes(journal, tmp_path):
    for number in range(5):
        journal.append([Added(number)])
        assert read(tmp_path)[1].total == sum(range(number + 1))


def test_reading_changes_nothing(journal, tmp_path):
    journal.append([Added(1)])
    before = files(tmp_path)
    read(tmp_path)
    assert files(tmp_path) == before
    journal.append([Added(2)])
    assert read(tmp_path)[1].total == 3


def test_copy_starts_at_the_snapshot(journal, tmp_path):
    for number in range(12):
        journal.append([Added(number)])
    journal.compact(Count(total=sum(range(12)), added=12))
    journal.append([Added(100)])
    number, state, facts = read(tmp_path)
    assert (number, facts) == (12, [Added(100)])
    assert state == Count(total=sum(range(12)) + 100, added=13)


def test_closed_journal_can_be_copied(journal, tmp_path):
    journal.append([Added(7)])
    journal.close()
    assert read(tmp_path)[1].total == 7


def test_inconsistent_copy_is_repeated(journal, tmp_path, monkeypatch):
    journal.append([Added(1)])
    copyfile, copied = journal_copy.shutil.copyfile, []

    def copy(source, target):
        copyfile(source, target)
        copied.append(source)
        if len(copied) == 1:
            journal.append([Added(2)])
            journal._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    monkeypatch.setattr(journal_copy.shutil, "copyfile", copy)
    assert read(tmp_path)[1].total == 3
    assert len(copied) > 2


def test_missing_journal_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(NotFoundError, match=FORMAT.file_name):
        JournalCopy(tmp_path, FORMAT)
    assert not list(tmp_path.iterdir())


def test_damaged_record_and_other_format_are_errors(journal, tmp_path):
    journal.append([Added(1)])
    journal.close()
    database = sqlite3.connect(tmp_path / FORMAT.file_name, isolation_level=None)
    database.execute("UPDATE events SET checksum = checksum + 1")
    with pytest.raises(DataLossError, match="record 1"):
        read(tmp_path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(FailedPreconditionError, match="format 99"):
        read(tmp_path)
    (tmp_path / FORMAT.file_name).write_bytes(b"no database" * 1000)
    with pytest.raises(DataLossError, match="damaged"):
        read(tmp_path)
