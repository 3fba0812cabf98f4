"""Large records, read one by one, each into the bytes that are given out: no block is copied.

It takes a format that says how a record is framed (`Frame`), and a local file, where a read more
costs little. What is odd about a record is left to who cuts blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.storage.compression import ByteStream

__all__ = ["Frame", "Framed", "read_framed"]


@dataclass(frozen=True, slots=True)
class Frame:
    """What lies around the data of a record: a header that tells its length, and a check.

    Attributes:
        header_size: Bytes before the data.
        check_size: Bytes after it.
        length: Returns the number of bytes of data that a header announces, None if it is damaged.
        matches: Says whether data and the bytes after it, from its check on, belong together.
    """

    header_size: int
    check_size: int
    length: Callable[[bytes], int | None]
    matches: Callable[[bytes, bytes], bool]


class Framed(NamedTuple):
    """Records that were read, and where that ended.

    Attributes:
        records: Their data.
        used: Bytes that they take, with all around them.
        rest: What was read after them: the next header, or more where that is odd.
        is_odd: Whether the rest is to be cut before more is read.
        failure: The read that failed, if one did; what it began is not in the rest.
        read: Bytes after `used` that were read when it failed.
    """

    records: list[bytes]
    used: int
    rest: bytes
    is_odd: bool = False
    failure: OSError | MemoryError | None = None
    read: int = 0


def read_framed(
    stream: ByteStream,
    frame: Frame,
    header: bytes,
    limit: int,
    block_size: int,
    least: int,
    largest: int,
) -> Framed:
    """Read records from a header on that is at hand.

    Args:
        stream: Stands after the header.
        frame: Of the records.
        header: Of the first.
        limit: The most records to read.
        block_size: About so many bytes are read.
        least: Bytes that a record has on average; reading ends where these have fewer.
        largest: Bytes of a record that is not odd.
    """
    records: list[bytes] = []
    used, beside = 0, frame.header_size + frame.check_size
    while len(records) < limit and len(records) * least <= used < block_size:
        length = frame.length(header)
        if length is None or length > largest:
            return Framed(records, used, header, is_odd=True)
        data = b""
        try:
            data = stream.read(length)
            after = stream.read(beside)
        except (OSError, MemoryError) as failure:
            read = len(header) + len(data)
            return Framed(records, used, header, failure=failure, read=read)
        if len(data) < length or not frame.matches(data, after):
            return Framed(records, used, header + data + after, is_odd=True)
        records.append(data)
        used += beside + length
        header = after[frame.check_size :]
        if len(header) < frame.header_size:
            break
    return Framed(records, used, header)
