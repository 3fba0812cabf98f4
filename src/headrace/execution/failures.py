"""The iterators of steps that say where an element fails which workers made (`plan.units`)."""

from __future__ import annotations

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.error_origins import Failed, fails_below
from headrace.execution.iterator import ElementIterator, Singles, make_iterator
from headrace.execution.stage import Stage
from headrace.execution.watch_point import Watched
from headrace.plan.units import FailsBelow, RaiseFailed

__all__ = ["FailsBelowIterator", "RaiseFailedIterator"]


@make_iterator.register(RaiseFailed)
class RaiseFailedIterator(Stage):
    """Raises the errors that are held in places of elements."""

    def __init__(self, node: RaiseFailed, context: Context) -> None:
        super().__init__(make_iterator(node.input, context))

    def _work(self, limit: int) -> Chunk | None:
        chunk = self._intake.look(limit)
        if chunk is None:
            return None
        start = self._intake.offset
        part = chunk.slice(start, start + limit)
        count = part.size
        if not part.is_columnar:  # columns hold nothing but elements
            rows = enumerate(part.rows())
            count = next((index for index, row in rows if type(row) is Failed), count)
        if not count:
            self._failure = part.rows()[0].error
            return None
        self._use(count)
        return part.slice(0, count)


@make_iterator.register(FailsBelow)
class FailsBelowIterator(Watched):
    """Lets errors say where they were raised."""

    def __init__(self, node: FailsBelow, context: Context) -> None:
        super().__init__(make_iterator(node.input, context))
        self.gives_rows = False

    def next_chunk(self, limit: int) -> Chunk | None:
        try:
            return super().next_chunk(limit)
        except Exception as error:
            fails_below(error)
            raise

    def singles(self) -> Singles | None:
        return ElementIterator.singles(self)
