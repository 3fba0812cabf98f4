"""A server reads shards from a checkpoint: those that it is to have, whatever they were before.

Files are read and shards are put together on another thread (`read_shards`); then all are put in
place between two operations (`put_shards`), so that nobody finds one without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from headrace.errors import DataLossError
from headrace.parameter_server.array_shard import ArrayShard
from headrace.parameter_server.assembling import assembled_shard, assembled_table
from headrace.parameter_server.checkpoint_format import Answers, Piece
from headrace.parameter_server.operations import Counted, ShardSpec, TableSpec
from headrace.parameter_server.snapshots import part_of_saved, put
from headrace.parameter_server.store import Store
from headrace.parameter_server.table_shard import TableShard
from headrace.parameter_server.tensor_file import TensorFile
from headrace.storage.folder import Folder

__all__ = ["Parts", "put_shards", "read_shards"]

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
        ready.append(part_of_saved(assembled_table(table, found, files.arrays_of, renamed)))
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
