"""Plans are fetched in parts, checked, and kept up to a number of bytes."""

from __future__ import annotations

import hashlib

import pytest

from headrace.errors import DataLossError
from headrace.service.messages import GetPlan, PlanBytes
from headrace.service.worker.plans import Fetch, PlanCache


def digest(plan: bytes) -> bytes:
    return hashlib.sha256(plan).digest()


def test_a_plan_is_fetched_in_parts() -> None:
    plan = bytes(range(25))
    fetch = Fetch(digest(plan))
    asked, found = [], None
    while found is None:
        question = fetch.question()
        asked.append(question)
        part = plan[question.offset : question.offset + 10]
        found = fetch.take(PlanBytes(part=part, total=len(plan)))
    assert found == plan
    assert asked == [GetPlan(digest=digest(plan), offset=offset) for offset in (0, 10, 20)]


def test_the_plan_that_was_not_used_for_longest_goes_when_bytes_run_out() -> None:
    plans = PlanCache(capacity=100)
    for name in (b"1", b"2"):
        plans.put(name, bytes(40))
    assert plans.get(b"1") is not None
    plans.put(b"3", bytes(40))
    assert [plans.get(name) is None for name in (b"1", b"2", b"3")] == [False, True, False]
    assert plans.size == 80


def test_a_plan_that_is_larger_than_all_that_is_kept_pushes_nothing_out() -> None:
    plans = PlanCache(capacity=100)
    plans.put(b"1", bytes(40))
    plans.put(b"2", bytes(101))
    assert plans.get(b"2") is None
    assert plans.size == 40


def test_an_empty_plan_and_one_that_ends_early_are_no_endless_loops() -> None:
    assert Fetch(digest(b"")).take(PlanBytes(part=b"", total=0)) == b""
    cut = Fetch(digest(b"abc"))
    assert cut.take(PlanBytes(part=b"ab", total=3)) is None
    with pytest.raises(DataLossError, match="2 bytes of 3"):
        cut.take(PlanBytes(part=b"", total=3))


def test_bytes_with_another_digest_are_refused() -> None:
    with pytest.raises(DataLossError, match="arrived damaged"):
        Fetch(digest(b"abc")).take(PlanBytes(part=b"abd", total=3))
