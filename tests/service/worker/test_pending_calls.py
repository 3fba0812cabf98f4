"""What a worker asks its dispatcher for: calls, units, plans; and what follows from them."""

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
from tests.service.worker.driving import Driven, definition

LEAVING, LEFT, PLAN = DrainWorker("w"), UnregisterWorker("w"), GetPlan(b"")


def test_what_is_asked_twice_is_one_call_until_it_is_answered() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    assert calls.add(LEAVING, 0.0)
    assert not calls.add(LEAVING, 0.5)
    assert calls.resolve(LEAVING, 1.0)
    assert not calls.resolve(LEAVING, 1.0)
    assert calls.add(LEAVING, 1.0)


def test_a_call_is_made_again_after_a_second_and_a_plan_is_waited_for_longer() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(LEAVING, 0.0)
    calls.add(PLAN, 0.0)
    assert calls.take_retries(0.9) == []
    assert calls.take_retries(1.0) == [LEAVING]
    assert calls.take_retries(1.9) == []
    assert calls.take_retries(10.0) == [LEAVING, PLAN]


def test_workers_that_lost_the_dispatcher_at_once_do_not_come_back_at_once() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    crowd = [PendingCalls(60.0, 0.0, chance.random) for _ in range(1000)]
    for calls in crowd:
        calls.add(LEAVING, 0.0)
        calls.note_failure(LEAVING, 0.0)
    first = sorted(calls.next_deadline for calls in crowd)
    for at, calls in zip([each.next_deadline for each in crowd], crowd, strict=True):
        assert calls.take_retries(at) == [LEAVING]
        calls.note_failure(LEAVING, 1.0)
    second = sorted(calls.next_deadline for calls in crowd)
    # Half as long again as the first delay of 50 ms, at most; the next delay is longer.
    assert 0.05 <= first[0] < 0.06
    assert 0.07 < first[-1] < 0.075
    assert 1.065 <= second[0] < second[-1] < 1.0975
    for times in (first, second):
        most = max(sum(at <= each < at + 0.001 for each in times) for at in times)
        assert most < 150


def test_what_is_not_answered_is_made_again_after_another_time_by_each() -> None:
    times = []
    for drawn in (0.0, 0.5, 0.999):
        calls = PendingCalls(60.0, 0.0, lambda drawn=drawn: drawn)  # type: ignore[misc]
        calls.add(LEAVING, 0.0)
        times.append(round(calls.next_deadline, 3))
        assert calls.take_retries(calls.next_deadline) == [LEAVING]
        times.append(round(calls.next_deadline, 3))
    assert times == [1.0, 2.0, 1.25, 2.5, 1.5, 2.999]


def test_the_loss_of_a_call_that_nobody_waits_for_is_none() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    assert calls.note_failure(LEAVING, 0.0) == 0
    calls.add(LEAVING, 0.0)
    assert [calls.note_failure(LEAVING, 0.0), calls.note_failure(LEAVING, 1.0)] == [1, 2]


def test_calls_that_are_of_no_use_any_more_are_forgotten() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(LEAVING, 0.0)
    calls.add(LEFT, 0.0)
    calls.discard(lambda call: isinstance(call, DrainWorker))
    assert calls.pending_of(DrainWorker, UnregisterWorker) == [LEFT]
    calls.discard()
    assert calls.next_deadline == math.inf


def test_a_call_is_given_up_when_patience_ends() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(LEAVING, 5.0)
    assert calls.take_expired(64.9) == []
    assert calls.take_expired(65.0) == [LEAVING]
    assert calls.take_retries(100.0) == []


def test_time_in_which_the_worker_did_not_run_is_left_out() -> None:
    calls = PendingCalls(60.0, 0.0, lambda: 0.0)
    calls.add(LEAVING, 0.0)
    calls.exclude_pause(100.0, 105.0)
    assert calls.silence_to_report(109.9) == 0.0
    assert calls.silence_to_report(110.0) == 10.0
    assert calls.take_expired(159.9) == []
    assert calls.take_expired(160.0) == [LEAVING]


# --- how many units a task asks for, and how it waits for them ------------------------------------


@pytest.mark.parametrize(
    ("want", "seconds", "expected"),
    [(1, 0.001, 2), (8, 0.02, 16), (8, 0.05, 8), (8, 2.0, 4), (1, 2.0, 1), (1 << 24, 0.0, 1 << 24)],
)
def test_a_range_used_up_soon_is_followed_by_a_longer_one(
    want: int, seconds: float, expected: int
) -> None:
    assert next_request_size(want, seconds) == expected


