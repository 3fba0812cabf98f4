"""Shard files of checkpoints: servers write and read their shards while they execute operations.

Rule 1. Copies are made between two operations, at most `CHUNK_BYTES` at a time if a shard is
        larger; all other work is done on another thread.
Rule 2. A shard is saved as of one moment. A shard larger than a chunk is copied chunk by chunk;
        then the rows written since then are copied together, and replace the earlier copies.
Rule 3. The write keys of a shard are those of the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataLossError, NotFoundError
from headrace.parameter_server.array_shard import ArrayShard
from headrace.parameter_server.checkpoint_format import (
    Answers,
    ShardPiece,
    TensorFile,
    compute_checksum,
    current_pieces,
    write_tensors,
)
from headrace.parameter_server.gradients import assign_shards
from headrace.parameter_server.operations import Counted
from headrace.parameter_server.shard_values import SavedShard, SavedTable, ShardSnapshot
from headrace.parameter_server.specs import ShardSpec, TableSpec, fill_array, parse_dtype
from headrace.parameter_server.store import (
    ShardId,
    ShardStore,
    build_shard,
    forget_removed_ids,
    list_shards,
    measure_dirty_bytes,
    measure_rows,
    put_shard,
    set_mark,
    snapshot_changes,
    snapshot_rows,
    snapshot_shard,
)
from headrace.parameter_server.table_shard import TableShard
from headrace.storage.files import Folder

__all__ = [
    "RestoredShards",
    "assemble_shard",
    "put_shards",
    "read_shards",
    "write_shards",
]


CHUNK_BYTES = 8 << 20
"""Bytes copied between two operations, which takes a few milliseconds."""
_TARGET_FILE_BYTES = 64 << 20


class WrittenShards(NamedTuple):
    """Shards that a server wrote to files.

    Attributes:
        pieces: Pieces, in order.
        mark: The pieces contain everything written before this mark.
        counters: Values of the counters.
        coordinator_term: Term of the coordinator whose writes `answers` holds.
        answers: Answers by write key, for each shard.
        bytes: Size of the files.
    """

    pieces: tuple[ShardPiece, ...]
    mark: int
    counters: dict[str, int]
    coordinator_term: int
    answers: Answers
    bytes: int


class _CopiedPiece(NamedTuple):
    """A piece with its arrays, before it has a file."""

    shard: ShardId
    owner: str
    row: int | None
    begins: bool
    slot_initial_values: dict[str, float]
    step: int
    arrays: dict[str, NDArray[Any]]


def write_shards(
    store: ShardStore,
    call_between_operations: Callable[[Callable[[], Any]], Any],
    folder: Folder,
    file_prefix: str,
    shards: Sequence[ShardId],
    since: int | None,
    forget_earlier_marks: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> WrittenShards:
    """Write shards to files.

    Args:
        store: Store of the shards.
        call_between_operations: Calls a function between two operations.
        folder: Directory to write to.
        file_prefix: Prefix of the file names.
        shards: Shards to write.
        since: Mark after which changes are written; None writes everything.
        forget_earlier_marks: Whether changes after earlier marks will never be requested.
        chunk_bytes: Bytes to copy at a time.

    Raises:
        NotFoundError: If the store lacks one of the shards.
    """

    def begin() -> int:
        missing = set(shards).difference(list_shards(store))
        if missing:
            kind, name = min(missing)
            raise NotFoundError(
                f"there is no {kind} {name} on this server, so it cannot be saved: the server was "
                "restarted and not restored"
            )
        if forget_earlier_marks:
            forget_removed_ids(store, store.period if since is None else since)
        return set_mark(store)

    marked = call_between_operations(begin)
    answers: Answers = {}
    files = _PieceFiles(folder, file_prefix)
    small: list[ShardId] = []
    size = 0
    for shard in shards:
        needed, is_all = call_between_operations(partial(measure_dirty_bytes, store, shard, since))
        if is_all and needed > chunk_bytes:
            for copied in _copy_in_chunks(
                store, call_between_operations, shard, marked, chunk_bytes, answers
            ):
                files.add(copied)
            continue
        if small and size + needed > chunk_bytes:
            for copied in call_between_operations(
                partial(_copy_small_shards, store, small, since, answers)
            ):
                files.add(copied)
            small, size = [], 0
        small.append(shard)
        size += needed
    if small:
        for copied in call_between_operations(
            partial(_copy_small_shards, store, small, since, answers)
        ):
            files.add(copied)
    files.flush()

    def end() -> tuple[dict[str, int], int]:
        for counter in store.counters:
            answers[f"counter {counter}"] = store.write_keys.answers_for(f"counter {counter}")
        return dict(store.counters), store.write_keys.coordinator_term

    counters, coordinator_term = call_between_operations(end)
    return WrittenShards(
        tuple(files.pieces),
        marked,
        counters,
        coordinator_term,
        {target: found for target, found in answers.items() if found},
        files.bytes,
    )


def _copy_small_shards(
    store: ShardStore, shards: list[ShardId], since: int | None, answers: Answers
) -> list[_CopiedPiece]:
    """Copy the current contents of shards, or their changes since a mark."""
    made = []
    for shard in shards:
        target = f"{shard.kind} {shard.name}"
        answers[target] = store.write_keys.answers_for(target)
        copied = _copy_shard(store, shard, since)
        if copied.begins or shard.kind == "table" or len(copied.arrays["rows"]):
            made.append(copied)
    return made


def _copy_shard(store: ShardStore, shard: ShardId, since: int | None) -> _CopiedPiece:
    if since is None:
        saved = snapshot_shard(store, shard)
        return _build_piece(shard, saved, None, 0, True)
    changes = snapshot_changes(store, shard, since)
    arrays = dict(changes.arrays)
    if changes.removed_ids is not None and len(changes.removed_ids):
        arrays["removed"] = changes.removed_ids
    return _build_piece(
        shard, ShardSnapshot(changes.record, arrays), changes.rows, 0, changes.is_complete
    )


def _build_piece(
    shard: ShardId,
    saved: ShardSnapshot[Any],
    rows: NDArray[np.int64] | None,
    first: int,
    begins: bool,
) -> _CopiedPiece:
    record, arrays = saved
    if shard.kind == "table":
        # Columns were gathered row by row, so they are copies.
        made = dict(arrays)
        return _CopiedPiece(
            shard, record.spec.table, None, begins, record.slot_initial_values, record.step, made
        )
    assert isinstance(record, SavedShard)
    made = {name: np.array(array, order="C", copy=True) for name, array in arrays.items()}
    row: int | None = record.spec.row + first
    if rows is not None:
        made["rows"] = rows + record.spec.row
        row = None
    return _CopiedPiece(
        shard, record.spec.variable, row, begins, record.slot_initial_values, 0, made
    )


def _copy_in_chunks(
    store: ShardStore,
    call_between_operations: Callable[[Callable[[], Any]], Any],
    shard: ShardId,
    mark: int,
    chunk_bytes: int,
    answers: Answers,
) -> Iterator[_CopiedPiece]:
    """Copy a large shard chunk by chunk, and finally the changes since the start."""
    start = 0
    stop, row_bytes = call_between_operations(partial(measure_rows, store, shard))
    step = max(1, chunk_bytes // row_bytes)
    is_first = True
    while start < stop:

        def part(first: int = start, begins: bool = is_first) -> _CopiedPiece:
            saved = snapshot_rows(store, shard, first, first + step)
            return _build_piece(shard, saved, None, first, begins)

        yield call_between_operations(part)
        start += step
        is_first = False

    def rest() -> list[_CopiedPiece]:
        return _copy_small_shards(store, [shard], mark, answers)

    yield from call_between_operations(rest)


class _PieceFiles:
    """Collects pieces into files of about 64 MB."""

    def __init__(self, folder: Folder, file_prefix: str) -> None:
        self.pieces: list[ShardPiece] = []
        self.bytes = 0
        self._folder = folder
        self._file_prefix = file_prefix
        self._number = 0
        self._tensors: dict[str, NDArray[Any]] = {}
        self._size = 0

    def add(self, copied: _CopiedPiece) -> None:
        """Add a piece; it is written when there is enough for a file."""
        key = str(len(self.pieces))
        value = copied.arrays.get("value")
        is_run = copied.row is not None and value is not None and value.ndim
        self.pieces.append(
            ShardPiece(
                kind=copied.shard.kind,
                shard=copied.shard.name,
                owner=copied.owner,
                file=f"{self._file_prefix}-{self._number}.safetensors",
                key=key,
                row=copied.row,
                begins=copied.begins,
                slot_initial_values=copied.slot_initial_values,
                step=copied.step,
                rows=len(value) if is_run and value is not None else None,
                checksum=compute_checksum(copied.arrays),
            )
        )
        for name, array in copied.arrays.items():
            self._tensors[f"{key}/{name}"] = array
            self._size += array.nbytes
        if self._size >= _TARGET_FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the remaining pieces."""
        if self._tensors:
            name = f"{self._file_prefix}-{self._number}.safetensors"
            self.bytes += write_tensors(self._folder, name, self._tensors)
            self._number += 1
            self._tensors, self._size = {}, 0


