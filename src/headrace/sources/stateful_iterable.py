"""Source of the elements of an iterable whose iterators save and restore their own states."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.ownership import take_ownership
from headrace.element.structure import Element
from headrace.errors import (
    FailedPreconditionError,
    InvalidElementError,
    UserFunctionError,
    describe_error,
)
from headrace.plan.source import Position, Reader, Source, check_limit, check_range

__all__ = ["StatefulIterableSource"]


@dataclass(frozen=True, eq=False)
class StatefulIterableSource(Source):
    """The elements of an iterable whose iterators have `get_state` and `set_state`, as in Grain.

    A position is the state of such an iterator, so that a restore reads no earlier elements. An
    error of the iterable ends reading, because an iterator's state after an error is not defined.

    Args:
        iterable: The iterable; each reader iterates over it. States are JSON values, or bytes of
            UTF-8 text.
    """

    iterable: Iterable[Any]

    @property
    def size(self) -> int:
        return 1

    @property
    def runs_user_code(self) -> bool:
        return True

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        check_range(start, stop, 1)
        return _StatefulReader(self.iterable, _ENDED if start == stop else position)


_ENDED: Position = ["ended", "", 0]
"""Position after the last element, or after an error of the iterable."""


class _StatefulReader:
    """Reader of an iterable.

    Its position is None at the start, else a list: the kind of an iterator's state ("start",
    "json", "bytes" or "ended"), its text, and the number of elements read since. A text, unlike the
    state, cannot change with the iterator.
    """

    def __init__(self, iterable: Iterable[Any], position: Position) -> None:
        self._iterable = iterable
        self._position = position
        #: Iterator at the position; None before the first read and after an interruption.
        self._iterator: Any = None
        #: Error to raise in the next call, and the position after it.
        self._pending: tuple[Exception, Position] | None = None
        self._is_closed = False

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        if self._is_closed:
            raise FailedPreconditionError("this reader is closed; open another one")
        if self._pending is None and self._position != _ENDED:
            rows = self._collect(limit)
            if rows:
                return Chunk.of_rows(rows)
        if self._pending is not None:
            (error, self._position), self._pending = self._pending, None
            raise error
        return None

    def get_position(self) -> Position:
        return self._position

    def close(self) -> None:
        self._is_closed = True
        self._close_iterator()

    def _collect(self, limit: int) -> list[Element]:
        """Return up to `limit` elements; keep an error until the elements before it are read."""
        rows: list[Element] = []
        after = _ENDED
        try:
            if self._iterator is None:
                self._iterator = self._open_iterator()
            # No variable refers to a value, so that `take_ownership` need not copy it.
            for row in map(take_ownership, islice(self._iterator, limit)):
                rows.append(row)  # those before an error are kept
            if len(rows) == limit:
                after = _position_of(self._iterator)
        except InvalidElementError as error:
            self._pending = error, _position_of(self._iterator)
            after = self._position_after(len(rows))
        except Exception as error:
            self._pending = self._wrap(error), _ENDED
            after = self._position_after(len(rows))
        except BaseException:
            # Ctrl-C or `sys.exit()`: the next call reads the elements of this one again.
            self._close_iterator()
            raise
        self._position = after
        return rows

    def _open_iterator(self) -> Any:
        """Return an iterator at the position."""
        iterator: Any = iter(self._iterable)
        kind, text, count = self._position or ("start", "", 0)
        if kind != "start":
            iterator.set_state(text.encode() if kind == "bytes" else json.loads(text))
        for _ in islice(iterator, count):
            pass
        return iterator

    def _position_after(self, count: int) -> Position:
        """Return the position `count` elements after the current one."""
        kind, text, skipped = self._position or ("start", "", 0)
        return [kind, text, skipped + count]

    def _wrap(self, error: Exception) -> Exception:
        """Return the error to raise for one that the iterable raised."""
        trace = "".join(traceback.format_exception(error))
        result = UserFunctionError(
            f"the iterator of {type(self._iterable).__name__} raised: {describe_error(error)}"
            f"\n\nOriginal traceback:\n{trace}",
            original_type=type(error).__name__,
            original_traceback=trace,
        )
        result.__cause__ = error
        return result

    def _close_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None
        with suppress(Exception):
            getattr(iterator, "close", bool)()


def _position_of(iterator: Any) -> Position:
    """Return the position of an iterator."""
    state = iterator.get_state()
    if isinstance(state, bytes):
        return ["bytes", state.decode(), 0]
    return ["json", json.dumps(state, separators=(",", ":")), 0]
