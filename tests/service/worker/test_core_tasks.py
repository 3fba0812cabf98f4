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
from tests.service.worker.driving import (
    AWAY,
    PLAN,
    TASK_TOKEN,
    Driven,
    definition,
    portion,
    units,
)


def worker_of(**options: Any) -> Driven:
    return Driven(heartbeat_interval=1000.0, **options).registered()


def first(worker: Driven, request: str) -> int:
    content = worker.answers[request]
    assert isinstance(content, ResultBatch)
    return content.first_element


# --- how it begins ------------------------------------------------------------------------------


def test_a_task_begins_with_the_first_request_and_requests_are_handed_on_in_order() -> None:
    worker = worker_of()
    requests = [worker.ask(number=n, acknowledged=0) for n in range(2)]
    assert worker.of(GetTask) == [GetTask(worker_id="w1", task_id=1)]
    worker.defines(definition())
    late = worker.ask("b")
    (start,) = worker.starts
    assert (start.plan, start.definition) == (PLAN, definition())
    worker.produce(start.producer, portion(0), portion(1), portion(2))
    assert [first(worker, each) for each in (*requests, late)] == [0, 1, 2]


def test_a_plan_is_fetched_in_parts() -> None:
    worker = worker_of()
    worker.ask()
    worker.say(GetTask, definition())
    for offset in range(0, len(PLAN), 5):
        assert worker.calls[-1] == GetPlan(digest=definition().digest, offset=offset)
        part = GetPlanReply(chunk=PLAN[offset : offset + 5], total_bytes=len(PLAN))
        worker.say(GetPlan, part)
        worker.session.reply_received(
            worker.of(GetPlan)[0], part, worker.now
        )  # the first comes again
    assert worker.starts[0].plan == PLAN


def test_a_plan_is_fetched_once_for_all_tasks_that_read_it() -> None:
    worker = worker_of()
    for task_id in (1, 2):
        worker.ask(task_id=task_id)
        worker.say(GetTask, definition(task_id))
    worker.say(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    worker.ask(task_id=3)
    worker.say(GetTask, definition(3))
    assert [start.definition.task_id for start in worker.starts] == [1, 2, 3]
    assert len(worker.of(GetPlan)) == 1


def test_a_task_whose_plan_arrives_damaged_fails_and_its_clients_hear_why() -> None:
    worker = worker_of()
    request = worker.ask()
    worker.defines(definition(), plan=b"?")
    assert isinstance(worker.answers[request], DataLossError)
    assert "is corrupt: received" in worker.of(FailTask)[0].reason
    assert worker.answers[worker.ask(number=1)] == GetElementsReply(
        first_element=0, num_elements=0, end_of_task=True
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [(NotFoundError("no plan"), CancelledError), (ValueError("offset"), HeadraceError)],
)
def test_who_waits_for_a_plan_that_cannot_be_had_hears_so(
    error: Exception, expected: type[Exception]
) -> None:
    worker = worker_of()
    request = worker.ask()
    worker.say(GetTask, definition())
    worker.say(GetPlan, error)
    assert isinstance(worker.answers[request], expected)
    assert worker.starts == []


def test_a_request_with_another_ticket_is_refused_and_disturbs_nobody() -> None:
    worker = worker_of()
    producer = worker.begin()
    stranger = worker.ask(acknowledged=100, task_token="of another dispatcher")
    assert isinstance(worker.answers[stranger], CancelledError)
    worker.produce(producer, portion(0))
    assert first(worker, "a0 (1)") == 0


# --- portions -----------------------------------------------------------------------------------


def test_a_producer_is_resumed_while_there_is_room_and_when_a_portion_was_taken() -> None:
    worker = worker_of(limits=BufferLimits(ready_batches=2))
    producer = worker.begin()
    assert worker.produce(producer, portion(0)).resumes == [producer]  # it was waited for
    assert worker.produce(producer, portion(1)).resumes == [producer]
    assert worker.produce(producer, portion(2)).resumes == []
    worker.session.request_received("late", message(1), worker.now)
    assert worker.act().resumes == [producer]
    worker.session.request_received("later", message(2), worker.now)
    assert worker.act().resumes == []  # it was let go on already


def message(number: int) -> GetElements:
    return GetElements(
        task_id=1, task_token=TASK_TOKEN, client_id="a", request_number=number, acknowledged=number
    )


def test_a_portion_in_halves_is_two_portions_and_lets_the_producer_go_on_once() -> None:
    worker = worker_of(limits=BufferLimits(ready_batches=1))
    producer = worker.begin()
    actions = worker.produce(producer, portion(0), portion(1))
    assert actions.resumes == []  # the second takes up the room that there was after the first
    worker.session.request_received("b0", message(1), worker.now)
    assert worker.act().resumes == [producer]


def test_portions_that_come_before_anybody_looks_let_the_producer_go_on_once() -> None:
    worker = worker_of(limits=BufferLimits(ready_batches=3))
    producer = worker.begin()
    actions = worker.produce(producer, *map(portion, range(3)))
    assert actions.resumes == [producer]


def test_what_a_silent_client_holds_is_dropped_with_a_warning() -> None:
    worker = Driven(limits=BufferLimits(client_timeout=60.0)).registered()
    producer = worker.begin()
    worker.produce(producer, portion(0, 7))
    for _ in range(13):
        worker.beat()
    assert "task 1: 7 elements dropped" in worker.warnings[-1]


# --- units --------------------------------------------------------------------------------------


def test_units_are_asked_for_when_they_are_needed_in_ranges_of_a_fitting_length() -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    asked = []
    for number, (seconds, want) in enumerate([(0.001, 1), (0.05, 2), (1.0, 2), (0.0, 1)]):
        worker.need(producer)
        asked.append(worker.of(GetSplit)[-1])
        actions = worker.grants(10 * number, 10 * number + want)
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


def test_the_dispatcher_hears_how_many_units_are_acknowledged() -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.grants(0, 2)
    worker.produce(producer, units(0), units(1))
    worker.ask(number=1)
    worker.need(producer)
    assert [each.num_done for each in worker.of(GetSplit)] == [0, 1]


def test_a_task_that_is_to_wait_asks_again_under_its_number_soon_and_then_less_often() -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    waits = []
    for _ in range(6):
        assert worker.grants(0, 0, wait=True).grants == []
        waits.append(round(worker.wake_in, 3))
        worker.act(worker.wake_in)
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.2, 0.2]
    assert [each.assignment_number for each in worker.of(GetSplit)] == [0] * 7
    assert worker.grants(3, 4, is_poison_candidate=True).grants == [
        SplitGrant(producer=producer, splits=(3, 4), deliver_at_once=True)
    ]


