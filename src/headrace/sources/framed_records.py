"""Reader of large records, one at a time, without an intermediate block.

It needs a format with a known framing (`RecordFraming`) and a local file, where additional reads
are cheap. Unusual records are left to the block parser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.storage.compression import ByteStream

__all__ = ["FramedRecords", "RecordFraming", "read_framed_records"]


@dataclass(frozen=True, slots=True)
class RecordFraming:
    """Framing of a record: a header with the length of the data, and checksums.

    Attributes:
        header_size: Number of bytes before the data.
        check_size: Number of bytes after the data.
        parse_length: Function that returns the length of the data from a header, or None if the
            header is damaged.
        verify: Function that returns whether the data matches the checksum at the start of the
            bytes after it.
    """

    header_size: int
    check_size: int
    parse_length: Callable[[bytes], int | None]
    verify: Callable[[bytes, bytes], bool]


class FramedRecords(NamedTuple):
    """Records that were read, and the state of the stream after them.

    Attributes:
        records: Data of the records.
        consumed_bytes: Size of the records in bytes, with their framing.
        rest: Bytes read after them: the next header, or more if its record is unusual.
        needs_parsing: Whether the block parser must handle the rest before more is read.
        failure: Error of a failed read, if any; its partial data is not in the rest.
        unconsumed_bytes: Number of bytes after `consumed_bytes` read before the failure.
    """

    records: list[bytes]
    consumed_bytes: int
    rest: bytes
    needs_parsing: bool = False
    failure: OSError | MemoryError | None = None
    unconsumed_bytes: int = 0


def read_framed_records(
    stream: ByteStream,
    framing: RecordFraming,
    header: bytes,
    limit: int,
    block_size: int,
    min_record_bytes: int,
    max_record_bytes: int,
) -> FramedRecords:
    """Read records, starting after a header that has already been read.

    Args:
        stream: Stream positioned after the header.
        framing: Framing of the records.
        header: Header of the first record.
        limit: Largest number of records to read.
        block_size: Approximate number of bytes to read.
        min_record_bytes: Smallest average record size; reading ends below it.
        max_record_bytes: Largest data size of a record that is not unusual.
    """
    records: list[bytes] = []
    used, beside = 0, framing.header_size + framing.check_size
    while len(records) < limit and len(records) * min_record_bytes <= used < block_size:
        length = framing.parse_length(header)
        if length is None or length > max_record_bytes:
            return FramedRecords(records, used, header, needs_parsing=True)
        data = b""
        try:
            data = stream.read(length)
            after = stream.read(beside)
        except (OSError, MemoryError) as failure:
            read = len(header) + len(data)
            return FramedRecords(records, used, header, failure=failure, unconsumed_bytes=read)
        if len(data) < length or not framing.verify(data, after):
            return FramedRecords(records, used, header + data + after, needs_parsing=True)
        records.append(data)
        used += beside + length
        header = after[framing.check_size :]
        if len(header) < framing.header_size:
            break
    return FramedRecords(records, used, header)
