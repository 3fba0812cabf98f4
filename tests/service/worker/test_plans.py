"""Plans are fetched in parts, checked, and kept up to a number of bytes."""

from __future__ import annotations

import hashlib

import pytest

from headrace.errors import DataLossError
from headrace.service.messages import PlanBytes
from headrace.service.worker.plans import PlanCache


class Stored:
    """A dispatcher that has one plan, and gives it in parts of 10 bytes."""

    def __init__(self, plan: bytes) -> None:
        self.plan = plan
        self.digest = hashlib.sha256(plan).digest()
        self.asked: list[int] = []

    def fetch(self, offset: int) -> PlanBytes:
        self.asked.append(offset)
        return PlanBytes(part=self.plan[offset : offset + 10], total=len(self.plan))


def test_a_plan_is_fetched_in_parts_and_only_once() -> None:
    stored, plans = Stored(bytes(range(25))), PlanCache()

    assert plans.get(stored.digest, stored.fetch) == stored.plan
    assert plans.get(stored.digest, stored.fetch) == stored.plan

    assert stored.asked == [0, 10, 20]


def test_the_plan_that_was_not_used_for_longest_goes_when_bytes_run_out() -> None:
    first, second, third = (Stored(bytes([n]) * 40) for n in range(3))
    plans = PlanCache(capacity=100)
    for stored in (first, second, first, third):
        plans.get(stored.digest, stored.fetch)
        assert plans.size <= 100

    for stored in (first, third, second):
        stored.asked.clear()
        plans.get(stored.digest, stored.fetch)
    assert (first.asked, third.asked) == ([], [])
    assert second.asked


def test_a_plan_larger_than_the_cache_is_not_kept() -> None:
    stored, plans = Stored(bytes(101)), PlanCache(capacity=100)
    assert plans.get(stored.digest, stored.fetch) == stored.plan
    assert plans.size == 0


@pytest.mark.parametrize("arrives", [b"", b"something else"])
def test_a_plan_that_arrives_damaged_is_refused(arrives: bytes) -> None:
    stored, plans = Stored(b"the plan"), PlanCache()
    with pytest.raises(DataLossError, match="arrived damaged"):
        plans.get(stored.digest, Stored(arrives).fetch)
    assert plans.get(stored.digest, stored.fetch) == b"the plan"
