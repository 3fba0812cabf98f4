"""A server writes its shards to a checkpoint, while it goes on with what it is asked.

Rule 1. What is copied is copied between two operations, at most `PART_BYTES` at a time where it can
        be more; the rest of the work is done on another thread.
Rule 2. A shard is of one moment. One that is larger than a part is copied part by part, and then
        the rows that were written meanwhile are copied at a time: they replace the earlier copies.
Rule 3. Keys of writes to a shard are those of its moment.
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
    Piece,
    TensorFile,
    checksum_of,
    standing,
    write_tensors,
)
from headrace.parameter_server.gradients import shard_of_ids
from headrace.parameter_server.operations import Counted
from headrace.parameter_server.saved import Saved, SavedShard, SavedTable
from headrace.parameter_server.specs import ShardSpec, TableSpec, dtype_named, filled
from headrace.parameter_server.store import (
    Holding,
    Store,
    changes_of,
    forget_removed,
    holdings,
    mark,
    part_of,
    part_of_saved,
    put,
    rows_of,
    snapshot_of,
    touched_bytes,
)
from headrace.parameter_server.table_shard import TableShard
from headrace.storage.files import Folder

__all__ = [
    "Parts",
    "assembled_shard",
    "put_shards",
    "read_shards",
    "write_shards",
]


PART_BYTES = 8 << 20
"""What is copied between two operations: some milliseconds."""
_FILE_BYTES = 64 << 20


class Written(NamedTuple):
    """What a server wrote.

    Attributes:
        pieces: In their order.
        mark: What was written before it is in the pieces.
        counters: What they are at.
        incarnation: Of the coordinator whose writes `answers` are.
        answers: Keys of writes, by shard.
        bytes: Of the files.
    """

    pieces: tuple[Piece, ...]
    mark: int
    counters: dict[str, int]
    incarnation: int
    answers: Answers
    bytes: int


class _Copied(NamedTuple):
    """A piece without a file yet, and its arrays."""

    holding: Holding
    of: str
    row: int | None
    begins: bool
    slot_firsts: dict[str, float]
    step: int
    arrays: dict[str, NDArray[Any]]


def write_shards(
    store: Store,
    between: Callable[[Callable[[], Any]], Any],
    folder: Folder,
    stem: str,
    wanted: Sequence[Holding],
    since: int | None,
    forget: bool = False,
    part_bytes: int = PART_BYTES,
) -> Written:
    """Write shards to files.

    Args:
        store: Whose.
        between: Calls a function between two operations.
        folder: Where to.
        stem: What the names of the files begin with.
        wanted: Which shards.
        since: A mark: write what changed after it. None: write all.
        forget: Nobody will ask for what changed after an earlier mark.
        part_bytes: Copied at a time.

    Raises:
        NotFoundError: The store has no such shard.
    """

    def begin() -> int:
        missing = set(wanted).difference(holdings(store))
        if missing:
            kind, name = min(missing)
            raise NotFoundError(
                f"there is no {kind} {name} on this server, so it cannot be saved: the server was "
                "started again and not restored"
            )
        if forget:
            forget_removed(store, store.period if since is None else since)
        return mark(store)

    marked = between(begin)
    answers: Answers = {}
    files = _Files(folder, stem)
    small: list[Holding] = []
    size = 0
    for holding in wanted:
        needed, is_all = between(partial(touched_bytes, store, holding, since))
        if is_all and needed > part_bytes:
            for copied in _in_parts(store, between, holding, marked, part_bytes, answers):
                files.add(copied)
            continue
        if small and size + needed > part_bytes:
            for copied in between(partial(_copies, store, small, since, answers)):
                files.add(copied)
            small, size = [], 0
        small.append(holding)
        size += needed
    if small:
        for copied in between(partial(_copies, store, small, since, answers)):
            files.add(copied)
    files.flush()

    def end() -> tuple[dict[str, int], int]:
        for counter in store.counters:
            answers[f"counter {counter}"] = store.keys.answers_of(f"counter {counter}")
        return dict(store.counters), store.keys.incarnation

    counters, incarnation = between(end)
    return Written(
        tuple(files.pieces),
        marked,
        counters,
        incarnation,
        {target: found for target, found in answers.items() if found},
        files.bytes,
    )


def _copies(
    store: Store, several: list[Holding], since: int | None, answers: Answers
) -> list[_Copied]:
    """Copy shards as they are at this moment, or what was written of them since a mark."""
    made = []
    for holding in several:
        target = f"{holding.kind} {holding.name}"
        answers[target] = store.keys.answers_of(target)
        copied = _copy(store, holding, since)
        if copied.begins or holding.kind == "table" or len(copied.arrays["rows"]):
            made.append(copied)
    return made


def _copy(store: Store, holding: Holding, since: int | None) -> _Copied:
    if since is None:
        saved = snapshot_of(store, holding)
        return _copied(holding, saved, None, 0, True)
    changes = changes_of(store, holding, since)
    arrays = dict(changes.arrays)
    if changes.removed is not None and len(changes.removed):
        arrays["removed"] = changes.removed
    return _copied(holding, Saved(changes.record, arrays), changes.rows, 0, changes.whole)


def _copied(
    holding: Holding, saved: Saved[Any], rows: NDArray[np.int64] | None, first: int, begins: bool
) -> _Copied:
    record, arrays = saved
    if holding.kind == "table":
        # Columns were taken row by row: they are copies.
        made = dict(arrays)
        return _Copied(
            holding, record.spec.table, None, begins, record.slot_firsts, record.step, made
        )
    assert isinstance(record, SavedShard)
    made = {name: np.array(array, order="C", copy=True) for name, array in arrays.items()}
    row: int | None = record.spec.row + first
    if rows is not None:
        made["rows"] = rows + record.spec.row
        row = None
    return _Copied(holding, record.spec.variable, row, begins, record.slot_firsts, 0, made)


def _in_parts(
    store: Store,
    between: Callable[[Callable[[], Any]], Any],
    holding: Holding,
    marked: int,
    part_bytes: int,
    answers: Answers,
) -> Iterator[_Copied]:
    """Copy a large shard part by part, and at last what was written since it was begun."""
    start = 0
    stop, row_bytes = between(partial(rows_of, store, holding))
    step = max(1, part_bytes // row_bytes)
    is_first = True
    while start < stop:

        def part(first: int = start, begins: bool = is_first) -> _Copied:
            saved = part_of(store, holding, first, first + step)
            return _copied(holding, saved, None, first, begins)

        yield between(part)
        start += step
        is_first = False

    def rest() -> list[_Copied]:
        return _copies(store, [holding], marked, answers)

    yield from between(rest)


class _Files:
    """Puts pieces into files, each as long as some parts."""

    def __init__(self, folder: Folder, stem: str) -> None:
        self.pieces: list[Piece] = []
        self.bytes = 0
        self._folder = folder
        self._stem = stem
        self._number = 0
        self._tensors: dict[str, NDArray[Any]] = {}
        self._size = 0

    def add(self, copied: _Copied) -> None:
        """Take a piece; it is written when there is enough for a file."""
        key = str(len(self.pieces))
        value = copied.arrays.get("value")
        is_run = copied.row is not None and value is not None and value.ndim
        self.pieces.append(
            Piece(
                kind=copied.holding.kind,
                shard=copied.holding.name,
                of=copied.of,
                file=f"{self._stem}-{self._number}.safetensors",
                key=key,
                row=copied.row,
                begins=copied.begins,
                slot_firsts=copied.slot_firsts,
                step=copied.step,
                rows=len(value) if is_run and value is not None else None,
                checksum=checksum_of(copied.arrays),
            )
        )
        for name, array in copied.arrays.items():
            self._tensors[f"{key}/{name}"] = array
            self._size += array.nbytes
        if self._size >= _FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is left."""
        if self._tensors:
            name = f"{self._stem}-{self._number}.safetensors"
            self.bytes += write_tensors(self._folder, name, self._tensors)
            self._number += 1
            self._tensors, self._size = {}, 0


