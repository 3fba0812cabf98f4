"""Who a worker is to its dispatcher: it registers, says that it is alive, asks until it hears."""

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
from tests.service.worker.driving import AWAY, INTERVAL, PLAN, Driven, definition, portion


def test_a_worker_registers_at_once() -> None:
    worker = Driven(tags=("fast",))
    assert worker.calls == [RegisterWorker(worker_id="w1", address="h:1", tags=("fast",))]
    assert not worker.session.is_registered
    worker.registered()
    assert worker.session.is_registered


def test_requests_that_come_while_a_worker_registers_are_handed_on_in_their_order() -> None:
    worker = Driven()
    requests = [worker.ask(number=n, acknowledged=0) for n in range(2)]
    other = worker.ask(task_id=2)
    assert len(worker.calls) == 1
    worker.registered()
    requests.append(worker.ask(number=2, acknowledged=0))
    assert [call.task_id for call in worker.of(GetTask)] == [1, 2]
    worker.session.reply_received(worker.of(GetTask)[0], definition(1), worker.now)
    worker.act()
    worker.say(GetPlan, GetPlanReply(chunk=PLAN, total_bytes=len(PLAN)))
    worker.produce(worker.starts[0].producer, *(portion(n, size=0) for n in range(2)))
    assert [worker.answers[each].first_element for each in requests[:2]] == [0, 1]
    assert not {requests[2], other} & worker.answers.keys()


def test_requests_that_come_while_a_worker_registers_again_wait_under_its_new_id() -> None:
    worker = Driven().registered()
    worker.pass_time(INTERVAL)
    worker.say(WorkerHeartbeat, NotFoundError("who are you?"))
    request = worker.ask()
    worker.registered()
    assert worker.of(GetTask) == [GetTask(worker_id="w2", task_id=1)]
    worker.say(GetTask, NotFoundError("of an earlier worker"))
    assert isinstance(worker.answers[request], CancelledError)


def test_a_registration_without_an_answer_is_repeated_under_its_id() -> None:
    worker = Driven()
    worker.pass_time(5.0)
    assert len(worker.calls) == 6
    assert set(worker.calls) == {worker.calls[0]}


def test_a_lost_registration_is_repeated_soon_and_then_less_often() -> None:
    worker = Driven()
    waits = []
    for _ in range(15):
        worker.say(RegisterWorker, AWAY)
        waits.append(round(worker.wake_in, 3))
        worker.act(worker.wake_in)
    assert waits[:3] == [0.05, 0.065, 0.085]
    assert waits == sorted(waits)
    assert waits[-1] == 1.0
    assert len(worker.calls) == 16


def test_a_worker_that_finds_no_dispatcher_fails_when_its_patience_ends() -> None:
    worker = Driven(dispatcher_timeout=30.0)
    worker.say(RegisterWorker, AWAY)
    worker.pass_time(29.0)
    assert worker.session.failure is None
    worker.pass_time(1.0)
    failure = worker.session.failure
    assert isinstance(failure, UnavailableError)
    assert "the worker at h:1 wants to register, did not answer for 30 s" in str(failure)
    assert "The last try: connection refused" in str(failure)
    assert worker.over


@pytest.mark.parametrize("error", [UnauthenticatedError("who?"), ValueError("no address")])
def test_a_worker_that_is_not_let_in_fails_at_once(error: Exception) -> None:
    worker = Driven()
    worker.say(RegisterWorker, error)
    assert str(error) in str(worker.session.failure)
    assert worker.over


