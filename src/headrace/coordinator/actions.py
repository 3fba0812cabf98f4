"""What the coordinator's core has its shell do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.coordinator.decided import NEVER, Round
from headrace.transport.channel import Buffer

__all__ = ["Actions", "Call"]


class Call(NamedTuple):
    """Ask a worker; the answer comes back with what was asked."""

    worker: int
    message: Any
    buffers: Sequence[Buffer] = ()


@dataclass
class Actions:
    """What is to be done.

    Attributes:
        calls: To workers, in this order.
        settles: Closures whose keys servers may forget.
        fences: Lives of workers whose writes servers are to refuse.
        round: The mean of what closures took as steps is to be pushed to servers.
        closes: Workers whose connection is to be closed: they have left.
        words: To be logged, as warnings.
        wake_in: Seconds after which to look again.
    """

    calls: list[Call] = field(default_factory=list)
    settles: list[int] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    round: Round | None = None
    closes: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    wake_in: float = NEVER
