"""Steps that keep elements: ahead of their use, or for the next pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace.arguments import check_string
from headrace.plan.node import AUTOTUNE, Node

__all__ = ["Cache", "CacheKey", "Prefetch"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Prefetch(Node):
    """Read up to `buffer_size` elements ahead, on a thread of its own.

    With `only_if_slow` the thread begins when elements turn out to take longer to make than to
    hand from one thread to another.
    """

    kind: ClassVar[str] = "prefetch"
    within_units: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True
    speed_only: ClassVar[tuple[str, ...]] = ("buffer_size", "only_if_slow")

    input: Node
    buffer_size: int = AUTOTUNE
    only_if_slow: bool = False

    def __post_init__(self) -> None:
        self.keep_int("buffer_size", minimum=0, also=(AUTOTUNE,))


class CacheKey:
    """Names one in-memory cache for as long as a plan that has it is alive."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], CacheKey] = {}

    def part(self, count: int, index: int) -> CacheKey:
        """Return the name of the cache of part `index` of so many of what this one keeps.

        It is the same each time: what shares a plan does so anew for each pass.
        """
        return self._parts.setdefault((count, index), CacheKey())

    def __reduce__(self) -> tuple[type[CacheKey], tuple[()]]:
        return CacheKey, ()

    def __repr__(self) -> str:
        return "CacheKey()"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache(Node):
    """Keep the elements of the first complete pass: in memory, or in the file `filename`.

    What keeps a worker's share (`rewrites.shard`) has the share in the name of its file. That is
    part of no state: a share has one place on whichever worker it is.
    """

    kind: ClassVar[str] = "cache"
    within_units: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True
    speed_only: ClassVar[tuple[str, ...]] = ("share",)

    input: Node
    filename: str = ""
    share: str = ""
    key: CacheKey = field(default_factory=CacheKey)

    def __post_init__(self) -> None:
        check_string("filename", self.filename)
        if "://" in self.filename:
            raise ValueError(
                f"`filename` must be a path on a local disk, but is the URL {self.filename!r}; "
                "name a local file, or leave it empty to keep the elements in memory"
            )

    @property
    def path(self) -> str:
        """The file in which elements are kept; empty: they are in memory."""
        return self.filename + self.share