def test_heartbeats_follow_each_answer_after_the_interval_and_name_the_tasks_that_run() -> None:
    worker = Driven().registered()
    assert worker.pass_time(INTERVAL - 0.1) == []
    assert worker.pass_time(0.1) == [WorkerHeartbeat(worker_id="w1", tasks=())]
    worker.say(WorkerHeartbeat, WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first"))
    worker.begin()
    worker.beat()
    assert worker.of(WorkerHeartbeat)[-1].tasks == (1,)


def test_the_configured_interval_goes_before_the_dispatchers_wish() -> None:
    worker = Driven(heartbeat_interval=0.5).registered()
    worker.pass_time(0.5)
    assert len(worker.of(WorkerHeartbeat)) == 1


def test_a_dispatcher_with_many_workers_is_told_less_often() -> None:
    rare = WorkerHeartbeatReply(
        tasks_to_delete=(), dispatcher_id="first", heartbeat_interval=3 * INTERVAL
    )
    wishing, configured = Driven().registered(), Driven(heartbeat_interval=INTERVAL).registered()
    for worker in (wishing, configured):
        worker.pass_time(INTERVAL)
        worker.say(WorkerHeartbeat, rare)
        worker.pass_time(3 * INTERVAL - 0.1)
    assert len(wishing.of(WorkerHeartbeat)) == 1
    assert len(configured.of(WorkerHeartbeat)) > 1
    wishing.pass_time(0.1)
    assert len(wishing.of(WorkerHeartbeat)) == 2


def test_a_heartbeat_without_an_answer_is_repeated_each_second() -> None:
    worker = Driven().registered()
    worker.pass_time(INTERVAL + 3.0)
    assert len(worker.of(WorkerHeartbeat)) == 4


@pytest.mark.parametrize(
    "answer",
    [
        NotFoundError("who are you?"),
        WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="second"),
    ],
)
def test_a_worker_that_is_not_known_any_more_registers_under_a_new_id(
    answer: WorkerHeartbeatReply | Exception,
) -> None:
    worker = Driven().registered()
    producer = worker.begin()
    running, waiting = worker.ask(number=1), worker.ask(task_id=2)
    worker.pass_time(INTERVAL)

    actions = worker.say(WorkerHeartbeat, answer)

    assert worker.calls[-1] == RegisterWorker(worker_id="w2", address="h:1")
    assert "registering again" in worker.warnings[-1]
    assert isinstance(worker.answers[running], CancelledError)
    assert isinstance(worker.answers[waiting], CancelledError)
    assert actions.cancellations == [producer]
    assert worker.session.tasks.running == ()

    worker.registered("second")
    worker.beat(incarnation="second")
    assert len(worker.of(RegisterWorker)) == 2


def test_what_an_earlier_producer_of_a_task_with_the_same_number_says_is_not_heard() -> None:
    worker = Driven().registered()
    before = worker.begin()
    worker.pass_time(INTERVAL)
    worker.say(WorkerHeartbeat, NotFoundError("who are you?"))
    worker.registered()
    after = worker.begin()
    assert before != after
    actions = worker.end(before, "its iterator was closed")
    assert actions.replies == actions.calls == []
    assert worker.session.tasks.running == (1,)


def test_a_registration_that_is_refused_later_is_tried_again_under_another_id() -> None:
    worker = Driven().registered()
    worker.pass_time(INTERVAL)
    worker.say(WorkerHeartbeat, NotFoundError("who are you?"))
    worker.say(RegisterWorker, ValueError("not now"))
    assert "cannot register again" in worker.warnings[-1]
    worker.pass_time(1.0)
    assert [call.worker_id for call in worker.of(RegisterWorker)] == ["w1", "w2", "w3"]
    assert worker.session.failure is None


def test_while_it_is_not_taken_again_a_worker_says_that_tasks_of_before_are_not_here() -> None:
    worker = Driven().registered()
    worker.begin()
    worker.pass_time(INTERVAL)
    worker.say(WorkerHeartbeat, NotFoundError("who are you?"))
    request = worker.ask("b")
    assert request not in worker.answers, "it may have such a task when it is taken"
    worker.say(RegisterWorker, ValueError("another one has the place"))
    assert isinstance(worker.answers[request], CancelledError)
    later = worker.ask("c")
    worker.pass_time(1.0)
    worker.say(RegisterWorker, ValueError("another one has the place"))
    assert isinstance(worker.answers[later], CancelledError)
    last = worker.ask("d")
    worker.pass_time(1.0)
    worker.registered()
    assert last not in worker.answers
    assert worker.of(GetTask)[-1].task_id == 1, "the dispatcher says what it is"


def test_an_answer_that_comes_late_or_twice_changes_nothing() -> None:
    worker = Driven().registered()
    worker.pass_time(INTERVAL)
    beat = worker.calls[-1]
    worker.say(WorkerHeartbeat, NotFoundError("who are you?"))
    first = worker.of(RegisterWorker)[0]
    for late in (
        NotFoundError("who are you?"),
        WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="x"),
    ):
        worker.session.reply_received(beat, late, worker.now)
    worker.session.reply_received(
        first, RegisterWorkerReply(heartbeat_interval=1.0, dispatcher_id="x"), worker.now
    )
    assert worker.act().calls == []
    assert not worker.session.is_registered


def test_an_answer_of_another_kind_names_both_kinds() -> None:
    worker = Driven()
    worker.say(RegisterWorker, Done())
    assert "answered RegisterWorker with Done; is it of another version" in str(
        worker.session.failure
    )


def test_a_dispatcher_that_does_not_answer_for_ten_seconds_is_named_and_then_each_minute() -> None:
    worker = Driven()
    worker.pass_time(9.9)
    assert worker.warnings == []
    worker.pass_time(0.1)
    assert worker.warnings == [
        "the dispatcher at d:1 has not answered the worker at h:1 for 10 s: is it running, and is "
        "this its address?"
    ]
    worker.pass_time(59.0)
    assert len(worker.warnings) == 1
    worker.pass_time(1.0)
    assert "for 70 s" in worker.warnings[1]


