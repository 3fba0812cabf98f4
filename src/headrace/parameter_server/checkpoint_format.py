"""What a checkpoint is on disk, format 1: files of tensors, and a manifest that names them.

    ckpt-3.json                        the manifest: written last, in one step
    ckpt-3.TOKEN.0-0.safetensors       what server 0 wrote, in files of some 64 MB
    ckpt-3.TOKEN.local.safetensors     arrays of the program that saved

Rule 1. There is a checkpoint when there is a manifest. Files that no manifest names are leftovers
        of a save that did not end.
Rule 2. A manifest says all: of what is in the files, nothing has to be guessed.
Rule 3. A *piece* is a part of one shard at one time. Pieces are applied in their order, and the
        later one counts; one that `begins` replaces all earlier ones of its shard.
Rule 4. An increment, `ckpt-3+2`, has what was written since `ckpt-3+1`; its manifest names those
        that it continues.
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
    "list_checkpoints",
    "list_increments",
    "list_up_to",
    "parse_tensor_file",
    "read_checkpoint",
    "split_path",
    "write_tensors",
]


FORMAT = 1

#: Before the rest of a manifest, of which it is the checksum; older ones have none.
_CHECKSUM_HEADER = re.compile(rb'\{\n "checksum": "([0-9a-f]{8})",')

_FILE = re.compile(r"(?P<name>.+)\.(?P<token>[0-9a-f]{8})\.[0-9a-z-]+\.safetensors")


class ShardPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of one shard, of a variable or a table.

    Its tensors are `key/value`, `key/OPTIMIZER/SLOT` ...; of a table also `key/ids`, `key/seen`,
    `key/touched`, and where it has them `key/removed` and `key/waiting_ids` ...

    Attributes:
        kind: "shard" or "table".
        shard: Its name.
        owner: Name of the variable or table.
        file: In which file.
        key: What the names of its tensors begin with.
        row: Of a variable: the first row, as the whole variable numbers them. None: the tensor
            `key/rows` names them.
        begins: Whether what was saved of the shard before is not needed.
        slot_firsts: What the elements of each slot begin with.
        step: Of a table: the highest step that an optimizer had reached.
        rows: Of a variable: how many rows there are from `row` on.
        checksum: Of its tensors; None, as of `rows`: it is of a time when none was written.
    """

    kind: str
    shard: str
    owner: str = msgspec.field(name="of")
    file: str
    key: str
    row: int | None = None
    begins: bool = False
    slot_firsts: dict[str, float] = {}
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
    """An optimizer: whose slots are its, and how many steps it took."""

    name: str
    kind: str
    iterations: int


class ArrayEntry(msgspec.Struct, frozen=True, tag="array"):
    """An array, or a variable of the program that saved; `key` is its tensor's name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int | None = None


class ValueEntry(msgspec.Struct, frozen=True, tag="value"):
    """A number, a string, a flag, or nothing."""

    value: int | float | str | bool | None


class StateEntry(msgspec.Struct, frozen=True, tag="state"):
    """What `get_state` returned: a value of JSON."""

    state: Any


class StateDictEntry(msgspec.Struct, frozen=True, tag="state_dict"):
    """What `state_dict` returned.

    Attributes:
        state: A value of JSON, see `checkpoint_tree.encode_state`.
        checksums: Of the arrays in it, by their tensors' names.
        kind: Name of the class; "", as of `parameters`: it is of a time when none was written.
        parameters: Of an optimizer: dtype and shape of each parameter.
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

#: Writes that were carried out: closure, number, answer; by what was written ("shard weights").
Answers: TypeAlias = dict[str, tuple[tuple[int, int, RecordedAnswer], ...]]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint.

    Attributes:
        format: 1.
        entries: What was saved, by path ("model/weights").
        pieces: Of variables and tables, in their order.
        local: The file with arrays of the program; "": none.
        continues: Names of the checkpoints that this one needs, the first one first.
        counters: What the servers counted.
        coordinator_term: Of the coordinator whose writes `answers` are.
        answers: Writes of closures that had not settled, each as it was when its shard was saved.
        holders: What had variables of its own, by path ("model"): "Dense of 2 variables".
    """

    format: int = FORMAT
    entries: dict[str, Entry] = {}
    pieces: tuple[ShardPiece, ...] = ()
    local: str = ""
    continues: tuple[str, ...] = ()
    counters: dict[str, int] = {}
    coordinator_term: int = msgspec.field(name="incarnation", default=0)
    answers: Answers = {}
    holders: dict[str, str] = {}

    def files(self) -> set[str]:
        """Return the names of the files that it needs itself."""
        own = {piece.file for piece in self.pieces}
        return own | {self.local} if self.local else own


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as it is written."""
    try:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    except TypeError as error:
        raise TypeError(
            f"a state that is to be saved holds what JSON has no form for: {error}"
        ) from error
    return b'{\n "checksum": "%08x",' % zlib.crc32(body[1:]) + body[1:]


