"""Files of frames: every chunk is found again by number, and no damage passes for data."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.element.frame_file import FrameReader, FrameWriter
from headrace.errors import DataLossError

PLACES = np.array([7, 8, 9], np.uint64)


def chunks() -> list[Chunk]:
    return [
        Chunk.of_rows([b"a", b"", b"long enough"]),
        Chunk.of_columns(np.arange(4), 4),
        Chunk.of_columns(np.array([4, 5, 6]), 3, None, PLACES),
        Chunk.of_rows([{"x": np.zeros(2)}]),
    ]


def written(path: Path) -> Path:
    with path.open("wb") as file:
        file.write(b"whose it is")
        writer = FrameWriter(file)
        for chunk in chunks():
            writer.append(chunk)
    return path


def whole_frames() -> list[bytes]:
    found = []
    for chunk in chunks():
        file = io.BytesIO()
        FrameWriter(file).append(chunk)
        found.append(file.getvalue())
    return found


def opened(file) -> FrameReader:
    file.seek(len(b"whose it is"))
    return FrameReader(file, "the file")


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_elements_are_found_by_number(tmp_path, limit):
    rows = [repr(row) for chunk in chunks() for row in chunk.rows()]
    with written(tmp_path / "frames").open("rb") as file:
        reader = opened(file)
        for start in (0, 3, 10, 5, 2):
            chunk = reader.read(start, limit)
            assert [repr(row) for row in chunk.rows()] == rows[start : start + chunk.size]
            assert 1 <= chunk.size <= limit
        assert reader.read(len(rows), limit) is None


def test_places_come_back_with_their_elements(tmp_path):
    with written(tmp_path / "frames").open("rb") as file:
        reader = opened(file)
        assert reader.read(8, 9).places.tolist() == [8, 9]
        assert reader.read(0, 9).places is None


def test_what_is_read_may_be_written_into(tmp_path):
    with written(tmp_path / "frames").open("rb") as file:
        reader = opened(file)
        reader.read(3, 2).columns()[:] = -1
        assert reader.read(3, 9).columns().tolist()[2:] == [2, 3]


def test_a_file_that_was_cut_anywhere_is_refused_by_its_name(tmp_path):
    whole = written(tmp_path / "frames").read_bytes()
    path = tmp_path / "cut"
    frames = [len(b"whose it is") + sum(map(len, whole_frames()[:n])) for n in range(4)]
    for size in range(len(b"whose it is"), len(whole)):
        path.write_bytes(whole[:size])
        with path.open("rb") as file:
            if size in frames:  # nothing is missing but what comes after
                assert opened(file).read(99, 1) is None
                continue
            with pytest.raises(
                DataLossError, match=r"^the file (ends inside a frame|is damaged); remove it"
            ):
                opened(file)
