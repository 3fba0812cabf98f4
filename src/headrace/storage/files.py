"""Open and create files by name: a local path, or a URL that fsspec knows.

Local files take the short way past fsspec.
"""

from __future__ import annotations

import io
import os
import re
from typing import Any, BinaryIO, cast

from headrace import storage
from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from headrace.storage.compression import ByteStream, Compression, InflatingStream
from headrace.storage.names import is_local, is_pattern

__all__ = ["create_file", "open_file"]

_LIST_IN_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
_SKIP_BLOCK = 1 << 20


def open_file(name: str, compression: Compression = "", offset: int = 0) -> ByteStream:
    """Open a file for reading in blocks.

    Args:
        name: A local path or an fsspec URL.
        compression: `""`, `"GZIP"` or `"ZLIB"`.
        offset: Where to begin, counted in bytes of the inflated content.

    Raises:
        NotFoundError: The file does not exist.
        FailedPreconditionError: It is a folder, or may not be read.
        UnavailableError: Its file system does not answer.
        DataLossError: The content before `offset` is damaged, or there is less.
    """
    try:
        stream = cast(ByteStream, _open(name.removeprefix("file://"), "rb"))
        if not compression:
            if offset:
                _seek(cast(BinaryIO, stream), offset, name)
            return stream
    except OSError as error:
        raise _explain(name, error) from error
    inflating = InflatingStream(stream, compression, name)
    left = offset
    try:
        while left:
            skipped = inflating.read(min(left, _SKIP_BLOCK))
            if not skipped:
                raise _too_short(name, offset - left, offset)
            left -= len(skipped)
    except BaseException:
        inflating.close()
        raise
    return inflating


def create_file(name: str) -> BinaryIO:
    """Open a file for writing, empty; what the name held before is gone.

    Raises:
        NotFoundError: Its folder does not exist.
        FailedPreconditionError: It is a folder, or may not be written.
        UnavailableError: Its file system does not answer.
    """
    try:
        return cast(BinaryIO, _open(name.removeprefix("file://"), "wb"))
    except FileNotFoundError as error:
        folder = os.path.dirname(name)
        raise NotFoundError(
            f"{name!r} cannot be written: the folder {folder!r} does not exist; create it first"
        ) from error
    except OSError as error:
        raise _explain(name, error) from error


def _open(name: str, mode: str) -> Any:
    if not is_local(name):
        return storage.remote.open_url(name, mode)
    # Readers ask for large blocks themselves; a buffer in between would only copy.
    return io.FileIO(name, "r") if mode == "rb" else open(name, "wb")


def _seek(stream: BinaryIO, offset: int, name: str) -> None:
    size = stream.seek(0, os.SEEK_END)
    if size < offset:
        stream.close()
        raise _too_short(name, size, offset)
    stream.seek(offset)


def _too_short(name: str, size: int, offset: int) -> DataLossError:
    return DataLossError(
        f"{name!r} has {size} bytes, but {offset} were read before the state was saved; restore it "
        "with the same data"
    )


def _explain(name: str, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError):
        looks_so = is_pattern(name) or _LIST_IN_BRACES.search(name)
        advice = "; it looks like a pattern: use Dataset.list_files" if looks_so else ""
        return NotFoundError(f"No such file: {name!r}{advice}")
    if isinstance(error, IsADirectoryError):
        return FailedPreconditionError(f"{name!r} is a folder; name the files in it")
    if isinstance(error, PermissionError):
        return FailedPreconditionError(f"{name!r} may not be opened: {error.strerror or error}")
    return UnavailableError(f"{name!r} cannot be opened: {error}")
