"""TFRecord files: records of bytes, framed by their length and two checksums.

A record is stored as

    length         8 bytes, little-endian
    length check   4 bytes, masked CRC-32C of the 8 bytes before
    data           `length` bytes
    data check     4 bytes, masked CRC-32C of the data

A masked checksum is the checksum rotated right by 15 bits, plus a constant, so that checksums stay
effective for data that contains checksums. Both are verified for every record.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import google_crc32c
import numpy as np

from headrace.errors import DataLossError, FailedPreconditionError
from headrace.sources.framed_records import RecordFraming
from headrace.sources.record_files import BlockParser, ParsedBlock, RecordFilesSource
from headrace.storage.compression import check_compression, deflater
from headrace.storage.files import create_file
from headrace.storage.names import FileName, as_names

__all__ = ["TFRecordSource", "TFRecordWriter", "masked_crc", "parse_records"]

_HEADER = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")
_CHECK = struct.Struct("<I")
_CHECK_AND_HEADER = struct.Struct("<IQI")
_MASK = 0xA282EAD8
_MIN_EQUAL_RECORDS = 16

_crc = google_crc32c.value


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of `data`."""
    crc: int = _crc(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


# Cached, because records of equal length have equal length checks.
@lru_cache(maxsize=1 << 14)
def _length_check(length: int) -> int:
    return masked_crc(_LENGTH.pack(length))


def parse_records(block: bytes, at_end: bool, name: str, offset: int) -> ParsedBlock:
    """Parse the complete records of a block."""
    size = len(block)
    error: DataLossError | None = None
    records, checks = _parse_equal_records(block)
    needs = 0
    begin = len(records) * (16 + len(records[0])) if records else 0
    if size - begin >= 12:
        add_record, add_check = records.append, checks.append
        unpack = _CHECK_AND_HEADER.unpack_from
        length, length_check = _HEADER.unpack_from(block, begin)
        while True:
            if length_check != _length_check(length):
                error = DataLossError(
                    f"{name}: the record at byte {offset + begin} is damaged: its length does "
                    "not match its checksum; the rest of the file cannot be "
                    f"read{'' if offset + begin else _guess_format(block)}"
                )
                break
            data = begin + 12
            end = data + length
            if end + 16 > size:
                # The last complete record has no header after it in this block.
                if end + 4 <= size:
                    add_record(block[data:end])
                    checks += _CHECK.unpack_from(block, end)
                    begin = end + 4
                else:
                    needs = length + 16
                break
            add_record(block[data:end])
            check, length, length_check = unpack(block, end)
            add_check(check)
            begin = end + 4
    bad = _find_mismatch(records, checks)
    if bad is not None:
        begin = sum(map(len, records[:bad])) + 16 * bad
        error = DataLossError(
            f"{name}: the record at byte {offset + begin} is damaged: its "
            f"{len(records[bad])} bytes of data do not match their checksum"
        )
        used = begin + 16 + len(records[bad])
        return ParsedBlock(records[:bad], used, error=error, can_continue=True)
    if at_end and error is None and begin < size:
        error = DataLossError(
            f"{name}: the record at byte {offset + begin} is truncated: the file ends after "
            f"{size - begin} of {needs or 'at least 16'} bytes"
        )
    return ParsedBlock(records, begin, needs, error)


def _parse_equal_records(block: bytes) -> tuple[list[bytes], list[int]]:
    """Return the leading records of equal length and their checks, if there are many.

    Files of such records are common, and are parsed without a Python loop.
    """
    if len(block) < 12:
        return [], []
    length, length_check = _HEADER.unpack_from(block)
    stride = length + 16
    count = len(block) // stride
    if count < _MIN_EQUAL_RECORDS or block[stride : stride + 12] != block[:12]:
        return [], []
    if length == 0 or length_check != _length_check(length):
        return [], []
    layout = np.dtype(
        {
            "names": ["length", "length_check", "data", "check"],
            "formats": ["<u8", "<u4", f"V{length}", "<u4"],
            "offsets": [0, 8, 12, 12 + length],
            "itemsize": stride,
        }
    )
    rows = np.frombuffer(block, layout, count)
    other = (rows["length"] != length) | (rows["length_check"] != length_check)
    if other.any():
        count = int(other.argmax())
        rows = rows[:count]
    return rows["data"].tolist(), rows["check"].tolist()


def _guess_format(block: bytes) -> str:
    """Return a guess at the format of a file whose first bytes are not a record."""
    if block.startswith(b"\x1f\x8b"):
        return '; it is a GZIP file: pass compression_type="GZIP"'
    if block[:1] == b"\x78":
        return '; it may be a ZLIB file: pass compression_type="ZLIB"'
    return "; is it a TFRecord file?"


def _find_mismatch(records: list[bytes], checks: list[int]) -> int | None:
    """Return the index of the first record that does not match its checksum, or None."""
    if not records:
        return None
    crc = np.fromiter(map(_crc, records), np.uint32, len(records))
    masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK)
    wrong = masked != np.array(checks, np.uint32)
    return int(wrong.argmax()) if wrong.any() else None


