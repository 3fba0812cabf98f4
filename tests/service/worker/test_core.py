"""Registration of a worker, its heartbeats, and repetition of its calls."""

from __future__ import annotations

import pytest

from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.service.messages import (
    Done,
    GetPlan,
    GetPlanReply,
    GetSplit,
    GetTask,
    RegisterWorker,
    RegisterWorkerReply,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from tests.service.worker.core_driver import (
    INTERVAL,
    PLAN,
    UNREACHABLE,
    CoreDriver,
    batch,
    definition,
)


def test_a_worker_registers_at_once() -> None:
    worker = CoreDriver(tags=("fast",))
    assert worker.calls == [RegisterWorker(worker_id="w1", address="h:1", tags=("fast",))]
    assert not worker.core.is_registered
    worker.register()
    assert worker.core.is_registered


def test_requests_received_during_registration_are_served_in_order() -> None:
    worker = CoreDriver()
    requests = [worker.request(number=n, acknowledged=0) for n in range(2)]
    other = worker.request(task_id=2)
    assert len(worker.calls) == 1
    worker.register()
    requests.append(worker.request(number=2, acknowledged=0))
    assert [call.task_id for call in worker.calls_of(GetTask)] == [1, 2]
    worker.core.reply_received(worker.calls_of(GetTask)[0], definition(1), worker.now)
    worker.act()
    worker.reply(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    worker.produce(worker.starts[0].producer, *(batch(n, size=0) for n in range(2)))
    assert [worker.replies[each].first_element for each in requests[:2]] == [0, 1]
    assert not {requests[2], other} & worker.replies.keys()


def test_requests_received_during_reregistration_use_the_new_worker_id() -> None:
    worker = CoreDriver().register()
    worker.pass_time(INTERVAL)
    worker.reply(WorkerHeartbeat, NotFoundError("unknown worker"))
    request = worker.request()
    worker.register()
    assert worker.calls_of(GetTask) == [GetTask(worker_id="w2", task_id=1)]
    worker.reply(GetTask, NotFoundError("of an earlier worker"))
    assert isinstance(worker.replies[request], CancelledError)


def test_an_unanswered_registration_is_repeated_with_the_same_id() -> None:
    worker = CoreDriver()
    worker.pass_time(5.0)
    assert len(worker.calls) == 6
    assert set(worker.calls) == {worker.calls[0]}


def test_a_lost_registration_is_retried_with_backoff() -> None:
    worker = CoreDriver()
    waits = []
    for _ in range(15):
        worker.reply(RegisterWorker, UNREACHABLE)
        waits.append(round(worker.wake_in, 3))
        worker.act(worker.wake_in)
    assert waits[:3] == [0.05, 0.065, 0.085]
    assert waits == sorted(waits)
    assert waits[-1] == 1.0
    assert len(worker.calls) == 16


def test_a_worker_without_a_dispatcher_fails_after_the_dispatcher_timeout() -> None:
    worker = CoreDriver(dispatcher_timeout=30.0)
    worker.reply(RegisterWorker, UNREACHABLE)
    worker.pass_time(29.0)
    assert worker.core.failure is None
    worker.pass_time(1.0)
    failure = worker.core.failure
    assert isinstance(failure, UnavailableError)
    assert "dispatcher d:1 did not reply to RegisterWorker of worker h:1 for 30 s" in str(failure)
    assert "Last error: connection refused" in str(failure)
    assert worker.is_finished


@pytest.mark.parametrize("error", [UnauthenticatedError("unknown key"), ValueError("no address")])
def test_a_rejected_first_registration_fails_at_once(error: Exception) -> None:
    worker = CoreDriver()
    worker.reply(RegisterWorker, error)
    assert str(error) in str(worker.core.failure)
    assert worker.is_finished


def test_heartbeats_follow_each_reply_after_the_interval_and_list_running_tasks() -> None:
    worker = CoreDriver().register()
    assert worker.pass_time(INTERVAL - 0.1) == []
    assert worker.pass_time(0.1) == [WorkerHeartbeat(worker_id="w1", tasks=())]
    worker.reply(WorkerHeartbeat, WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first"))
    worker.start_task()
    worker.heartbeat()
    assert worker.calls_of(WorkerHeartbeat)[-1].tasks == (1,)


def test_the_configured_heartbeat_interval_overrides_the_dispatchers() -> None:
    worker = CoreDriver(heartbeat_interval=0.5).register()
    worker.pass_time(0.5)
    assert len(worker.calls_of(WorkerHeartbeat)) == 1


def test_the_dispatcher_can_lengthen_the_heartbeat_interval() -> None:
    rare = WorkerHeartbeatReply(
        tasks_to_delete=(), dispatcher_id="first", heartbeat_interval=3 * INTERVAL
    )
    default, configured = (
        CoreDriver().register(),
        CoreDriver(heartbeat_interval=INTERVAL).register(),
    )
    for worker in (default, configured):
        worker.pass_time(INTERVAL)
        worker.reply(WorkerHeartbeat, rare)
        worker.pass_time(3 * INTERVAL - 0.1)
    assert len(default.calls_of(WorkerHeartbeat)) == 1
    assert len(configured.calls_of(WorkerHeartbeat)) > 1
    default.pass_time(0.1)
    assert len(default.calls_of(WorkerHeartbeat)) == 2


def test_an_unanswered_heartbeat_is_repeated_each_second() -> None:
    worker = CoreDriver().register()
    worker.pass_time(INTERVAL + 3.0)
    assert len(worker.calls_of(WorkerHeartbeat)) == 4


@pytest.mark.parametrize(
    "answer",
    [
        NotFoundError("unknown worker"),
        WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="second"),
    ],
)
def test_an_unknown_worker_registers_again_with_a_new_id(
    answer: WorkerHeartbeatReply | Exception,
) -> None:
    worker = CoreDriver().register()
    producer = worker.start_task()
    running, waiting = worker.request(number=1), worker.request(task_id=2)
    worker.pass_time(INTERVAL)

    actions = worker.reply(WorkerHeartbeat, answer)

    assert worker.calls[-1] == RegisterWorker(worker_id="w2", address="h:1")
    assert "registers again" in worker.warnings[-1]
    assert isinstance(worker.replies[running], CancelledError)
    assert isinstance(worker.replies[waiting], CancelledError)
    assert actions.cancellations == [producer]
    assert worker.core.tasks.running == ()

    worker.register("second")
    worker.heartbeat(dispatcher_id="second")
    assert len(worker.calls_of(RegisterWorker)) == 2


def test_output_of_a_producer_from_an_earlier_registration_is_ignored() -> None:
    worker = CoreDriver().register()
    before = worker.start_task()
    worker.pass_time(INTERVAL)
    worker.reply(WorkerHeartbeat, NotFoundError("unknown worker"))
    worker.register()
    after = worker.start_task()
    assert before != after
    actions = worker.end_producer(before, "its iterator was closed")
    assert actions.replies == actions.calls == []
    assert worker.core.tasks.running == (1,)


def test_a_rejected_reregistration_is_retried_with_another_id() -> None:
    worker = CoreDriver().register()
    worker.pass_time(INTERVAL)
    worker.reply(WorkerHeartbeat, NotFoundError("unknown worker"))
    worker.reply(RegisterWorker, ValueError("not now"))
    assert "rejected the new registration of worker h:1" in worker.warnings[-1]
    worker.pass_time(1.0)
    assert [call.worker_id for call in worker.calls_of(RegisterWorker)] == ["w1", "w2", "w3"]
    assert worker.core.failure is None


def test_requests_fail_while_the_reregistration_is_rejected() -> None:
    worker = CoreDriver().register()
    worker.start_task()
    worker.pass_time(INTERVAL)
    worker.reply(WorkerHeartbeat, NotFoundError("unknown worker"))
    request = worker.request("b")
    assert request not in worker.replies, "the worker may have this task once it is registered"
    worker.reply(RegisterWorker, ValueError("the slot is taken"))
    assert isinstance(worker.replies[request], CancelledError)
    later = worker.request("c")
    worker.pass_time(1.0)
    worker.reply(RegisterWorker, ValueError("the slot is taken"))
    assert isinstance(worker.replies[later], CancelledError)
    last = worker.request("d")
    worker.pass_time(1.0)
    worker.register()
    assert last not in worker.replies
    assert worker.calls_of(GetTask)[-1].task_id == 1, "the task is looked up"


def test_a_late_or_duplicate_reply_changes_nothing() -> None:
    worker = CoreDriver().register()
    worker.pass_time(INTERVAL)
    beat = worker.calls[-1]
    worker.reply(WorkerHeartbeat, NotFoundError("unknown worker"))
    first = worker.calls_of(RegisterWorker)[0]
    for late in (
        NotFoundError("unknown worker"),
        WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="x"),
    ):
        worker.core.reply_received(beat, late, worker.now)
    worker.core.reply_received(
        first, RegisterWorkerReply(heartbeat_interval=1.0, dispatcher_id="x"), worker.now
    )
    assert worker.act().calls == []
    assert not worker.core.is_registered


def test_a_reply_of_the_wrong_type_names_both_types() -> None:
    worker = CoreDriver()
    worker.reply(RegisterWorker, Done())
    assert "replied to RegisterWorker with Done, expected RegisterWorkerReply" in str(
        worker.core.failure
    )


def test_a_silent_dispatcher_is_reported_after_ten_seconds_and_each_minute() -> None:
    worker = CoreDriver()
    worker.pass_time(9.9)
    assert worker.warnings == []
    worker.pass_time(0.1)
    assert worker.warnings == [
        "dispatcher d:1 has not replied to worker h:1 for 10 s: is it running at this address?"
    ]
    worker.pass_time(59.0)
    assert len(worker.warnings) == 1
    worker.pass_time(1.0)
    assert "for 70 s" in worker.warnings[1]


def test_silence_counts_from_the_last_reply_and_only_during_pending_calls() -> None:
    worker = CoreDriver(heartbeat_interval=60.0).register()
    worker.pass_time(59.0)
    assert worker.warnings == []
    worker.pass_time(8.0)  # the heartbeat is pending for 7 s
    worker.reply(WorkerHeartbeat, WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first"))
    worker.pass_time(69.0)
    assert worker.warnings == []
    worker.pass_time(1.0)
    assert len(worker.warnings) == 1


def fail_split_requests(worker: CoreDriver, seconds: float) -> None:
    """Advance the time; heartbeats are answered, and split requests fail."""
    until = worker.now + seconds
    while worker.now < until:
        for call in worker.pass_time(0.5):
            if isinstance(call, WorkerHeartbeat):
                worker.reply(
                    WorkerHeartbeat, WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first")
                )
            elif isinstance(call, GetSplit):
                worker.reply(GetSplit, UnavailableError("the disk is full"))


def test_a_call_failing_for_ten_seconds_is_reported_and_then_each_minute() -> None:
    worker = CoreDriver(heartbeat_interval=1.0).register()
    worker.need_splits(worker.start_task(assigns_splits=True))
    worker.reply(GetSplit, UnavailableError("the disk is full"))
    fail_split_requests(worker, 9.0)
    assert worker.warnings == []
    fail_split_requests(worker, 3.0)
    (warning,) = worker.warnings
    assert "dispatcher d:1: GetSplit of worker h:1 has failed for 1" in warning
    assert "Last error: the disk is full" in warning
    fail_split_requests(worker, 55.0)
    assert len(worker.warnings) == 1
    fail_split_requests(worker, 8.0)
    assert len(worker.warnings) == 2


def test_a_wait_for_a_slot_in_the_worker_list_is_reported() -> None:
    worker = CoreDriver()
    until = worker.now + 11.0
    worker.reply(RegisterWorker, AbortedError("no free slot in `worker_addresses=['h', 'h']`"))
    while worker.now < until:
        for _ in worker.pass_time(0.5):
            worker.reply(
                RegisterWorker, AbortedError("no free slot in `worker_addresses=['h', 'h']`")
            )
    (warning,) = worker.warnings
    assert "dispatcher d:1: RegisterWorker of worker h:1 has failed for" in warning
    assert "`worker_addresses=['h', 'h']`" in warning
    assert worker.core.failure is None


def test_a_call_pending_during_a_silence_is_not_reported_as_failing() -> None:
    worker = CoreDriver(heartbeat_interval=1.0).register()
    worker.need_splits(worker.start_task(assigns_splits=True))
    worker.reply(GetSplit, UNREACHABLE)
    worker.pass_time(15.0)
    assert "has not replied" in worker.warnings[0]
    fail_split_requests(worker, 9.0)
    assert len(worker.warnings) == 1


def test_a_pause_of_the_worker_is_not_counted_as_silence() -> None:
    worker = CoreDriver(dispatcher_timeout=20.0)
    worker.act(3600.0)
    assert worker.warnings == []
    assert worker.core.failure is None


def test_a_lost_call_is_retried_before_the_regular_interval() -> None:
    worker = CoreDriver().register()
    worker.request()
    worker.reply(GetTask, UNREACHABLE)
    worker.pass_time(0.05)
    assert len(worker.calls_of(GetTask)) == 2


def test_client_requests_fail_after_the_dispatcher_timeout() -> None:
    worker = CoreDriver(dispatcher_timeout=20.0).register()
    request = worker.request()
    for _ in range(19):
        worker.pass_time(1.0)
        assert request not in worker.replies
    worker.pass_time(1.0)
    assert "did not reply to GetTask of worker h:1 for 20 s" in str(worker.replies[request])
    assert worker.core.failure is None


def test_a_request_for_a_task_unknown_to_the_dispatcher_fails() -> None:
    worker = CoreDriver().register()
    request = worker.request()
    worker.reply(GetTask, NotFoundError("no such task"))
    assert "is not on this worker" in str(worker.replies[request])
    worker.request()
    assert len(worker.calls_of(GetTask)) == 2


def test_a_request_fails_with_the_error_of_the_task_lookup() -> None:
    worker = CoreDriver().register()
    request = worker.request()
    worker.reply(GetTask, FailedPreconditionError("of another run"))
    assert "of another run" in str(worker.replies[request])


def test_a_task_deleted_during_its_lookup_does_not_start() -> None:
    worker = CoreDriver().register()
    request = worker.request()
    worker.heartbeat(1)
    assert isinstance(worker.replies[request], CancelledError)
    worker.reply(GetTask, definition())
    assert worker.starts == []
