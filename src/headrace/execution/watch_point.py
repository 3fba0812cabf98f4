"""The watch point: where statistics, tracing and faults for tests see every stage of a plan.

    start(plan, watch=watch):  context.watch(node, iterator of node) -> what stands in its place

Each iterator of a plan is made through `context.watch`, the steps of index parts and of nested
datasets too. By default it stays what it is, so watching costs nothing where nobody watches.

Rule 1. Nothing is measured inside a stage. Whoever measures returns a `Watched` of their own.
Rule 2. What stands in a stage's place keeps the rules of `iterator`: it gives the same elements,
        errors and states, and asks for no more than it is asked for.
Rule 3. A stage is read on whichever thread its consumer reads on (`prefetch`, a threaded map or
        interleave), one at a time, and nested datasets on several at once: what they count
        together needs a lock. A stage that did not return in time is made, and watched, again.
"""

from __future__ import annotations

from headrace.element.chunk import Chunk
from headrace.execution.iterator import ElementIterator, Singles, State

__all__ = ["Watched"]


class Watched(ElementIterator):
    """A stage as it is: to be derived from, by whoever looks at what passes.

    Elements pass by `next_chunk` or, where `gives_rows`, one by one by `singles`; `skip` passes
    over elements that nobody sees.

    Args:
        stage: The stage's iterator.
    """

    def __init__(self, stage: ElementIterator) -> None:
        self.stage = stage
        self.gives_rows = stage.gives_rows

    @property
    def reads_ahead_freely(self) -> bool:
        return self.stage.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return self.stage.at_hand

    def next_chunk(self, limit: int) -> Chunk | None:
        return self.stage.next_chunk(limit)

    def singles(self) -> Singles | None:
        return self.stage.singles()

    def get_state(self) -> State:
        return self.stage.get_state()

    def set_state(self, state: State) -> None:
        self.stage.set_state(state)

    def skip(self, count: int) -> int:
        return self.stage.skip(count)

    def seek(self, position: int) -> None:
        self.stage.seek(position)

    def close(self) -> None:
        self.stage.close()
