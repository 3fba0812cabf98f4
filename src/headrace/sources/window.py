"""The elements of a sliding window, one component of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.memory import copy_array
from headrace.element.ownership import copy_element
from headrace.element.spec import Spec
from headrace.plan.source import Position, Reader, Source, check_limit, check_range

__all__ = ["WindowSource"]


class WindowSource(Source):
    """Part of a buffer that several windows share. Each read returns copies.

    It has one index, with the elements of the window.

    Args:
        buffer: Elements as an array or a list. The part is never changed.
        start: Index of the first element.
        stop: End, exclusive.
        stride: Distance between elements.
        spec: Spec of an element, if it is known.
    """

    __slots__ = ("_rows", "_size", "_spec")

    def __init__(
        self,
        buffer: NDArray[Any] | list[Any],
        start: int,
        stop: int,
        stride: int,
        spec: Spec | None = None,
    ) -> None:
        self._size = -(-(stop - start) // stride)
        self._spec = spec
        #: A view of an array, or a list and the part of it.
        self._rows: NDArray[Any] | tuple[list[Any], int, int, int] = (
            buffer[start:stop:stride]
            if isinstance(buffer, np.ndarray)
            else (buffer, start, stop, stride)
        )

    @property
    def size(self) -> int:
        return 1

    @property
    def element_spec(self) -> Spec | None:
        return self._spec

    @property
    def elements_per_index(self) -> int | None:
        return self._size

    @property
    def is_small(self) -> bool:
        rows = self._rows
        return (
            isinstance(rows, np.ndarray)
            and self._size <= _SMALL_SIZE
            and rows.nbytes <= _SMALL_BYTES
        )

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, 1)
        return _WindowReader(self, position or 0, self._size if stop > start else 0)

    def read_rows(self, start: int, stop: int) -> Chunk:
        """Return copies of elements `start` to `stop` - 1."""
        rows = self._rows
        if isinstance(rows, np.ndarray):
            return Chunk.of_columns(copy_array(rows[start:stop]), stop - start)
        buffer, first, _, stride = rows
        part = buffer[first + start * stride : first + (stop - 1) * stride + 1 : stride]
        return Chunk.of_rows(list(map(copy_element, part)))

    def __getstate__(self) -> tuple[Any, int, Spec | None]:
        rows = self._rows
        if not isinstance(rows, np.ndarray):  # without the elements of other windows
            buffer, start, stop, stride = rows
            rows = (buffer[start:stop:stride], 0, self._size, 1)
        return rows, self._size, self._spec

    def __setstate__(self, state: tuple[Any, int, Spec | None]) -> None:
        self._rows, self._size, self._spec = state


_SMALL_SIZE, _SMALL_BYTES = 512, 4096


class _WindowReader:
    """Reader of a window; its position is the number of the next element."""

    def __init__(self, source: WindowSource, position: int, size: int) -> None:
        self._source = source
        self._next = position
        self._size = size

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        start, stop = self._next, min(self._next + limit, self._size)
        if stop <= start:
            return None
        self._next = stop
        return self._source.read_rows(start, stop)

    def get_position(self) -> Position:
        return self._next

    def close(self) -> None:
        self._next = self._size