# --- shards from the pieces of a checkpoint, whatever the shards were that it was saved from ------

#     shard = assembled_shard(spec, pieces, arrays_of, renamed)
#     table = _assembled_table(spec, pieces, arrays_of, renamed)
#
# `arrays_of(piece)` returns the arrays of a piece; it is called once for each, in their order.

Arrays = Mapping[str, NDArray[Any]]

ArraysOf = Callable[[Piece], Arrays]


def assembled_shard(
    spec: ShardSpec, pieces: Sequence[Piece], arrays_of: ArraysOf, renamed: Mapping[str, str]
) -> Saved[SavedShard]:
    """Return a shard of a variable.

    Args:
        spec: Which rows of it.
        pieces: Of the variable.
        arrays_of: Returns the arrays of a piece.
        renamed: New names of optimizers.

    Raises:
        DataLossError: Not all of its rows are there.
    """
    found: dict[str, NDArray[Any]] = {}
    firsts: dict[str, float] = {}
    value = found["value"] = np.empty(spec.shape, dtype_named(spec.dtype))
    rows = spec.shape[0] if spec.shape else 1
    covered = 0
    for piece in standing(pieces):
        if _is_elsewhere(spec, rows, piece):
            continue
        arrays = arrays_of(piece)
        there, taken = _places(spec, rows, piece, arrays)
        if piece.row is not None:
            covered += there.stop - there.start
        for name, array in _renamed(arrays, renamed, ("rows",)):
            part = array[taken] if array.ndim else array
            if name not in found:
                first = firsts[name] = _first(piece, name, renamed)
                shape = (*value.shape[:1], *array.shape[1:])
                found[name] = filled(shape, first, array.dtype)
            if spec.shape:
                found[name][there] = part
            else:
                found[name][...] = part
    if covered < rows:
        raise DataLossError(
            f"of the {rows} rows of {spec.name} that begin at row {spec.row} of {spec.variable}, "
            f"the checkpoint has {covered}"
        )
    return Saved(SavedShard(spec=spec, slot_firsts=firsts), found)


