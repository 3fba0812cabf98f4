"""Checkpoint files, format 1: files of tensors, and a manifest that names them.

    ckpt-3.json                        the manifest: written last, atomically
    ckpt-3.TOKEN.0-0.safetensors       shards of server 0, in files of about 64 MB
    ckpt-3.TOKEN.local.safetensors     arrays of the saving program

Rule 1. A checkpoint exists if its manifest exists. Files that no manifest names are left over from
        a save that was interrupted.
Rule 2. The manifest describes all contents of the files; readers need to guess nothing.
Rule 3. A *piece* is a part of one shard at one time. Pieces are applied in order, and later ones
        take precedence; a piece with `begins` replaces all earlier ones of its shard.
Rule 4. An increment, `ckpt-3+2`, has the changes since `ckpt-3+1`; its manifest names the
        checkpoints that it continues.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataLossError, FailedPreconditionError, NotFoundError
from headrace.parameter_server.specs import name_of, parse_dtype
from headrace.parameter_server.write_keys import RecordedAnswer
from headrace.storage.files import Folder, open_file, open_folder
from headrace.storage.names import FileName, as_names, is_local

__all__ = [
    "FORMAT",
    "ArrayEntry",
    "Entry",
    "LoadedCheckpoint",
    "Manifest",
    "OptimizerEntry",
    "ShardPiece",
    "StateDictEntry",
    "StateEntry",
    "TableEntry",
    "TensorFile",
    "ValueEntry",
    "VariableEntry",
    "compute_checksum",
    "current_pieces",
    "decode",
    "delete_checkpoint",
    "delete_unfinished",
    "encode",
    "is_numbered",
    "list_checkpoints",
    "list_increments",
    "list_up_to",
    "list_without_manifest",
    "parse_tensor_file",
    "read_checkpoint",
    "split_path",
    "write_tensors",
]


FORMAT = 1

#: Checksum of the rest of the manifest, which follows it; older manifests have none.
_CHECKSUM_HEADER = re.compile(rb'\{\n "checksum": "([0-9a-f]{8})",')

_FILE = re.compile(r"(?P<name>.+)\.(?P<token>[0-9a-f]{8})\.[0-9a-z-]+\.safetensors")


class ShardPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of one shard, of a variable or a table.

    Its tensors are `key/value`, `key/OPTIMIZER/SLOT` ...; those of a table also `key/ids`,
    `key/seen`, `key/last_used`, and optionally `key/removed` and `key/waiting_ids` ...

    Attributes:
        kind: "shard" or "table".
        shard: Name of the shard.
        owner: Name of the variable or table.
        file: Name of the file.
        key: Prefix of the names of its tensors.
        row: For a variable: first row, in the numbering of the whole variable. None if the tensor
            `key/rows` has the row numbers.
        begins: Whether the piece replaces all earlier pieces of the shard.
        slot_initial_values: Initial value of the elements of each slot.
        step: For a table: highest step that an optimizer had reached.
        rows: For a variable: number of rows starting at `row`. None in old checkpoints.
        checksum: Checksum of its tensors. None in old checkpoints.
    """

    kind: str
    shard: str
    owner: str
    file: str
    key: str
    row: int | None = None
    begins: bool = False
    slot_initial_values: dict[str, float] = {}
    step: int = 0
    rows: int | None = None
    checksum: int | None = None


class VariableEntry(msgspec.Struct, frozen=True, tag="variable"):
    """A variable on parameter servers."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class TableEntry(msgspec.Struct, frozen=True, tag="table"):
    """A table on parameter servers."""

    name: str
    dim: int
    dtype: str


class OptimizerEntry(msgspec.Struct, frozen=True, tag="optimizer"):
    """An optimizer: the owner of slots, and its number of steps."""

    name: str
    kind: str
    iterations: int


class ArrayEntry(msgspec.Struct, frozen=True, tag="array"):
    """An array, or a local variable of the saving program; `key` is the name of its tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int | None = None


class ValueEntry(msgspec.Struct, frozen=True, tag="value"):
    """A number, a string, a bool, or None."""

    value: int | float | str | bool | None


class StateEntry(msgspec.Struct, frozen=True, tag="state"):
    """The result of `get_state`: a JSON value."""

    state: Any


class StateDictEntry(msgspec.Struct, frozen=True, tag="state_dict"):
    """The result of `state_dict`.

    Attributes:
        state: A JSON value, see `checkpoint_tree.encode_state`.
        checksums: Checksums of its arrays, by tensor name.
        kind: Class name. "" in old checkpoints.
        parameters: For an optimizer: dtype and shape of each parameter. Empty in old checkpoints.
    """

    state: Any
    checksums: dict[str, int]
    kind: str = ""
    parameters: tuple[str, ...] = ()


