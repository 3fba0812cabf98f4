"""A chunk file that is read: in order, or at any rows. What is returned is always fresh memory.

Rule 1. Where reading begins a batch its checksum is verified, once. Rows at random are not
        verified, unless they are bytes or str: for a few rows one would read the whole file.
Rule 2. Whatever is wrong with a file is a DataLossError with its name.
"""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.memory import fresh
from headrace.element.structure import unflatten
from headrace.element.transpose import untranspose
from headrace.errors import DataLossError, FailedPreconditionError, NotFoundError
from headrace.saved.arrow import check_sum, own_order, stored_dtype
from headrace.saved.batches import (
    ALIGNMENT,
    Batch,
    Stored,
    decoded_strings,
    form_text,
    map_file,
    read_batches,
    taken_strings,
    whole_buffer,
)
from headrace.saved.form import NUMBERS, Column, Form, decode_form
from headrace.saved.format import ChunkRecord
from headrace.storage.files import Folder

__all__ = ["ChunkFile", "finished", "new_columns"]

#: Rows of so many bytes are copied one by one, smaller ones gathered together.
_LARGE_ROW = 4096


class ChunkFile:
    """A chunk file that is open: on a local disk mapped into memory, else read as a whole.

    It has nothing to close: its memory lives as long as it does. Several threads may read it.

    Args:
        folder: Where it is.
        chunk: What is known of it; its order is.
        save: Id of its save.

    Attributes:
        path: Its path or URL.
        form: How its elements are columns.
        size: How many elements it holds.

    Raises:
        DataLossError: It is missing or damaged.
    """

    def __init__(self, folder: Folder, chunk: ChunkRecord, save: str) -> None:
        name = folder.found_as(chunk.name(save), chunk.public_name(save))
        self.path = folder.path(name)
        self._source = self._opened(folder, name)
        if chunk.bytes not in (0, self._source.size):
            raise DataLossError(
                f"{self.path!r} has {self._source.size} bytes where {chunk.bytes} were written; it "
                "was cut short or changed: bring it back, or save the dataset again"
            )
        try:
            self.form: Form = decode_form(chunk.form or form_text(self._source), self.path)
            self._batches: list[Batch] = read_batches(self._source, self.form)
        except (DataLossError, FailedPreconditionError):
            raise
        except Exception as error:
            raise self._damaged(error) from error
        #: The number of each batch's first element, and of what comes after the last.
        self._starts = list(itertools.accumulate([b.size for b in self._batches], initial=0))
        self.size = self._starts[-1]
        if chunk.elements not in (0, self.size):
            raise self._damaged(ValueError(f"it has {self.size} elements, not {chunk.elements}"))
        self._verified = [False] * len(self._batches)
        # For rows at random: where each batch begins, and in it each column, in the file.
        self._firsts = np.array(self._starts)
        self._offsets = [
            np.array([batch.columns[index].offset for batch in self._batches])
            for index in range(len(self.form.columns))
        ]

    def _opened(self, folder: Folder, name: str) -> Any:
        try:
            return map_file(self.path) if folder.is_local else whole_buffer(folder.read(name))
        except (FileNotFoundError, NotFoundError) as error:
            raise DataLossError(
                f"{self.path!r} is missing; bring it back, or save the dataset again"
            ) from error
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataLossError:
        return DataLossError(
            f"{self.path!r} is damaged: {error}; bring it back, or save the dataset again"
        )

    # --- in order ---------------------------------------------------------------------------------

    def read(self, start: int, limit: int) -> Chunk:
        """Return 1 to `limit` elements from number `start` on, all of one batch."""
        number = bisect.bisect_right(self._starts, start) - 1
        batch = self._batches[number]
        self._verify(number)
        begin = start - self._starts[number]
        end = min(begin + limit, batch.size)
        form = self.form
        if form.is_fixed and form.columns:
            made = new_columns(form, end - begin)
            self._copy(batch, begin, end, made, 0)
            return Chunk.of_columns(unflatten(form.structure, finished(form, made)), end - begin)
        columns = [
            self._values(column, stored, begin, end)
            for column, stored in zip(form.columns, batch.columns, strict=True)
        ]
        return Chunk.of_rows(untranspose(form.structure, columns, end - begin))

    def copy(self, start: int, stop: int, made: list[NDArray[Any]], at: int) -> None:
        """Copy elements `start` to `stop` - 1 into `new_columns`, from row `at` on."""
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin = start - self._starts[number]
            if not begin:
                self._verify(number)
            end = min(stop - self._starts[number], self._batches[number].size)
            self._copy(self._batches[number], begin, end, made, at)
            start, at, number = start + end - begin, at + end - begin, number + 1

    def _copy(self, batch: Batch, begin: int, end: int, made: list[NDArray[Any]], at: int) -> None:
        for column, stored, target in zip(self.form.columns, batch.columns, made, strict=True):
            part = target[at : at + end - begin]
            if column.held == NUMBERS:
                part[...] = stored.values[begin:end]
            else:
                part.reshape(-1)[:] = self._strings(column, stored, begin, end)

    def _strings(self, column: Column, stored: Stored, begin: int, end: int) -> list[Any]:
        each = math.prod(column.lengths)
        try:
            return decoded_strings(column, stored.values, begin * each, end * each)
        except ValueError as error:
            raise self._damaged(error) from error

    def _values(self, column: Column, stored: Stored, begin: int, end: int) -> list[Any]:
        """Return the values of one component, one for each element."""
        if column.is_fixed:
            if column.held != NUMBERS and not column.shape:
                return self._strings(column, stored, begin, end)
            made = _new_column(column, end - begin)
            if column.held == NUMBERS:
                made[...] = stored.values[begin:end]
                made = own_order(made, column.dtype)
            else:
                made.reshape(-1)[:] = self._strings(column, stored, begin, end)
            return list(made)
        assert stored.starts is not None
        starts = stored.starts[begin : end + 1].tolist()
        first, last = starts[0], starts[-1]
        flat: NDArray[Any]
        if column.held == NUMBERS:
            flat = own_order(np.array(stored.values[first:last]), column.dtype)
        else:
            flat = np.empty(last - first, object)
            try:
                flat[:] = decoded_strings(column, stored.values, first, last)
            except ValueError as error:
                raise self._damaged(error) from error
        cuts = itertools.pairwise(starts)
        if stored.shapes is None:
            return [flat[a - first : b - first] for a, b in cuts]
        shapes = stored.shapes[begin:end].tolist()
        return [
            flat[a - first : b - first].reshape(shape)
            for (a, b), shape in zip(cuts, shapes, strict=True)
        ]

    def _verify(self, number: int) -> None:
        if not self._verified[number]:
            batch = self._batches[number]
            found = check_sum(batch.arrays)
            if found != batch.check:
                raise self._damaged(
                    ValueError(
                        f"elements {self._starts[number]} to {self._starts[number + 1] - 1} do not "
                        "match their checksum"
                    )
                )
            self._verified[number] = True

    # --- at random --------------------------------------------------------------------------------

    def gather(
        self, rows: NDArray[np.int64], made: list[NDArray[Any]], places: NDArray[np.int64]
    ) -> None:
        """Copy the elements of these numbers into `new_columns`, each to its place."""
        numbers = np.searchsorted(self._firsts, rows, side="right") - 1
        within = rows - self._firsts[numbers]
        for index, (column, target) in enumerate(zip(self.form.columns, made, strict=True)):
            if column.held != NUMBERS:
                self._gather_strings(index, column, numbers, within, target, places)
                continue
            row_bytes = math.prod(column.lengths) * column.dtype.itemsize
            if not row_bytes:
                continue
            if row_bytes >= _LARGE_ROW:
                columns = [batch.columns[index].values for batch in self._batches]
                for number, row, place in zip(
                    numbers.tolist(), within.tolist(), places.tolist(), strict=True
                ):
                    target[place] = columns[number][row]
                continue
            # Rows begin at multiples of `step`: they are the items of one array, that overlap.
            step = math.gcd(row_bytes, ALIGNMENT)
            count = (self._source.size - row_bytes) // step + 1
            windows = np.ndarray((count,), f"V{row_bytes}", self._source, strides=(step,))
            found = windows[(self._offsets[index][numbers] + within * row_bytes) // step]
            target[places] = found.view(target.dtype).reshape(-1, *column.lengths)

    def _gather_strings(
        self,
        index: int,
        column: Column,
        numbers: NDArray[np.int64],
        within: NDArray[np.int64],
        target: NDArray[Any],
        places: NDArray[np.int64],
    ) -> None:
        each = np.arange(math.prod(column.lengths))
        for number in np.unique(numbers).tolist():
            self._verify(number)
            chosen = numbers == number
            items = within[chosen][:, np.newaxis] * each.size + each
            stored = self._batches[number].columns[index].values
            try:
                found = taken_strings(column, stored, items.reshape(-1))
            except ValueError as error:
                raise self._damaged(error) from error
            made = np.empty(items.size, object)
            made[:] = found
            target[places[chosen]] = made.reshape(-1, *column.lengths)


def new_columns(form: Form, size: int) -> list[NDArray[Any]]:
    """Return arrays that `size` elements of a fixed form can be copied into."""
    return [_new_column(column, size) for column in form.columns]


def _new_column(column: Column, size: int) -> NDArray[Any]:
    dtype = stored_dtype(column.dtype) if column.held == NUMBERS else column.dtype
    return fresh((size, *column.lengths), dtype)


def finished(form: Form, made: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return `new_columns` that are filled as the columns of elements."""
    return [
        own_order(array, column.dtype) if column.held == NUMBERS else array
        for array, column in zip(made, form.columns, strict=True)
    ]
