from __future__ import annotations

import base64
import gzip
import io
import os
import random
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.errors import DataLossError, FailedPreconditionError, NotFoundError
from headrace.plan.source import Reader
from headrace.sources import record_files
from headrace.sources.tfrecord import TFRecordSource, TFRecordWriter, masked_crc
from headrace.testing.conformance import check_source, read_all

#: What TensorFlow wrote for these records.
GOLDEN_RECORDS = [b"", b"abc", bytes(range(40)) * 8]
GOLDEN = {
    "": (
        "0000000000DFc`X*y@6!0{{R300000u$f5?VPa!$SMec00RR910000k=VVO)0RjUA1qKHQ2?`4g4Gs?w"
        "5fT#=6&4p585$cL9UdPbAtECrB_<~T0RjUA1qKHQ2?`4g4Gs?w5fT#=6&4p585$cL9UdPbAtECrB_<~T"
        "0RjUA1qKHQ2?`4g4Gs?w5fT#=6&4p585$cL9UdPbAtECrB_<~T0RjUA1qKHQ2?`4g4Gs?w5fT#=6&4p5"
        "85$cL9UdPbAtECrB_<~T0RjUA1qKHQ2?`4g4Gs?w5fT#=6&4p585$cL9UdPbAtECrB_<~T0RjUA1qKHQ"
        "2?`4g4Gs?w5fT#=6&4p585$cL9UdPbAtECrB_<~T0RjUA1qKHQ2?`4g4Gs?w5fT#=6&4p585$cL9UdPb"
        "AtECrB_<~T0RjUA1qKHQ2?`4g4Gs?w5fT#=6&4p585$cL9UdPbAtECrB_=1uAAvs"
    ),
    "GZIP": (
        "ABzY80000000U!SfB;SA8SFP+H7#O>@;A)%<V#FS&I|vj=)edO(tDob%fQIQ%)-jX&cVsW&BM#bFCZu+"
        "EFvl<E+Hu;Eh8%@ub`-;tfH!>KB^A8x})-q_5kdYKeKZI000"
    ),
    "ZLIB": (
        "c${NkfB;SA8SFP+H7#O>@;A)%<V#FS&I|vj=)edO(tDob%fQIQ%)-jX&cVsW&BM#bFCZu+EFvl<E+Hu;"
        "Eh8%@ub`-;tfH!>KB^A8x})-q_5l3<BwY"
    ),
}


def write(path: Path, records: list[bytes], compression: str | None = None) -> str:
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def records_of(count: int) -> list[bytes]:
    return [bytes([index % 251]) * (index * 7 % 50) for index in range(count)]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("buffer_size", [None, 1, 64])
def test_records_round_trip(tmp_path: Path, compression: str, buffer_size: int | None) -> None:
    records = records_of(60)
    names = [
        write(tmp_path / "a", records[:40], compression),
        write(tmp_path / "b", [], compression),
        write(tmp_path / "c", records[40:], compression),
    ]
    source = TFRecordSource(names, compression, buffer_size)  # type: ignore[arg-type]

    assert source.element_spec == ArraySpec((), bytes)
    check_source(source, records)