Entry: TypeAlias = (
    VariableEntry
    | TableEntry
    | OptimizerEntry
    | ArrayEntry
    | ValueEntry
    | StateEntry
    | StateDictEntry
)

#: Executed writes as (closure, write number, answer), by target ("shard weights").
Answers: TypeAlias = dict[str, tuple[tuple[int, int, RecordedAnswer], ...]]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a checkpoint.

    Attributes:
        format: 1.
        entries: Saved objects, by path ("model/weights").
        pieces: Pieces of variables and tables, in order.
        local: File with arrays of the saving program; "" if there is none.
        continues: Names of the checkpoints that this one needs, oldest first.
        counters: Counters of the servers.
        coordinator_term: Term of the coordinator whose writes `answers` holds.
        answers: Writes of unfinished closures, as of the moment when each shard was saved.
        holders: Objects that have variables, by path ("model"): "Dense of 2 variables".
    """

    format: int = FORMAT
    entries: dict[str, Entry] = {}
    pieces: tuple[ShardPiece, ...] = ()
    local: str = ""
    continues: tuple[str, ...] = ()
    counters: dict[str, int] = {}
    coordinator_term: int = 0
    answers: Answers = {}
    holders: dict[str, str] = {}

    def files(self) -> set[str]:
        """Return the names of the files that this checkpoint itself needs."""
        own = {piece.file for piece in self.pieces}
        return own | {self.local} if self.local else own


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file."""
    try:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    except TypeError as error:
        raise TypeError(
            f"the state of an object contains a value that JSON does not support: {error}"
        ) from error
    return b'{\n "checksum": "%08x",' % zlib.crc32(body[1:]) + body[1:]


