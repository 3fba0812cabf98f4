"""A step that hands each element to a device, so that it can stand below a prefetch.

The elements that are on their way there are buffered by the engine then, and a state is the place
of what was yielded, as it is of every dataset: chunks know their places, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.node import Node

__all__ = ["Moved"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Moved(Node):
    """`move(element)` for each element: anything at all, for the step's own iterator alone.

    It stands at the top of a plan, with nothing above it but a prefetch.
    """

    kind: ClassVar[str] = "moved"
    within_units: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True
    speed_only: ClassVar[tuple[str, ...]] = ("move",)

    input: Node
    move: Callable[[Any], Any]


@make_iterator.register(Moved)
class _MovedIterator(ElementIterator):
    """Moves one element at a time: an error is raised when its element's turn comes."""

    def __init__(self, node: Moved, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._move = node.move

    @property
    def reads_ahead_freely(self) -> bool:
        return False  # each takes memory of the device: no more than was asked for

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(1)
        if chunk is None:
            return None
        return Chunk.of_rows([self._move(row) for row in chunk.rows()], chunk.states, chunk.places)

    def get_state(self) -> State:
        return self._input.get_state()

    def set_state(self, state: State) -> None:
        self._input.set_state(state)

    def skip(self, count: int) -> int:
        return self._input.skip(count)

    def close(self) -> None:
        self._input.close()
