"""The step that stores the first epoch in a directory for later programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.plan.buffering import Cache

__all__ = ["Snapshot"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Snapshot(Cache):
    """A cache file whose name follows from the pipeline before it (`plan.fingerprint`)."""

    kind: ClassVar[str] = "snapshot"
    dynamic_sharding_obstacle: ClassVar[str] = (
        "it stores a complete epoch, but workers compute only parts of one: save the elements with "
        "`hr.service.distributed_save` and read them with `Dataset.load`, or use "
        "ShardingPolicy.OFF or FILE"
    )
    # Changed code has another file, but a state is restored with a warning, as without a snapshot.
    performance_fields: ClassVar[tuple[str, ...]] = ("filename", "shard_suffix")