def _parse_length(header: bytes) -> int | None:
    length, length_check = _HEADER.unpack(header)
    return length if length_check == _length_check(length) else None


def _verify_record(data: bytes, after: bytes) -> bool:
    return len(after) >= 4 and _CHECK.unpack_from(after)[0] == masked_crc(data)


class TFRecordSource(RecordFilesSource):
    """The records of TFRecord files as `bytes`; an index is a file. All checksums are verified."""

    framing = RecordFraming(
        header_size=12, check_size=4, parse_length=_parse_length, verify=_verify_record
    )

    def make_parser(self) -> BlockParser:
        return parse_records


class TFRecordWriter:
    """Writer of records to a TFRecord file. A context manager.

    >>> with hr.io.TFRecordWriter("data.tfrecord.gz", "GZIP") as writer:
    ...     writer.write(hr.io.encode_example({"label": 3}))
    >>> len(list(hr.TFRecordDataset("data.tfrecord.gz", "GZIP")))
    1

    Args:
        path: A local path or fsspec URL; an existing file is replaced.
        compression_type: None, `""`, `"GZIP"` or `"ZLIB"`.

    Raises:
        NotFoundError: If the folder does not exist.
    """

    def __init__(self, path: FileName, compression_type: str | None = None) -> None:
        compression = check_compression(compression_type)
        (self._name,) = as_names("path", [path])
        self._deflater = deflater(compression) if compression else None
        self._file = create_file(self._name)
        self._closed = False

    def write(self, record: bytes | bytearray | memoryview) -> None:
        """Append one record.

        Raises:
            TypeError: If it is not bytes.
            FailedPreconditionError: If the writer is closed.
        """
        if not isinstance(record, bytes):
            if not isinstance(record, bytearray | memoryview):
                raise TypeError(
                    f"record must be bytes, got {type(record).__name__}; encode it first, as with "
                    f"encode_example"
                )
            record = bytes(record)
        self._check_open()
        length = len(record)
        framed = b"".join(
            (
                _HEADER.pack(length, _length_check(length)),
                record,
                _CHECK.pack(masked_crc(record)),
            )
        )
        self._file.write(framed if self._deflater is None else self._deflater.compress(framed))

    def flush(self) -> None:
        """Flush everything written so far to the operating system, or to the remote file system."""
        self._check_open()
        if self._deflater is not None:
            self._file.write(self._deflater.flush(2))  # 2: Z_SYNC_FLUSH
        self._file.flush()

    def close(self) -> None:
        """Complete the file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._deflater is not None:
                self._file.write(self._deflater.flush())
        finally:
            self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError(f"the writer of {self._name!r} is closed")
