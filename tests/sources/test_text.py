from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.element.spec import ArraySpec
from headrace.errors import NotFoundError
from headrace.sources.files import TextLineSource, cut_lines
from headrace.testing.conformance import check_source, read_all


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    contents = [b"one\ntwo\r\n\nlast without end", b"", b"\n", b"\r\nx\ry\r\n", b"long " * 5000]
    names = []
    for index, content in enumerate(contents):
        path = tmp_path / f"{index}.txt"
        path.write_bytes(content)
        names.append(str(path))
    return names


LINES = [b"one", b"two", b"", b"last without end", b"", b"", b"x\ry", b"long " * 5000]


@pytest.mark.parametrize("buffer_size", [None, 1, 3, 100])
def test_lines_come_without_their_ends(files: list[str], buffer_size: int | None) -> None:
    source = TextLineSource(files, buffer_size=buffer_size)  # type: ignore[arg-type]

    assert source.element_spec == ArraySpec((), bytes)
    assert source.size == 5
    check_source(source, LINES)


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"a\nb\nc"))

    check_source(TextLineSource(path, "GZIP", 2), [b"a", b"b", b"c"])  # type: ignore[arg-type]


def test_a_missing_file_fails_when_its_turn_comes_and_the_next_one_follows(
    files: list[str],
) -> None:
    source = TextLineSource((files[0], files[0] + ".gone", files[3]))
    reader = source.open(0, 3)

    chunk = reader.read(100)
    assert chunk is not None
    assert chunk.size == 3
    chunk = reader.read(100)
    assert chunk is not None
    assert chunk.rows() == [b"last without end"]
    with pytest.raises(NotFoundError, match=r"0\.txt\.gone"):
        reader.read(100)
    position = reader.get_position()

    assert read_all(reader) == [b"", b"x\ry"]
    assert read_all(source.open(0, 3, position)) == [b"", b"x\ry"]


@given(
    content=st.binary(max_size=60).map(lambda b: b.translate(bytes(b"\n\r\nab" * 52)[:256])),
    cut=st.integers(1, 20),
)
def test_blocks_do_not_matter(content: bytes, cut: int) -> None:
    whole = cut_lines(content, True, "x", 0)
    assert whole.used == len(content)
    found: list[bytes] = []
    rest = b""
    for start in range(0, len(content), cut):
        rest += content[start : start + cut]
        part = cut_lines(rest, False, "x", 0)
        found += part.records
        rest = rest[part.used :]
    found += cut_lines(rest, True, "x", 0).records
    assert found == whole.records


@pytest.mark.parametrize("buffer_size", [0, -1])
def test_buffers_hold_something(buffer_size: int) -> None:
    with pytest.raises(ValueError, match="`buffer_size` must be at least 1"):
        TextLineSource(("x",), None, buffer_size)
    with pytest.raises(TypeError, match="`buffer_size` must be an integer"):
        TextLineSource(("x",), None, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [[0, 0], [5, 0, 0], [0, -1, 0], "x", 3, [0, 0.5, 0]])
def test_positions_that_cannot_be_are_refused(position: object) -> None:
    with pytest.raises(ValueError, match="position must be"):
        TextLineSource(("x", "y")).open(0, 2, position)
