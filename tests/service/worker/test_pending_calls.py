"""Calls to the dispatcher, split requests, plans, and assignment order."""

from __future__ import annotations

import gc
import hashlib
import math
import random
from typing import Any

import msgspec
import pytest

import headrace as hr
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.plan.serialize import dump_plan
from headrace.service.dispatcher.policy_selection import POLICIES
from headrace.service.element_sets import END_ORDINAL
from headrace.service.messages import (
    DrainWorker,
    FailTask,
    GetPlan,
    GetPlanReply,
    GetSplitReply,
    TaskDefinition,
    UnregisterWorker,
)
from headrace.service.worker import registry
from headrace.service.worker.assignment_order import AssignmentOrder
from headrace.service.worker.delivery_policy import DeliveryPolicy
from headrace.service.worker.fifo_delivery import FifoDelivery
from headrace.service.worker.pending_actions import PendingCalls
from headrace.service.worker.plan_lookups import PlanBytesCache, PlanFetch
from headrace.service.worker.registry import create_delivery
from headrace.service.worker.split_requests import SplitRequests, next_request_size
from headrace.service.worker.task_iterator import open_plan
from tests.service.worker.core_driver import CoreDriver, definition

DRAIN, UNREGISTER, PLAN = DrainWorker("w"), UnregisterWorker("w"), GetPlan(b"")


def test_a_repeated_request_is_one_call_until_it_is_answered() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    assert calls.add(DRAIN, 0.0)
    assert not calls.add(DRAIN, 0.5)
    assert calls.resolve(DRAIN, 1.0)
    assert not calls.resolve(DRAIN, 1.0)
    assert calls.add(DRAIN, 1.0)


def test_a_call_is_retried_after_a_second_and_a_plan_request_later() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(DRAIN, 0.0)
    calls.add(PLAN, 0.0)
    assert calls.take_retries(0.9) == []
    assert calls.take_retries(1.0) == [DRAIN]
    assert calls.take_retries(1.9) == []
    assert calls.take_retries(10.0) == [DRAIN, PLAN]


def test_workers_that_lose_the_dispatcher_together_retry_at_different_times() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    workers = [PendingCalls(60.0, 0.0, rng.random) for _ in range(1000)]
    for calls in workers:
        calls.add(DRAIN, 0.0)
        calls.note_failure(DRAIN, 0.0)
    first = sorted(calls.next_deadline for calls in workers)
    for at, calls in zip([each.next_deadline for each in workers], workers, strict=True):
        assert calls.take_retries(at) == [DRAIN]
        calls.note_failure(DRAIN, 1.0)
    second = sorted(calls.next_deadline for calls in workers)
    # The first delay of 50 ms is lengthened by at most half; the next delay is longer.
    assert 0.05 <= first[0] < 0.06
    assert 0.07 < first[-1] < 0.075
    assert 1.065 <= second[0] < second[-1] < 1.0975
    for times in (first, second):
        most = max(sum(at <= each < at + 0.001 for each in times) for at in times)
        assert most < 150


def test_retry_intervals_have_jitter() -> None:
    times = []
    for drawn in (0.0, 0.5, 0.999):
        calls = PendingCalls(60.0, 0.0, lambda drawn=drawn: drawn)  # type: ignore[misc]
        calls.add(DRAIN, 0.0)
        times.append(round(calls.next_deadline, 3))
        assert calls.take_retries(calls.next_deadline) == [DRAIN]
        times.append(round(calls.next_deadline, 3))
    assert times == [1.0, 2.0, 1.25, 2.5, 1.5, 2.999]


def test_the_failure_of_an_unknown_call_is_not_counted() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    assert calls.note_failure(DRAIN, 0.0) == 0
    calls.add(DRAIN, 0.0)
    assert [calls.note_failure(DRAIN, 0.0), calls.note_failure(DRAIN, 1.0)] == [1, 2]


def test_discarded_calls_are_removed() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(DRAIN, 0.0)
    calls.add(UNREGISTER, 0.0)
    calls.discard(lambda call: isinstance(call, DrainWorker))
    assert calls.pending_of(DrainWorker, UnregisterWorker) == [UNREGISTER]
    calls.discard()
    assert calls.next_deadline == math.inf


def test_a_call_expires_after_the_timeout() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(DRAIN, 5.0)
    assert calls.take_expired(64.9) == []
    assert calls.take_expired(65.0) == [DRAIN]
    assert calls.take_retries(100.0) == []


def test_pauses_of_the_worker_do_not_count() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(DRAIN, 0.0)
    calls.exclude_pause(100.0, 105.0)
    assert calls.silence_to_report(109.9) == 0.0
    assert calls.silence_to_report(110.0) == 10.0
    assert calls.take_expired(159.9) == []
    assert calls.take_expired(160.0) == [DRAIN]


