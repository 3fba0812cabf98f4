"""Plans: their bytes by digest, fetched once by a worker however many tasks read them."""

from __future__ import annotations

import hashlib

from headrace.errors import DataLossError
from headrace.service.messages import GetPlan, PlanBytes

__all__ = ["Fetch", "PlanCache"]

_CAPACITY = 64 << 20


class PlanCache:
    """The plans that were used last, up to a number of bytes.

    Args:
        capacity: Bytes to keep. A larger plan is fetched whenever it is needed.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        #: By digest, the one used last at the end.
        self._plans: dict[bytes, bytes] = {}

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, self._plans.values()))

    def get(self, digest: bytes) -> bytes | None:
        """Return a plan's bytes, if they are kept."""
        plan = self._plans.pop(digest, None)
        if plan is not None:
            self._plans[digest] = plan
        return plan

    def put(self, digest: bytes, plan: bytes) -> None:
        """Keep a plan, unless it is too large; what was not used for longest goes for it."""
        if len(plan) > self._capacity:
            return
        self._plans[digest] = plan
        while self.size > self._capacity:
            del self._plans[next(iter(self._plans))]


class Fetch:
    """A plan that is fetched from the dispatcher, part by part.

    Args:
        digest: SHA-256 of its bytes.
    """

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._parts: list[bytes] = []
        self._offset = 0
        # Computed part by part: a long plan must not hold up those who wait for something else.
        self._hash = hashlib.sha256()

    def question(self) -> GetPlan:
        """Return what to ask for next."""
        return GetPlan(digest=self._digest, offset=self._offset)

    def take(self, answer: PlanBytes) -> bytes | None:
        """Take the answer to the last question; return the plan when it is whole.

        Raises:
            DataLossError: It has another digest.
        """
        self._parts.append(answer.part)
        self._hash.update(answer.part)
        self._offset += len(answer.part)
        if answer.part and self._offset < answer.total:
            return None
        if self._hash.digest() != self._digest:
            raise DataLossError(
                f"the plan {self._digest.hex()[:12]} arrived damaged: {self._offset} bytes of "
                f"{answer.total}, with SHA-256 {self._hash.hexdigest()[:12]}; the dispatcher's "
                "copy of it may be damaged: register the dataset again"
            )
        return b"".join(self._parts)
