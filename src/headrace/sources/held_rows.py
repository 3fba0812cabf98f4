"""A source of elements that somebody holds: a window, whatever the shapes of its elements."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.element.chunk import Chunk
from headrace.element.ownership import copied
from headrace.element.structure import Element
from headrace.plan.source import Position, Reader, Source, check_limit, check_range

__all__ = ["HeldRowsSource"]


class HeldRowsSource(Source):
    """Elements in the order in which they are held. Each reading gives copies of its own.

    Args:
        rows: Normal elements.
    """

    def __init__(self, rows: Sequence[Element]) -> None:
        self._rows = rows

    @property
    def size(self) -> int:
        return 1

    @property
    def elements_per_index(self) -> int | None:
        return len(self._rows)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, self.size)
        return _RowReader(self._rows if stop > start else (), position or 0)


class _RowReader:
    """Reads elements that are held; its position is the number of the next."""

    def __init__(self, rows: Sequence[Element], position: int) -> None:
        self._rows = rows
        self._next = position

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        rows = [copied(row) for row in self._rows[self._next : self._next + limit]]
        self._next += len(rows)
        return Chunk.of_rows(rows) if rows else None

    def get_position(self) -> Position:
        return self._next

    def close(self) -> None:
        self._rows = ()