def test_a_request_for_units_that_is_lost_is_repeated_and_granted_once() -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.say(GetSplit, AWAY)
    worker.pass_time(0.1)
    asked, again = worker.of(GetSplit)
    assert asked == again
    assert len(worker.grants(0, 4).grants) == 1
    assert worker.grants(0, 4).grants == []
    worker.need(producer)
    assert worker.of(GetSplit)[-1].assignment_number == 1


@pytest.mark.parametrize("units", [(0, 3), None])
def test_after_the_last_grant_the_producer_hears_so_and_nobody_is_asked_again(
    units: tuple[int, int] | None,
) -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    granted = worker.grants(*(units or (0, 0)), is_last=units is not None)
    assert granted.grants == [SplitGrant(producer=producer, splits=units)]
    assert worker.need(producer).grants == [SplitGrant(producer=producer)]
    assert len(worker.of(GetSplit)) == 1


@pytest.mark.parametrize("left", [0, 4])
def test_a_producer_that_ended_while_a_thread_of_its_waited_for_units_is_granted_none(
    left: int,
) -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.end(producer, "SystemExit")
    assert worker.grants(0, left).grants == []
    assert worker.need(producer).grants == []
    worker.pass_time(60.0)
    assert len({each.assignment_number for each in worker.of(GetSplit)}) == 1


def test_a_producer_that_ended_while_it_was_to_wait_for_units_asks_for_none() -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.grants(0, 0, wait=True)
    worker.end(producer, "SystemExit")
    asked = len(worker.of(GetSplit))
    worker.pass_time(10.0)
    assert len(worker.of(GetSplit)) == asked


@pytest.mark.parametrize("error", [NotFoundError("closed"), FailedPreconditionError("of another")])
def test_a_task_whose_units_the_dispatcher_does_not_know_is_called_off(error: Exception) -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    actions = worker.say(GetSplit, error)
    assert actions.cancellations == [producer]
    assert isinstance(worker.answers["a0 (1)"], CancelledError)
    # Perhaps the dispatcher does not know this worker: that is asked now.
    assert isinstance(worker.calls[-1], WorkerHeartbeat)
    assert worker.of(FailTask) == []


def test_a_task_that_gets_no_units_by_an_error_is_called_off_and_reported() -> None:
    worker = worker_of()
    worker.need(worker.begin(dealt=True))
    worker.say(GetSplit, ValueError("want=0"))
    assert isinstance(worker.answers["a0 (1)"], CancelledError)
    assert (
        "the dispatcher rejected its split request: ValueError: want=0"
        in worker.of(FailTask)[0].reason
    )


