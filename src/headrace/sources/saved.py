"""Saved datasets that are finished: by rows where these can be gathered, else by chunk files.

Where they lie is no part of what they are: a saved state fits a directory that was moved or copied.
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
    IndexHolds,
    Position,
    Reader,
    Source,
    check_limit,
    check_range,
)
from headrace.saved.directory import SavedDirectory
from headrace.saved.form import Form, decode_form
from headrace.saved.format import ChunkRecord

__all__ = ["SavedChunksSource", "SavedRowsSource", "saved_source"]

_MOST_MAPPED = 4096


def saved_source(
    path: str, save: str, stream: int | None, chunks: tuple[ChunkRecord, ...], spec: Spec | None
) -> Source:
    """Return the source of the elements of some chunk files.

    Rows are gathered where the files are local and all elements have one shape: random access then
    costs a copy of the row.
    """
    forms = [decode_form(text, path) for text in dict.fromkeys(chunk.form for chunk in chunks)]
    if forms:
        form = functools.reduce(lambda one, other: one.joined(other, 0), forms)
        spec = form.spec(spec)
        is_local = SavedDirectory(path).folder.is_local
        if is_local and len(forms) == 1 and form.is_fixed and form.columns:
            return SavedRowsSource(path, save, stream, chunks, spec)
    return SavedChunksSource(path, save, stream, chunks, spec)


@dataclass(frozen=True, eq=False)
class SavedRowsSource(IndexedSource):
    """The elements of chunk files on a local disk, which have one shape; an index is an element.

    Args:
        path: The directory.
        save: Id of the save.
        stream: The only stream whose elements these are; None: those of all.
        chunks: The chunk files, in order.
        spec: Spec of the elements.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("path", "chunks", "spec")

    path: str
    save: str
    stream: int | None
    chunks: tuple[ChunkRecord, ...]
    spec: Spec
    #: Files that are mapped, by number; the oldest first.
    _files: dict[int, saved.chunk_file.ChunkFile] = field(
        init=False, repr=False, default_factory=dict
    )
    _starts: NDArray[np.int64] = field(init=False, repr=False)
    _form: Form = field(init=False, repr=False)

    def __post_init__(self) -> None:
        starts = np.cumsum([0, *(chunk.elements for chunk in self.chunks)])
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_form", decode_form(self.chunks[0].form, self.path))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.save, self.stream, self.chunks, self.spec)

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
        """Return the elements from one number up to another, stacked."""
        made = saved.chunk_file.new_columns(self._form, stop - start)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = 0
        while start < stop:
            first, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            self._file(number).copy(start - first, end - first, made, at)
            start, at, number = end, at + end - start, number + 1
        return self._finished(made)

    def _gather(self, rows: NDArray[np.int64]) -> Any:
        made = saved.chunk_file.new_columns(self._form, rows.size)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        for places in np.split(order, cuts) if rows.size else ():
            number = int(numbers[places[0]])
            self._file(number).gather(rows[places] - self._starts[number], made, places)
        return self._finished(made)

    def _finished(self, made: list[NDArray[Any]]) -> Any:
        return unflatten(self._form.structure, saved.chunk_file.finished(self._form, made))

    def _file(self, number: int) -> saved.chunk_file.ChunkFile:
        file = self._files.get(number)
        if file is None:
            folder = SavedDirectory(self.path).folder
            file = saved.chunk_file.ChunkFile(folder, self.chunks[number], self.save)
            while len(self._files) >= _MOST_MAPPED:
                self._files.pop(next(iter(self._files)), None)
            self._files[number] = file
        return file


@dataclass(frozen=True, eq=False)
class SavedChunksSource(Source):
    """The elements of chunk files, wherever and whatever they are; an index is a file.

    Args:
        path: The directory.
        save: Id of the save.
        stream: The only stream whose elements these are; None: those of all.
        chunks: The chunk files, in order.
        spec: Spec of the elements; None where it is not known, since there are none.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("path", "chunks", "spec")

    path: str
    save: str
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
    def index_holds(self) -> IndexHolds:
        return "file"

    @property
    def paths(self) -> tuple[str, ...]:
        folder = SavedDirectory(self.path).folder
        return tuple(
            folder.path(folder.found_as(chunk.name(self.save), chunk.public_name(self.save)))
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
    """Reads the elements of several chunk files, one after another.

    Args:
        source: Whose files these are.
        start: Number of the first file.
        stop: Number after the last.
        position: Where to begin, if not there: `[file, elements of it that were passed]`.
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
                folder, source.chunks[self._number], source.save
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
    if position is None:
        return start, 0
    if (
        not isinstance(position, list | tuple)
        or len(position) != 2
        or not all(type(value) is int and value >= 0 for value in position)
        or not start <= position[0] <= stop
        or position[1] > (chunks[position[0]].elements if position[0] < stop else 0)
    ):
        raise ValueError(
            f"position must be [file, elements] with a file from {start} to {stop}, got "
            f"{position!r}"
        )
    number, row = position
    return number, row
