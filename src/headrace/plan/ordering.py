"""Steps that choose which elements come, and when, without looking at them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.element.spec import ArraySpec, Spec
from headrace.plan.node import Node, check_int
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Enumerate", "Repeat", "Shard", "Shuffle", "Skip", "Take"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shuffle(Node):
    """Yield elements at random from a buffer of `buffer_size` that is filled in order."""

    input: Node
    buffer_size: int
    seed: int | None = None
    reshuffle_each_iteration: bool = True

    def __post_init__(self) -> None:
        check_int("buffer_size", self.buffer_size, minimum=1)
        if self.seed is not None:
            check_int("seed", self.seed, minimum=-(1 << 63))


@dataclass(frozen=True, kw_only=True, eq=False)
class Repeat(Node):
    """Go over the input `count` times; None: without end."""

    input: Node
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            check_int("count", self.count, minimum=0)

    def cardinality(self, *inputs: int) -> int:
        if self.count == 0 or inputs[0] == 0:
            return 0
        if self.count is None or inputs[0] == INFINITE:
            return INFINITE
        return UNKNOWN if inputs[0] == UNKNOWN else inputs[0] * self.count


@dataclass(frozen=True, kw_only=True, eq=False)
class Take(Node):
    """Yield at most the first `count` elements; -1: all of them."""

    input: Node
    count: int

    def __post_init__(self) -> None:
        check_int("count", self.count, minimum=0, also=(-1,))

    def cardinality(self, *inputs: int) -> int:
        if self.count == -1 or inputs[0] == UNKNOWN:
            return inputs[0] if self.count else 0
        return self.count if inputs[0] == INFINITE else min(self.count, inputs[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Skip(Node):
    """Leave out the first `count` elements; -1: all of them."""

    input: Node
    count: int

    def __post_init__(self) -> None:
        check_int("count", self.count, minimum=0, also=(-1,))

    def cardinality(self, *inputs: int) -> int:
        if self.count == -1:
            return 0
        return inputs[0] if inputs[0] in (INFINITE, UNKNOWN) else max(0, inputs[0] - self.count)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard(Node):
    """Yield every `num_shards`-th element, from element `index` on."""

    input: Node
    num_shards: int
    index: int

    def __post_init__(self) -> None:
        check_int("num_shards", self.num_shards, minimum=1)
        check_int("index", self.index, minimum=0)
        if self.index >= self.num_shards:
            raise ValueError(
                f"`index` must be between 0 and {self.num_shards - 1} "
                f"(currently index = {self.index})"
            )

    def cardinality(self, *inputs: int) -> int:
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        return max(0, -(-(inputs[0] - self.index) // self.num_shards))


@dataclass(frozen=True, kw_only=True, eq=False)
class Enumerate(Node):
    """Pair each element with its number, counted from `start`."""

    input: Node
    start: int = 0

    def __post_init__(self) -> None:
        check_int("start", self.start, minimum=-(1 << 63))

    def spec(self, *inputs: Spec) -> Spec | None:
        return (ArraySpec((), "int64"), inputs[0])