def test_an_answer_about_units_that_were_asked_for_with_another_ticket_is_asked_again() -> None:
    worker = worker_of()
    worker.need(worker.begin(dealt=True))
    worker.say(GetSplit, UnauthenticatedError("not let in"))
    worker.pass_time(0.1)
    assert len(worker.of(GetSplit)) == 2


# --- clients that are gone ----------------------------------------------------------------------


def departed(worker: Driven, *pairs: tuple[int, str]) -> None:
    worker.pass_time(1000.0)
    worker.say(
        WorkerHeartbeat,
        WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first", departed_clients=pairs),
    )


def test_the_dispatcher_hears_what_a_client_that_is_gone_had_not_acknowledged() -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.grants(0, 4)
    worker.produce(producer, units(0), units(1, 2))
    worker.ask(number=1, acknowledged=1)
    waiting = worker.ask(number=2, acknowledged=1)

    departed(worker, (1, "a"))

    (said,) = worker.of(ReportDepartedClient)
    assert said == ReportDepartedClient(
        worker_id="w1",
        task_id=1,
        task_token=TASK_TOKEN,
        client_id="a",
        unacknowledged=((1, 3),),
        possibly_lost=(),
        delivered=((0, 1),),
        partially_delivered=((0, 1),),
    )
    assert isinstance(worker.answers[waiting], CancelledError)
    worker.need(producer)
    assert worker.of(GetSplit)[-1].num_done == 1  # nothing is done before it was heard
    worker.done(ReportDepartedClient)
    worker.grants(4, 5)
    worker.need(producer)
    assert worker.of(GetSplit)[-1].num_done == 3


def test_what_is_said_of_a_client_that_is_gone_is_repeated_until_it_is_heard() -> None:
    worker = worker_of()
    worker.begin(dealt=True)
    departed(worker, (1, "a"))
    worker.say(ReportDepartedClient, AWAY)
    worker.pass_time(1.0)
    departed(worker, (1, "a"))
    assert len(worker.of(ReportDepartedClient)) > 2
    assert len(set(worker.of(ReportDepartedClient))) == 1
    worker.say(ReportDepartedClient, NotFoundError("closed"))
    before = len(worker.of(ReportDepartedClient))
    worker.pass_time(100.0)
    assert len(worker.of(ReportDepartedClient)) == before


def test_of_a_task_that_is_over_a_client_that_is_gone_held_nothing() -> None:
    worker, _ = finished()
    worker.done(FinishTask)
    departed(worker, (1, "a"), (7, "a"))
    assert worker.of(ReportDepartedClient) == [
        ReportDepartedClient(
            worker_id="w1",
            task_id=1,
            task_token=TASK_TOKEN,
            client_id="a",
            unacknowledged=(),
            possibly_lost=(),
        )
    ]


def test_of_a_task_that_is_over_its_clients_have_all_units() -> None:
    worker = worker_of()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    worker.grants(0, 3)
    worker.produce(producer, units(0), units(1, 2))
    worker.end(producer)
    worker.ask(number=1)
    worker.ask(number=2, acknowledged=2)
    worker.done(FinishTask)
    departed(worker, (1, "a"))
    (said,) = worker.of(ReportDepartedClient)
    assert (said.delivered, said.partially_delivered) == (((0, 3),), ((0, 3),))


# --- its end ------------------------------------------------------------------------------------


def finished(**options: Any) -> tuple[Driven, str]:
    """Return a worker whose task is over but for the report of it, and who waits for its end."""
    worker = worker_of(**options)
    producer = worker.begin()
    worker.produce(producer, portion(0))
    worker.end(producer)
    return worker, worker.ask(number=1)


def test_clients_hear_of_the_end_when_the_dispatcher_has() -> None:
    worker, request = finished()
    assert worker.of(FinishTask) == [FinishTask(worker_id="w1", task_id=1, task_token=TASK_TOKEN)]
    assert request not in worker.answers
    worker.done(FinishTask)
    assert worker.answers[request].end_of_task
    assert worker.session.tasks.running == ()


@pytest.mark.parametrize("error", [NotFoundError("closed"), FailedPreconditionError("another")])
def test_a_dispatcher_that_has_no_use_for_a_report_has_answered_it(error: Exception) -> None:
    worker, request = finished()
    worker.say(FinishTask, error)
    assert worker.answers[request].end_of_task
    worker.pass_time(10.0)
    assert len(worker.of(FinishTask)) == 1


