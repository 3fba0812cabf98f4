"""Finished saved datasets, read by rows if these can be gathered, else by chunk files.

The path of the directory is not part of their identity, so a saved state is valid for a directory
that was moved or copied.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace import saved
from headrace.element.chunk import Chunk
from headrace.element.spec import Spec
from headrace.element.structure import unflatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError
from headrace.plan.source import (
    IndexedSource,
    IndexKind,
    Position,
    Reader,
    Source,
    check_limit,
    check_part_position,
    check_range,
)
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import ChunkRecord
from headrace.saved.schema import FileSchema, decode_schema

__all__ = ["SavedChunksSource", "SavedRowsSource", "chunk_files_source"]

_MAX_MAPPED_FILES = 4096


def chunk_files_source(
    path: str, save_id: str, stream: int | None, chunks: tuple[ChunkRecord, ...], spec: Spec | None
) -> Source:
    """Return the source of the elements of chunk files.

    Rows are gathered if the files are local and all elements have the same shape: random access
    then costs one copy of the row.
    """
    forms = [decode_schema(text, path) for text in dict.fromkeys(chunk.schema for chunk in chunks)]
    if forms:
        form = functools.reduce(lambda one, other: one.merge(other, 0), forms)
        spec = form.spec(spec)
        is_local = SavedDirectory(path).folder.is_local
        if is_local and len(forms) == 1 and form.is_fixed and form.columns:
            return SavedRowsSource(path, save_id, stream, chunks, spec)
    return SavedChunksSource(path, save_id, stream, chunks, spec)


@dataclass(frozen=True, eq=False)
class SavedRowsSource(IndexedSource):
    """Elements of one shape in chunk files on a local disk; an index is an element.

    Args:
        path: The directory.
        save_id: ID of the save.
        stream: The only stream to read; None reads all streams.
        chunks: The chunk files, in order.
        spec: Spec of the elements.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("path", "chunks", "spec")

    path: str
    save_id: str
    stream: int | None
    chunks: tuple[ChunkRecord, ...]
    spec: Spec
    #: Memory-mapped files by number, oldest first.
    _files: dict[int, saved.chunk_file.ChunkFile] = field(
        init=False, repr=False, default_factory=dict
    )
    _starts: NDArray[np.int64] = field(init=False, repr=False)
    _schema: FileSchema = field(init=False, repr=False)

    def __post_init__(self) -> None:
        starts = np.cumsum([0, *(chunk.elements for chunk in self.chunks)])
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_schema", decode_schema(self.chunks[0].schema, self.path))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.save_id, self.stream, self.chunks, self.spec)

    @property
    def size(self) -> int:
        return int(self._starts[-1])

    @property
    def element_spec(self) -> Spec | None:
        return self.spec

    def gather(self, indices: NDArray[np.int64]) -> Any:
        rows = np.asarray(indices).reshape(-1)
        if rows.size and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all():
            gathered = self.gather_run(int(rows[0]), int(rows[-1]) + 1)
        else:
            gathered = self._gather(rows)
        if np.ndim(indices) == 1:
            return gathered
        shape = np.shape(indices)
        return map_leaves(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), gathered)

    def gather_run(self, start: int, stop: int) -> Any:
        """Return the stacked elements from one index up to another."""
        result = saved.chunk_file.allocate_columns(self._schema, stop - start)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while start < stop:
            first, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            self._open_file(number).copy(start - first, end - first, result, filled)
            start, filled, number = end, filled + end - start, number + 1
        return self._to_element(result)

    def _gather(self, rows: NDArray[np.int64]) -> Any:
        result = saved.chunk_file.allocate_columns(self._schema, rows.size)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        for indices in np.split(order, cuts) if rows.size else ():
            number = int(numbers[indices[0]])
            self._open_file(number).gather(rows[indices] - self._starts[number], result, indices)
        return self._to_element(result)

    def _to_element(self, columns: list[NDArray[Any]]) -> Any:
        return unflatten(
            self._schema.structure, saved.chunk_file.finish_columns(self._schema, columns)
        )

    def _open_file(self, number: int) -> saved.chunk_file.ChunkFile:
        file = self._files.get(number)
        if file is None:
            folder = SavedDirectory(self.path).folder
            file = saved.chunk_file.ChunkFile(folder, self.chunks[number], self.save_id)
            while len(self._files) >= _MAX_MAPPED_FILES:
                self._files.pop(next(iter(self._files)), None)
            self._files[number] = file
        return file


@dataclass(frozen=True, eq=False)
class SavedChunksSource(Source):
    """Elements of any shape in chunk files anywhere; an index is a file.

    Args:
        path: The directory.
        save_id: ID of the save.
        stream: The only stream to read; None reads all streams.
        chunks: The chunk files, in order.
        spec: Spec of the elements; None if it is unknown because there are none.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("path", "chunks", "spec")

    path: str
    save_id: str
    stream: int | None
    chunks: tuple[ChunkRecord, ...]
    spec: Spec | None

    @property
    def size(self) -> int:
        return len(self.chunks)

    @property
    def element_spec(self) -> Spec | None:
        return self.spec

    @property
    def element_count(self) -> int | None:
        return sum(chunk.elements for chunk in self.chunks)

    @property
    def index_kind(self) -> IndexKind:
        return "file"

    @property
    def paths(self) -> tuple[str, ...]:
        folder = SavedDirectory(self.path).folder
        return tuple(
            folder.path(folder.find_name(chunk.name(self.save_id), chunk.public_name(self.save_id)))
            for chunk in self.chunks
        )

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return ChunksReader(self, start, stop, position)


class ChunksReader:
    """Reads the elements of several chunk files, one file after another.

    Args:
        source: The source of the files.
        start: Number of the first file.
        stop: Number after the last file.
        position: Position to start from, `[file, elements consumed of it]`; None is the start.
    """

    def __init__(
        self, source: SavedChunksSource, start: int, stop: int, position: Position = None
    ) -> None:
        self._source = source
        self._stop = stop
        self._number, self._row = _check_position(position, source.chunks, start, stop)
        self._file: saved.chunk_file.ChunkFile | None = None
        self._closed = False

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        while self._number < self._stop:
            file = self._file or self._open()
            if self._row < file.size:
                try:
                    chunk = file.read(self._row, limit)
                except Exception:
                    self._next_file()
                    raise
                self._row += chunk.size
                if self._row == file.size:
                    self._next_file()
                return chunk
            self._next_file()
        return None

    def _open(self) -> saved.chunk_file.ChunkFile:
        source = self._source
        folder = SavedDirectory(source.path).folder
        try:
            self._file = saved.chunk_file.ChunkFile(
                folder, source.chunks[self._number], source.save_id
            )
        except Exception:
            self._next_file()
            raise
        return self._file

    def _next_file(self) -> None:
        self._file, self._number, self._row = None, self._number + 1, 0

    def get_position(self) -> Position:
        return [self._number, self._row]

    def close(self) -> None:
        self._closed, self._file = True, None


def _check_position(
    position: Position, chunks: tuple[ChunkRecord, ...], start: int, stop: int
) -> tuple[int, int]:
    number, row = check_part_position(position, start, stop, "[file, elements]")
    size = chunks[number].elements if number < stop else 0
    if row > size:
        raise ValueError(
            f"position {position!r} is after the end of file {number} ({size} elements)"
        )
    return number, row