def test_silence_is_counted_anew_after_an_answer_and_only_while_something_was_asked() -> None:
    worker = Driven(heartbeat_interval=60.0).registered()
    worker.pass_time(59.0)
    assert worker.warnings == []
    worker.pass_time(8.0)  # the heartbeat waits for 7 s
    worker.say(WorkerHeartbeat, WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first"))
    worker.pass_time(69.0)
    assert worker.warnings == []
    worker.pass_time(1.0)
    assert len(worker.warnings) == 1


def refused(worker: Driven, seconds: float) -> None:
    """Let time pass in which heartbeats are answered and requests for units are not."""
    until = worker.now + seconds
    while worker.now < until:
        for call in worker.pass_time(0.5):
            if isinstance(call, WorkerHeartbeat):
                worker.say(
                    WorkerHeartbeat, WorkerHeartbeatReply(tasks_to_delete=(), dispatcher_id="first")
                )
            elif isinstance(call, GetSplit):
                worker.say(GetSplit, UnavailableError("the disk is full"))


def test_a_call_that_alone_is_refused_for_ten_seconds_is_named_and_then_each_minute() -> None:
    worker = Driven(heartbeat_interval=1.0).registered()
    worker.need(worker.begin(dealt=True))
    worker.say(GetSplit, UnavailableError("the disk is full"))
    refused(worker, 9.0)
    assert worker.warnings == []
    refused(worker, 3.0)
    (warning,) = worker.warnings
    assert "the dispatcher at d:1 answers the worker at h:1, but not its GetSplit, for 1" in warning
    assert "The last try: the disk is full" in warning
    refused(worker, 55.0)
    assert len(worker.warnings) == 1
    refused(worker, 8.0)
    assert len(worker.warnings) == 2


def test_worker_that_waits_for_a_place_in_the_fixed_list_is_told_so() -> None:
    worker = Driven()
    until = worker.now + 11.0
    worker.say(RegisterWorker, AbortedError("a place in `worker_addresses=['h', 'h']`"))
    while worker.now < until:
        for _ in worker.pass_time(0.5):
            worker.say(RegisterWorker, AbortedError("a place in `worker_addresses=['h', 'h']`"))
    (warning,) = worker.warnings
    assert "the dispatcher at d:1 answers the worker at h:1, but not its RegisterWorker" in warning
    assert "`worker_addresses=['h', 'h']`" in warning
    assert worker.session.failure is None


def test_what_waited_through_a_silence_is_not_said_to_be_refused_when_it_ends() -> None:
    worker = Driven(heartbeat_interval=1.0).registered()
    worker.need(worker.begin(dealt=True))
    worker.say(GetSplit, AWAY)
    worker.pass_time(15.0)
    assert "has not answered" in worker.warnings[0]
    refused(worker, 9.0)
    assert len(worker.warnings) == 1


def test_a_pause_of_the_worker_itself_is_no_silence_of_the_dispatcher() -> None:
    worker = Driven(dispatcher_timeout=20.0)
    worker.act(3600.0)
    assert worker.warnings == []
    assert worker.session.failure is None


def test_a_call_that_is_lost_does_not_wait_for_its_time_to_be_repeated() -> None:
    worker = Driven().registered()
    worker.ask()
    worker.say(GetTask, AWAY)
    worker.pass_time(0.05)
    assert len(worker.of(GetTask)) == 2


def test_what_a_dispatcher_that_is_away_keeps_from_clients_fails_when_patience_ends() -> None:
    worker = Driven(dispatcher_timeout=20.0).registered()
    request = worker.ask()
    for _ in range(19):
        worker.pass_time(1.0)
        assert request not in worker.answers
    worker.pass_time(1.0)
    assert "did not answer for 20 s" in str(worker.answers[request])
    assert worker.session.failure is None


def test_a_task_that_the_dispatcher_does_not_know_is_not_on_this_worker() -> None:
    worker = Driven().registered()
    request = worker.ask()
    worker.say(GetTask, NotFoundError("no such task"))
    assert "is not on this worker" in str(worker.answers[request])
    worker.ask()
    assert len(worker.of(GetTask)) == 2


def test_who_asks_for_a_task_hears_why_it_cannot_be_looked_up() -> None:
    worker = Driven().registered()
    request = worker.ask()
    worker.say(GetTask, FailedPreconditionError("of another run"))
    assert "of another run" in str(worker.answers[request])


def test_a_task_that_is_deleted_while_it_is_looked_up_does_not_start() -> None:
    worker = Driven().registered()
    request = worker.ask()
    worker.beat(1)
    assert isinstance(worker.answers[request], CancelledError)
    worker.say(GetTask, definition())
    assert worker.starts == []
