"""What the dispatcher remembers of static sharding."""

from __future__ import annotations

import msgspec

from headrace.service.dispatcher.mode_state import TaskModeState
from headrace.service.messages import TaskAddress

__all__ = ["Shard", "shard_of"]


class Shard(TaskModeState):
    """The part of the dataset that a task reads."""

    index: int
    of: int

    def address(self, address: TaskAddress) -> TaskAddress:
        """Add which shard it is."""
        return msgspec.structs.replace(address, shard=self.index)


def shard_of(mode: TaskModeState | None) -> Shard | None:
    """Return which shard a task reads; None: it reads none."""
    return mode if isinstance(mode, Shard) else None
