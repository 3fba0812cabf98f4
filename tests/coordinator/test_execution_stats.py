"""Execution statistics of a coordinator, with a simulated clock."""

from __future__ import annotations

import pytest

from headrace.coordinator.closure import Closure, Payload
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.coordinator_core import CoordinatorCore
from headrace.coordinator.messages import (
    AwaitSessionEnd,
    CallSpec,
    PackedFunction,
    RunClosure,
    RunReply,
    SessionStarted,
    StartSession,
)
from headrace.coordinator.status import coordinator_status
from headrace.coordinator.worker_connection import WorkerConnection
from headrace.errors import UnavailableError


class Cluster:
    """A coordinator core whose workers the test controls."""

    def __init__(self, num_workers: int = 1, **options: object) -> None:
        self.now = 100.0
        self.queue = ClosureQueue(in_flight=1, staleness=8)
        self.core = CoordinatorCore(
            self.queue,
            session_request=StartSession(
                cluster_id="c", term=1, session=0, worker=0, servers=("10.0.0.9:1",)
            ),
            read_error=lambda body: ValueError(body.decode()),
        )
        self.words: list[str] = []
        #: Requests sent, by worker.
        self.asked: dict[int, list[object]] = {}
        for number in range(num_workers):
            self.core.add_worker(f"10.0.0.{number}:1", self.now, number)
        self.pass_time(0.0)

    def pass_time(self, seconds: float) -> list[str]:
        """Advance the clock, and start sessions of workers; return the warnings."""
        self.now += seconds
        said: list[str] = []
        for _ in range(3):
            actions = self.core.take_actions(self.now)
            said += actions.warnings
            for call in actions.calls:
                if isinstance(call.message, StartSession):
                    self.core.handle_reply(
                        call.worker, call.message, SessionStarted(), (), self.now
                    )
                elif not isinstance(call.message, AwaitSessionEnd):
                    self.asked.setdefault(call.worker, []).append(call.message)
            # Confirm requests to servers, since there are none.
            for session in actions.fences:
                self.queue.worker_fenced(session, self.now)
            self.queue.write_keys_forgotten(actions.key_cleanups, self.now)
        self.words += said
        return said

    def schedule(self, name: str = "step") -> Closure:
        function = PackedFunction(name=name, digest=name.encode(), payload=Payload(b""))
        closure = Closure(name, call_spec=CallSpec(function=function, arguments=Payload(b"")))
        self.queue.schedule(closure, self.now)
        self.pass_time(0.0)
        return closure

    def end(self, closure: Closure, *, error: bytes = b"") -> None:
        [run] = [
            each
            for each in self.asked[closure.worker]
            if isinstance(each, RunClosure) and each.number == closure.number
        ]
        seconds = self.now - (closure.started_at or self.now)
        ran = RunReply(error=error, seconds=seconds)
        self.core.handle_reply(closure.worker, run, ran, (), self.now)
        self.pass_time(0.0)

    def call(self, seconds: float, name: str = "step", *, error: bytes = b"") -> None:
        closure = self.schedule(name)
        self.pass_time(seconds)
        self.end(closure, error=error)


@pytest.mark.catalogue("2.8.27", "3.6.2")
def test_a_function_beyond_ten_times_its_median_is_reported_once():
    cluster = Cluster()
    for seconds in (1.0, 2.0, 3.0):
        cluster.call(seconds)
    stuck = cluster.schedule()
    assert not cluster.pass_time(19.0)
    [words] = cluster.pass_time(2.0)
    assert words.startswith(
        "step has been running on worker 0 (10.0.0.0:1) for 21 s, and usually takes 2 s"
    )
    assert not cluster.pass_time(100.0)
    cluster.end(stuck)
    cluster.call(1.0)
    cluster.schedule()
    assert len(cluster.pass_time(30.0)) == 1, "another call is reported separately"


def test_short_functions_may_take_ten_seconds_without_a_warning():
    cluster = Cluster()
    for _ in range(4):
        cluster.call(0.001)
    cluster.schedule()
    assert not cluster.pass_time(9.5)
    assert cluster.pass_time(1.0)


def test_a_function_that_never_returned_is_reported_after_a_minute():
    cluster = Cluster()
    for _ in range(4):
        cluster.call(0.01, "step")
    cluster.schedule("evaluate")
    assert not cluster.pass_time(59.0)
    [words] = cluster.pass_time(2.0)
    assert "evaluate has been running on worker 0" in words
    assert "has returned fewer than 3 times before" in words


