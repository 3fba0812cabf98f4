"""Steps that buffer elements: read-ahead and caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace.arguments import check_string
from headrace.plan.node import AUTOTUNE, Node

__all__ = ["Cache", "CacheKey", "Prefetch"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Prefetch(Node):
    """Read up to `buffer_size` elements ahead on a separate thread.

    With `only_if_slow` the thread starts only once computing an element takes longer than handing
    it from one thread to another.
    """

    kind: ClassVar[str] = "prefetch"
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True
    performance_fields: ClassVar[tuple[str, ...]] = ("buffer_size", "only_if_slow")

    input: Node
    buffer_size: int = AUTOTUNE
    only_if_slow: bool = False

    def __post_init__(self) -> None:
        self.validate_int("buffer_size", minimum=0, also_allowed=(AUTOTUNE,))


class CacheKey:
    """Identity of one in-memory cache, which lives as long as a plan refers to it."""

    def __init__(self) -> None:
        self._shard_keys: dict[tuple[int, int], CacheKey] = {}

    def shard_key(self, count: int, index: int) -> CacheKey:
        """Return the key of the cache of shard `index` of `count`.

        The key is the same each time, because the plan of each epoch is sharded separately.
        """
        return self._shard_keys.setdefault((count, index), CacheKey())

    def __reduce__(self) -> tuple[type[CacheKey], tuple[()]]:
        return CacheKey, ()

    def __repr__(self) -> str:
        return "CacheKey()"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cache(Node):
    """Keep the elements of the first complete epoch, in memory or in the file `filename`.

    The cache file of a worker's dataset shard (`rewrites.shard`) has the shard in its name. The
    suffix is not part of a state: a state of a shard is valid on any worker.
    """

    kind: ClassVar[str] = "cache"
    is_split_local: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True
    performance_fields: ClassVar[tuple[str, ...]] = ("shard_suffix",)

    input: Node
    filename: str = ""
    shard_suffix: str = ""
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
        """Cache file; empty if elements are kept in memory."""
        return self.filename + self.shard_suffix
