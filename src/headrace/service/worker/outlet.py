"""Where a producer's portions go: the contract."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.service.rows import OriginRun
from headrace.service.worker.portion import Portion

__all__ = ["Outlet"]


class Outlet(Protocol):
    """Where a producer's portions go."""

    @property
    def puts_at_once(self) -> bool:
        """Whether what is yielded is to be put at once, before more is asked for."""

    @property
    def most(self) -> int | None:
        """How many elements the next portion may have; None: as is usual."""

    def wait_for_room(self) -> bool:
        """Wait until another portion may be made; False: nothing more is wanted."""

    def origins(
        self, runs: Iterable[OriginRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[OriginRun, ...]:
        """Return origins in dealt order, given those by units of the stream."""

    def put(self, portion: Portion) -> None:
        """Take a portion."""

    def end(self, failure: str | None) -> None:
        """Take note that no portion will follow, and why, if the task failed."""
