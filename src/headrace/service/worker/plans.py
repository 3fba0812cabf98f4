"""Plans: their bytes by digest, fetched once by a worker however many tasks read them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from headrace.errors import DataLossError
from headrace.service.messages import PlanBytes

__all__ = ["PlanCache"]

_CAPACITY = 64 << 20


class PlanCache:
    """The plans that were used last, up to a number of bytes.

    Args:
        capacity: Bytes to keep. A larger plan is fetched whenever it is needed.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        #: By digest, the one used last at the end.
        self._plans: dict[bytes, bytes] = {}

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, self._plans.values()))

    def get(self, digest: bytes, fetch: Callable[[int], PlanBytes]) -> bytes:
        """Return a plan's bytes.

        Args:
            digest: SHA-256 of the bytes.
            fetch: Asks the dispatcher for the part that begins at an offset.

        Raises:
            DataLossError: What was fetched has another digest.
        """
        with self._lock:
            plan = self._plans.pop(digest, None)
        if plan is None:
            plan = _fetch(digest, fetch)
        if len(plan) <= self._capacity:
            with self._lock:
                self._plans[digest] = plan
                while self.size > self._capacity:
                    del self._plans[next(iter(self._plans))]
        return plan


def _fetch(digest: bytes, fetch: Callable[[int], PlanBytes]) -> bytes:
    parts: list[bytes] = []
    offset, total = 0, 1
    while offset < total:
        answer = fetch(offset)
        if not answer.part:
            break
        parts.append(answer.part)
        offset += len(answer.part)
        total = answer.total
    plan = b"".join(parts)
    if hashlib.sha256(plan).digest() != digest:
        raise DataLossError(
            f"the plan {digest.hex()[:12]} arrived damaged: {len(plan)} bytes of {total}, with "
            f"SHA-256 {hashlib.sha256(plan).hexdigest()[:12]}; the dispatcher's copy of it may be "
            "damaged: register the dataset again"
        )
    return plan
