"""A task on a worker, from the first request for it to its end."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from headrace.errors import (
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnauthenticatedError,
)
from headrace.service.messages import (
    FailTask,
    FinishTask,
    GetElements,
    GetElementsReply,
    GetPlan,
    GetPlanReply,
    GetSplit,
    GetTask,
    ReportDepartedClient,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from headrace.service.worker.delivery_policy import BufferLimits
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.plan_lookups import PlanBytesCache
from headrace.service.worker.result_batch import ResultBatch
from tests.service.worker.core_driver import (
    PLAN,
    TASK_TOKEN,
    UNREACHABLE,
    CoreDriver,
    batch,
    definition,
    split_batch,
)


def registered_worker(**options: Any) -> CoreDriver:
    return CoreDriver(heartbeat_interval=1000.0, **options).register()


def first(worker: CoreDriver, request: str) -> int:
    content = worker.replies[request]
    assert isinstance(content, ResultBatch)
    return content.first_element


# --- start --------------------------------------------------------------------------------------


def test_a_task_starts_with_its_first_request_and_serves_requests_in_order() -> None:
    worker = registered_worker()
    requests = [worker.request(number=n, acknowledged=0) for n in range(2)]
    assert worker.calls_of(GetTask) == [GetTask(worker_id="w1", task_id=1)]
    worker.define_task(definition())
    late = worker.request("b")
    (start,) = worker.starts
    assert (start.plan, start.definition) == (PLAN, definition())
    worker.produce(start.producer, batch(0), batch(1), batch(2))
    assert [first(worker, each) for each in (*requests, late)] == [0, 1, 2]


def test_a_plan_is_fetched_in_parts() -> None:
    worker = registered_worker()
    worker.request()
    worker.reply(GetTask, definition())
    for offset in range(0, len(PLAN), 5):
        assert worker.calls[-1] == GetPlan(digest=definition().digest, offset=offset)
        part = GetPlanReply(chunk=PLAN[offset : offset + 5], total_bytes=len(PLAN))
        worker.reply(GetPlan, part)
        worker.core.reply_received(
            worker.calls_of(GetPlan)[0], part, worker.now
        )  # the first part arrives again
    assert worker.starts[0].plan == PLAN


def test_a_plan_shared_by_several_tasks_is_fetched_once() -> None:
    worker = registered_worker()
    for task_id in (1, 2):
        worker.request(task_id=task_id)
        worker.reply(GetTask, definition(task_id))
    worker.reply(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    worker.request(task_id=3)
    worker.reply(GetTask, definition(3))
    assert [start.definition.task_id for start in worker.starts] == [1, 2, 3]
    assert len(worker.calls_of(GetPlan)) == 1


def test_a_task_with_a_corrupt_plan_fails_and_clients_receive_the_reason() -> None:
    worker = registered_worker()
    request = worker.request()
    worker.define_task(definition(), plan=b"?")
    assert isinstance(worker.replies[request], DataLossError)
    assert "is corrupt: received" in worker.calls_of(FailTask)[0].reason
    assert worker.replies[worker.request(number=1)] == GetElementsReply(
        first_element=0, num_elements=0, end_of_task=True
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [(NotFoundError("no plan"), CancelledError), (ValueError("offset"), HeadraceError)],
)
def test_requests_fail_if_the_plan_cannot_be_fetched(
    error: Exception, expected: type[Exception]
) -> None:
    worker = registered_worker()
    request = worker.request()
    worker.reply(GetTask, definition())
    worker.reply(GetPlan, error)
    assert isinstance(worker.replies[request], expected)
    assert worker.starts == []


def test_a_request_with_a_wrong_task_token_is_rejected_without_side_effects() -> None:
    worker = registered_worker()
    producer = worker.start_task()
    wrong = worker.request(acknowledged=100, task_token="of another dispatcher")
    assert isinstance(worker.replies[wrong], CancelledError)
    worker.produce(producer, batch(0))
    assert first(worker, "a0 (1)") == 0


# --- batches -----------------------------------------------------------------------------------


def test_a_producer_is_resumed_while_there_is_room_and_after_a_delivery() -> None:
    worker = registered_worker(limits=BufferLimits(ready_batches=2))
    producer = worker.start_task()
    assert worker.produce(producer, batch(0)).resumes == [producer]  # a request was waiting
    assert worker.produce(producer, batch(1)).resumes == [producer]
    assert worker.produce(producer, batch(2)).resumes == []
    worker.core.request_received("late", message(1), worker.now)
    assert worker.act().resumes == [producer]
    worker.core.request_received("later", message(2), worker.now)
    assert worker.act().resumes == []  # it was resumed before


def message(number: int) -> GetElements:
    return GetElements(
        task_id=1, task_token=TASK_TOKEN, client_id="a", request_number=number, acknowledged=number
    )


def test_two_batches_made_at_once_resume_the_producer_once() -> None:
    worker = registered_worker(limits=BufferLimits(ready_batches=1))
    producer = worker.start_task()
    actions = worker.produce(producer, batch(0), batch(1))
    assert actions.resumes == []  # the second batch uses the room left after the first
    worker.core.request_received("b0", message(1), worker.now)
    assert worker.act().resumes == [producer]


def test_batches_made_before_the_next_action_resume_the_producer_once() -> None:
    worker = registered_worker(limits=BufferLimits(ready_batches=3))
    producer = worker.start_task()
    actions = worker.produce(producer, *map(batch, range(3)))
    assert actions.resumes == [producer]


def test_batches_of_a_silent_client_are_dropped_with_a_warning() -> None:
    worker = CoreDriver(limits=BufferLimits(client_timeout=60.0)).register()
    producer = worker.start_task()
    worker.produce(producer, batch(0, 7))
    for _ in range(13):
        worker.heartbeat()
    assert "task 1: 7 elements dropped" in worker.warnings[-1]


# --- splits --------------------------------------------------------------------------------------


def test_splits_are_requested_on_demand_in_ranges_of_adaptive_length() -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    asked = []
    for number, (seconds, want) in enumerate([(0.001, 1), (0.05, 2), (1.0, 2), (0.0, 1)]):
        worker.need_splits(producer)
        asked.append(worker.calls_of(GetSplit)[-1])
        actions = worker.grant_splits(10 * number, 10 * number + want)
        assert actions.grants == [
            SplitGrant(producer=producer, splits=(10 * number, 10 * number + want))
        ]
        worker.pass_time(seconds)
    assert [(each.assignment_number, each.max_splits) for each in asked] == [
        (0, 1),
        (1, 2),
        (2, 2),
        (3, 1),
    ]


def test_a_split_request_reports_the_acknowledged_splits() -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.grant_splits(0, 2)
    worker.produce(producer, split_batch(0), split_batch(1))
    worker.request(number=1)
    worker.need_splits(producer)
    assert [each.num_done for each in worker.calls_of(GetSplit)] == [0, 1]


def test_a_deferred_split_request_is_repeated_with_backoff_and_its_number() -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    waits = []
    for _ in range(6):
        assert worker.grant_splits(0, 0, wait=True).grants == []
        waits.append(round(worker.wake_in, 3))
        worker.act(worker.wake_in)
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.2, 0.2]
    assert [each.assignment_number for each in worker.calls_of(GetSplit)] == [0] * 7
    assert worker.grant_splits(3, 4, is_poison_candidate=True).grants == [
        SplitGrant(producer=producer, splits=(3, 4), deliver_at_once=True)
    ]


def test_a_lost_split_request_is_repeated_and_granted_once() -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.reply(GetSplit, UNREACHABLE)
    worker.pass_time(0.1)
    asked, again = worker.calls_of(GetSplit)
    assert asked == again
    assert len(worker.grant_splits(0, 4).grants) == 1
    assert worker.grant_splits(0, 4).grants == []
    worker.need_splits(producer)
    assert worker.calls_of(GetSplit)[-1].assignment_number == 1


@pytest.mark.parametrize("splits", [(0, 3), None])
def test_after_the_last_assignment_no_splits_are_requested(
    splits: tuple[int, int] | None,
) -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    granted = worker.grant_splits(*(splits or (0, 0)), is_last=splits is not None)
    assert granted.grants == [SplitGrant(producer=producer, splits=splits)]
    assert worker.need_splits(producer).grants == [SplitGrant(producer=producer)]
    assert len(worker.calls_of(GetSplit)) == 1


@pytest.mark.parametrize("left", [0, 4])
def test_a_producer_that_ended_during_a_split_request_is_granted_none(
    left: int,
) -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.end_producer(producer, "SystemExit")
    assert worker.grant_splits(0, left).grants == []
    assert worker.need_splits(producer).grants == []
    worker.pass_time(60.0)
    assert len({each.assignment_number for each in worker.calls_of(GetSplit)}) == 1


def test_a_producer_that_ended_while_deferred_requests_no_splits() -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.grant_splits(0, 0, wait=True)
    worker.end_producer(producer, "SystemExit")
    asked = len(worker.calls_of(GetSplit))
    worker.pass_time(10.0)
    assert len(worker.calls_of(GetSplit)) == asked


@pytest.mark.parametrize("error", [NotFoundError("closed"), FailedPreconditionError("of another")])
def test_a_task_unknown_to_the_dispatcher_is_cancelled(error: Exception) -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    actions = worker.reply(GetSplit, error)
    assert actions.cancellations == [producer]
    assert isinstance(worker.replies["a0 (1)"], CancelledError)
    # The dispatcher may not know this worker: a heartbeat finds out.
    assert isinstance(worker.calls[-1], WorkerHeartbeat)
    assert worker.calls_of(FailTask) == []


def test_a_task_with_a_failed_split_request_is_cancelled_and_reported() -> None:
    worker = registered_worker()
    worker.need_splits(worker.start_task(assigns_splits=True))
    worker.reply(GetSplit, ValueError("want=0"))
    assert isinstance(worker.replies["a0 (1)"], CancelledError)
    assert (
        "the dispatcher rejected its split request: ValueError: want=0"
        in worker.calls_of(FailTask)[0].reason
    )


def test_an_unauthenticated_split_request_is_repeated() -> None:
    worker = registered_worker()
    worker.need_splits(worker.start_task(assigns_splits=True))
    worker.reply(GetSplit, UnauthenticatedError("not let in"))
    worker.pass_time(0.1)
    assert len(worker.calls_of(GetSplit)) == 2


# --- departed clients ---------------------------------------------------------------------------


def departed(worker: CoreDriver, *pairs: tuple[int, str]) -> None:
    worker.pass_time(1000.0)
    worker.reply(
        WorkerHeartbeat,
        WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first", departed_clients=pairs),
    )


def test_unacknowledged_splits_of_a_departed_client_are_reported() -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.grant_splits(0, 4)
    worker.produce(producer, split_batch(0), split_batch(1, 2))
    worker.request(number=1, acknowledged=1)
    waiting = worker.request(number=2, acknowledged=1)

    departed(worker, (1, "a"))

    (report,) = worker.calls_of(ReportDepartedClient)
    assert report == ReportDepartedClient(
        worker_id="w1",
        task_id=1,
        task_token=TASK_TOKEN,
        client_id="a",
        unacknowledged=((1, 3),),
        possibly_lost=(),
        delivered=((0, 1),),
        partially_delivered=((0, 1),),
    )
    assert isinstance(worker.replies[waiting], CancelledError)
    worker.need_splits(producer)
    assert (
        worker.calls_of(GetSplit)[-1].num_done == 1
    )  # splits are incomplete until the report is acknowledged
    worker.acknowledge(ReportDepartedClient)
    worker.grant_splits(4, 5)
    worker.need_splits(producer)
    assert worker.calls_of(GetSplit)[-1].num_done == 3


def test_the_report_about_a_departed_client_is_repeated_until_acknowledged() -> None:
    worker = registered_worker()
    worker.start_task(assigns_splits=True)
    departed(worker, (1, "a"))
    worker.reply(ReportDepartedClient, UNREACHABLE)
    worker.pass_time(1.0)
    departed(worker, (1, "a"))
    assert len(worker.calls_of(ReportDepartedClient)) > 2
    assert len(set(worker.calls_of(ReportDepartedClient))) == 1
    worker.reply(ReportDepartedClient, NotFoundError("closed"))
    before = len(worker.calls_of(ReportDepartedClient))
    worker.pass_time(100.0)
    assert len(worker.calls_of(ReportDepartedClient)) == before


def test_a_client_departed_from_a_finished_task_has_nothing_unacknowledged() -> None:
    worker, _ = finished()
    worker.acknowledge(FinishTask)
    departed(worker, (1, "a"), (7, "a"))
    assert worker.calls_of(ReportDepartedClient) == [
        ReportDepartedClient(
            worker_id="w1",
            task_id=1,
            task_token=TASK_TOKEN,
            client_id="a",
            unacknowledged=(),
            possibly_lost=(),
        )
    ]


def test_the_report_of_a_finished_task_lists_all_splits_as_delivered() -> None:
    worker = registered_worker()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    worker.grant_splits(0, 3)
    worker.produce(producer, split_batch(0), split_batch(1, 2))
    worker.end_producer(producer)
    worker.request(number=1)
    worker.request(number=2, acknowledged=2)
    worker.acknowledge(FinishTask)
    departed(worker, (1, "a"))
    (report,) = worker.calls_of(ReportDepartedClient)
    assert (report.delivered, report.partially_delivered) == (((0, 3),), ((0, 3),))


# --- end ----------------------------------------------------------------------------------------


def finished(**options: Any) -> tuple[CoreDriver, str]:
    """Return a worker whose task ended but is not reported, and a request for the end."""
    worker = registered_worker(**options)
    producer = worker.start_task()
    worker.produce(producer, batch(0))
    worker.end_producer(producer)
    return worker, worker.request(number=1)


def test_clients_receive_the_end_after_the_dispatcher() -> None:
    worker, request = finished()
    assert worker.calls_of(FinishTask) == [
        FinishTask(worker_id="w1", task_id=1, task_token=TASK_TOKEN)
    ]
    assert request not in worker.replies
    worker.acknowledge(FinishTask)
    assert worker.replies[request].end_of_task
    assert worker.core.tasks.running == ()


@pytest.mark.parametrize("error", [NotFoundError("closed"), FailedPreconditionError("another")])
def test_a_rejected_end_report_counts_as_acknowledged(error: Exception) -> None:
    worker, request = finished()
    worker.reply(FinishTask, error)
    assert worker.replies[request].end_of_task
    worker.pass_time(10.0)
    assert len(worker.calls_of(FinishTask)) == 1


def test_clients_receive_the_end_while_the_dispatcher_is_unreachable() -> None:
    worker, request = finished()
    worker.reply(FinishTask, UNREACHABLE)
    assert worker.replies[request].end_of_task
    worker.pass_time(3.0)
    assert len(worker.calls_of(FinishTask)) > 3
    worker.acknowledge(FinishTask)
    before = len(worker.calls_of(FinishTask))
    worker.pass_time(10.0)
    assert len(worker.calls_of(FinishTask)) == before


def test_clients_wait_one_second_for_a_silent_dispatcher() -> None:
    worker, request = finished()
    worker.pass_time(0.9)
    assert request not in worker.replies
    worker.pass_time(0.1)
    assert worker.replies[request].end_of_task
    assert len(worker.calls_of(FinishTask)) == 2


def test_a_failed_task_reports_its_reason_and_clients_receive_error_and_end() -> None:
    worker = registered_worker()
    producer = worker.start_task()
    worker.produce(producer, batch(0, 0, error=DataLossError("corrupt")))
    worker.end_producer(producer, "its plan cannot be opened: corrupt")
    assert isinstance(worker.replies["a0 (1)"], ResultBatch)
    request = worker.request(number=1)
    assert worker.calls_of(FailTask) == [
        FailTask(
            worker_id="w1",
            task_id=1,
            task_token=TASK_TOKEN,
            reason="its plan cannot be opened: corrupt",
        )
    ]
    worker.acknowledge(FailTask)
    assert worker.replies[request].end_of_task


def test_the_end_of_a_finished_task_is_sent_to_holders_of_its_token() -> None:
    worker, _ = finished()
    worker.acknowledge(FinishTask)
    assert worker.replies[worker.request("b", 9)].end_of_task
    wrong = worker.request("b", 9, task_token="another")
    assert isinstance(worker.replies[wrong], CancelledError)
    assert len(worker.calls_of(GetTask)) == 1


def test_a_deleted_task_is_cancelled_and_later_requests_get_the_reason() -> None:
    worker = CoreDriver().register()
    producer = worker.start_task(assigns_splits=True)
    worker.need_splits(producer)
    actions = worker.heartbeat(1, 7)
    assert actions.cancellations == [producer]
    assert "has been deleted" in str(worker.replies["a0 (1)"])
    assert "has been deleted" in str(worker.replies[worker.request(number=1)])
    assert "has been deleted" in str(worker.replies[worker.request(task_id=7)])
    assert worker.grant_splits(0, 1).grants == []
    calls = worker.pass_time(3.0)
    assert calls == []


def test_the_number_of_remembered_tasks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.service.worker.task_table._MAX_ENDED_TASKS", 2)
    worker = CoreDriver().register()
    worker.heartbeat(1, 2, 3)
    worker.request(task_id=1)
    worker.request(task_id=3)
    assert [each.task_id for each in worker.calls_of(GetTask)] == [1]


def test_a_plan_with_a_wrong_digest_is_not_cached() -> None:
    worker = registered_worker()
    worker.request()
    worker.define_task(definition(), plan=b"?")
    worker.request(task_id=2)
    worker.define_task(definition(2))
    assert hashlib.sha256(worker.starts[0].plan).digest() == definition().digest


def test_a_task_starts_once_its_plan_and_cost_function_are_fetched() -> None:
    """Each is fetched once by its digest, even if the plan is too large for the cache."""
    cost = b"a pickled cost function"
    digest = hashlib.sha256(cost).digest()
    worker = registered_worker(plan_cache=PlanBytesCache(capacity=len(cost)))
    costly = [
        msgspec.structs.replace(
            definition(task_id), cost_fn_digest=digest, num_consumers=2, delivery_policy="rounds"
        )
        for task_id in (1, 2)
    ]
    for task in costly:
        worker.request(task_id=task.task_id)
        worker.reply(GetTask, task)
    assert worker.calls_of(GetPlan) == [GetPlan(digest=costly[0].digest)]
    worker.reply(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    assert not worker.starts
    assert worker.calls_of(GetPlan)[1:] == [GetPlan(digest=digest)]
    worker.reply(GetPlan, GetPlanReply(chunk=cost, total_bytes=len(cost)))
    assert [(start.plan, start.cost_plan) for start in worker.starts] == [(PLAN, cost)] * 2
    assert len(worker.calls_of(GetPlan)) == 2


def test_requests_fail_if_the_cost_function_cannot_be_fetched() -> None:
    worker = registered_worker()
    request = worker.request()
    costly = msgspec.structs.replace(definition(), cost_fn_digest=bytes(32))
    worker.reply(GetTask, costly)
    worker.reply(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    worker.reply(GetPlan, GetPlanReply(chunk=b"?", total_bytes=1))
    assert isinstance(worker.replies[request], DataLossError)
    (failed,) = worker.calls_of(FailTask)
    assert failed.reason.startswith("it cannot be started: ")