# --- assembly of shards from the pieces of a checkpoint, however it was partitioned ---------------

#     shard = assemble_shard(spec, pieces, arrays_of, optimizer_renames)
#     table = _assemble_table(spec, pieces, arrays_of, optimizer_renames)
#
# `arrays_of(piece)` returns the arrays of a piece; it is called once for each, in order.

Arrays = Mapping[str, NDArray[Any]]

ArraysOf = Callable[[ShardPiece], Arrays]


def assemble_shard(
    spec: ShardSpec,
    pieces: Sequence[ShardPiece],
    arrays_of: ArraysOf,
    optimizer_renames: Mapping[str, str],
) -> ShardSnapshot[SavedShard]:
    """Return a shard of a variable.

    Args:
        spec: Spec of the shard.
        pieces: Pieces of the variable.
        arrays_of: Returns the arrays of a piece.
        optimizer_renames: New names of optimizers.

    Raises:
        DataLossError: If rows of the shard are missing.
    """
    found: dict[str, NDArray[Any]] = {}
    initial_values: dict[str, float] = {}
    value = found["value"] = np.empty(spec.shape, parse_dtype(spec.dtype))
    rows = spec.shape[0] if spec.shape else 1
    covered = 0
    for piece in current_pieces(pieces):
        if _has_no_rows_of(spec, rows, piece):
            continue
        arrays = arrays_of(piece)
        target, source = _locate_rows(spec, rows, piece, arrays)
        if piece.row is not None:
            covered += target.stop - target.start
        for name, array in _rename_slots(arrays, optimizer_renames, ("rows",)):
            part = array[source] if array.ndim else array
            if name not in found:
                first = initial_values[name] = _slot_initial_value(piece, name, optimizer_renames)
                shape = (*value.shape[:1], *array.shape[1:])
                found[name] = fill_array(shape, first, array.dtype)
            if spec.shape:
                found[name][target] = part
            else:
                found[name][...] = part
    if covered < rows:
        raise DataLossError(
            f"the checkpoint has only {covered} of the {rows} rows of {spec.name}, which begin at "
            f"row {spec.row} of {spec.variable}"
        )
    return ShardSnapshot(SavedShard(spec=spec, slot_initial_values=initial_values), found)


