"""Saved datasets as sources: by rows, by chunk files, and while they are being saved."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from headrace.data.saving import load_source
from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec
from headrace.errors import DataLossError
from headrace.plan.elements import FromSource
from headrace.plan.fingerprint import fingerprint
from headrace.plan.identity import identity_digest
from headrace.plan.source import UNKNOWN, Source
from headrace.saved.directory import SavedDirectory
from headrace.sources.saved_chunks import SavedChunksSource, SavedRowsSource, chunk_files_source
from headrace.testing.conformance import check_source, read_all
from tests.saved.streams import SAVE, saved


def fixed(n: int) -> Any:
    return {"x": np.full((2, 3), n, ">f4"), "y": np.int64(n), "name": f"row {n}", "none": None}


def varying(n: int) -> Any:
    return (np.arange(n % 4), b"b" * n, np.full((n % 2, 2), n))


def interleaved(*streams: list[Any], each: int) -> list[Any]:
    """Return the elements of streams in the order of a finished directory."""
    files = [
        (start // each, number, rows[start : start + each])
        for number, rows in enumerate(streams)
        for start in range(0, len(rows), each)
    ]
    return [row for _, _, rows in sorted(files, key=lambda file: file[:2]) for row in rows]


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://saved-{uuid.uuid4().hex}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.mark.parametrize(("make", "kind"), [(fixed, SavedRowsSource), (varying, SavedChunksSource)])
def test_a_saved_dataset_keeps_the_contract_of_sources(
    tmp_path: Path, make: Callable[[int], Any], kind: type
) -> None:
    streams = [[make(n) for n in range(start, stop)] for start, stop in [(0, 9), (9, 9), (9, 22)]]
    saved(tmp_path, *streams, each=4)
    source = load_source(tmp_path, wait=False)

    assert type(source) is kind
    assert FromSource(source=source).cardinality() == 22
    check_source(source, interleaved(*streams, each=4))


def test_for_remote_files_an_index_is_a_file(memory: str) -> None:
    rows = [fixed(n) for n in range(10)]
    saved(memory, rows, each=4)
    source = load_source(memory, wait=False)

    assert type(source) is SavedChunksSource
    assert (source.size, source.element_count) == (3, 10)
    check_source(source, rows)


def test_an_unfinished_dataset_keeps_the_contract(tmp_path: Path) -> None:
    streams = [[varying(n) for n in range(7)], [varying(n) for n in range(7, 10)]]
    saved(tmp_path, *streams, each=3)
    source = load_source(tmp_path, wait=True)

    assert FromSource(source=source).cardinality() == UNKNOWN
    check_source(source, interleaved(*streams, each=3))


@pytest.mark.parametrize("wait", [False, True])
def test_an_empty_dataset_is_a_source(tmp_path: Path, wait: bool) -> None:
    saved(tmp_path, [])

    check_source(load_source(tmp_path, wait), [])


def test_the_spec_describes_the_files(tmp_path: Path) -> None:
    saved(tmp_path / "rows", [fixed(n) for n in range(3)])
    saved(tmp_path / "files", [varying(n) for n in range(3)])

    assert load_source(tmp_path / "rows", wait=False).element_spec == {
        "x": ArraySpec((2, 3), ">f4"),
        "y": ArraySpec((), np.int64),
        "name": ArraySpec((), str),
        "none": None,
    }
    assert load_source(tmp_path / "files", wait=False).element_spec == (
        ArraySpec((None,), np.int64),
        ArraySpec((), bytes),
        ArraySpec((None, 2), np.int64),
    )


def test_rows_of_several_shapes_are_read_by_file(tmp_path: Path) -> None:
    rows = [np.zeros(4), np.zeros(4), np.zeros(2)]
    saved(tmp_path, rows, each=2)

    check_source(load_source(tmp_path, wait=False), rows)


def test_a_run_of_rows_spans_batches_and_files(tmp_path: Path) -> None:
    rows = [np.int32(n) for n in range(1000)]
    saved(tmp_path, rows, each=90)
    source = load_source(tmp_path, wait=False)
    assert isinstance(source, SavedRowsSource)

    assert source.gather(np.arange(85, 700).reshape(5, 123)).ravel().tolist() == [*range(85, 700)]
    backwards = np.arange(999, -1, -1)
    assert source.gather(backwards).tolist() == backwards.tolist()


def test_one_stream_is_a_separate_source(tmp_path: Path) -> None:
    streams = [[fixed(n) for n in range(5)], [fixed(n) for n in range(5, 8)]]
    chunks = saved(tmp_path, *streams, each=2).read_status().chunks or ()
    own = tuple(chunk for chunk in chunks if chunk.stream == 1)
    source = chunk_files_source(str(tmp_path), SAVE, 1, own, None)

    check_source(source, streams[1])
    assert identity_digest(FromSource(source=source)) != identity_digest(
        FromSource(source=chunk_files_source(str(tmp_path), SAVE, 0, own, None))
    )


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("make", [fixed, varying])
def test_a_directory_that_was_moved_is_the_same_dataset(
    tmp_path: Path, make: Callable[[int], Any], wait: bool
) -> None:
    saved(tmp_path / "here", [make(n) for n in range(3)])
    here = identity_digest(FromSource(source=load_source(tmp_path / "here", wait)))
    (tmp_path / "here").rename(tmp_path / "there")
    there = identity_digest(FromSource(source=load_source(tmp_path / "there", wait)))

    assert here == there


def test_open_files_are_not_part_of_a_source(tmp_path: Path) -> None:
    saved(tmp_path, [fixed(n) for n in range(3)])
    source = load_source(tmp_path, wait=False)
    before = fingerprint(FromSource(source=source)), len(pickle.dumps(source))
    assert isinstance(source, SavedRowsSource)
    source.gather(np.arange(3))

    assert (fingerprint(FromSource(source=source)), len(pickle.dumps(source))) == before


# --- damage ---------------------------------------------------------------------------------------


def damage(directory: SavedDirectory, number: int) -> str:
    """Change a byte in the middle of a chunk file; return its path."""
    chunks = directory.read_status().chunks or ()
    path = Path(directory.folder.path(chunks[number].public_name(SAVE)))
    data = bytearray(path.read_bytes())
    data[data.index(b"HERE")] ^= 1
    path.write_bytes(data)
    return str(path)


def marked(n: int) -> Any:
    return np.frombuffer(b"HERE", np.uint8).copy()


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("make", [marked, lambda n: (b"HERE", np.zeros(n))], ids=["rows", "files"])
def test_a_damaged_file_is_named_after_the_elements_before_it(
    tmp_path: Path, make: Callable[[int], Any], wait: bool
) -> None:
    directory = saved(tmp_path, [make(n) for n in range(6)], each=2)
    path = damage(directory, 1)
    source = load_source(tmp_path, wait)
    reader = source.open(0, source.size)

    assert len((reader.read(2) or Chunk.of_rows([])).rows()) == 2
    with pytest.raises(DataLossError, match=f"{path}' is damaged: elements 0 to 1 do not match"):
        reader.read(2)
    reader.close()


@pytest.mark.parametrize("wait", [False, True])
def test_after_a_damaged_file_the_next_one_is_read(tmp_path: Path, wait: bool) -> None:
    rows = [(b"HERE", np.zeros(n)) for n in range(6)]
    damage(saved(tmp_path, rows, each=2), 1)
    source = load_source(tmp_path, wait)
    reader = source.open(0, source.size)
    assert reader.read(2) is not None
    with pytest.raises(DataLossError):
        reader.read(2)

    assert len(read_all(reader)) == 2


def test_a_missing_file_is_reported_in_its_turn(tmp_path: Path) -> None:
    directory = saved(tmp_path, [fixed(n) for n in range(6)], each=2)
    last = directory.folder.path((directory.read_status().chunks or ())[2].public_name(SAVE))
    Path(last).unlink()
    source = load_source(tmp_path, wait=False)
    reader = source.open(0, 6)

    assert reader.read(4) is not None
    with pytest.raises(DataLossError, match=f"{last}' is missing"):
        reader.read(1)
    reader.close()


@pytest.mark.parametrize("position", [[3, 0], [-1, 0], [0], "0", [0, 99], [2, 1], [1.0, 0]])
def test_invalid_positions_are_rejected(tmp_path: Path, position: Any) -> None:
    saved(tmp_path, [varying(n) for n in range(6)], each=3)
    source = load_source(tmp_path, wait=False)

    with pytest.raises(
        ValueError,
        match=r"position (must be \[file, elements\] with an|.* is after the end of file)",
    ):
        source.open(0, 2, position)


@pytest.mark.parametrize("position", [[-2, 0], [0], "0", [0, 0, 1], [1.0, 0]])
def test_positions_in_an_unfinished_dataset_are_checked(tmp_path: Path, position: Any) -> None:
    saved(tmp_path, [varying(n) for n in range(6)])
    source: Source = load_source(tmp_path, wait=True)

    with pytest.raises(ValueError, match=r"position must be \[file, elements\], got"):
        source.open(0, 1, position)


def test_positions_are_json(tmp_path: Path) -> None:
    saved(tmp_path, [varying(n) for n in range(6)], each=2)
    reader = load_source(tmp_path, wait=True).open(0, 1)
    reader.read(1)

    assert json.loads(json.dumps(reader.get_position())) == [0, 1]
    reader.read(1)
    assert reader.get_position() == [1, 0]
    reader.close()
