"""The iterator over every n-th block of elements."""

from __future__ import annotations

from headrace.element.chunk import Chunk, States
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.ordering import ShardBlocks

__all__ = ["ShardBlocksIterator"]


@make_iterator.register(ShardBlocks)
class ShardBlocksIterator(ElementIterator):
    """Keeps every n-th block; counts the elements that it read."""

    def __init__(self, node: ShardBlocks, context: Context) -> None:
        self._input: ElementIterator = make_iterator(node.input, context)
        self._block = node.block
        self._stride = node.num_shards * node.block
        self._first = node.index * node.block
        self._count = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            count = self._count
            at = (count - self._first) % self._stride
            inside = at < self._block
            wanted = min(limit, self._block - at) if inside else self._stride - at
            chunk = self._input.next_chunk(wanted)
            if chunk is None:
                return None
            self._count = count + chunk.size
            if inside:
                return chunk.with_states(_counted(chunk.states, count))

    def seek(self, position: int) -> None:
        block, within = divmod(position, self._block)
        self._count = self._first + block * self._stride + within
        self._input.seek(self._count)

    def get_state(self) -> State:
        return {"count": self._count, "input": self._input.get_state()}

    def set_state(self, state: State) -> None:
        self._count = state["count"]
        self._input.set_state(state["input"])

    def close(self) -> None:
        self._input.close()


def _counted(states: States, count: int) -> States:
    return lambda index: {"count": count + index, "input": states(index)}