@pytest.mark.parametrize("compression", GOLDEN)
def test_files_that_tensorflow_wrote_are_read(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "golden"
    path.write_bytes(base64.b85decode(GOLDEN[compression]))

    check_source(TFRecordSource(path, compression), GOLDEN_RECORDS)  # type: ignore[arg-type]


def test_written_files_equal_those_of_tensorflow(tmp_path: Path) -> None:
    name = write(tmp_path / "x", GOLDEN_RECORDS)

    assert Path(name).read_bytes() == base64.b85decode(GOLDEN[""])


def test_checksums_are_masked_castagnoli() -> None:
    # The check value of CRC-32C for "123456789" is 0xE3069283.
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    assert masked_crc(b"123456789") == masked


def test_many_records_over_many_blocks(tmp_path: Path) -> None:
    records = [os.urandom(size) for size in (100, 5, 0, 70_000, 3_000_000, 1) * 5]
    source = TFRecordSource((write(tmp_path / "x", records),))

    assert read_all(source.open(0, 1)) == records


@pytest.mark.parametrize("compression", ["", "ZLIB"])
@pytest.mark.parametrize("sizes", [(200,), (10, 300, 0), (900, 20, 40), (484,), (3000, 1)])
def test_records_of_any_size_are_read_from_every_position(
    tmp_path: Path, compression: str, sizes: tuple[int, ...]
) -> None:
    records = [bytes([index]) * size for index, size in enumerate(sizes * 9)]
    name = write(tmp_path / "x", records, compression)

    for buffer_size in (100, 500, 1000):
        check_source(TFRecordSource((name,), compression, buffer_size), records)


class LocalFile(io.FileIO):
    """A local file that records the sizes of reads."""

    def __init__(self, name: str, asked: list[int]) -> None:
        super().__init__(name)
        self._asked = asked

    def read(self, size: int = -1, /) -> bytes:
        self._asked.append(size)
        return super().read(size)


class RemoteFile:
    """The same file on a custom file system."""

    def __init__(self, name: str, asked: list[int]) -> None:
        self._file = LocalFile(name, asked)
        self.read, self.close = self._file.read, self._file.close


@pytest.mark.parametrize(
    ("kind", "size", "block_size", "expected"),
    [
        # A hundred bytes each, with its frame: once they are known to be large, each is read as it
        # is, then its check and the header of the next one.
        pytest.param(LocalFile, 84, 250, [250, 62, 84, 16, 84, 16], id="large"),
        # The missing part of a large record is read alone, that of a small one with a block.
        pytest.param(RemoteFile, 84, 250, [250, 50, 250, 50], id="large and remote"),
        pytest.param(LocalFile, 4, 2000, [2000, 2000], id="small"),
    ],
)
def test_large_local_records_are_read_one_by_one_and_others_in_blocks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    size: int,
    block_size: int,
    expected: list[int],
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        record_files, "open_file", lambda name, compression, offset, options: kind(name, asked)
    )
    records = [bytes([index]) * size for index in range(200)]
    path = write(tmp_path / "x", records)

    found = read_all(TFRecordSource((path,), None, block_size).open(0, 1))

    assert found == records
    assert asked[: len(expected)] == expected


@pytest.mark.parametrize("seed", range(8))
def test_errors_among_large_records_equal_those_in_blocks(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([300, 300, 40, 0]) for _ in range(30)]
    content = bytearray(
        Path(write(tmp_path / "whole", [chance.randbytes(size) for size in sizes])).read_bytes()
    )
    content[chance.randrange(len(content))] ^= 4
    del content[-chance.randrange(400) :]
    path = tmp_path / "x"
    told = []

    # Compressed files are always read in blocks.
    for compression, stored in (("GZIP", gzip.compress(content)), ("", bytes(content))):
        path.write_bytes(stored)
        rows, errors = drain(TFRecordSource((str(path),), compression, 1000).open(0, 1))
        told.append((rows, [str(error) for error in errors]))

    assert told[0] == told[1]
    assert told[0][1]


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_after_a_failed_read_no_record_is_lost_or_reported_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compression: str,
    error: type[BaseException],
) -> None:
    records = [bytes([index]) * size for index, size in enumerate((484, 100, 3000) * 3)]
    source = TFRecordSource((write(tmp_path / "x", records, compression),), compression, 1000)
    read = LocalFile.read
    asked: list[int] = []
    fails_at = 1

    def lose(file: LocalFile, size: int = -1, /) -> bytes:
        data = read(file, size)
        if len(asked) == fails_at:
            raise error
        return data

    monkeypatch.setattr(LocalFile, "read", lose)
    monkeypatch.setattr("headrace.storage.files.io.FileIO", lambda name, _: LocalFile(name, asked))
    while True:
        reader, found, errors = source.open(0, 1), [], []
        while True:
            try:
                chunk = reader.read(2)
            except (Exception, KeyboardInterrupt) as raised:
                errors.append(type(raised))
                continue
            if chunk is None:
                break
            found += chunk.rows()
        reader.close()
        assert found == records
        if not errors:
            break
        assert errors == [error]
        fails_at += 1
        asked.clear()
    assert fails_at > 2


