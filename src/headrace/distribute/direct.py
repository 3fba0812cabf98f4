"""Large arrays of several workers, added up by the framework's own means, straight between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.distribute.agreement import said_by_all
from headrace.distribute.calls import naming_the_missing
from headrace.distribute.meeting.member import Member
from headrace.frameworks.framework import Framework
from headrace.transport import address as addresses

__all__ = ["DirectSums"]

_LARGE_BYTES = 1 << 20
"""From here on the framework's own way is worth a message more."""


class DirectSums:
    """Adds up what is large, where the framework can.

    All workers are to be there by then: the framework does not say who is missing.

    Args:
        member: This worker.
        framework: Whose arrays they are.
        rank: Of this worker.
        size: How many there are.
        at: Where the first worker listens.
        timeout: Seconds that others are waited for.
        is_allowed: Whether the framework's ways, which have no keys, may be used.
    """

    def __init__(
        self,
        member: Member,
        framework: Framework,
        rank: int,
        size: int,
        at: str,
        timeout: float,
        is_allowed: bool,
    ) -> None:
        self._member, self._framework = member, framework
        self._rank, self._size = rank, size
        self._at, self._timeout = at, timeout
        self._is_allowed = is_allowed
        #: What adds them up, once there was one.
        self._sums: Any = None

    def takes(self, total: Any, device: Any) -> bool:
        """Whether workers add up such arrays so; all ask for the same ones.

        Args:
            total: What this worker has.
            device: Where such arrays are.
        """
        if not self._is_allowed or total.nbytes < _LARGE_BYTES:
            return False
        if self._sums is None:
            self._sums = self._framework.sums_of_workers(
                self._rank,
                self._size,
                addresses.towards(self._at),
                self._timeout,
                lambda own: said_by_all(self._member, "where each listens for large arrays", own),
                device,
            )
            self._is_allowed = self._sums is not None
        return self._is_allowed and bool(self._sums.adds(total))

    def sums(self, totals: Sequence[Any]) -> list[Any]:
        """Return the sums over all workers.

        Raises:
            UnavailableError: A worker is gone.
        """
        if not totals:
            return []
        try:
            found: list[Any] = self._sums.sums(totals, self._member.look)
        except RuntimeError as error:
            naming_the_missing(self._member, "an exchange of large arrays, which failed", error)
        return found
