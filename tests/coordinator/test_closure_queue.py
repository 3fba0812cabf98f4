"""The closure queue: actions that result from sequences of inputs."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.coordinator.closure import (
    CancelAction,
    CancelMode,
    Closure,
    Payload,
    QueueActions,
    RemoteValueStatus,
)
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    HeadraceError,
    UnavailableError,
    UserFunctionError,
)
from tests.coordinator.invariants import check

VALUE = Payload(b"value")
CANCELLED = "The corresponding function is cancelled. Please reschedule the function."


class Driver:
    """A queue and its workers, driven step by step."""

    def __init__(self, num_workers: int = 1, **options: Any) -> None:
        self.queue = ClosureQueue(**{"in_flight": 1, **options})
        self.staleness = options.get("staleness")
        self.now = 0.0
        self._next_session = 1
        self.sessions: dict[int, int] = {}
        #: Numbers of the closures in flight on each worker.
        self.at: dict[int, list[int]] = {}
        self.last = QueueActions()
        self._to_settle: list[int] = []
        for worker in range(num_workers):
            self.sent(worker)

    def sent(self, worker: int) -> None:
        self.sessions[worker] = self._next_session
        self._next_session += 1
        self.at[worker] = []
        self.queue.worker_connected(worker, self.sessions[worker])
        self.decide()

    def schedule(self, **fields: Any) -> Closure:
        closure = Closure("step", **fields)
        self.queue.schedule(closure, self.now)
        self.decide()
        return closure

    def decide(self, after: float = 0.0) -> QueueActions:
        self.now += after
        self.last = decided = self.queue.take_actions(self.now)
        check(self.queue, self.staleness)
        self._to_settle += decided.key_cleanups
        for send in decided.sends:
            assert send.session == self.sessions[send.worker]
            self.at[send.worker].append(send.closure.number)
        return decided

    def forget_keys(self) -> None:
        """Confirm that servers have forgotten all requested write keys."""
        numbers, self._to_settle = self._to_settle, []
        self.queue.write_keys_forgotten(numbers, self.now)
        self.decide()

    def ends(
        self, worker: int, number: int, error: Exception | None = None, *, wrote: bool = False
    ) -> None:
        self.at[worker].remove(number)
        value = None if error else VALUE
        session = self.sessions[worker]
        assert self.queue.closure_returned(
            session, number, value, error, has_written=wrote, seconds=1.0, now=self.now
        )
        self.decide()

    def dropped(self, worker: int, number: int) -> None:
        self.at[worker].remove(number)
        self.queue.cancel_answered(self.sessions[worker], number, is_dropped=True, now=self.now)
        self.decide()

    def lose(self, worker: int) -> None:
        """Lose a worker, and confirm that servers fenced it."""
        self.queue.worker_lost(worker)
        fences = self.decide().fences
        assert fences == [self.sessions[worker]]
        self.at[worker] = []
        self.queue.worker_fenced(fences[0], self.now)
        self.decide()

    def take_error(self) -> Exception:
        """Return the error to raise, and reset the queue."""
        failure = self.queue.take_failure()
        assert failure is not None
        return failure.build_error()


def _fetch(closure: Closure) -> Payload | None:
    if closure.result.error is not None:
        raise closure.result.error
    return closure.result.payload


@pytest.mark.catalogue("2.8.5", "3.1.1-3")
def test_a_closure_of_a_lost_worker_reruns_first_under_its_number():
    driver = Driver(2)
    first, second, third, fourth = (driver.schedule() for _ in range(4))
    assert (driver.at[0], driver.at[1]) == ([first.number], [second.number])
    driver.lose(0)
    driver.ends(1, second.number)
    assert driver.at[1] == [first.number], "it runs before later closures"
    driver.ends(1, first.number)
    driver.ends(1, third.number)
    driver.ends(1, fourth.number)
    driver.forget_keys()
    assert driver.queue.is_drained


def test_a_lost_worker_is_fenced_before_its_closures_go_elsewhere():
    driver = Driver(2)
    closure = driver.schedule()
    driver.queue.worker_lost(0)
    assert driver.decide().fences == [1]
    assert driver.last.sends == []
    driver.queue.worker_fenced(1, driver.now)
    (send,) = driver.decide().sends
    assert (send.closure, send.worker) == (closure, 1)


def test_late_replies_of_a_lost_worker_are_ignored():
    driver = Driver(2)
    closure = driver.schedule()
    driver.lose(0)
    was_heard = driver.queue.closure_returned(
        1, closure.number, Payload(b"old"), None, has_written=True, seconds=1.0, now=0.0
    )
    assert not was_heard
    driver.ends(1, closure.number)
    assert _fetch(closure) == VALUE


def test_a_closure_is_done_once_servers_have_forgotten_its_keys():
    driver = Driver()
    closure = driver.schedule()
    driver.ends(0, closure.number, wrote=True)
    assert driver.last.key_cleanups == [closure.number]
    assert closure.result.is_ready, "its result is available before that"
    assert not driver.queue.is_drained
    driver.queue.write_keys_forgotten([closure.number], driver.now)
    assert driver.queue.is_drained


@pytest.mark.catalogue("2.8.6", "3.1.5-8")
def test_an_error_cancels_queued_closures_and_is_raised_once():
    driver = Driver()
    failing, queued = driver.schedule(), driver.schedule()
    driver.ends(0, failing.number, ValueError("Some error."))
    assert driver.queue.is_drained
    assert isinstance(driver.take_error(), ValueError)
    assert driver.queue.take_failure() is None
    with pytest.raises(CancelledError, match=CANCELLED):
        _fetch(queued)
    with pytest.raises(ValueError, match=r"Some error\."):
        _fetch(failing)
    again = driver.schedule()
    driver.ends(0, again.number)
    assert driver.queue.failure is None


@pytest.mark.catalogue("2.8.13", "3.1.9", "3.1.10")
def test_after_an_error_running_closures_are_fenced_and_awaited():
    driver = Driver(2)
    first, second, third = (driver.schedule() for _ in range(3))
    driver.ends(0, first.number, ValueError("Some error."))
    assert driver.last.cancels == [CancelAction(second.number, 1, 2, CancelMode.REJECT_WRITES)]
    assert not driver.queue.is_drained
    driver.queue.cancel_answered(2, second.number, is_dropped=False, now=driver.now)
    driver.ends(1, second.number, CancelledError("Fake cancellation error."))
    assert driver.queue.is_drained
    assert str(driver.take_error()) == "Some error."
    with pytest.raises(CancelledError, match="Fake cancellation error"):
        _fetch(second)
    assert second.result.status is RemoteValueStatus.READY
    with pytest.raises(CancelledError, match=CANCELLED):
        _fetch(third)
    again = driver.schedule()
    driver.ends(0, again.number)
    assert _fetch(again) == VALUE


@pytest.mark.catalogue("3.1.9", "3.1.10")
def test_closures_running_ten_seconds_after_an_error_are_abandoned():
    driver = Driver(2)
    failing, long = driver.schedule(), driver.schedule()
    driver.ends(0, failing.number, ValueError("Some error."))
    assert driver.last.wake_in == pytest.approx(10.0)
    driver.decide(after=9.9)
    assert not driver.last.cancels
    driver.decide(after=0.2)
    assert driver.last.cancels == [CancelAction(long.number, 1, 2, CancelMode.ABANDON)]
    with pytest.raises(CancelledError, match=CANCELLED):
        _fetch(long)
    driver.dropped(1, long.number)
    assert driver.last.key_cleanups == [long.number], (
        "its earlier writes stay, and its keys are forgotten"
    )
    driver.queue.write_keys_forgotten([long.number], driver.now)
    assert driver.queue.is_drained


@pytest.mark.catalogue("2.8.6", "3.1.33", "3.1.34")
def test_later_errors_are_notes_of_the_first():
    driver = Driver(3)
    closures = [driver.schedule() for _ in range(5)]
    driver.ends(0, closures[0].number, ValueError("the first"))
    driver.ends(1, closures[1].number, KeyError("the second"))
    driver.ends(2, closures[2].number, CancelledError(CANCELLED))
    notes = driver.take_error().__notes__
    assert "1 more functions failed" in notes[0]
    assert "KeyError" in notes[0]
    assert "2 scheduled functions were cancelled" in notes[1]


@pytest.mark.catalogue("2.8.4", "3.1.12")
def test_pinned_closures_run_first_and_are_not_awaited():
    driver = Driver(2)
    busy = [driver.schedule(), driver.schedule()]
    plain = driver.schedule()
    mine = Closure("dataset")
    driver.queue.schedule_on(1, mine)
    driver.decide()
    assert driver.at == {0: [busy[0].number], 1: [busy[1].number, mine.number]}
    driver.ends(0, busy[0].number)
    driver.ends(1, busy[1].number)
    driver.ends(0, plain.number)
    assert driver.queue.is_drained, "although the pinned closure of worker 1 still runs"
    driver.ends(1, mine.number, ValueError("no data"))
    assert driver.queue.failure is None
    assert isinstance(mine.result.error, ValueError)


def test_pinned_closures_of_a_lost_worker_are_not_reassigned():
    driver = Driver(2)
    mine = Closure("dataset")
    driver.queue.schedule_on(0, mine)
    driver.decide()
    driver.lose(0)
    assert driver.at == {0: [], 1: []}


@pytest.mark.catalogue("2.8.26", "4.3.16")
def test_a_full_queue_accepts_requeued_closures_only():
    driver = Driver(1, max_queued=2)
    running, *_ = (driver.schedule() for _ in range(3))
    assert not driver.queue.has_capacity
    driver.lose(0)
    assert driver.queue.num_waiting == 3
    driver.sent(0)
    assert not driver.queue.has_capacity
    driver.ends(0, running.number)
    assert driver.queue.has_capacity


@pytest.mark.catalogue("1.9.3")
def test_a_closure_waits_for_its_input_without_blocking_others():
    driver = Driver(2)
    producer = driver.schedule()
    consumer = driver.schedule(inputs=(producer.result,))
    other = driver.schedule()
    assert driver.at == {0: [producer.number], 1: [other.number]}
    driver.ends(0, producer.number)
    assert driver.at[0] == [consumer.number]


@pytest.mark.catalogue("2.8.8")
def test_a_closure_fails_with_the_error_of_its_input():
    driver = Driver()
    producer = driver.schedule()
    chain = [driver.schedule(inputs=(producer.result,))]
    for _ in range(3000):
        chain.append(driver.schedule(inputs=(chain[-1].result,)))
        if len(chain) == 30:
            break
    unrelated = driver.schedule()
    driver.ends(0, producer.number, UserFunctionError("oh"))
    assert driver.queue.is_drained
    assert {type(closure.result.error) for closure in chain} == {UserFunctionError}
    assert isinstance(unrelated.result.error, CancelledError)
    driver.take_error()
    late = driver.schedule(inputs=(producer.result,))
    assert isinstance(late.result.error, UserFunctionError)
    assert driver.queue.take_failure() is not None


def test_cancelling_a_closure_cancels_its_dependents_without_failure():
    driver = Driver()
    driver.schedule()
    producer = driver.schedule()
    consumer = driver.schedule(inputs=(producer.result,))
    assert driver.queue.cancel(producer, driver.now)
    assert isinstance(consumer.result.error, CancelledError)
    assert driver.queue.failure is None
    assert not driver.queue.cancel(producer, driver.now)


def test_a_cancelled_running_closure_fails_at_once_and_frees_its_slot_later():
    driver = Driver()
    running, waiting = driver.schedule(), driver.schedule()
    assert driver.queue.cancel(running, driver.now)
    assert isinstance(running.result.error, CancelledError)
    driver.decide()
    assert driver.last.cancels == [CancelAction(running.number, 0, 1, CancelMode.ABANDON)]
    assert driver.at[0] == [running.number]
    driver.dropped(0, running.number)
    assert driver.at[0] == [waiting.number]


def test_a_cancelled_closure_of_a_lost_worker_is_not_rerun():
    driver = Driver(2)
    closure = driver.schedule()
    driver.queue.cancel(closure, driver.now)
    driver.lose(0)
    assert driver.at == {0: [], 1: []}
    driver.queue.write_keys_forgotten([closure.number], driver.now)
    assert driver.queue.is_drained


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_staleness_delays_a_closure_until_earlier_ones_are_done(staleness: int):
    driver = Driver(5, staleness=staleness)
    closures = [driver.schedule() for _ in range(5)]
    sent = [number for numbers in driver.at.values() for number in numbers]
    assert sorted(sent) == [1, 2, 3][: staleness + 1]
    last = sorted(sent)[-1]
    if staleness:
        worker = next(each for each in driver.at if driver.at[each] == [last])
        driver.ends(worker, last)
        assert driver.queue.num_waiting == 4 - staleness, "the first has not ended"
    worker = next(each for each in driver.at if driver.at[each] == [closures[0].number])
    driver.ends(worker, closures[0].number, wrote=True)
    assert driver.queue.num_waiting == 4 - staleness, "its keys are not forgotten"
    driver.queue.write_keys_forgotten([1], driver.now)
    driver.decide()
    assert driver.queue.num_waiting < 4 - staleness


def test_a_timeout_counts_run_time_and_is_an_error():
    driver = Driver(1, in_flight=2)
    first, second = driver.schedule(), driver.schedule(timeout=2.0)
    assert driver.at[0] == [1, 2]
    driver.decide(after=5.0)
    assert not driver.last.cancels
    driver.ends(0, first.number)
    driver.decide(after=1.0)
    assert not second.result.is_ready
    driver.decide(after=1.1)
    assert isinstance(second.result.error, DeadlineExceededError)
    assert driver.last.cancels == [CancelAction(2, 0, 1, CancelMode.ABANDON)]
    driver.dropped(0, 2)
    with pytest.raises(DeadlineExceededError, match=r"took longer than its timeout of 2 s on"):
        raise driver.take_error()


@pytest.mark.catalogue("2.8.23", "4.3.17", "4.3.21")
def test_a_closure_that_always_kills_its_worker_fails_after_its_retries():
    driver = Driver(1, in_flight=3)
    poison = driver.schedule(retries=2)
    bystander = driver.schedule(retries=2)
    for _ in range(3):
        assert driver.at[0][0] == poison.number
        driver.lose(0)
        driver.sent(0)
    with pytest.raises(UnavailableError, match="was lost with its worker 3 times"):
        _fetch(poison)
    assert isinstance(bystander.result.error, CancelledError), "cancelled, not out of retries"
    assert bystander.num_losses == 0


def test_a_closure_behind_a_long_one_is_recalled_for_an_idle_worker():
    driver = Driver(2, in_flight=2)
    long, short, waiting, last = (driver.schedule() for _ in range(4))
    assert driver.at == {0: [long.number, waiting.number], 1: [short.number, last.number]}
    driver.decide(after=0.01)
    driver.ends(1, short.number)
    driver.ends(1, last.number)
    assert 0 < driver.last.wake_in < 0.1
    driver.decide(after=0.1)
    assert driver.last.cancels == [CancelAction(waiting.number, 0, 1, CancelMode.RECALL)]
    driver.dropped(0, waiting.number)
    assert driver.at == {0: [long.number], 1: [waiting.number]}


def test_the_window_grows_for_short_closures_and_shrinks_for_long_ones():
    driver = Driver(1, in_flight=2)
    for _ in range(200):
        driver.schedule()
    load = next(iter(driver.queue.worker_pool))
    for _ in range(20):
        number = driver.at[0].pop(0)
        driver.queue.closure_returned(
            1, number, VALUE, None, has_written=False, seconds=5e-4, now=0.0
        )
        driver.decide()
    assert len(load.in_flight) == 20
    number = driver.at[0].pop(0)
    driver.queue.closure_returned(1, number, VALUE, None, has_written=False, seconds=0.5, now=0.0)
    driver.decide()
    assert load.window == 2


def test_equally_loaded_workers_take_turns():
    driver = Driver(3)
    order = []
    for _ in range(6):
        closure = driver.schedule()
        (worker,) = [each for each in driver.at if driver.at[each]]
        order.append(worker)
        driver.ends(worker, closure.number)
    assert order == [0, 1, 2, 0, 1, 2]


def test_a_draining_worker_finishes_running_and_returns_waiting_closures():
    driver = Driver(2, in_flight=2)
    closures = [driver.schedule() for _ in range(4)]
    assert not driver.queue.drain_worker(0)
    driver.decide()
    assert [each.mode for each in driver.last.cancels] == [CancelMode.RECALL, CancelMode.RECALL]
    driver.queue.cancel_answered(1, closures[0].number, is_dropped=False, now=0.0)
    driver.dropped(0, closures[2].number)
    assert not driver.queue.drain_worker(0)
    driver.ends(0, closures[0].number)
    assert driver.queue.drain_worker(0)
    driver.ends(1, closures[1].number)
    assert driver.at == {0: [], 1: [closures[3].number, closures[2].number]}


def test_failed_server_requests_raise_and_the_queue_continues():
    driver = Driver(2)
    closure = driver.schedule()
    driver.queue.worker_lost(0)
    driver.decide()
    gone = UnavailableError("parameter server 1 at a:1 is gone")
    driver.queue.worker_fenced(1, driver.now, gone)
    driver.decide()
    assert closure.result.error is gone
    assert isinstance(driver.take_error(), HeadraceError)
    driver.queue.write_keys_forgotten([closure.number], driver.now)
    assert driver.queue.is_drained
