"""State that static sharding adds to tasks."""

from __future__ import annotations

import msgspec

from headrace.service.dispatcher.mode_state import TaskModeState
from headrace.service.messages import TaskAddress

__all__ = ["DatasetShard", "shard_of"]


class DatasetShard(TaskModeState):
    """The part of the dataset that a task reads."""

    index: int
    num_shards: int

    def extend_address(self, address: TaskAddress) -> TaskAddress:
        """Add the shard index to the address."""
        return msgspec.structs.replace(address, shard_index=self.index)


def shard_of(mode: TaskModeState | None) -> DatasetShard | None:
    """Return the shard of a task; None if it has none."""
    return mode if isinstance(mode, DatasetShard) else None