def decode(data: bytes, name: str) -> Manifest:
    """Return a manifest that was read.

    Raises:
        DataLossError: It is damaged.
        FailedPreconditionError: It is of a later version.
    """
    checked = _CHECKSUM_HEADER.match(data)
    if checked and int(checked[1], 16) != zlib.crc32(data[checked.end() :]):
        raise DataLossError(
            f"the manifest of the checkpoint {name!r} is damaged: its checksum is not that of what "
            "was written"
        )
    try:
        found = msgspec.json.decode(data, type=_FormatVersion).format
        if found > FORMAT:
            raise FailedPreconditionError(
                f"the checkpoint {name!r} is of format {found}, and this version of Headrace reads "
                f"formats up to {FORMAT}; use a later one"
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise DataLossError(
            f"the manifest of the checkpoint {name!r} is damaged: {error}"
        ) from error


class _FormatVersion(msgspec.Struct):
    format: int


def parse_tensor_file(file: str) -> tuple[str, str] | None:
    """Return the checkpoint and the attempt that a file of tensors belongs to; None: it is none."""
    found = _FILE.fullmatch(file)
    return None if found is None else (found["name"], found["token"])


def current_pieces(pieces: Iterable[ShardPiece]) -> Sequence[ShardPiece]:
    """Return the pieces that count: of each shard, those from the last one that begins it."""
    kept: dict[str, list[ShardPiece]] = {}
    for piece in pieces:
        if piece.begins or piece.shard not in kept:
            kept[piece.shard] = []
        kept[piece.shard].append(piece)
    return [piece for each in kept.values() for piece in each]


# --- files of tensors, as `safetensors` writes them: a header of JSON, then the bytes of each -----

# What is written is known beforehand but for its bytes, so arrays are written one after another and
# never copied together. Dtypes that the format has no name for are written as bytes (U8), with the
# dtype's name in the header's metadata.

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
        if dtype not in _DTYPE_NAMES:
            others[key] = dtype
            shape.append(array.dtype.itemsize)
        header[key] = {
            "dtype": _DTYPE_NAMES.get(dtype, "U8"),
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
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL_ERRORS:
            raise FailedPreconditionError(
                f"{folder.path(name)!r} cannot be written: {cause.strerror}; make room there"
            ) from error
        raise
    return 8 + len(words) + at


def compute_checksum(tensors: Mapping[str, NDArray[Any]]) -> int:
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
        if not 2 <= head <= min(_MAX_HEADER_BYTES, len(self._bytes) - 8):
            raise self._damaged_error("it has no header")
        try:
            self._header = json.loads(self._bytes[8 : 8 + head].tobytes())
        except ValueError as error:
            raise self._damaged_error(f"its header is no JSON ({error})") from error
        if not isinstance(self._header, dict):
            raise self._damaged_error("its header is no object")
        self._others = self._header.pop("__metadata__", {})
        self._first = 8 + head

    def names(self) -> list[str]:
        """Return the names of its tensors."""
        return list(self._header)

    def __getitem__(self, name: str) -> NDArray[Any]:
        form = self._header.get(name)
        if form is None:
            raise self._damaged_error(f"it has no tensor {name!r}")
        try:
            begin, end = form["data_offsets"]
            dtype = parse_dtype(self._others.get(name) or _DTYPES[form["dtype"]])
            shape = form["shape"][:-1] if name in self._others else form["shape"]
            raw = self._bytes[self._first + begin : self._first + end]
            due = dtype.itemsize * math.prod(shape)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged_error(
                f"its header says nonsense of {name!r} ({error!r})"
            ) from error
        if len(raw) != end - begin or len(raw) != due:
            raise self._damaged_error(f"it ends within the tensor {name!r}")
        if not len(raw):
            return np.empty(shape, dtype)
        found = np.frombuffer(raw.data, dtype).reshape(shape)
        found.flags.writeable = False
        return found

    def read_under(self, key: str, checksum: int | None = None) -> dict[str, NDArray[Any]]:
        """Return the tensors whose names begin with `key/`, by the rest of their names.

        Args:
            key: Of a piece.
            checksum: What `compute_checksum` returned when they were written; None: it is not
                known.

        Raises:
            DataLossError: They are others now.
        """
        start = f"{key}/"
        found = {name[len(start) :]: self[name] for name in self._header if name.startswith(start)}
        self.check(key, found, checksum)
        return found

    def check(self, what: str, tensors: Mapping[str, NDArray[Any]], checksum: int | None) -> None:
        """Raise DataLossError if tensors are not those that were written."""
        if checksum is not None and compute_checksum(tensors) != checksum:
            raise self._damaged_error(f"the checksum of {what!r} is not that of what was written")

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

    def _damaged_error(self, why: str) -> DataLossError:
        return DataLossError(f"the checkpoint's file {self._path!r} is damaged: {why}")


# --------------------------------------------------------------------------------------------------
# The checkpoints in a folder: found, read, deleted, and what is left of saves that did not end

_MANIFEST = ".json"
_NUMBERED = re.compile(r"-(\d+)$")
_INCREMENT = re.compile(r"(?P<full>.+)\+(?P<number>\d+)$")


class LoadedCheckpoint:
    """A checkpoint that was read: its manifest, and the pieces of those that it continues.

    Args:
        folder: Where it is.
        name: Its name there.
        manifest: Of it.
        pieces: Of all, in their order.
    """

    def __init__(
        self, folder: Folder, name: str, manifest: Manifest, pieces: Sequence[ShardPiece]
    ) -> None:
        self.folder = folder
        self.name = name
        self.manifest = manifest
        self.pieces = tuple(pieces)

    @property
    def path(self) -> str:
        """Its path or URL."""
        return self.folder.path(self.name)

    def exists(self) -> bool:
        """Whether it is still there."""
        try:
            self.folder.read(self.name + _MANIFEST)
        except NotFoundError:
            return False
        return True


def split_path(path: FileName) -> tuple[Folder, str]:
    """Return the folder of a checkpoint and its name there."""
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
    """Return a checkpoint.

    Raises:
        NotFoundError: There is none, or it was deleted meanwhile.
        DataLossError: Its manifest is damaged.
    """
    manifest = _manifest(folder, name)
    pieces: list[ShardPiece] = []
    for before in manifest.continues:
        try:
            pieces += _manifest(folder, before).pieces
        except NotFoundError as error:
            raise NotFoundError(
                f"the checkpoint {folder.path(name)!r} continues {before!r}, which is not there"
            ) from error
    return LoadedCheckpoint(folder, name, manifest, [*pieces, *manifest.pieces])


def _manifest(folder: Folder, name: str) -> Manifest:
    try:
        data = folder.read(name + _MANIFEST)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no checkpoint {folder.path(name)!r}: it was deleted, or never finished"
        ) from error
    return decode(data, folder.path(name))


def list_checkpoints(folder: Folder, prefix: str | None = None) -> list[str]:
    """Return the names of full checkpoints, by their number."""
    found = []
    for file in _list_files(folder):
        name = file.removesuffix(_MANIFEST)
        number = _NUMBERED.search(name)
        if name != file and number and (prefix is None or name[: number.start()] == prefix):
            found.append((int(number[1]), name))
    return [name for _, name in sorted(found)]


def list_increments(folder: Folder, full: str) -> list[str]:
    """Return the names of the increments of a checkpoint, in their order."""
    found = []
    for file in _list_files(folder):
        match = _INCREMENT.fullmatch(file.removesuffix(_MANIFEST))
        if match and file.endswith(_MANIFEST) and match["full"] == full:
            found.append((int(match["number"]), match.string))
    return [name for _, name in sorted(found)]


def list_up_to(folder: Folder, prefix: str, last: str) -> list[str]:
    """Return the names of full checkpoints and increments up to one, in their order."""
    names = []
    for full in list_checkpoints(folder, prefix):
        for name in (full, *list_increments(folder, full)):
            names.append(name)
            if name == last:
                return names
    return names


def delete_checkpoint(folder: Folder, full: str) -> None:
    """Delete a checkpoint with its increments: the manifests first."""
    names = [full, *list_increments(folder, full)]
    for name in reversed(names):
        folder.remove(name + _MANIFEST)
    delete_unfinished(folder, lambda name: name in names)


def delete_unfinished(folder: Folder, is_deletable: Callable[[str], bool]) -> None:
    """Delete the files of saves that did not end.

    Args:
        folder: Where they are.
        is_deletable: Says of the name of a checkpoint whether its files may be deleted.
    """
    left: dict[str, list[str]] = {}
    for file in _list_files(folder):
        attempt = parse_tensor_file(file)
        if attempt is not None and is_deletable(attempt[0]):
            left.setdefault(attempt[0], []).append(file)
    for name, files in left.items():
        try:
            needed = _manifest(folder, name).files()
        except (NotFoundError, DataLossError):
            needed = set()
        for file in files:
            if file not in needed:
                folder.remove(file)


def _list_files(folder: Folder) -> list[str]:
    left = set(folder.leftovers())
    if folder.is_local:  # where they are of files that are not whole
        left = {name for name in left if not name.endswith(_MANIFEST)}
    return sorted(left.union(folder.names()))