# --- split requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "seconds", "expected"),
    [(1, 0.001, 2), (8, 0.02, 16), (8, 0.05, 8), (8, 2.0, 4), (1, 2.0, 1), (1 << 24, 0.0, 1 << 24)],
)
def test_the_request_size_follows_the_speed_of_consumption(
    want: int, seconds: float, expected: int
) -> None:
    assert next_request_size(want, seconds) == expected


def test_granted_splits_are_counted_and_end_the_wait() -> None:
    requests = SplitRequests()
    requests.splits_needed(1.0)
    assert requests.request_at == 1.0
    requests.request_at = math.inf
    assert requests.is_pending
    assert requests.reply_received(GetSplitReply(start=3, stop=5), 1.0) == (3, 5)
    assert (requests.assignment_number, requests.num_assigned, requests.is_needed) == (1, 2, False)


def test_a_reply_without_splits_is_not_counted() -> None:
    requests = SplitRequests()
    requests.splits_needed(1.0)
    assert requests.reply_received(GetSplitReply(start=0, stop=0, wait=True), 1.0) is None
    assert (requests.assignment_number, requests.request_at, requests.is_exhausted) == (
        0,
        1.02,
        False,
    )
    assert requests.reply_received(GetSplitReply(start=0, stop=0), 1.02) is None
    assert (requests.assignment_number, requests.is_exhausted) == (0, True)


def test_the_duration_of_a_range_starts_with_its_grant() -> None:
    requests = SplitRequests()
    requests.splits_needed(0.0)
    requests.reply_received(GetSplitReply(start=0, stop=0, wait=True), 1.0)
    requests.reply_received(GetSplitReply(start=0, stop=1), 9.0)
    requests.splits_needed(9.001)
    assert requests.request_size == 2


# --- plans ----------------------------------------------------------------------------------------


def digest(plan: bytes) -> bytes:
    return hashlib.sha256(plan).digest()


def test_a_plan_is_fetched_in_parts() -> None:
    plan = bytes(range(25))
    fetch = PlanFetch(digest(plan))
    asked, found = [], None
    while found is None:
        question = fetch.next_request()
        asked.append(question)
        part = plan[question.offset : question.offset + 10]
        found = fetch.add_part(GetPlanReply(chunk=part, total_bytes=len(plan)))
    assert found == plan
    assert asked == [GetPlan(digest=digest(plan), offset=offset) for offset in (0, 10, 20)]


def test_the_least_recently_used_plan_is_evicted() -> None:
    plans = PlanBytesCache(capacity=100)
    for name in (b"1", b"2"):
        plans.put(name, bytes(40))
    assert plans.get(b"1") is not None
    plans.put(b"3", bytes(40))
    assert [plans.get(name) is None for name in (b"1", b"2", b"3")] == [False, True, False]
    assert plans.size == 80


def test_a_plan_larger_than_the_cache_evicts_nothing() -> None:
    plans = PlanBytesCache(capacity=100)
    plans.put(b"1", bytes(40))
    plans.put(b"2", bytes(101))
    assert plans.get(b"2") is None
    assert plans.size == 40


def test_empty_and_truncated_plans_end_the_fetch() -> None:
    assert PlanFetch(digest(b"")).add_part(GetPlanReply(chunk=b"", total_bytes=0)) == b""
    cut = PlanFetch(digest(b"abc"))
    assert cut.add_part(GetPlanReply(chunk=b"ab", total_bytes=3)) is None
    with pytest.raises(DataLossError, match="received 2 of 3 bytes"):
        cut.add_part(GetPlanReply(chunk=b"", total_bytes=3))


def test_bytes_with_a_wrong_digest_are_rejected() -> None:
    with pytest.raises(DataLossError, match="is corrupt: received"):
        PlanFetch(digest(b"abc")).add_part(GetPlanReply(chunk=b"abd", total_bytes=3))


# --- element ids in assignment order --------------------------------------------------------------


def test_splits_are_numbered_in_assignment_order() -> None:
    order = AssignmentOrder()
    order.assign(10, 13)
    order.assign(40, 42)
    order.assign(2, 3)
    assert order.element_ids([(41, 1, 0, 5), (10, 3, 0, 1), (2, 1, 4, 2)], []) == (
        (4, 1, 0, 5),
        (0, 3, 0, 1),
        (5, 1, 4, 2),
    )


def test_a_run_assigned_in_parts_becomes_several() -> None:
    order = AssignmentOrder()
    order.assign(12, 14)
    order.assign(10, 12)
    assert order.element_ids([(10, 4, 0, 1)], []) == ((2, 2, 0, 1), (0, 2, 0, 1))


def test_the_end_of_a_split_covers_all_ordinals_after_its_elements() -> None:
    order = AssignmentOrder()
    order.assign(7, 9)
    assert order.element_ids([], [(7, 2, 3)]) == ((0, 2, 3, END_ORDINAL - 3),)