def test_clients_do_not_wait_for_a_dispatcher_that_is_away_and_the_report_is_repeated() -> None:
    worker, request = finished()
    worker.say(FinishTask, AWAY)
    assert worker.answers[request].end_of_task
    worker.pass_time(3.0)
    assert len(worker.of(FinishTask)) > 3
    worker.done(FinishTask)
    before = len(worker.of(FinishTask))
    worker.pass_time(10.0)
    assert len(worker.of(FinishTask)) == before


def test_clients_wait_a_second_for_a_dispatcher_that_does_not_answer() -> None:
    worker, request = finished()
    worker.pass_time(0.9)
    assert request not in worker.answers
    worker.pass_time(0.1)
    assert worker.answers[request].end_of_task
    assert len(worker.of(FinishTask)) == 2


def test_a_task_that_fails_says_why_and_its_clients_get_the_error_and_then_the_end() -> None:
    worker = worker_of()
    producer = worker.begin()
    worker.produce(producer, portion(0, 0, error=DataLossError("torn")))
    worker.end(producer, "its plan cannot be opened: torn")
    assert isinstance(worker.answers["a0 (1)"], ResultBatch)
    request = worker.ask(number=1)
    assert worker.of(FailTask) == [
        FailTask(
            worker_id="w1",
            task_id=1,
            task_token=TASK_TOKEN,
            reason="its plan cannot be opened: torn",
        )
    ]
    worker.done(FailTask)
    assert worker.answers[request].end_of_task


def test_of_a_finished_task_its_end_is_kept_for_those_who_show_its_ticket() -> None:
    worker, _ = finished()
    worker.done(FinishTask)
    assert worker.answers[worker.ask("b", 9)].end_of_task
    stranger = worker.ask("b", 9, task_token="another")
    assert isinstance(worker.answers[stranger], CancelledError)
    assert len(worker.of(GetTask)) == 1


def test_a_task_that_the_dispatcher_deletes_is_called_off_and_explained_afterwards() -> None:
    worker = Driven().registered()
    producer = worker.begin(dealt=True)
    worker.need(producer)
    actions = worker.beat(1, 7)
    assert actions.cancellations == [producer]
    assert "has been deleted" in str(worker.answers["a0 (1)"])
    assert "has been deleted" in str(worker.answers[worker.ask(number=1)])
    assert "has been deleted" in str(worker.answers[worker.ask(task_id=7)])
    assert worker.grants(0, 1).grants == []
    calls = worker.pass_time(3.0)
    assert calls == []


def test_the_tasks_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.service.worker.task_table._MAX_FINISHED_TASKS", 2)
    worker = Driven().registered()
    worker.beat(1, 2, 3)
    worker.ask(task_id=1)
    worker.ask(task_id=3)
    assert [each.task_id for each in worker.of(GetTask)] == [1]


def test_a_plan_of_another_digest_is_not_kept() -> None:
    worker = worker_of()
    worker.ask()
    worker.defines(definition(), plan=b"?")
    worker.ask(task_id=2)
    worker.defines(definition(2))
    assert hashlib.sha256(worker.starts[0].plan).digest() == definition().digest


def test_a_task_begins_when_its_plan_and_its_cost_function_are_here() -> None:
    """Each under its digest, fetched once; also where a plan is too large to be kept."""
    cost = b"what a row costs"
    digest = hashlib.sha256(cost).digest()
    worker = worker_of(plan_cache=PlanBytesCache(capacity=len(cost)))
    costly = [
        msgspec.structs.replace(
            definition(task_id), cost_fn_digest=digest, num_consumers=2, delivery_policy="rounds"
        )
        for task_id in (1, 2)
    ]
    for task in costly:
        worker.ask(task_id=task.task_id)
        worker.say(GetTask, task)
    assert worker.of(GetPlan) == [GetPlan(digest=costly[0].digest)]
    worker.say(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    assert not worker.starts
    assert worker.of(GetPlan)[1:] == [GetPlan(digest=digest)]
    worker.say(GetPlan, GetPlanReply(chunk=cost, total_bytes=len(cost)))
    assert [(start.plan, start.cost_plan) for start in worker.starts] == [(PLAN, cost)] * 2
    assert len(worker.of(GetPlan)) == 2


def test_a_cost_function_that_cannot_be_had_is_said_to_whoever_waits() -> None:
    worker = worker_of()
    request = worker.ask()
    costly = msgspec.structs.replace(definition(), cost_fn_digest=bytes(32))
    worker.say(GetTask, costly)
    worker.say(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    worker.say(GetPlan, GetPlanReply(chunk=b"?", total_bytes=1))
    assert isinstance(worker.answers[request], DataLossError)
    (failed,) = worker.of(FailTask)
    assert failed.reason.startswith("it cannot be started: ")
