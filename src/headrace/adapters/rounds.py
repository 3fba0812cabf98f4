"""A step for readers that must end together, where nobody knows how many elements there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Rounds"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rounds(Node):
    """Keep block `index` of each `count` in a row; a last round that is not complete is dropped.

    It is a shard whose readers all get equally many blocks, each without a word to the others:
    every one reads a round to its end before it gives its block.
    """

    kind: ClassVar[str] = "rounds"
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True

    input: Node
    count: int
    index: int
    block: int = 1
    """Elements in a block."""
    short: bool = False
    """Whether a round is complete, too, if its last block has fewer elements."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        self.keep_int("count", minimum=1)
        self.keep_int("index", minimum=0)
        self.keep_int("block", minimum=1)

    def cardinality(self, *inputs: int) -> int:
        """Return INFINITE, or UNKNOWN: where it is known, a shard will do."""
        return INFINITE if inputs[0] == INFINITE else UNKNOWN


@make_iterator.register(Rounds)
class _RoundsIterator(ElementIterator):
    """Reads a round, then gives its block.

    Its state is where the round begins, how much of it failed already, and how much of the block
    was given. What fails is raised when it is read, and counts as none.
    """

    def __init__(self, node: Rounds, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._first, self._stop = node.index * node.block, (node.index + 1) * node.block
        self._size = node.count * node.block
        self._least = self._size - node.block + 1 if node.short else self._size
        self._begin(self._input.get_state())

    def _begin(self, start: State, failed: int = 0, given: int = 0) -> None:
        """Stand in a round of which nothing is read yet."""
        self._start = start
        self._failed = failed
        #: Failures that were raised before, and are met again.
        self._known = failed
        self._read = 0
        self._kept: list[Chunk] = []
        #: Elements of the block that were given.
        self._given = given
        self._is_read = False

    @property
    def reads_ahead_freely(self) -> bool:
        return self._input.reads_ahead_freely

    def next_chunk(self, limit: int) -> Chunk | None:
        while not (self._is_read and self._kept):
            if self._is_read:  # all of it was given before a restore
                self._begin(self._input.get_state())
            if not self._read_round():
                return None
        chunk = self._kept[0].slice(0, limit)
        self._kept = _after(self._kept, chunk.size)
        before = self.get_state()
        self._given += chunk.size
        if not self._kept:
            self._begin(self._input.get_state())
        after = self.get_state()
        size, given = chunk.size, before["given"]
        return chunk.with_states(
            lambda index: after if index == size else {**before, "given": given + index}
        )

    def _read_round(self) -> bool:
        """Read a round to its end, and keep the block; False: there is none."""
        while self._read < self._size:
            try:
                chunk = self._input.next_chunk(self._size - self._read)
            except Exception:
                if self._known:
                    self._known -= 1
                    continue
                self._failed += 1
                raise
            if chunk is None:
                if self._read < self._least:
                    return False
                break
            kept = chunk.slice(self._first - self._read, self._stop - self._read)
            if kept.size:
                self._kept.append(kept)
            self._read += chunk.size
        self._kept = _after(self._kept, self._given)
        self._is_read = True
        return True

    def get_state(self) -> State:
        return {"input": self._start, "failed": self._failed, "given": self._given}

    def set_state(self, state: State) -> None:
        self._input.set_state(state["input"])
        self._begin(state["input"], state["failed"], state["given"])

    def close(self) -> None:
        self._input.close()


def _after(chunks: list[Chunk], count: int) -> list[Chunk]:
    """Return what comes after so many elements."""
    rest = []
    for chunk in chunks:
        if count < chunk.size:
            rest.append(chunk.slice(count, chunk.size))
        count = max(0, count - chunk.size)
    return rest
