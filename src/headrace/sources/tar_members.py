"""Members of tar archives (ustar, GNU and pax formats), read from a stream.

Only the parts of the format that matter for data sets are supported: names and contents of regular
files. Sparse files are rejected, and all other members are skipped.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, cast
from zlib import adler32

from headrace.errors import DataLossError, UnavailableError
from headrace.storage.compression import ByteStream

__all__ = ["TAR_BLOCK", "Member", "TarMembers"]

TAR_BLOCK = 512
"""Size of a header; data is padded to a multiple of it."""

_ZEROS = bytes(TAR_BLOCK)
_REGULAR = frozenset(b"0\x007")
_WITHOUT_DATA = frozenset(b"123456")
_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX, _SPARSE = b"LKxgS"
_MAX_EXTENSION = 1 << 20
_MAX_READ_BYTES = 64 << 20
_LARGE = 64 << 10
"""Data of at least this size is read on its own, without a block of data after it."""
_HEADER_READ = 4 << 10
"""Number of bytes to read for a header between large members."""


class Member(NamedTuple):
    """A regular file in an archive.

    Attributes:
        start: Offset of its first header in the (uncompressed) archive.
        name: Path of the file, with `/` between folders.
        data: Offset of its data.
        size: Size of its data in bytes.
    """

    start: int
    name: str
    data: int
    size: int


class TarMembers:
    """Reads the members of an archive in order, from any header on.

    Args:
        stream: The uncompressed archive, positioned at `offset`. It is closed by `close`.
        path: Name of the archive, for messages.
        offset: Offset of the first header to read.
        block_size: Number of bytes to read at once.
        can_seek: Whether to skip data by seeking instead of reading it.
        stop: Offset of the header to stop before; None reads to the end of the archive.
    """

    def __init__(
        self,
        stream: ByteStream,
        path: str,
        offset: int,
        block_size: int,
        can_seek: bool,
        stop: int | None = None,
    ) -> None:
        self._stream = stream
        self._path = path
        self._block_size = block_size
        self._can_seek = can_seek
        self._stop = stop
        #: Data that was read, from offset `_base` on.
        self._buffer = b""
        self._base = offset
        self._after_large = False
        #: Offset of the next header.
        self.offset: int = offset

    def next(self) -> Member | None:
        """Return the next regular file, or None at the end.

        Raises:
            DataLossError: If the archive is corrupt or truncated here, or no header begins at
                `stop`.
            UnavailableError: If it cannot be read.
        """
        start = offset = self.offset
        long_name, long_size = None, None
        while True:
            if start == self._stop:
                return None
            header = self._get(offset, TAR_BLOCK)
            if self._stop is not None and (start > self._stop or header == _ZEROS):
                raise DataLossError(
                    f"{self._path!r} has no tar header at byte {self._stop}, but had one when the "
                    "dataset was created; create the dataset again"
                )
            if header == _ZEROS:
                return None
            if len(header) < TAR_BLOCK:
                if not offset and not header:
                    return None  # an empty file
                raise DataLossError(
                    f"{self._path!r} is truncated: it ends at byte {offset + len(header)}, "
                    f"without an end-of-archive marker{'' if offset else '; is it a tar archive?'}"
                )
            size = self._check_header(header, offset)
            kind = header[156]
            data = offset + TAR_BLOCK
            if kind in _REGULAR:
                name = _parse_name(header) if long_name is None else long_name
                size = size if long_size is None else long_size
                self.offset = data + _padded(size)
                if not name.endswith("/"):
                    return Member(start, name, data, size)
                start, long_name, long_size = self.offset, None, None
            elif kind in (_LONG_NAME, _PAX):
                self.offset = data + _padded(size)
                value = self._read_extension(offset, data, size)
                if kind == _PAX:
                    fields = self._parse_pax(value, offset)
                    path, text = fields.get(b"path"), fields.get(b"size")
                    long_name = long_name if path is None else _to_text(path)
                    long_size = long_size if text is None else int(text)
                else:
                    long_name = _to_text(value.partition(b"\0")[0])
            elif kind == _SPARSE:
                raise _sparse_error(self._path, offset)
            elif kind in (_LONG_LINK, _GLOBAL_PAX):
                self.offset = data + _padded(size)
            else:
                size = size if long_size is None else long_size
                self.offset = start = data if kind in _WITHOUT_DATA else data + _padded(size)
                long_name, long_size = None, None
            offset = self.offset

    def read(self, member: Member) -> bytes:
        """Return the data of the member that `next` returned last.

        Raises:
            DataLossError: If the archive is truncated here.
            UnavailableError: If it cannot be read.
        """
        data = self._get(member.data, member.size)
        if len(data) < member.size:
            raise DataLossError(
                f"{self._path!r} is truncated: {member.name!r} has {member.size} bytes at byte "
                f"{member.data}, but the archive ends at byte {member.data + len(data)}"
            )
        return data

    def close(self) -> None:
        """Close the stream. Idempotent."""
        self._buffer = b""
        self._stream.close()

    def _check_header(self, header: bytes, offset: int) -> int:
        """Return the size field of a header after verifying the checksum."""
        field = header[148:156]
        try:
            expected = int(field.partition(b"\0")[0].rstrip(), 8)
            # The low half of Adler-32 is one more than the sum of the bytes, modulo 65521. It is
            # 20 times as fast as `sum`, which is left to decide about what looks damaged.
            if ((adler32(header) & 0xFFFF) - sum(field) + 255 - expected) % 65521:
                _verify_sum(header, expected)
            size = _parse_number(header[124:136])
        except ValueError as error:
            if offset:
                text = f"{self._path!r} is corrupt: the tar header at byte {offset} is damaged"
            else:
                text = f"{self._path!r} is not a tar archive, or is corrupt at byte 0"
            raise DataLossError(f"{text} ({error})") from None
        return size

    def _read_extension(self, offset: int, data: int, size: int) -> bytes:
        if size <= _MAX_EXTENSION:
            value = self._get(data, size)
            if len(value) == size:
                return value
            problem = "is truncated"
        else:
            problem = f"is corrupt: an extended header has {size} bytes"
        raise DataLossError(f"{self._path!r} {problem}, in the tar header at byte {offset}")

    def _parse_pax(self, value: bytes, offset: int) -> dict[bytes, bytes]:
        """Parse the records `<length> <name>=<value>` and a newline of a pax header."""
        fields = {}
        try:
            at = 0
            while at < len(value) and value[at]:
                digits = value[at : value.index(b" ", at)]
                record = value[at + len(digits) + 1 : at + int(digits)]
                name, equals, text = record.partition(b"=")
                if not equals or not text.endswith(b"\n"):
                    raise ValueError("a record has no value")
                fields[name] = text[:-1]
                at += int(digits)
            if int(fields.get(b"size", b"0")) < 0:
                raise ValueError("the size is negative")
        except ValueError as error:
            raise DataLossError(
                f"{self._path!r} is corrupt: the pax header at byte {offset} is damaged ({error})"
            ) from None
        if any(name.startswith(b"GNU.sparse.") for name in fields):
            raise _sparse_error(self._path, offset)
        return fields

    def _get(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at an offset, or fewer at the end of the archive."""
        at = offset - self._base
        end = at + size
        if end <= len(self._buffer):
            return self._buffer[at:end]
        try:
            return self._fetch(offset, size)
        except UnavailableError:
            raise
        except OSError as error:
            raise UnavailableError(
                f"{self._path!r} cannot be read at byte {offset}: {error}"
            ) from error

    def _fetch(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at an offset; some of them may be in the buffer."""
        available = self._base + len(self._buffer) - offset
        is_large = size - max(available, 0) >= _LARGE
        pieces: list[Any] = []
        if available < 0:
            self._skip(-available)
        elif available > 0 and is_large and self._can_seek:
            # To read it all again is faster than to copy it in order to join the two pieces.
            cast(Any, self._stream).seek(offset)
        elif available > 0:
            pieces.append(memoryview(self._buffer)[-available:])
        missing = size - sum(map(len, pieces))
        block_size = _HEADER_READ if self._after_large else self._block_size
        while missing > 0:
            wanted = missing if is_large else max(missing, block_size)
            piece = self._stream.read(min(wanted, _MAX_READ_BYTES))
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        data = b"".join(pieces)
        self._after_large = is_large
        if is_large:
            self._buffer, self._base = b"", offset + len(data)
            return data
        self._buffer, self._base = data, offset
        return data[:size]

    def _skip(self, count: int) -> None:
        self._base += len(self._buffer) + count
        self._buffer = b""
        if self._can_seek:
            cast(Any, self._stream).seek(count, os.SEEK_CUR)
            return
        while count and (skipped := self._stream.read(min(count, self._block_size))):
            count -= len(skipped)


def _padded(size: int) -> int:
    return (size + TAR_BLOCK - 1) // TAR_BLOCK * TAR_BLOCK


def _verify_sum(header: bytes, expected: int) -> None:
    """Check the checksum, which some old programs compute from signed bytes.

    Raises:
        ValueError: If it is wrong.
    """
    counted = header[:148] + b" " * 8 + header[156:]
    found = sum(counted)
    if expected not in (found, found - 256 * sum(byte >= 128 for byte in counted)):
        raise ValueError(f"its checksum is {found}, expected {expected}")


def _parse_number(field: bytes) -> int:
    """Return the value of an octal or base-256 number.

    Raises:
        ValueError: If it is not a number, or is negative.
    """
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    number = int(field.partition(b"\0")[0].rstrip() or b"0", 8)
    if number < 0:
        raise ValueError("its size is negative")
    return number


def _parse_name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    # Other versions of the format use the prefix for other fields.
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return _to_text(name)


def _to_text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _sparse_error(path: str, offset: int) -> DataLossError:
    return DataLossError(
        f"{path!r} has a sparse file at byte {offset}, which is not supported; create the archive "
        "without --sparse"
    )
