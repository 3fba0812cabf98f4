"""Block-wise decompression and compression of files.

The names are those of tf.data: `""` or None for no compression, `"GZIP"`, `"ZLIB"`. All data before
damage in a stream is returned before the damage is reported.
"""

from __future__ import annotations

import zlib
from typing import Literal, Protocol, TypeAlias, cast

from headrace.errors import DataLossError

__all__ = ["ByteStream", "Compression", "InflatingStream", "check_compression", "deflater"]

Compression: TypeAlias = Literal["", "GZIP", "ZLIB"]
"""One of `""`, `"GZIP"` and `"ZLIB"`."""

_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}
_RAW_BLOCK = 128 << 10


class ByteStream(Protocol):
    """The interface of an open file that record readers use."""

    def read(self, size: int, /) -> bytes:
        """Return 1 to `size` bytes, or `b""` at the end."""

    def close(self) -> None:
        """Release the file. Idempotent."""


def check_compression(compression_type: str | None) -> Compression:
    """Return the compression that an argument names.

    Raises:
        ValueError: If it is not None, `""`, `"GZIP"` or `"ZLIB"`.
    """
    if compression_type is None or compression_type == "":
        return ""
    if isinstance(compression_type, str) and compression_type in _WINDOW_BITS:
        return cast("Compression", compression_type)
    raise ValueError(
        f'compression_type must be None, "", "GZIP" or "ZLIB" (in capitals), got '
        f"{compression_type!r}"
    )


def deflater(compression: Compression) -> zlib._Compress:
    """Return a compressor for `"GZIP"` or `"ZLIB"`; its output depends on its input alone."""
    return zlib.compressobj(wbits=_WINDOW_BITS[compression])


class InflatingStream:
    """Decompressing reader of a stream.

    A GZIP file may have several members, as created by `cat a.gz b.gz`.

    Args:
        raw: Stream of compressed bytes; closed together with this stream.
        compression: `"GZIP"` or `"ZLIB"`.
        name: Name of the file, for messages.
    """

    def __init__(self, raw: ByteStream, compression: Compression, name: str) -> None:
        self._raw = raw
        self._compression = compression
        self._name = name
        self._inflater = zlib.decompressobj(wbits=_WINDOW_BITS[compression])
        self._input = b""
        self._is_inside_stream = False
        self._pending_error: DataLossError | None = None

    def read(self, size: int, /) -> bytes:
        """Return 1 to `size` decompressed bytes, or `b""` at the end.

        Raises:
            DataLossError: If the stream is damaged here, or ends too early.
        """
        while self._pending_error is None:
            if not self._input and not self._fill():
                return b""
            output = self._inflate(size)
            if output:
                return output
        raise self._pending_error

    def close(self) -> None:
        """Close the underlying file. Idempotent."""
        self._raw.close()

    def _fill(self) -> bool:
        """Read compressed bytes; return False at a proper end."""
        self._input = self._raw.read(_RAW_BLOCK)
        if self._input:
            return True
        if not self._is_inside_stream:
            return False
        self._pending_error = DataLossError(
            f"{self._name}: the {self._compression} stream is incomplete; the file is truncated"
        )
        raise self._pending_error

    def _inflate(self, size: int) -> bytes:
        if not self._is_inside_stream:
            if self._compression == "GZIP":
                # Zero bytes between and after members are padding.
                self._input = self._input.lstrip(b"\0")
            if not self._input:
                return b""
            self._is_inside_stream = True
        before = self._inflater.copy()
        try:
            output = self._inflater.decompress(self._input, size)
        except zlib.error as error:
            output = self._salvage(before)
            self._pending_error = DataLossError(
                f"{self._name}: the {self._compression} stream is damaged ({error})"
            )
            return output
        self._input = self._inflater.unconsumed_tail
        if self._inflater.eof:
            self._input = self._inflater.unused_data
            self._is_inside_stream = False
            self._inflater = zlib.decompressobj(wbits=_WINDOW_BITS[self._compression])
        return output

    def _salvage(self, inflater: zlib._Decompress) -> bytes:
        """Return the output of `inflater` up to the byte at which it fails.

        zlib drops the output of a failing call, so the block is decompressed again byte by byte.
        """
        pieces = []
        try:
            for at in range(len(self._input)):
                pieces.append(inflater.decompress(self._input[at : at + 1]))
        except zlib.error:
            pass
        return b"".join(pieces)
