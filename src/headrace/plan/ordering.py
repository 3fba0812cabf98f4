"""Steps that choose which elements come, and when, without looking at them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.element.spec import Spec
from headrace.plan.node import Node
from headrace.plan.source import INDEX_SPEC, INFINITE, UNKNOWN

__all__ = ["SHARD_HINT", "Enumerate", "Repeat", "Shard", "ShardBlocks", "Shuffle", "Skip", "Take"]

SHARD_HINT = -1
"""In place of a number of shards: who shards the dataset over workers says how many, and which."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Shuffle(Node):
    """Yield elements at random from a buffer of `buffer_size` that is filled in order."""

    kind: ClassVar[str] = "shuffle"
    carries: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    buffer_size: int
    seed: int | None = None
    reshuffle_each_iteration: bool = True
    drawn_seed: int | None = field(default=None, metadata={"counts": False})
    """Where each pass has the same order and the user gave no seed: drawn when the step is made.
    It does not tell the step from another, for a script draws a different one in each run."""

    def __post_init__(self) -> None:
        self.keep_int("buffer_size", minimum=1)
        if self.seed is not None:
            self.keep_int("seed", minimum=-(1 << 63))
        elif not self.reshuffle_each_iteration and self.drawn_seed is None:
            object.__setattr__(self, "drawn_seed", secrets.randbits(52))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Repeat(Node):
    """Go over the input `count` times; None: without end."""

    kind: ClassVar[str] = "repeat"
    within_units: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            self.keep_int("count", minimum=0)

    def cardinality(self, *inputs: int) -> int:
        if self.count == 0 or inputs[0] == 0:
            return 0
        if self.count is None or inputs[0] == INFINITE:
            return INFINITE
        return UNKNOWN if inputs[0] == UNKNOWN else inputs[0] * self.count


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Take(Node):
    """Yield at most the first `count` elements; -1: all of them."""

    kind: ClassVar[str] = "take"
    only_reads: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    count: int

    def __post_init__(self) -> None:
        self.keep_int("count", minimum=0, also=(-1,))

    def cardinality(self, *inputs: int) -> int:
        if self.count == -1 or inputs[0] == UNKNOWN:
            return inputs[0] if self.count else 0
        return self.count if inputs[0] == INFINITE else min(self.count, inputs[0])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Skip(Node):
    """Leave out the first `count` elements; -1: all of them."""

    kind: ClassVar[str] = "skip"
    only_reads: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    count: int

    def __post_init__(self) -> None:
        self.keep_int("count", minimum=0, also=(-1,))

    def cardinality(self, *inputs: int) -> int:
        if self.count == -1:
            return 0
        return inputs[0] if inputs[0] in (INFINITE, UNKNOWN) else max(0, inputs[0] - self.count)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Shard(Node):
    """Yield every `num_shards`-th element, from element `index` on.

    With SHARD_HINT shards it only marks where a rule is to shard the plan (`rewrites.shard`).
    """

    kind: ClassVar[str] = "shard"
    only_reads: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    num_shards: int
    index: int

    def __post_init__(self) -> None:
        self.keep_int("num_shards", minimum=1, also=(SHARD_HINT,))
        if self.num_shards == SHARD_HINT:
            return
        self.keep_int("index", minimum=0)
        if self.index >= self.num_shards:
            raise ValueError(
                f"`index` must be between 0 and {self.num_shards - 1} "
                f"(currently index = {self.index})"
            )

    def cardinality(self, *inputs: int) -> int:
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        if self.num_shards == SHARD_HINT:
            return UNKNOWN
        return max(0, -(-(inputs[0] - self.index) // self.num_shards))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Enumerate(Node):
    """Pair each element with its number, counted from `start`."""

    kind: ClassVar[str] = "enumerate"
    only_reads: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    start: int = 0

    def __post_init__(self) -> None:
        self.keep_int("start", minimum=-(1 << 63))

    def spec(self, *inputs: Spec) -> Spec | None:
        return (INDEX_SPEC, inputs[0])


# --- Blocks: every n-th piece of several elements, as one of many readers takes it ----------------


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