def test_a_split_reassigned_in_part_has_its_own_number() -> None:
    order = AssignmentOrder()
    order.assign(7, 8)
    order.assign(7, 8, ((3, 5), (9, END_ORDINAL)))
    found = order.element_ids([(7, 1, 0, 2), (7, 1, 3, 2), (7, 1, 6, 1)], [(7, 1, 12)])
    assert found == ((0, 1, 0, 2), (1, 1, 3, 2), (0, 1, 6, 1), (1, 1, 12, END_ORDINAL - 12))


def test_an_early_end_of_a_partly_assigned_split_is_located() -> None:
    order = AssignmentOrder()
    order.assign(7, 8, ((3, 5),))
    assert order.element_ids([(7, 1, 3, 1)], [(7, 1, 5)]) == (
        (0, 1, 3, 1),
        (0, 1, 5, END_ORDINAL - 5),
    )


def test_splits_of_several_assignments_have_distinct_numbers() -> None:
    order = AssignmentOrder()
    order.assign(100, 110)
    order.assign(110, 120)
    order.assign(50, 60)
    runs = [(112, 3, 0, 1), (108, 4, 0, 1), (50, 10, 0, 2)]
    assert order.element_ids(runs, [(119, 1, 2)]) == (
        (12, 3, 0, 1),
        (8, 2, 0, 1),
        (10, 2, 0, 1),
        (20, 10, 0, 2),
        (19, 1, 2, END_ORDINAL - 2),
    )


def test_a_long_assignment_order_forgets_completed_splits() -> None:
    order = AssignmentOrder()
    for number in range(10_000):
        order.forget(number - 3)
        order.assign(2 * number, 2 * number + 1)  # other tasks receive the others
        order.forget(number - 3)
        assert order.element_ids([(2 * number, 1, 0, 1)], []) == ((number, 1, 0, 1),)
    assert count_referenced_objects(order) < 1000


def test_completed_partial_splits_are_forgotten() -> None:
    order = AssignmentOrder()
    for number in range(10_000):
        order.forget(number - 3)
        order.assign(number, number + 1, ((3, 5),))
        assert order.element_ids([(number, 1, 4, 1)], []) == ((number, 1, 4, 1),)
    assert count_referenced_objects(order) < 2000


def test_ends_of_forgotten_splits_are_left_out() -> None:
    order = AssignmentOrder()
    for split in range(1000):
        order.assign(2 * split, 2 * split + 1)
    order.forget(999)
    assert order.element_ids([], [(0, 1, 5), (1990, 9, 5)]) == ((999, 1, 5, END_ORDINAL - 5),)


def count_referenced_objects(order: AssignmentOrder) -> int:
    """Return the number of objects that an assignment order references."""
    seen: set[int] = set()
    left: list[object] = [order]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            left += gc.get_referents(one) if not isinstance(one, type) else []
    return len(seen)


# --- implementations of the names in a task definition --------------------------------------------


def changed_definition(**fields: Any) -> TaskDefinition:
    return msgspec.structs.replace(definition(), **fields)


def test_a_worker_supports_all_policies_of_the_dispatcher() -> None:
    plain = hr.Dataset.range(4)
    hinted = plain.shard(hr.service.SHARD_HINT, 0)
    for policy in POLICIES.values():
        task = changed_definition(
            delivery_policy=policy.delivery_policy,
            shard_kind=policy.shard_kind,
            shard_index=0,
            num_shards=1,
        )
        assert isinstance(create_delivery(task, None), DeliveryPolicy)
        if policy.shard_kind != "files":  # a range has none
            plan = (hinted if policy.shard_kind == "hints" else plain).plan
            open_plan(dump_plan(plan), task, None, worker="h:1").close()


def test_a_delivery_policy_can_be_added_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LifoDelivery(FifoDelivery[Any]):
        pass

    monkeypatch.setitem(
        registry._DELIVERY_POLICIES, "lifo", lambda task, limits: LifoDelivery(limits)
    )
    assert isinstance(
        create_delivery(changed_definition(delivery_policy="lifo"), None), LifoDelivery
    )
    assert type(create_delivery(changed_definition(), None)) is FifoDelivery


def test_a_task_with_an_unknown_delivery_policy_fails_with_the_reason() -> None:
    worker = CoreDriver().register()
    request = worker.request()
    worker.define_task(changed_definition(delivery_policy="unknown"))
    content = worker.replies[request]
    assert isinstance(content, FailedPreconditionError)
    assert "this worker does not support delivery policy 'unknown'" in str(content)
    (failed,) = worker.calls_of(FailTask)
    assert "it cannot be started" in failed.reason
    assert worker.starts == []


def test_an_unknown_shard_kind_is_rejected_by_name() -> None:
    plan = dump_plan(hr.Dataset.range(4).plan)
    task = changed_definition(shard_kind="unknown", shard_index=0, num_shards=1)
    with pytest.raises(FailedPreconditionError, match="does not support shard kind 'unknown'"):
        open_plan(plan, task, None, worker="h:1")