def test_what_is_granted_is_counted_and_ends_the_waiting() -> None:
    asking = SplitRequests()
    asking.splits_needed(1.0)
    assert asking.request_at == 1.0
    asking.request_at = math.inf
    assert asking.is_pending
    assert asking.reply_received(GetSplitReply(start=3, stop=5), 1.0) == (3, 5)
    assert (asking.assignment_number, asking.num_assigned, asking.is_needed) == (1, 2, False)


def test_an_answer_without_units_does_not_count() -> None:
    asking = SplitRequests()
    asking.splits_needed(1.0)
    assert asking.reply_received(GetSplitReply(start=0, stop=0, wait=True), 1.0) is None
    assert (asking.assignment_number, asking.request_at, asking.is_exhausted) == (0, 1.02, False)
    assert asking.reply_received(GetSplitReply(start=0, stop=0), 1.02) is None
    assert (asking.assignment_number, asking.is_exhausted) == (0, True)


def test_a_range_that_was_waited_for_lasts_from_its_grant() -> None:
    asking = SplitRequests()
    asking.splits_needed(0.0)
    asking.reply_received(GetSplitReply(start=0, stop=0, wait=True), 1.0)
    asking.reply_received(GetSplitReply(start=0, stop=1), 9.0)
    asking.splits_needed(9.001)
    assert asking.request_size == 2


# --- plans are fetched in parts, checked, and kept up to a number of bytes ------------------------


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


def test_the_plan_that_was_not_used_for_longest_goes_when_bytes_run_out() -> None:
    plans = PlanBytesCache(capacity=100)
    for name in (b"1", b"2"):
        plans.put(name, bytes(40))
    assert plans.get(b"1") is not None
    plans.put(b"3", bytes(40))
    assert [plans.get(name) is None for name in (b"1", b"2", b"3")] == [False, True, False]
    assert plans.size == 80


def test_a_plan_that_is_larger_than_all_that_is_kept_pushes_nothing_out() -> None:
    plans = PlanBytesCache(capacity=100)
    plans.put(b"1", bytes(40))
    plans.put(b"2", bytes(101))
    assert plans.get(b"2") is None
    assert plans.size == 40


def test_an_empty_plan_and_one_that_ends_early_are_no_endless_loops() -> None:
    assert PlanFetch(digest(b"")).add_part(GetPlanReply(chunk=b"", total_bytes=0)) == b""
    cut = PlanFetch(digest(b"abc"))
    assert cut.add_part(GetPlanReply(chunk=b"ab", total_bytes=3)) is None
    with pytest.raises(DataLossError, match="received 2 of 3 bytes"):
        cut.add_part(GetPlanReply(chunk=b"", total_bytes=3))


def test_bytes_with_another_digest_are_refused() -> None:
    with pytest.raises(DataLossError, match="is corrupt: received"):
        PlanFetch(digest(b"abc")).add_part(GetPlanReply(chunk=b"abd", total_bytes=3))


# --- origins in the order in which units were dealt to a task -------------------------------------


def test_units_are_numbered_in_the_order_in_which_they_were_dealt() -> None:
    order = AssignmentOrder()
    order.assign(10, 13)
    order.assign(40, 42)
    order.assign(2, 3)
    assert order.element_ids([(41, 1, 0, 5), (10, 3, 0, 1), (2, 1, 4, 2)], []) == (
        (4, 1, 0, 5),
        (0, 3, 0, 1),
        (5, 1, 4, 2),
    )


def test_a_run_that_was_dealt_in_pieces_is_several() -> None:
    order = AssignmentOrder()
    order.assign(12, 14)
    order.assign(10, 12)
    assert order.element_ids([(10, 4, 0, 1)], []) == ((2, 2, 0, 1), (0, 2, 0, 1))


def test_the_end_of_a_unit_is_all_that_comes_after_its_elements() -> None:
    order = AssignmentOrder()
    order.assign(7, 9)
    assert order.element_ids([], [(7, 2, 3)]) == ((0, 2, 3, END_ORDINAL - 3),)