def _is_elsewhere(spec: ShardSpec, rows: int, piece: Piece) -> bool:
    """Whether a piece is known to have no row of the shard, so that it need not be read."""
    if piece.row is None or piece.rows is None:
        return False
    return piece.row + piece.rows <= spec.row or piece.row >= spec.row + rows


def _places(spec: ShardSpec, rows: int, piece: Piece, arrays: Arrays) -> tuple[Any, Any]:
    """Return where in the shard a piece goes, and which part of the piece goes there."""
    if piece.row is None:
        local = arrays["rows"] - spec.row
        mine = (local >= 0) & (local < rows)
        return local[mine], mine
    value = arrays["value"]
    length = len(value) if value.ndim else 1
    start = max(0, piece.row - spec.row)
    stop = max(start, min(rows, piece.row + length - spec.row))
    first = start + spec.row - piece.row
    return slice(start, stop), slice(first, first + stop - start)


def _assembled_table(
    spec: TableSpec, pieces: Sequence[Piece], arrays_of: ArraysOf, renamed: Mapping[str, str]
) -> Saved[SavedTable]:
    """Return a shard of a table: the ids that fall to it; see `assembled_shard`."""
    firsts: dict[str, float] = {}
    step = 0
    #: Where the state of an id is: of those that stand there several times the last counts.
    layers: list[dict[str, NDArray[Any]]] = []
    waiting: dict[str, dict[str, NDArray[Any]]] = {}
    for piece in standing(pieces):
        arrays = arrays_of(piece)
        step = max(step, piece.step)
        mine = shard_of_ids(arrays["ids"], spec.shards) == spec.index
        layer: dict[str, NDArray[Any]] = {}
        without = [each for each in arrays if "/" in each and each not in piece.slot_firsts]
        for name, array in _renamed(arrays, renamed, without):
            if name.startswith("waiting_"):
                continue
            if name == "removed":
                layer[name] = np.asarray(array)
                continue
            layer[name] = array[mine]
            if "/" in name:
                firsts[name] = _first(piece, name, renamed)
        layers.append(layer)
        if "waiting_ids" in arrays:
            due = shard_of_ids(arrays["waiting_ids"], spec.shards) == spec.index
            waiting[piece.shard] = {
                name: array[due] for name, array in arrays.items() if name.startswith("waiting_")
            }
    whole = _last_of_each(layers, firsts)
    for name in ("waiting_ids", "waiting_seen", "waiting_touched"):
        parts = [each[name] for each in waiting.values()]
        whole[name] = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Saved(SavedTable(spec=spec, step=step, slot_firsts=firsts), whole)


def _last_of_each(
    layers: Sequence[Mapping[str, NDArray[Any]]], firsts: Mapping[str, float]
) -> dict[str, NDArray[Any]]:
    """Return the rows of all layers, of each id the last, without those that were removed."""
    kept: list[NDArray[np.bool_]] = [np.ones(len(layer["ids"]), bool) for layer in layers]
    later = np.zeros(0, np.int64)
    for number in range(len(layers) - 1, -1, -1):
        ids = layers[number]["ids"]
        if len(later):
            kept[number] &= ~np.isin(ids, later)
        gone = [later, ids, *([layers[number]["removed"]] if "removed" in layers[number] else [])]
        later = np.unique(np.concatenate(gone)) if number else later
    examples = {
        name: array for layer in layers for name, array in layer.items() if name != "removed"
    }
    return {
        name: np.concatenate(
            [
                layer[name][keep]
                if name in layer
                else np.full((int(keep.sum()), *like.shape[1:]), firsts[name], like.dtype)
                for layer, keep in zip(layers, kept, strict=True)
            ]
        )
        for name, like in examples.items()
    }