def _has_no_rows_of(spec: ShardSpec, rows: int, piece: ShardPiece) -> bool:
    """Return whether a piece is known to have no row of the shard, so that it need not be read."""
    if piece.row is None or piece.rows is None:
        return False
    return piece.row + piece.rows <= spec.row or piece.row >= spec.row + rows


def _locate_rows(spec: ShardSpec, rows: int, piece: ShardPiece, arrays: Arrays) -> tuple[Any, Any]:
    """Return the rows of the shard that a piece fills, and the matching part of the piece."""
    if piece.row is None:
        local = arrays["rows"] - spec.row
        is_local = (local >= 0) & (local < rows)
        return local[is_local], is_local
    value = arrays["value"]
    length = len(value) if value.ndim else 1
    start = max(0, piece.row - spec.row)
    stop = max(start, min(rows, piece.row + length - spec.row))
    first = start + spec.row - piece.row
    return slice(start, stop), slice(first, first + stop - start)


def _assemble_table(
    spec: TableSpec,
    pieces: Sequence[ShardPiece],
    arrays_of: ArraysOf,
    optimizer_renames: Mapping[str, str],
) -> ShardSnapshot[SavedTable]:
    """Return a shard of a table with the ids assigned to it; see `assemble_shard`."""
    initial_values: dict[str, float] = {}
    step = 0
    #: State of ids; if an id occurs several times, the last one is used.
    layers: list[dict[str, NDArray[Any]]] = []
    waiting: dict[str, dict[str, NDArray[Any]]] = {}
    for piece in current_pieces(pieces):
        arrays = arrays_of(piece)
        step = max(step, piece.step)
        is_local = assign_shards(arrays["ids"], spec.shards) == spec.index
        layer: dict[str, NDArray[Any]] = {}
        excluded = [
            each for each in arrays if "/" in each and each not in piece.slot_initial_values
        ]
        for name, array in _rename_slots(arrays, optimizer_renames, excluded):
            if name.startswith("waiting_"):
                continue
            if name == "removed":
                layer[name] = np.asarray(array)
                continue
            layer[name] = array[is_local]
            if "/" in name:
                initial_values[name] = _slot_initial_value(piece, name, optimizer_renames)
        layers.append(layer)
        if "waiting_ids" in arrays:
            is_waiting = assign_shards(arrays["waiting_ids"], spec.shards) == spec.index
            waiting[piece.shard] = {
                name: array[is_waiting]
                for name, array in arrays.items()
                if name.startswith("waiting_")
            }
    whole = _latest_rows(layers, initial_values)
    for name in ("waiting_ids", "waiting_seen", "waiting_last_used"):
        parts = [each[name] for each in waiting.values()]
        whole[name] = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return ShardSnapshot(
        SavedTable(spec=spec, step=step, slot_initial_values=initial_values), whole
    )


