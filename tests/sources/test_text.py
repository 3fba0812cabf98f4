"""Text files, and datasets of files: names in any form, patterns, open files refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.errors import NotFoundError
from headrace.plan.source import IndexedSource
from headrace.sources.text_files import FileNamesSource, TextLineSource, parse_lines
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
def test_lines_have_no_line_endings(files: list[str], buffer_size: int | None) -> None:
    source = TextLineSource(files, buffer_size=buffer_size)  # type: ignore[arg-type]

    assert source.element_spec == ArraySpec((), bytes)
    assert source.size == 5
    check_source(source, LINES)


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"a\nb\nc"))

    check_source(TextLineSource(path, "GZIP", 2), [b"a", b"b", b"c"])  # type: ignore[arg-type]


def test_a_missing_file_fails_in_its_turn_and_the_next_file_follows(
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
def test_the_block_size_does_not_matter(content: bytes, cut: int) -> None:
    whole = parse_lines(content, True, "x", 0)
    assert whole.consumed_bytes == len(content)
    found: list[bytes] = []
    rest = b""
    for start in range(0, len(content), cut):
        rest += content[start : start + cut]
        part = parse_lines(rest, False, "x", 0)
        found += part.records
        rest = rest[part.consumed_bytes :]
    found += parse_lines(rest, True, "x", 0).records
    assert found == whole.records


@pytest.mark.parametrize("buffer_size", [0, -1])
def test_the_buffer_size_must_be_positive(buffer_size: int) -> None:
    with pytest.raises(ValueError, match="`buffer_size` must be at least 1"):
        TextLineSource(("x",), None, buffer_size)
    with pytest.raises(TypeError, match="`buffer_size` must be an integer"):
        TextLineSource(("x",), None, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [[0, 0], [5, 0, 0], [0, -1, 0], "x", 3, [0, 0.5, 0]])
def test_invalid_positions_are_rejected(position: object) -> None:
    with pytest.raises(ValueError, match="position must be"):
        TextLineSource(("x", "y")).open(0, 2, position)


def test_file_names_are_a_source(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.csv"):
        (tmp_path / name).touch()

    source = FileNamesSource.from_patterns([f"{tmp_path}/*.txt"])

    assert isinstance(source, IndexedSource)
    assert source.patterns == (f"{tmp_path}/*.txt",)
    check_source(source, [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"])


# --- datasets of files: names in any form, patterns, open files refused ---------------------------


Dataset = hr.Dataset


@pytest.fixture
def record_files(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / f"s{index}.records") for index in range(3)]
    for index, name in enumerate(names):
        with hr.io.TFRecordWriter(name) as writer:
            writer.write(b"%d" % index)
    return names


EXPECTED = [b"0", b"1", b"2"]


@pytest.mark.parametrize("as_written", [str, str.encode, Path, np.str_, lambda n: np.array(n)])
def test_files_are_named_in_any_form(record_files: list[str], as_written: Any) -> None:
    assert list(hr.TFRecordDataset([as_written(name) for name in record_files])) == EXPECTED
    assert list(hr.TFRecordDataset(as_written(record_files[0]))) == EXPECTED[:1]
    assert sorted(hr.TFRecordDataset([as_written(n) for n in record_files], None, 2)) == EXPECTED


@pytest.mark.parametrize("as_element", [str, str.encode])
def test_files_are_named_by_elements_of_text_or_bytes(
    record_files: list[str], as_element: Any
) -> None:
    names = Dataset.from_tensor_slices([as_element(name) for name in record_files])

    assert sorted(names.interleave(hr.TFRecordDataset)) == EXPECTED
    assert list(names.flat_map(hr.TextLineDataset))
    assert list(hr.TFRecordDataset(names)) == EXPECTED


def test_an_open_file_is_not_a_name(record_files: list[str]) -> None:
    with (
        open(record_files[0]) as file,
        pytest.raises(TypeError, match=r"an open file .*pass its name"),
    ):
        hr.TextLineDataset(file)


def test_files_are_listed_by_braces(record_files: list[str], tmp_path: Path) -> None:
    listed = Dataset.list_files(str(tmp_path / "s{0..1}.*"), shuffle=False)

    assert list(listed) == record_files[:2]
    with pytest.raises(NotFoundError, match=r"No such file: .*s3\.records"):
        Dataset.list_files(str(tmp_path / "s{2..3}.records"))