def decode(data: bytes, name: str) -> Manifest:
    """Return the manifest that a file holds.

    Raises:
        DataLossError: If it is damaged.
        FailedPreconditionError: If it was written by a later version.
    """
    checksum_header = _CHECKSUM_HEADER.match(data)
    if checksum_header and int(checksum_header[1], 16) != zlib.crc32(data[checksum_header.end() :]):
        raise DataLossError(
            f"the manifest of the checkpoint {name!r} is damaged: checksum mismatch"
        )
    try:
        found = msgspec.json.decode(data, type=_FormatVersion).format
        if found > FORMAT:
            raise FailedPreconditionError(
                f"the checkpoint {name!r} has format {found}, but this version of Headrace reads "
                f"formats up to {FORMAT}; use a later version"
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise DataLossError(
            f"the manifest of the checkpoint {name!r} is damaged: {error}"
        ) from error


class _FormatVersion(msgspec.Struct):
    format: int


def parse_tensor_file(file: str) -> tuple[str, str] | None:
    """Return the checkpoint name and save token of a tensor file; None for other files."""
    found = _FILE.fullmatch(file)
    return None if found is None else (found["name"], found["token"])


def current_pieces(pieces: Iterable[ShardPiece]) -> Sequence[ShardPiece]:
    """Return the current pieces: for each shard, those from the last one that begins it."""
    by_shard: dict[str, list[ShardPiece]] = {}
    for piece in pieces:
        if piece.begins or piece.shard not in by_shard:
            by_shard[piece.shard] = []
        by_shard[piece.shard].append(piece)
    return [piece for each in by_shard.values() for piece in each]


# --- tensor files as written by `safetensors`: a JSON header, then the bytes of each tensor -------

# The layout is known before the bytes are, so arrays are written one after another and never copied
# into one buffer. Dtypes without a name in the format are written as bytes (U8), with the dtype's
# name in the header's metadata.

_DTYPE_NAMES = {
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

_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_HEADER_BYTES = 100 << 20
_BLOCK = 16 << 20


def write_tensors(folder: Folder, name: str, tensors: Mapping[str, NDArray[Any]]) -> int:
    """Write a file, and return its size in bytes; it becomes visible when it is complete.

    Raises:
        FailedPreconditionError: If the disk is full.
    """
    header: dict[str, Any] = {}
    other_dtypes: dict[str, str] = {}
    offset = 0
    for key, array in tensors.items():
        dtype = name_of(array.dtype)
        shape = list(array.shape)
        if dtype not in _DTYPE_NAMES:
            other_dtypes[key] = dtype
            shape.append(array.dtype.itemsize)
        header[key] = {
            "dtype": _DTYPE_NAMES.get(dtype, "U8"),
            "shape": shape,
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    if other_dtypes:
        header["__metadata__"] = other_dtypes
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    try:
        with folder.create(name) as file:
            _write(file, len(header_bytes).to_bytes(8, "little"))
            _write(file, header_bytes)
            for array in tensors.values():
                flat = _bytes_of(array)
                for start in range(0, flat.nbytes, _BLOCK):
                    _write(file, flat[start : start + _BLOCK])
        folder.publish(name, name)
    except Exception as error:
        with contextlib.suppress(Exception):
            folder.remove(name)  # free the space
        cause = error if isinstance(error, OSError) and error.errno else error.__cause__
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL_ERRORS:
            raise FailedPreconditionError(
                f"{folder.path(name)!r} cannot be written: {cause.strerror}; free space on that "
                "disk"
            ) from error
        raise
    return 8 + len(header_bytes) + offset


def compute_checksum(tensors: Mapping[str, NDArray[Any]]) -> int:
    """Return a checksum (CRC-32) of names, dtypes, shapes and bytes, independent of their order."""
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
    """Write all bytes: an unbuffered file may accept fewer at a time."""
    rest = memoryview(data)
    while rest.nbytes:
        taken = file.write(rest)
        rest = rest[taken:]


class TensorFile:
    """A tensor file opened for reading; its arrays are read-only views of its memory.

    Args:
        folder: Directory of the file.
        name: Name of the file.

    Raises:
        DataLossError: If the file is missing or damaged.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._path = folder.path(folder.find_name(name, name))
        self._bytes = self._read(folder)
        header_size = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if not 2 <= header_size <= min(_MAX_HEADER_BYTES, len(self._bytes) - 8):
            raise self._damaged_error("the header is missing")
        try:
            self._header = json.loads(self._bytes[8 : 8 + header_size].tobytes())
        except ValueError as error:
            raise self._damaged_error(f"the header is not valid JSON ({error})") from error
        if not isinstance(self._header, dict):
            raise self._damaged_error("the header is not a JSON object")
        self._other_dtypes = self._header.pop("__metadata__", {})
        self._data_start = 8 + header_size

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._header)

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._header.get(name)
        if entry is None:
            raise self._damaged_error(f"it has no tensor {name!r}")
        try:
            begin, end = entry["data_offsets"]
            dtype = parse_dtype(self._other_dtypes.get(name) or _DTYPES[entry["dtype"]])
            shape = entry["shape"][:-1] if name in self._other_dtypes else entry["shape"]
            raw = self._bytes[self._data_start + begin : self._data_start + end]
            expected_size = dtype.itemsize * math.prod(shape)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged_error(
                f"the header entry of tensor {name!r} is invalid ({error!r})"
            ) from error
        if len(raw) != end - begin or len(raw) != expected_size:
            raise self._damaged_error(f"the data of tensor {name!r} is incomplete")
        if not len(raw):
            return np.empty(shape, dtype)
        found = np.frombuffer(raw.data, dtype).reshape(shape)
        found.flags.writeable = False
        return found

    def read_under(self, key: str, checksum: int | None = None) -> dict[str, NDArray[Any]]:
        """Return the tensors whose names begin with `key/`, by the rest of their names.

        Args:
            key: Key of a piece.
            checksum: Result of `compute_checksum` when they were written; None skips the check.

        Raises:
            DataLossError: If the checksum differs.
        """
        start = f"{key}/"
        found = {name[len(start) :]: self[name] for name in self._header if name.startswith(start)}
        self.check(key, found, checksum)
        return found

    def check(
        self, description: str, tensors: Mapping[str, NDArray[Any]], checksum: int | None
    ) -> None:
        """Raise DataLossError if tensors do not match the checksum of what was written."""
        if checksum is not None and compute_checksum(tensors) != checksum:
            raise self._damaged_error(f"checksum mismatch in {description!r}")

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
            raise self._damaged_error(str(error)) from error
        return np.frombuffer(b"".join(blocks), np.uint8)

    def _damaged_error(self, reason: str) -> DataLossError:
        return DataLossError(f"the checkpoint's file {self._path!r} is damaged: {reason}")


# --------------------------------------------------------------------------------------------------
# Checkpoints in a directory: list, read, delete, and clean up after interrupted saves

_MANIFEST = ".json"
_NUMBERED = re.compile(r"-(\d+)$")
_INCREMENT = re.compile(r"(?P<full>.+)\+(?P<number>\d+)$")


class LoadedCheckpoint:
    """A checkpoint that was read: its manifest, and all pieces, with those that it continues.

    Args:
        folder: Directory of the checkpoint.
        name: Name of the checkpoint.
        manifest: Manifest of the checkpoint.
        pieces: All pieces, in order.
    """

    def __init__(
        self, folder: Folder, name: str, manifest: Manifest, pieces: Sequence[ShardPiece]
    ) -> None:
        self.folder = folder
        self.name = name
        self.manifest = manifest
        self.pieces: tuple[ShardPiece, ...] = tuple(pieces)

    @property
    def path(self) -> str:
        """Path or URL."""
        return self.folder.path(self.name)

    def exists(self) -> bool:
        """Return whether the checkpoint still exists."""
        try:
            self.folder.read(self.name + _MANIFEST)
        except NotFoundError:
            return False
        return True


def split_path(path: FileName) -> tuple[Folder, str]:
    """Return the directory and the name of a checkpoint."""
    (given,) = as_names("path", [path])
    given = given.removeprefix("file://")
    directory, _, name = given.rpartition("/")
    if not name:
        raise ValueError(f"`path` must end with the name of a checkpoint, but got {given!r}")
    if not directory:
        directory = "/" if given.startswith("/") else "."
    # Servers have other working directories.
    return open_folder(os.path.abspath(directory) if is_local(given) else directory), name


def read_checkpoint(folder: Folder, name: str) -> LoadedCheckpoint:
    """Read a checkpoint.

    Raises:
        NotFoundError: If it does not exist, or was deleted during the read.
        DataLossError: If its manifest is damaged.
    """
    manifest = _manifest(folder, name)
    pieces: list[ShardPiece] = []
    for earlier in manifest.continues:
        try:
            pieces += _manifest(folder, earlier).pieces
        except NotFoundError as error:
            raise NotFoundError(
                f"the checkpoint {folder.path(name)!r} continues {earlier!r}, which does not exist"
            ) from error
    return LoadedCheckpoint(folder, name, manifest, [*pieces, *manifest.pieces])


def _manifest(folder: Folder, name: str) -> Manifest:
    try:
        data = folder.read(name + _MANIFEST)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no checkpoint {folder.path(name)!r}: it was deleted, or its save was not "
            "completed"
        ) from error
    return decode(data, folder.path(name))


def list_checkpoints(folder: Folder, prefix: str | None = None) -> list[str]:
    """Return the names of full checkpoints, sorted by number."""
    found = []
    for file in _list_files(folder):
        name = file.removesuffix(_MANIFEST)
        number = _NUMBERED.search(name)
        if name != file and number and (prefix is None or name[: number.start()] == prefix):
            found.append((int(number[1]), name))
    return [name for _, name in sorted(found)]


def list_increments(folder: Folder, full: str) -> list[str]:
    """Return the names of the increments of a checkpoint, in order."""
    found = []
    for file in _list_files(folder):
        match = _INCREMENT.fullmatch(file.removesuffix(_MANIFEST))
        if match and file.endswith(_MANIFEST) and match["full"] == full:
            found.append((int(match["number"]), match.string))
    return [name for _, name in sorted(found)]


def list_up_to(folder: Folder, prefix: str, last: str) -> list[str]:
    """Return the names of full checkpoints and increments up to `last`, in order."""
    names = []
    for full in list_checkpoints(folder, prefix):
        for name in (full, *list_increments(folder, full)):
            names.append(name)
            if name == last:
                return names
    return names


def is_numbered(name: str, prefix: str) -> bool:
    """Return whether a name is that of a checkpoint or increment with this prefix."""
    return re.fullmatch(rf"{re.escape(prefix)}-\d+(\+\d+)?", name) is not None


def list_without_manifest(folder: Folder, prefix: str) -> list[str]:
    """Return the names of tensor files of checkpoints of which no manifest exists."""
    names = _list_files(folder)
    return [
        file
        for file in names
        if (attempt := parse_tensor_file(file)) is not None
        and is_numbered(attempt[0], prefix)
        and attempt[0] + _MANIFEST not in names
    ]


def delete_checkpoint(folder: Folder, full: str) -> None:
    """Delete a checkpoint with its increments, manifests first."""
    names = [full, *list_increments(folder, full)]
    for name in reversed(names):
        folder.remove(name + _MANIFEST)
    delete_unfinished(folder, lambda name: name in names)


def delete_unfinished(folder: Folder, is_deletable: Callable[[str], bool]) -> None:
    """Delete the files of interrupted saves.

    Args:
        folder: Directory of the files.
        is_deletable: Returns whether the files of a checkpoint name may be deleted.
    """
    candidates: dict[str, list[str]] = {}
    for file in _list_files(folder):
        attempt = parse_tensor_file(file)
        if attempt is not None and is_deletable(attempt[0]):
            candidates.setdefault(attempt[0], []).append(file)
    for name, files in candidates.items():
        try:
            needed = _manifest(folder, name).files()
        except (NotFoundError, DataLossError):
            needed = set()
        for file in files:
            if file not in needed:
                folder.remove(file)


def _list_files(folder: Folder) -> list[str]:
    names = set(folder.list_unpublished())
    if folder.is_local:  # unpublished manifests in a local directory are incomplete
        names = {name for name in names if not name.endswith(_MANIFEST)}
    return sorted(names.union(folder.list_published()))
