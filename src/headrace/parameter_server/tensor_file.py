"""Files of tensors, as `safetensors` writes them: a header of JSON, then the bytes of each.

What is written is known beforehand but for its bytes, so arrays are written one after another and
never copied together. Dtypes that the format has no name for are written as bytes (U8), with the
dtype's name in the header's metadata.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataLossError, FailedPreconditionError, NotFoundError
from headrace.parameter_server.dtypes import dtype_named, name_of
from headrace.storage.files import open_file
from headrace.storage.folder import Folder

__all__ = ["TensorFile", "checksum_of", "write_tensors"]

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LARGEST_HEADER = 100 << 20
_BLOCK = 16 << 20


def write_tensors(folder: Folder, name: str, tensors: Mapping[str, NDArray[Any]]) -> int:
    """Write a file, and return its bytes; others see it when it is whole.

    Raises:
        FailedPreconditionError: There is no room for it.
    """
    header: dict[str, Any] = {}
    others: dict[str, str] = {}
    at = 0
    for key, array in tensors.items():
        dtype = name_of(array.dtype)
        shape = list(array.shape)
        if dtype not in _NAMES:
            others[key] = dtype
            shape.append(array.dtype.itemsize)
        header[key] = {
            "dtype": _NAMES.get(dtype, "U8"),
            "shape": shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    if others:
        header["__metadata__"] = others
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    try:
        with folder.create(name) as file:
            _write(file, len(words).to_bytes(8, "little"))
            _write(file, words)
            for array in tensors.values():
                flat = _bytes_of(array)
                for start in range(0, flat.nbytes, _BLOCK):
                    _write(file, flat[start : start + _BLOCK])
        folder.publish(name, name)
    except Exception as error:
        with contextlib.suppress(Exception):
            folder.remove(name)  # others want the room
        cause = error if isinstance(error, OSError) and error.errno else error.__cause__
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise FailedPreconditionError(
                f"{folder.path(name)!r} cannot be written: {cause.strerror}; make room there"
            ) from error
        raise
    return 8 + len(words) + at


def checksum_of(tensors: Mapping[str, NDArray[Any]]) -> int:
    """Return a checksum (CRC-32) of names, dtypes, shapes and bytes, whatever their order."""
    found = 0
    for name, array in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {name_of(array.dtype)} {array.shape}".encode(), found)
        found = zlib.crc32(_bytes_of(array), found)
    return found


def _bytes_of(array: NDArray[Any]) -> memoryview:
    if not array.size:
        return memoryview(b"")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of it: an unbuffered file may take less at a time."""
    rest = memoryview(data)
    while rest.nbytes:
        taken = file.write(rest)
        rest = rest[taken:]


class TensorFile:
    """A file that was written; its arrays show its memory and are not to be written to.

    Args:
        folder: Where it is.
        name: Its name there.

    Raises:
        DataLossError: It is missing, or damaged.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._path = folder.path(folder.found_as(name, name))
        self._bytes = self._read(folder)
        head = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if not 2 <= head <= min(_LARGEST_HEADER, len(self._bytes) - 8):
            raise self._damaged("it has no header")
        try:
            self._header = json.loads(self._bytes[8 : 8 + head].tobytes())
        except ValueError as error:
            raise self._damaged(f"its header is no JSON ({error})") from error
        if not isinstance(self._header, dict):
            raise self._damaged("its header is no object")
        self._others = self._header.pop("__metadata__", {})
        self._first = 8 + head

    def names(self) -> list[str]:
        """Return the names of its tensors."""
        return list(self._header)

    def __getitem__(self, name: str) -> NDArray[Any]:
        form = self._header.get(name)
        if form is None:
            raise self._damaged(f"it has no tensor {name!r}")
        try:
            begin, end = form["data_offsets"]
            dtype = dtype_named(self._others.get(name) or _DTYPES[form["dtype"]])
            shape = form["shape"][:-1] if name in self._others else form["shape"]
            raw = self._bytes[self._first + begin : self._first + end]
            due = dtype.itemsize * math.prod(shape)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(f"its header says nonsense of {name!r} ({error!r})") from error
        if len(raw) != end - begin or len(raw) != due:
            raise self._damaged(f"it ends within the tensor {name!r}")
        if not len(raw):
            return np.empty(shape, dtype)
        found = np.frombuffer(raw.data, dtype).reshape(shape)
        found.flags.writeable = False
        return found

    def of(self, key: str, checksum: int | None = None) -> dict[str, NDArray[Any]]:
        """Return the tensors whose names begin with `key/`, by the rest of their names.

        Args:
            key: Of a piece.
            checksum: What `checksum_of` returned when they were written; None: it is not known.

        Raises:
            DataLossError: They are others now.
        """
        start = f"{key}/"
        found = {name[len(start) :]: self[name] for name in self._header if name.startswith(start)}
        self.check(key, found, checksum)
        return found

    def check(self, what: str, tensors: Mapping[str, NDArray[Any]], checksum: int | None) -> None:
        """Raise DataLossError if tensors are not those that were written."""
        if checksum is not None and checksum_of(tensors) != checksum:
            raise self._damaged(f"the checksum of {what!r} is not that of what was written")

    def _read(self, folder: Folder) -> NDArray[np.uint8]:
        try:
            if folder.is_local:
                return np.memmap(self._path, np.uint8, "r")
            stream = open_file(self._path)
            try:
                blocks = list(iter(lambda: stream.read(_BLOCK), b""))
            finally:
                stream.close()
        except (FileNotFoundError, NotFoundError) as error:
            raise DataLossError(f"the checkpoint's file {self._path!r} is missing") from error
        except ValueError as error:
            raise self._damaged(str(error)) from error
        return np.frombuffer(b"".join(blocks), np.uint8)

    def _damaged(self, why: str) -> DataLossError:
        return DataLossError(f"the checkpoint's file {self._path!r} is damaged: {why}")