def _renamed(
    arrays: Arrays, renamed: Mapping[str, str], without: Sequence[str]
) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in arrays.items():
        if name not in without:
            optimizer, slash, slot = name.rpartition("/")
            yield f"{renamed.get(optimizer, optimizer)}{slash}{slot}", array


def _first(piece: Piece, name: str, renamed: Mapping[str, str]) -> float:
    for old, first in piece.slot_firsts.items():
        optimizer, slash, slot = old.rpartition("/")
        if f"{renamed.get(optimizer, optimizer)}{slash}{slot}" == name:
            return first
    return 0.0


# --------------------------------------------------------------------------------------------------
# A server reads shards from a checkpoint: those that it is to have, whatever they were before

# Files are read and shards are put together on another thread (`read_shards`); then all are put in
# place between two operations (`put_shards`), so that nobody finds one without the others.

Parts: TypeAlias = list[ArrayShard | TableShard]


def read_shards(
    folder: Folder,
    shards: Sequence[tuple[ShardSpec, str]],
    tables: Sequence[tuple[TableSpec, str]],
    pieces: Sequence[Piece],
    renamed: Mapping[str, str],
) -> Parts:
    """Read shards, and check them.

    Args:
        folder: Where the files are.
        shards: Each with the name of the variable in the checkpoint.
        tables: Likewise.
        pieces: What is in the files.
        renamed: New names of optimizers.

    Raises:
        DataLossError: A file is missing or damaged, or rows are.
    """
    files = _Opened(folder)
    ready: Parts = []
    for spec, name in shards:
        found = _of(pieces, "shard", name)
        ready.append(part_of_saved(assembled_shard(spec, found, files.arrays_of, renamed)))
    for table, name in tables:
        found = _of(pieces, "table", name)
        if not found:
            raise DataLossError(f"the checkpoint has nothing of the table {name}")
        ready.append(part_of_saved(_assembled_table(table, found, files.arrays_of, renamed)))
    return ready


def put_shards(
    store: Store,
    between: Callable[[Callable[[], Any]], Any],
    parts: Parts,
    counters: Mapping[str, int],
    incarnation: int,
    answers: Answers,
    recovers: bool = False,
) -> None:
    """Put shards in place of what is there under their names.

    Args:
        store: Whose.
        between: Calls a function between two operations.
        parts: The shards.
        counters: What they are to be at.
        incarnation: Of the coordinator whose writes `answers` are.
        answers: Keys of writes that are in the shards; none where rows were dealt again.
        recovers: The store lost what it had: what it has counted since then counts as well.
    """

    def put_in_place() -> None:
        for part in parts:
            put(store, part)
        for counter, count in counters.items():
            later = _counted_since(store, counter, incarnation, answers) if recovers else 0
            store.counters[counter] = count + later
        store.keys.restore(incarnation, answers)
        store.is_restored = True

    between(put_in_place)


def _counted_since(store: Store, counter: str, incarnation: int, answers: Answers) -> int:
    """Return how far a counter was moved by writes that are not in what was saved of it."""
    target = f"counter {counter}"
    moved = store.counters.get(counter, 0)
    if store.keys.incarnation == incarnation:
        # Those whose answer the lost server did not get out: they were sent again.
        known = {(closure, number) for closure, number, _ in answers.get(target, ())}
        for closure, number, answer in store.keys.answers_of(target):
            if (closure, number) in known and isinstance(answer, Counted):
                moved -= answer.after - answer.before
    return moved


def _of(pieces: Sequence[Piece], kind: str, name: str) -> list[Piece]:
    return [piece for piece in pieces if piece.kind == kind and piece.of == name]


class _Opened:
    """The last file that was read: pieces of one file come one after another."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._name = ""
        self._file: TensorFile | None = None
        self._checked: set[tuple[str, str]] = set()

    def arrays_of(self, piece: Piece) -> dict[str, NDArray[Any]]:
        """Return the arrays of a piece; they are checked when it is read first."""
        if self._file is None or self._name != piece.file:
            self._file = None
            self._file = TensorFile(self._folder, piece.file)
            self._name = piece.file
        is_new = (piece.file, piece.key) not in self._checked
        self._checked.add((piece.file, piece.key))
        return self._file.of(piece.key, piece.checksum if is_new else None)