def _latest_rows(
    layers: Sequence[Mapping[str, NDArray[Any]]], initial_values: Mapping[str, float]
) -> dict[str, NDArray[Any]]:
    """Return the latest row of each id in all layers, without removed ids."""
    masks: list[NDArray[np.bool_]] = [np.ones(len(layer["ids"]), bool) for layer in layers]
    newer_ids = np.zeros(0, np.int64)
    for number in range(len(layers) - 1, -1, -1):
        ids = layers[number]["ids"]
        if len(newer_ids):
            masks[number] &= ~np.isin(ids, newer_ids)
        replaced_ids = [
            newer_ids,
            ids,
            *([layers[number]["removed"]] if "removed" in layers[number] else []),
        ]
        newer_ids = np.unique(np.concatenate(replaced_ids)) if number else newer_ids
    examples = {
        name: array for layer in layers for name, array in layer.items() if name != "removed"
    }
    return {
        name: np.concatenate(
            [
                layer[name][mask]
                if name in layer
                else np.full((int(mask.sum()), *like.shape[1:]), initial_values[name], like.dtype)
                for layer, mask in zip(layers, masks, strict=True)
            ]
        )
        for name, like in examples.items()
    }


def _rename_slots(
    arrays: Arrays, optimizer_renames: Mapping[str, str], without: Sequence[str]
) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in arrays.items():
        if name not in without:
            optimizer, slash, slot = name.rpartition("/")
            yield f"{optimizer_renames.get(optimizer, optimizer)}{slash}{slot}", array


def _slot_initial_value(
    piece: ShardPiece, name: str, optimizer_renames: Mapping[str, str]
) -> float:
    for old, first in piece.slot_initial_values.items():
        optimizer, slash, slot = old.rpartition("/")
        if f"{optimizer_renames.get(optimizer, optimizer)}{slash}{slot}" == name:
            return first
    return 0.0


# --------------------------------------------------------------------------------------------------
# Restore of shards from a checkpoint, however it was partitioned

