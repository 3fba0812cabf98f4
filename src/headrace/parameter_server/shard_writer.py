"""A server writes its shards to a checkpoint, while it goes on with what it is asked.

Rule 1. What is copied is copied between two operations, at most `PART_BYTES` at a time where it can
        be more; the rest of the work is done on another thread.
Rule 2. A shard is of one moment. One that is larger than a part is copied part by part, and then
        the rows that were written meanwhile are copied at a time: they replace the earlier copies.
Rule 3. Keys of writes to a shard are those of its moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import NotFoundError
from headrace.parameter_server.checkpoint_format import Answers, Piece
from headrace.parameter_server.saved import Saved, SavedShard
from headrace.parameter_server.snapshots import (
    Holding,
    changes_of,
    forget_removed,
    holdings,
    mark,
    part_of,
    rows_of,
    snapshot_of,
    touched_bytes,
)
from headrace.parameter_server.store import Store
from headrace.parameter_server.tensor_file import checksum_of, write_tensors
from headrace.storage.folder import Folder

__all__ = ["PART_BYTES", "Written", "write_shards"]

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