@pytest.mark.catalogue("2.8.25", "3.6.1")
def test_the_status_counts_calls_failures_and_retries():
    cluster = Cluster(num_workers=2)
    for _ in range(8):
        cluster.call(0.5)
    first, second = cluster.schedule("train"), cluster.schedule("train")
    cluster.pass_time(2.0)
    cluster.core.worker_lost(first.worker, UnavailableError("it was killed"), cluster.now)
    cluster.pass_time(0.0)
    status = coordinator_status(cluster.core, cluster.now)
    assert (status.num_finished, status.num_returned, status.num_failed) == (8, 8, 0)
    assert status.total_seconds == pytest.approx(4.0)
    assert (status.num_retried, status.num_workers_lost) == (1, 1)
    assert status.uptime_seconds == pytest.approx(6.0)
    assert status.finished_per_second == pytest.approx(8 / 6, rel=0.5)
    assert [(each.num_losses, each.num_finished) for each in status.workers] in ([(1, 4), (0, 4)],)
    assert status.servers == ("10.0.0.9:1",)
    assert status.longest_running is not None
    assert (status.longest_running.name, status.longest_running.worker) == ("train", second.worker)
    assert status.longest_running.seconds == pytest.approx(2.0)
    cluster.end(second, error=b"no")
    assert coordinator_status(cluster.core, cluster.now).num_failed == 1
    assert "no" in coordinator_status(cluster.core, cluster.now).failure


def test_the_maximum_staleness_gap_is_kept_and_bounded():
    cluster = Cluster(num_workers=2)
    slow = cluster.schedule()
    for _ in range(20):
        closure = cluster.schedule()
        if closure.session:
            cluster.end(closure)
    status = coordinator_status(cluster.core, cluster.now)
    assert (status.staleness_gap, status.max_staleness_gap) == (8, 8)
    cluster.end(slow)
    while running := [each for each in cluster.queue.unfinished.values() if each.session]:
        cluster.end(running[0])
    status = coordinator_status(cluster.core, cluster.now)
    assert (status.staleness_gap, status.max_staleness_gap) == (0, 8)


@pytest.mark.catalogue("3.5.4")
def test_a_lost_registered_worker_expires_after_five_minutes():
    cluster = Cluster()
    number = cluster.core.add_worker("10.0.0.7:1", cluster.now, registered_at=cluster.now)
    cluster.pass_time(0.0)
    assert cluster.core.connections[number].is_connected
    cluster.core.worker_lost(number, UnavailableError("it was killed"), cluster.now)
    contact = cluster.core.connections[number]
    contact.retry_at = float("inf")  # the worker is not retried
    assert not [words for words in cluster.pass_time(290.0) if "did not register again" in words]
    # Registration extends the expiry, even if the worker cannot be reached.
    assert cluster.core.add_worker("10.0.0.7:1", cluster.now, registered_at=cluster.now) == number
    assert not [words for words in cluster.pass_time(290.0) if "did not register again" in words]
    [words] = [words for words in cluster.pass_time(20.0) if "did not register again" in words]
    assert words.startswith("worker 1 (10.0.0.7:1) has not been connected for 600 s")
    cluster.pass_time(0.0)
    assert number not in cluster.core.connections
    assert (
        cluster.core.add_worker("10.0.0.7:1", cluster.now, registered_at=cluster.now) == number + 1
    )


def test_a_configured_worker_never_expires():
    contact = WorkerConnection(0, "10.0.0.0:1", state_since=0.0)
    assert not contact.is_expired(1e9)
    cluster = Cluster()
    assert cluster.core.add_worker("10.0.0.0:1", cluster.now, registered_at=cluster.now) == 0
    assert cluster.core.connections[0].registered_at is None


def test_a_cancellation_for_a_removed_worker_is_ignored():
    cluster = Cluster(2)
    first, second = cluster.schedule(), cluster.schedule()
    cluster.core.remove_worker(first.worker)
    cluster.queue.cancel(first, cluster.now)
    cluster.core.worker_lost(first.worker, UnavailableError("it is gone"), cluster.now)
    cluster.pass_time(0.0)
    assert list(cluster.core.connections) == [second.worker]
    cluster.queue.closure_returned(
        cluster.core.connections[second.worker].session,
        second.number,
        Payload(b""),
        None,
        has_written=False,
        seconds=0.0,
        now=cluster.now,
    )
    cluster.pass_time(0.0)
    assert cluster.queue.is_drained
