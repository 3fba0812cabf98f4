"""Tests of the directory of a saved dataset: starting a save, valid and ignored files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.errors import (
    AbortedError,
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
)
from headrace.saved.directory import DirectoryStatus, SavedDirectory
from headrace.saved.format import (
    DONE,
    ERROR,
    METADATA,
    ChunkRecord,
    SaveHeader,
    assign_order,
    encode_done,
)
from tests.saved.streams import SAVE, begun, publish, read, saved, write_stream

OTHER = "f" * 16


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_status_shows_the_progress_of_a_save(tmp_path: Path) -> None:
    path = tmp_path / "d"
    assert SavedDirectory(path).read_status() == DirectoryStatus(None)

    directory = begun(path)
    first = SaveHeader(SAVE, "plan", None)
    assert directory.read_status() == DirectoryStatus(first)

    records = write_stream(directory, 0, [b"a", b"b", b"c"], each=2)
    assert directory.list_published(SAVE) == []
    publish(directory, records[:1])
    assert directory.list_published(SAVE) == [ChunkRecord(0, 0, order=0)]
    records = publish(directory, records)
    directory.finish(SAVE, records)

    assert directory.read_status() == DirectoryStatus(first, tuple(records))
    assert read(directory, records) == [b"a", b"b", b"c"]


def test_files_are_ordered_by_publication(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    a, b, c = write_stream(directory, 0, [b"a", b"b", b"c"], each=1)
    x, y = write_stream(directory, 7, [b"x", b"y"], each=1)
    records = publish(directory, [x, a, b, y, c])
    assert read(directory, directory.list_published(SAVE)) == [b"x", b"a", b"b", b"y", b"c"]

    directory.finish(SAVE, records)
    assert read(directory, directory.read_status().chunks or ()) == [b"x", b"a", b"b", b"y", b"c"]


def test_file_is_readable_once_its_predecessors_are_published(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    records = assign_order(write_stream(directory, 0, [b"a", b"b", b"c"], each=1))
    directory.publish(SAVE, [records[0], records[2]])
    assert read(directory, directory.list_published(SAVE)) == [b"a"]

    directory.publish(SAVE, records)
    assert read(directory, directory.list_published(SAVE)) == [b"a", b"b", b"c"]


def test_stray_files_are_ignored(tmp_path: Path) -> None:
    directory = saved(tmp_path, [b"a"])
    for name in (
        "00000001-00000-000001-0123456789abcdef.arrow",  # of this save, but not in DONE
        "00000000-00000-000000-ffffffffffffffff.arrow",
        "00000-000000-0123456789abcdef.arrow.partial",
        "stream_-1",
        "notes.txt",
    ):
        (tmp_path / name).write_bytes(b"?")
    (tmp_path / "folder").mkdir()
    chunks = directory.read_status().chunks

    assert chunks is not None
    assert read(directory, chunks) == [b"a"]


def test_finished_save_is_not_overwritten(tmp_path: Path) -> None:
    directory = saved(tmp_path, [b"a", b"b"])
    before = names(tmp_path)

    with pytest.raises(AlreadyExistsError, match=r"already contains a saved dataset of 2 elements"):
        directory.begin(SaveHeader(OTHER, "plan", None))
    assert names(tmp_path) == before


def test_unfinished_save_can_be_restarted_by_the_same_plan(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    records = write_stream(directory, 0, [b"old", b"older"], each=1)
    publish(directory, records[:1])
    (tmp_path / "notes.txt").touch()

    directory.begin(SaveHeader(OTHER, "plan", None))

    assert names(tmp_path) == [METADATA, "notes.txt"]
    assert directory.read_status() == DirectoryStatus(SaveHeader(OTHER, "plan", None))


def test_unfinished_save_of_another_plan_is_not_overwritten(tmp_path: Path) -> None:
    directory = begun(tmp_path)

    with pytest.raises(AlreadyExistsError, match="an unfinished save of another pipeline; choose"):
        directory.begin(SaveHeader(OTHER, "another plan", None))


def test_save_is_aborted_after_another_one_has_started(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    records = assign_order(write_stream(directory, 0, [b"a"]))
    directory.begin(SaveHeader(OTHER, "plan", None))

    for act in (
        lambda: directory.publish(SAVE, records),
        lambda: directory.finish(SAVE, records),
        lambda: directory.fail(SAVE, "why"),
    ):
        with pytest.raises(AbortedError, match="was aborted: another process started a save there"):
            act()
    assert directory.read_status() == DirectoryStatus(SaveHeader(OTHER, "plan", None))


def test_starting_a_save_twice_continues_it(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    publish(directory, write_stream(directory, 0, [b"a"]))

    begun(tmp_path)

    assert directory.list_published(SAVE) == [ChunkRecord(0, 0, order=0)]


def test_failed_save_can_be_replaced_by_any_plan(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    publish(directory, write_stream(directory, 0, [b"a"]))
    directory.fail(SAVE, "KeyError: 3")
    assert names(tmp_path) == [ERROR, METADATA]
    assert directory.read_status().error == "KeyError: 3"

    directory.begin(SaveHeader(OTHER, "another plan", None))

    assert names(tmp_path) == [METADATA]
    assert directory.read_status() == DirectoryStatus(SaveHeader(OTHER, "another plan", None))


def test_records_of_another_save_are_ignored(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    directory.folder.write(DONE, encode_done(OTHER, []))

    status = directory.read_status()
    assert status == DirectoryStatus(SaveHeader(SAVE, "plan", None), other_done=OTHER)


@pytest.mark.parametrize("name", [METADATA, DONE])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"save": 3}', b"\xff"])
def test_damaged_record_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    directory = saved(tmp_path, [b"a"])
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DataLossError, match=name):
        directory.read_status()


def test_inconsistent_completion_record_is_damaged(tmp_path: Path) -> None:
    directory = saved(tmp_path, [b"a", b"b"], each=1)
    value = json.loads((tmp_path / DONE).read_text())
    for changes in (
        {"elements": 3},
        {"chunks": value["chunks"][1:]},
        {"forms": []},
        {"chunks": [[0, 0, "2", 3, 0]]},
    ):
        (tmp_path / DONE).write_text(json.dumps({**value, **changes}))
        with pytest.raises(DataLossError, match=r"DONE' is damaged: .*save the dataset again"):
            directory.read_status()


def test_later_version_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path, [b"a"])
    value = json.loads((tmp_path / METADATA).read_text())
    (tmp_path / METADATA).write_text(json.dumps({**value, "version": 2}))

    with pytest.raises(FailedPreconditionError, match=r"version 2 of the format .* reads 1"):
        directory.read_status()


def test_save_with_a_missing_file_is_not_finished() -> None:
    with pytest.raises(ValueError, match="chunk file 2 of stream 1 is out of sequence"):
        encode_done(SAVE, assign_order([ChunkRecord(1, 0, 1), ChunkRecord(1, 2, 1)]))
    with pytest.raises(ValueError, match="the chunk file of order 1 is missing"):
        encode_done(SAVE, [ChunkRecord(1, 0, 1, order=0), ChunkRecord(1, 1, 1, order=2)])
