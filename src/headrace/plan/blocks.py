"""Blocks: a part of a dataset in pieces of several elements, as one of many readers takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["ShardBlocks"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardBlocks(Node):
    """Yield every `num_shards`-th block of `block` elements, from block `index` on.

    A shard of batches is so a batch of a shard. There is no method for it.
    """

    kind: ClassVar[str] = "shard_blocks"
    only_reads: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    num_shards: int
    index: int
    block: int

    def __post_init__(self) -> None:
        self.keep_int("num_shards", minimum=1)
        self.keep_int("index", minimum=0)
        self.keep_int("block", minimum=1)

    def cardinality(self, *inputs: int) -> int:
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        stride = self.num_shards * self.block
        rounds, rest = divmod(inputs[0], stride)
        return rounds * self.block + min(self.block, max(0, rest - self.index * self.block))