def test_a_unit_that_is_dealt_once_more_in_part_is_another() -> None:
    order = AssignmentOrder()
    order.assign(7, 8)
    order.assign(7, 8, ((3, 5), (9, END_ORDINAL)))
    found = order.element_ids([(7, 1, 0, 2), (7, 1, 3, 2), (7, 1, 6, 1)], [(7, 1, 12)])
    assert found == ((0, 1, 0, 2), (1, 1, 3, 2), (0, 1, 6, 1), (1, 1, 12, END_ORDINAL - 12))


def test_of_a_unit_that_is_dealt_in_part_alone_an_early_end_is_known() -> None:
    order = AssignmentOrder()
    order.assign(7, 8, ((3, 5),))
    assert order.element_ids([(7, 1, 3, 1)], [(7, 1, 5)]) == (
        (0, 1, 3, 1),
        (0, 1, 5, END_ORDINAL - 5),
    )


def test_units_of_what_was_dealt_last_and_before_have_their_own_numbers() -> None:
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


def test_an_order_that_goes_on_for_ever_knows_only_what_is_not_done() -> None:
    order = AssignmentOrder()
    for number in range(10_000):
        order.forget(number - 3)
        order.assign(2 * number, 2 * number + 1)  # the others are dealt to others
        order.forget(number - 3)
        assert order.element_ids([(2 * number, 1, 0, 1)], []) == ((number, 1, 0, 1),)
    assert held_by(order) < 1000


def test_parts_of_units_are_forgotten_when_they_are_done() -> None:
    order = AssignmentOrder()
    for number in range(10_000):
        order.forget(number - 3)
        order.assign(number, number + 1, ((3, 5),))
        assert order.element_ids([(number, 1, 4, 1)], []) == ((number, 1, 4, 1),)
    assert held_by(order) < 2000


def test_that_units_ended_which_are_done_is_left_out() -> None:
    order = AssignmentOrder()
    for unit in range(1000):
        order.assign(2 * unit, 2 * unit + 1)
    order.forget(999)
    assert order.element_ids([], [(0, 1, 5), (1990, 9, 5)]) == ((999, 1, 5, END_ORDINAL - 5),)


def held_by(order: AssignmentOrder) -> int:
    """Return how many objects an order keeps alive."""
    seen: set[int] = set()
    left: list[object] = [order]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            left += gc.get_referents(one) if not isinstance(one, type) else []
    return len(seen)


# --- what a worker does with a task follows from names in its definition --------------------------


def changed(**fields: Any) -> TaskDefinition:
    return msgspec.structs.replace(definition(), **fields)


def test_a_worker_knows_all_that_a_dispatcher_offers() -> None:
    plain = hr.Dataset.range(4)
    hinted = plain.shard(hr.service.SHARD_HINT, 0)
    for policy in POLICIES.values():
        task = changed(
            delivery_policy=policy.delivery_policy,
            shard_kind=policy.shard_kind,
            shard_index=0,
            num_shards=1,
        )
        assert isinstance(create_delivery(task, None), DeliveryPolicy)
        if policy.shard_kind != "files":  # a range has none
            plan = (hinted if policy.shard_kind == "hints" else plain).plan
            open_plan(dump_plan(plan), task, None, worker="h:1").close()


def test_a_way_to_hand_out_is_added_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LastCome(FifoDelivery[Any]):
        pass

    monkeypatch.setitem(
        registry._DELIVERY_POLICIES, "last_come", lambda task, bounds: LastCome(bounds)
    )
    assert isinstance(create_delivery(changed(delivery_policy="last_come"), None), LastCome)
    assert type(create_delivery(changed(), None)) is FifoDelivery


def test_a_task_of_a_kind_that_is_not_known_fails_and_its_clients_hear_why() -> None:
    worker = Driven().registered()
    request = worker.ask()
    worker.defines(changed(delivery_policy="unheard of"))
    content = worker.answers[request]
    assert isinstance(content, FailedPreconditionError)
    assert "this worker does not support delivery policy 'unheard of'" in str(content)
    (failed,) = worker.of(FailTask)
    assert "it cannot be started" in failed.reason
    assert worker.starts == []


def test_a_part_of_a_plan_that_is_not_known_is_refused_by_name() -> None:
    plan = dump_plan(hr.Dataset.range(4).plan)
    task = changed(shard_kind="unheard of", shard_index=0, num_shards=1)
    with pytest.raises(FailedPreconditionError, match="does not support shard kind 'unheard of'"):
        open_plan(plan, task, None, worker="h:1")
