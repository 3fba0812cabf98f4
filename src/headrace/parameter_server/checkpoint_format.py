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

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from headrace.errors import DataLossError, FailedPreconditionError
from headrace.parameter_server.write_keys import Remembered

__all__ = [
    "FORMAT",
    "ArrayEntry",
    "Entry",
    "Manifest",
    "OptimizerEntry",
    "Piece",
    "StateDictEntry",
    "StateEntry",
    "TableEntry",
    "ValueEntry",
    "VariableEntry",
    "attempt_of",
    "decode",
    "encode",
    "standing",
]

FORMAT = 1

#: Before the rest of a manifest, of which it is the checksum; older ones have none.
_CHECKED = re.compile(rb'\{\n "checksum": "([0-9a-f]{8})",')
_FILE = re.compile(r"(?P<name>.+)\.(?P<token>[0-9a-f]{8})\.[0-9a-z-]+\.safetensors")


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of one shard, of a variable or a table.

    Its tensors are `key/value`, `key/OPTIMIZER/SLOT` ...; of a table also `key/ids`, `key/seen`,
    `key/touched`, and where it has them `key/removed` and `key/waiting_ids` ...

    Attributes:
        kind: "shard" or "table".
        shard: Its name.
        of: Name of the variable or table.
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
    of: str
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
        state: A value of JSON, see `checkpoint_frameworks.encode_state`.
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
Answers: TypeAlias = dict[str, tuple[tuple[int, int, Remembered], ...]]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint.

    Attributes:
        format: 1.
        entries: What was saved, by path ("model/weights").
        pieces: Of variables and tables, in their order.
        local: The file with arrays of the program; "": none.
        continues: Names of the checkpoints that this one needs, the first one first.
        counters: What the servers counted.
        incarnation: Of the coordinator whose writes `answers` are.
        answers: Writes of closures that had not settled, each as it was when its shard was saved.
        holders: What had variables of its own, by path ("model"): "Dense of 2 variables".
    """

    format: int = FORMAT
    entries: dict[str, Entry] = {}
    pieces: tuple[Piece, ...] = ()
    local: str = ""
    continues: tuple[str, ...] = ()
    counters: dict[str, int] = {}
    incarnation: int = 0
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
    checked = _CHECKED.match(data)
    if checked and int(checked[1], 16) != zlib.crc32(data[checked.end() :]):
        raise DataLossError(
            f"the manifest of the checkpoint {name!r} is damaged: its checksum is not that of what "
            "was written"
        )
    try:
        found = msgspec.json.decode(data, type=_Form).format
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


class _Form(msgspec.Struct):
    format: int


def attempt_of(file: str) -> tuple[str, str] | None:
    """Return the checkpoint and the attempt that a file of tensors belongs to; None: it is none."""
    found = _FILE.fullmatch(file)
    return None if found is None else (found["name"], found["token"])


def standing(pieces: Iterable[Piece]) -> Sequence[Piece]:
    """Return the pieces that count: of each shard, those from the last one that begins it."""
    kept: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.begins or piece.shard not in kept:
            kept[piece.shard] = []
        kept[piece.shard].append(piece)
    return [piece for each in kept.values() for piece in each]
