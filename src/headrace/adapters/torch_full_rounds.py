"""The step by which ranks end together although the number of elements is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["ShardFullRounds"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardFullRounds(Node):
    """Yields block `index` of every `count` consecutive blocks; drops an incomplete last round.

    All readers of such shards get the same number of blocks without communication, because each
    reads a round completely before it yields its block.
    """

    kind: ClassVar[str] = "shard_full_rounds"
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    input: Node
    count: int
    index: int
    block: int = 1
    """Number of elements in a block."""
    allows_short_block: bool = False
    """Whether a round is also complete if its last block has fewer elements."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        self.validate_int("count", minimum=1)
        self.validate_int("index", minimum=0)
        self.validate_int("block", minimum=1)

    def cardinality(self, *inputs: int) -> int:
        """Return INFINITE or UNKNOWN; for a known cardinality, a plain shard step is used."""
        return INFINITE if inputs[0] == INFINITE else UNKNOWN


@make_iterator.register(ShardFullRounds)
class _ShardFullRoundsIterator(ElementIterator):
    """Reads a round, then yields its block.

    Its state consists of the start of the round, the number of failed elements in it, and the
    number of yielded elements of the block. An error is raised when its element is read; failed
    elements do not count as elements of the round.
    """

    def __init__(self, node: ShardFullRounds, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._block_start, self._block_stop = node.index * node.block, (node.index + 1) * node.block
        self._round_size = node.count * node.block
        self._min_round_size = (
            self._round_size - node.block + 1 if node.allows_short_block else self._round_size
        )
        self._begin_round(self._input.get_state())

    def _begin_round(self, start: State, num_failed: int = 0, num_yielded: int = 0) -> None:
        """Set the position to the start of a round."""
        self._round_start = start
        self._num_failed = num_failed
        #: Failures that were already raised, and will be encountered again.
        self._num_known_failures = num_failed
        self._num_read = 0
        self._block_chunks: list[Chunk] = []
        #: Elements of the block that were yielded.
        self._num_yielded = num_yielded
        self._is_complete = False

    @property
    def can_read_ahead(self) -> bool:
        return self._input.can_read_ahead

    def next_chunk(self, limit: int) -> Chunk | None:
        while not (self._is_complete and self._block_chunks):
            if self._is_complete:  # its whole block was yielded before a restore
                self._begin_round(self._input.get_state())
            if not self._read_round():
                return None
        chunk = self._block_chunks[0].slice(0, limit)
        self._block_chunks = _drop_first(self._block_chunks, chunk.size)
        before = self.get_state()
        self._num_yielded += chunk.size
        if not self._block_chunks:
            self._begin_round(self._input.get_state())
        after = self.get_state()
        size, num_yielded = chunk.size, before["num_yielded"]
        return chunk.with_states(
            lambda index: after if index == size else {**before, "num_yielded": num_yielded + index}
        )

    def _read_round(self) -> bool:
        """Read a whole round, and store the block; return False if there is no further round."""
        while self._num_read < self._round_size:
            try:
                chunk = self._input.next_chunk(self._round_size - self._num_read)
            except Exception:
                if self._num_known_failures:
                    self._num_known_failures -= 1
                    continue
                self._num_failed += 1
                raise
            if chunk is None:
                if self._num_read < self._min_round_size:
                    return False
                break
            block_part = chunk.slice(
                self._block_start - self._num_read, self._block_stop - self._num_read
            )
            if block_part.size:
                self._block_chunks.append(block_part)
            self._num_read += chunk.size
        self._block_chunks = _drop_first(self._block_chunks, self._num_yielded)
        self._is_complete = True
        return True

    def get_state(self) -> State:
        return {
            "input": self._round_start,
            "num_failed": self._num_failed,
            "num_yielded": self._num_yielded,
        }

    def set_state(self, state: State) -> None:
        self._input.set_state(state["input"])
        self._begin_round(state["input"], state["num_failed"], state["num_yielded"])

    def close(self) -> None:
        self._input.close()


def _drop_first(chunks: list[Chunk], count: int) -> list[Chunk]:
    """Remove the first `count` elements."""
    rest = []
    for chunk in chunks:
        if count < chunk.size:
            rest.append(chunk.slice(count, chunk.size))
        count = max(0, count - chunk.size)
    return rest
