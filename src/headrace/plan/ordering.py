"""Steps that select and order elements without looking at them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.element.spec import Spec
from headrace.plan.node import Node
from headrace.plan.source import INDEX_SPEC, INFINITE, UNKNOWN

__all__ = [
    "SHARD_HINT",
    "Enumerate",
    "Repeat",
    "ShardBlocks",
    "ShardElements",
    "Shuffle",
    "Skip",
    "Take",
]

SHARD_HINT = -1
"""Stands for a number of shards and an index that are set when the dataset is divided among
workers."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Shuffle(Node):
    """Yield random elements of a buffer of `buffer_size`, which is filled in order."""

    kind: ClassVar[str] = "shuffle"
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True
    is_random: ClassVar[bool] = True
    selects_by_position: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    buffer_size: int
    seed: int | None = None
    reshuffle_each_iteration: bool = True
    default_seed: int | None = field(default=None, metadata={"is_parameter": False})
    """Seed drawn at construction if all epochs have the same order and the user gave no seed. Not a
    parameter that distinguishes steps, because it differs between runs of a script."""

    def __post_init__(self) -> None:
        self.validate_int("buffer_size", minimum=1)
        if self.seed is not None:
            self.validate_int("seed", minimum=-(1 << 63))
        elif not self.reshuffle_each_iteration and self.default_seed is None:
            object.__setattr__(self, "default_seed", secrets.randbits(52))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Repeat(Node):
    """Repeat the input `count` times; None repeats it forever."""

    kind: ClassVar[str] = "repeat"
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    selects_by_position: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            self.validate_int("count", minimum=0, also_allowed=(-1,))
        if self.count == -1:
            object.__setattr__(self, "count", None)

    def cardinality(self, *inputs: int) -> int:
        if self.count == 0 or inputs[0] == 0:
            return 0
        if self.count is None or inputs[0] == INFINITE:
            return INFINITE
        return UNKNOWN if inputs[0] == UNKNOWN else inputs[0] * self.count


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Take(Node):
    """Yield at most the first `count` elements; -1 yields all of them."""

    kind: ClassVar[str] = "take"
    is_read_only: ClassVar[bool] = True
    selects_by_position: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    count: int

    def __post_init__(self) -> None:
        self.validate_int("count", minimum=0, also_allowed=(-1,))

    def cardinality(self, *inputs: int) -> int:
        if self.count == -1 or inputs[0] == UNKNOWN:
            return inputs[0] if self.count else 0
        return self.count if inputs[0] == INFINITE else min(self.count, inputs[0])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Skip(Node):
    """Skip the first `count` elements; -1 skips all of them."""

    kind: ClassVar[str] = "skip"
    is_read_only: ClassVar[bool] = True
    selects_by_position: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    count: int

    def __post_init__(self) -> None:
        self.validate_int("count", minimum=0, also_allowed=(-1,))

    def cardinality(self, *inputs: int) -> int:
        if self.count == -1:
            return 0
        return inputs[0] if inputs[0] in (INFINITE, UNKNOWN) else max(0, inputs[0] - self.count)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardElements(Node):
    """Yield every `num_shards`-th element, starting with element `index`.

    With SHARD_HINT the step only marks where `rewrites.shard` shards the plan.
    """

    kind: ClassVar[str] = "shard"
    is_read_only: ClassVar[bool] = True
    selects_by_position: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    num_shards: int
    index: int

    def __post_init__(self) -> None:
        self.validate_int("num_shards", minimum=1, also_allowed=(SHARD_HINT,))
        if self.num_shards == SHARD_HINT:
            return
        self.validate_int("index", minimum=0)
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
    is_read_only: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    start: int = 0

    def __post_init__(self) -> None:
        self.validate_int("start", minimum=-(1 << 63))

    def spec(self, *inputs: Spec) -> Spec | None:
        return (INDEX_SPEC, inputs[0])


# --- Shards of blocks -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardBlocks(Node):
    """Yield every `num_shards`-th block of `block_size` elements, starting with block `index`.

    Sharding before a batch this way equals sharding the batches. There is no public method for it.
    """

    kind: ClassVar[str] = "shard_blocks"
    is_read_only: ClassVar[bool] = True
    selects_by_position: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    num_shards: int
    index: int
    block_size: int

    def __post_init__(self) -> None:
        self.validate_int("num_shards", minimum=1)
        self.validate_int("index", minimum=0)
        self.validate_int("block_size", minimum=1)

    def cardinality(self, *inputs: int) -> int:
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        stride = self.num_shards * self.block_size
        rounds, rest = divmod(inputs[0], stride)
        return rounds * self.block_size + min(
            self.block_size, max(0, rest - self.index * self.block_size)
        )
