"""Steps that keep elements: ahead of their use, or for the next pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.plan.node import AUTOTUNE, Node, check_int

__all__ = ["Cache", "CacheKey", "Prefetch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefetch(Node):
    """Read up to `buffer_size` elements ahead, on a thread of its own."""

    input: Node
    buffer_size: int = AUTOTUNE

    def __post_init__(self) -> None:
        check_int("buffer_size", self.buffer_size, minimum=0, also=(AUTOTUNE,))


class CacheKey:
    """Names one in-memory cache for as long as a plan that has it is alive."""

    def __repr__(self) -> str:
        return "CacheKey()"


@dataclass(frozen=True, kw_only=True, eq=False)
class Cache(Node):
    """Keep the elements of the first complete pass: in memory, or in the file `filename`."""

    input: Node
    filename: str = ""
    key: CacheKey = field(default_factory=CacheKey)

    def __post_init__(self) -> None:
        if not isinstance(self.filename, str):
            raise TypeError(f"`filename` must be a string, but got {self.filename!r}")