@pytest.mark.parametrize("size", [0, 1, 30])
@pytest.mark.parametrize("tail", [[], [b"another"], [b"", b"x" * 30, b"y" * 31]])
def test_runs_of_records_of_one_length(tmp_path: Path, size: int, tail: list[bytes]) -> None:
    # Zeros at the end of a record are part of it.
    records = [bytes([index]) * (size // 2) + bytes(size - size // 2) for index in range(40)] + tail
    source = TFRecordSource((write(tmp_path / "x", records),), None, 700)

    check_source(source, records)


def drain(reader: Reader) -> tuple[list[bytes], list[DataLossError]]:
    """Read on behind errors, and restore the reader at each place."""
    rows: list[bytes] = []
    errors: list[DataLossError] = []
    while True:
        try:
            chunk = reader.read(3)
        except DataLossError as error:
            errors.append(error)
            continue
        if chunk is None:
            return rows, errors
        rows += chunk.rows()


@pytest.mark.parametrize("buffer_size", [None, 10])
@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("count", [10, 100])
def test_damaged_data_drops_one_record(
    tmp_path: Path, buffer_size: int | None, compression: str, count: int
) -> None:
    records = [b"%03d" % index * 10 for index in range(count)]
    content = bytearray(Path(write(tmp_path / "plain", records)).read_bytes())
    content[46 * 4 + 20] ^= 1
    content[46 * 6 + 43] ^= 1
    path = tmp_path / "x"
    with fsspec.open(str(path), "wb", compression="gzip" if compression else None) as file:
        file.write(bytes(content))
    source = TFRecordSource((str(path),), compression, buffer_size)

    rows, errors = drain(source.open(0, 1))

    assert rows == records[:4] + records[5:6] + records[7:]
    assert [str(error) for error in errors] == [
        f"{path}: the record at byte {46 * bad} is damaged: its 30 bytes of data do not match "
        f"their checksum"
        for bad in (4, 6)
    ]


@pytest.mark.parametrize("count", [10, 100])
def test_a_damaged_length_drops_the_rest_of_the_file(tmp_path: Path, count: int) -> None:
    records = [b"x" * 30] * count
    name = write(tmp_path / "x", records)
    content = bytearray(Path(name).read_bytes())
    content[46 * 4] ^= 1
    Path(name).write_bytes(content)
    other = write(tmp_path / "y", [b"next"])

    rows, errors = drain(TFRecordSource((name, other)).open(0, 2))

    assert rows == [*records[:4], b"next"]
    (error,) = errors
    assert f"x: the record at byte {46 * 4} is damaged: its length" in str(error)


@pytest.mark.parametrize("cut", [1, 11, 12, 30, 45])
@pytest.mark.parametrize("buffer_size", [None, 7])
def test_a_truncated_record_is_reported(tmp_path: Path, cut: int, buffer_size: int | None) -> None:
    name = write(tmp_path / "x", [b"x" * 30] * 3)
    Path(name).write_bytes(Path(name).read_bytes()[: 46 * 2 + cut])

    rows, errors = drain(TFRecordSource((name,), None, buffer_size).open(0, 1))

    assert rows == [b"x" * 30] * 2
    (error,) = errors
    assert f"the record at byte 92 is truncated: the file ends after {cut} of" in str(error)


def test_a_length_beyond_the_file_reads_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    length = struct.pack("<Q", 1 << 60)
    path.write_bytes(length + struct.pack("<I", masked_crc(length)) + b"few bytes")

    rows, errors = drain(TFRecordSource((str(path),)).open(0, 1))

    assert rows == []
    assert "is truncated" in str(errors[0])


def test_positions_between_errors_restore(tmp_path: Path) -> None:
    records = [b"%03d" % index * 10 for index in range(8)]
    name = write(tmp_path / "x", records)
    content = bytearray(Path(name).read_bytes())
    content[46 * 4 + 20] ^= 1
    Path(name).write_bytes(content)
    source = TFRecordSource((name,))

    def outcomes(reader: Reader) -> list[Any]:
        found: list[Any] = []
        while True:
            try:
                chunk = reader.read(1)
            except DataLossError as error:
                found.append(str(error))
                continue
            if chunk is None:
                return found
            found += chunk.rows()

    whole = outcomes(source.open(0, 1))
    reader = source.open(0, 1)
    assert len(whole) == 8
    for done in range(9):
        assert outcomes(source.open(0, 1, reader.get_position())) == whole[done:]
        try:
            reader.read(1)
        except DataLossError:
            assert done == 4
    reader.close()


def test_missing_files_are_reported_in_their_turn(tmp_path: Path) -> None:
    reader = TFRecordSource((str(tmp_path / "gone"),)).open(0, 1)

    with pytest.raises(NotFoundError, match=r"No such file: .*gone"):
        reader.read(1)
    assert reader.read(1) is None


def test_urls_are_written_and_read() -> None:
    with TFRecordWriter("memory://streams/x.tfrecord", "GZIP") as writer:
        writer.write(b"one")
        writer.write(bytearray(b"two"))
        writer.write(memoryview(b"three"))

    check_source(
        TFRecordSource("memory://streams/x.tfrecord", "GZIP"),  # type: ignore[arg-type]
        [b"one", b"two", b"three"],
    )


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_flushed_records_are_readable_before_the_file_is_closed(
    tmp_path: Path, compression: str
) -> None:
    writer = TFRecordWriter(tmp_path / "x", compression)
    writer.write(b"one")
    writer.flush()

    reader = TFRecordSource((str(tmp_path / "x"),), compression).open(0, 1)
    chunk = reader.read(1)
    reader.close()
    writer.close()
    writer.close()

    assert chunk is not None
    assert chunk.rows() == [b"one"]
    with pytest.raises(FailedPreconditionError, match="is closed"):
        writer.write(b"two")
    with pytest.raises(FailedPreconditionError, match="is closed"):
        writer.flush()


def test_records_are_bytes(tmp_path: Path) -> None:
    with (
        TFRecordWriter(tmp_path / "x") as writer,
        pytest.raises(TypeError, match="record must be bytes, got str"),
    ):
        writer.write("text")  # type: ignore[arg-type]


def test_a_writer_requires_an_existing_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        TFRecordWriter(tmp_path / "gone" / "x")
    with pytest.raises(ValueError, match="compression_type"):
        TFRecordWriter(tmp_path / "x", "gzip")


class Watched(tuple[str, ...]):
    """Names that may be looked up, and not gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("opening one file goes through the names of all")

    __contains__ = index = count = __iter__  # type: ignore[assignment]


def test_opening_one_file_accesses_no_other_name(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with TFRecordWriter(path) as writer:
        writer.write(b"record")
    source = TFRecordSource((str(path),) * 10_000)
    object.__setattr__(source, "filenames", Watched(source.filenames))

    assert read_all(source.open(7000, 7001)) == [b"record"]
    assert read_all(source.open(7000, 7001, [7001, 0, 0])) == []


def test_an_index_is_a_file() -> None:
    source = TFRecordSource(("a", "b"))

    assert source.index_kind == "file"
    assert source.paths == ("a", "b")


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"root:x:0:0:root:/root:/bin/bash\n", "is it a TFRecord file"),
        (gzip.compress(b"much", mtime=0), 'it is a GZIP file: pass compression_type="GZIP"'),
        (zlib.compress(b"much"), 'it may be a ZLIB file: pass compression_type="ZLIB"'),
    ],
    ids=["text", "gzip", "zlib"],
)
def test_a_file_of_another_kind_is_recognised(tmp_path: Path, content: bytes, advice: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(DataLossError, match=re.escape(advice)):
        list(hr.TFRecordDataset(str(path)))