# Files are read and shards are assembled on another thread (`read_shards`); then all are installed
# between two operations (`put_shards`), so that no operation sees only some of them.

RestoredShards: TypeAlias = list[ArrayShard | TableShard]


def read_shards(
    folder: Folder,
    shards: Sequence[tuple[ShardSpec, str]],
    tables: Sequence[tuple[TableSpec, str]],
    pieces: Sequence[ShardPiece],
    optimizer_renames: Mapping[str, str],
) -> RestoredShards:
    """Read and check shards.

    Args:
        folder: Directory of the files.
        shards: Variable shards, each with the name of its variable in the checkpoint.
        tables: Table shards, likewise.
        pieces: Contents of the files.
        optimizer_renames: New names of optimizers.

    Raises:
        DataLossError: If a file or rows are missing, or a file is damaged.
    """
    files = _OpenPieceFile(folder)
    ready: RestoredShards = []
    for spec, name in shards:
        found = _pieces_of(pieces, "shard", name)
        ready.append(build_shard(assemble_shard(spec, found, files.arrays_of, optimizer_renames)))
    for table, name in tables:
        found = _pieces_of(pieces, "table", name)
        if not found:
            raise DataLossError(f"the checkpoint has no data of the table {name}")
        ready.append(build_shard(_assemble_table(table, found, files.arrays_of, optimizer_renames)))
    return ready


def put_shards(
    store: ShardStore,
    call_between_operations: Callable[[Callable[[], Any]], Any],
    parts: RestoredShards,
    counters: Mapping[str, int],
    coordinator_term: int,
    answers: Answers,
    is_recovery: bool = False,
) -> None:
    """Install shards, replacing those of the same names.

    Args:
        store: Store of the shards.
        call_between_operations: Calls a function between two operations.
        parts: The shards.
        counters: Values for the counters.
        coordinator_term: Term of the coordinator whose writes `answers` holds.
        answers: Answers by write key of writes that the shards contain; empty if the rows were
            repartitioned.
        is_recovery: Whether the store lost its contents; its counts since then are then kept.
    """

    def put_in_place() -> None:
        for part in parts:
            put_shard(store, part)
        for counter, count in counters.items():
            unsaved = (
                _count_unsaved_increments(store, counter, coordinator_term, answers)
                if is_recovery
                else 0
            )
            store.counters[counter] = count + unsaved
        store.write_keys.restore(coordinator_term, answers)
        store.is_restored = True

    call_between_operations(put_in_place)


def _count_unsaved_increments(
    store: ShardStore, counter: str, coordinator_term: int, answers: Answers
) -> int:
    """Return the sum of a counter's increments that are not in its saved value."""
    target = f"counter {counter}"
    unsaved = store.counters.get(counter, 0)
    if store.write_keys.coordinator_term == coordinator_term:
        # Increments that were saved but not acknowledged by the lost server: clients sent them
        # again.
        known = {(closure, number) for closure, number, _ in answers.get(target, ())}
        for closure, number, answer in store.write_keys.answers_for(target):
            if (closure, number) in known and isinstance(answer, Counted):
                unsaved -= answer.after - answer.before
    return unsaved


def _pieces_of(pieces: Sequence[ShardPiece], kind: str, name: str) -> list[ShardPiece]:
    return [piece for piece in pieces if piece.kind == kind and piece.owner == name]


class _OpenPieceFile:
    """The most recently read file: the pieces of one file are read one after another."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._name = ""
        self._file: TensorFile | None = None
        self._verified: set[tuple[str, str]] = set()

    def arrays_of(self, piece: ShardPiece) -> dict[str, NDArray[Any]]:
        """Return the arrays of a piece; their checksum is verified on the first read."""
        if self._file is None or self._name != piece.file:
            self._file = None
            self._file = TensorFile(self._folder, piece.file)
            self._name = piece.file
        is_new = (piece.file, piece.key) not in self._verified
        self._verified.add((piece.file, piece.key))
        return self._file.read_under(piece.key, piece.checksum if is_new else None)
