"""Parts of text files: each record is read once, whatever the bounds of parts and blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.errors import DataLossError, FailedPreconditionError, NotFoundError
from headrace.sources import byte_ranges
from headrace.sources.byte_range_reader import DecodedBlock, RecordFormat
from headrace.sources.byte_ranges import ByteRangeSource, count_parts
from headrace.storage.files import find_file_size
from headrace.testing.conformance import check_source, read_all


class LineFormat(RecordFormat):
    """Lines; `#` is a damaged one."""

    def decode(self, block: bytes, name: str, offset: int) -> DecodedBlock:
        lines = block.removesuffix(b"\n").split(b"\n")
        if b"#" not in lines:
            return DecodedBlock(Chunk.of_rows(lines), len(block))
        rows = lines[: lines.index(b"#")]
        size = sum(len(row) + 1 for row in rows)
        error = DataLossError(f"{name} at {offset + size}")
        return DecodedBlock(Chunk.of_rows(rows), min(size + 2, len(block)), error)


@dataclass(frozen=True)
class LineSource(ByteRangeSource):
    def make_format(self) -> RecordFormat:
        return LineFormat()


def divided(*paths: Path, part_bytes: int, block_bytes: int = 5) -> LineSource:
    counts = tuple(max(1, round(path.stat().st_size / part_bytes)) for path in paths)
    return LineSource(tuple(map(str, paths)), None, counts, part_bytes, block_bytes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    contents=st.lists(
        st.lists(st.integers(0, 9), max_size=12).map(
            lambda sizes: b"\n".join(b"x" * size for size in sizes)
        ),
        min_size=1,
        max_size=3,
    ),
    part_bytes=st.integers(1, 30),
    block_bytes=st.integers(1, 30),
)
def test_any_parts_and_blocks_give_the_same_lines(
    tmp_path: Path, contents: list[bytes], part_bytes: int, block_bytes: int
) -> None:
    paths = [tmp_path / str(index) for index in range(len(contents))]
    expected: list[bytes] = []
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
        if content:
            expected += content.removesuffix(b"\n").split(b"\n")

    source = divided(*paths, part_bytes=part_bytes, block_bytes=block_bytes)

    check_source(source, expected)
    assert len(source.paths) == source.size


def test_damaged_lines_raise_in_their_turn_from_every_position(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"aa\n#\nbb\ncc\n#\n#\ndd")

    def events(source: LineSource, start: int, position: object) -> list[object]:
        """Return rows, the offsets of damaged lines, and the positions before them."""
        reader = source.open(start, source.size, position)
        found: list[object] = []
        while True:
            found.append(reader.get_position())
            try:
                chunk = reader.read(1)
            except DataLossError as error:
                found.append(int(str(error).rsplit(maxsplit=1)[1]))
                continue
            if chunk is None:
                return found[:-1]
            found.append(chunk.rows()[0])

    for part_bytes, block_bytes in itertools.product((2, 4, 7, 100), (1, 4, 100)):
        source = divided(path, part_bytes=part_bytes, block_bytes=block_bytes)
        all_events = events(source, 0, None)
        assert all_events[1::2] == [b"aa", 3, b"bb", b"cc", 11, 13, b"dd"]
        for index, position in enumerate(all_events[::2]):
            assert events(source, 0, position)[1::2] == all_events[2 * index + 1 :: 2]


def test_missing_file_raises_in_its_turn_and_the_next_file_follows(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    names = (str(tmp_path / "a"), str(tmp_path / "gone"), str(tmp_path / "a"))
    reader = LineSource(names).open(0, 3)

    assert reader.read(9) is not None
    with pytest.raises(NotFoundError, match="gone"):
        reader.read(9)
    assert read_all(reader) == [b"1"]


def test_changed_file_does_not_fit_a_position(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"aaaa\nbbbb\ncccc\n")
    source = divided(path, part_bytes=100)
    reader = source.open(0, 1)
    reader.read(1)
    position = reader.get_position()
    reader.read(1)
    later = reader.get_position()
    reader.close()

    path.write_bytes(b"aaaaaaa\nbbbbbbb\n")
    with pytest.raises(FailedPreconditionError, match=r"x' begins at byte 5"):
        source.open(0, 1, position).read(1)
    path.write_bytes(b"aaaa\n")
    with pytest.raises(DataLossError, match="has 5 bytes, but 9"):
        source.open(0, 1, later).read(1)
    with pytest.raises(DataLossError, match="has 1 records from byte 0 on, but at least 2"):
        source.open(0, 1, [0, 0, 2]).read(1)


def test_file_that_became_shorter_than_its_parts_raises(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"aaaa\n" * 4)
    source = divided(path, part_bytes=5)
    path.write_bytes(b"aaaa\n")

    with pytest.raises(DataLossError, match="ends before byte 15"):
        source.open(3, 4).read(1)


@pytest.mark.parametrize("position", [[0, 0], [9, 0, 0], [0, -1, 0], "x", 3, [1, 0, 0]])
def test_invalid_positions_are_rejected(tmp_path: Path, position: object) -> None:
    (tmp_path / "x").write_bytes(b"12345678")
    with pytest.raises(ValueError, match="position"):
        divided(tmp_path / "x", part_bytes=4).open(0, 2, position)


def test_large_files_have_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(tmp_path / name) for name in "abc"]
    for name, size in zip(names, (0, 10, 26), strict=True):
        Path(name).write_bytes(b"x" * size)
    gone = str(tmp_path / "gone")

    assert count_parts([*names, gone], part_bytes=10) == (1, 1, 3, 1)
    assert count_parts(names, part_bytes=100) == ()
    monkeypatch.setattr(byte_ranges, "_MAX_DIVIDED_FILES", 2)
    assert count_parts(names, part_bytes=10) == ()


def test_size_of_a_url_is_known() -> None:
    url = "memory://byte_ranges/size.txt"
    with fsspec.open(url, "wb") as file:
        file.write(b"12345")
    try:
        assert find_file_size(url) == 5
        assert find_file_size(url + ".gone") is None
    finally:
        fsspec.filesystem("memory").rm("/byte_ranges", recursive=True)


def test_workers_share_the_parts_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    lines = [b"%d" % number for number in range(500)]
    path.write_bytes(b"\n".join(lines))
    dataset = hr.Dataset.from_source(divided(path, part_bytes=100))

    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        spread = dataset.apply(hr.service.distribute("distributed_epoch", cluster.target))
        assert sorted(spread, key=int) == lines
        ordered = dataset.apply(
            hr.service.distribute("distributed_epoch", cluster.target, ordered=True)
        )
        assert list(ordered) == lines
