"""What a coordinator counts and finds too long, in time that a test makes up."""

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
    """A coordinator's core, whose workers do as a test says."""

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
        #: What was asked, by worker.
        self.asked: dict[int, list[object]] = {}
        for number in range(num_workers):
            self.core.add_worker(f"10.0.0.{number}:1", self.now, number)
        self.pass_time(0.0)

    def pass_time(self, seconds: float) -> list[str]:
        """Let time pass, and workers be greeted; return what was said."""
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
            # There are no servers to be told.
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
def test_a_function_that_runs_for_ten_times_its_median_is_named_once_with_its_worker():
    cluster = Cluster()
    for seconds in (1.0, 2.0, 3.0):
        cluster.call(seconds)
    stuck = cluster.schedule()
    assert not cluster.pass_time(19.0)
    [words] = cluster.pass_time(2.0)
    assert words.startswith(
        "step has been running on worker 0 (10.0.0.0:1) for 21 s, and takes 2 s in the median"
    )
    assert not cluster.pass_time(100.0)
    cluster.end(stuck)
    cluster.call(1.0)
    cluster.schedule()
    assert len(cluster.pass_time(30.0)) == 1, "another call is another matter"


def test_short_functions_may_take_ten_seconds_once():
    cluster = Cluster()
    for _ in range(4):
        cluster.call(0.001)
    cluster.schedule()
    assert not cluster.pass_time(9.5)
    assert cluster.pass_time(1.0)


def test_a_function_that_has_never_returned_has_a_minute():
    cluster = Cluster()
    for _ in range(4):
        cluster.call(0.01, "step")
    cluster.schedule("evaluate")
    assert not cluster.pass_time(59.0)
    [words] = cluster.pass_time(2.0)
    assert "evaluate has been running on worker 0" in words
    assert "has hardly returned before" in words


@pytest.mark.catalogue("2.8.25", "3.6.1")
def test_a_status_counts_calls_failures_and_what_is_run_again():
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


def test_the_largest_gap_is_remembered_and_within_the_bound():
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
def test_a_worker_that_announced_itself_and_is_gone_is_forgotten_after_five_minutes():
    cluster = Cluster()
    number = cluster.core.add_worker("10.0.0.7:1", cluster.now, registered_at=cluster.now)
    cluster.pass_time(0.0)
    assert cluster.core.connections[number].is_connected
    cluster.core.worker_lost(number, UnavailableError("it was killed"), cluster.now)
    contact = cluster.core.connections[number]
    contact.retry_at = float("inf")  # nobody answers there
    assert not [words for words in cluster.pass_time(290.0) if "not waited for" in words]
    # One that says that it is there is waited for; it is another matter whether it can be reached.
    assert cluster.core.add_worker("10.0.0.7:1", cluster.now, registered_at=cluster.now) == number
    assert not [words for words in cluster.pass_time(290.0) if "not waited for" in words]
    [words] = [words for words in cluster.pass_time(20.0) if "not waited for" in words]
    assert words.startswith("worker 1 (10.0.0.7:1) has not been there for 600 s")
    cluster.pass_time(0.0)
    assert number not in cluster.core.connections
    assert (
        cluster.core.add_worker("10.0.0.7:1", cluster.now, registered_at=cluster.now) == number + 1
    )


def test_a_worker_that_the_strategy_names_is_waited_for_whatever_it_announces():
    contact = WorkerConnection(0, "10.0.0.0:1", state_since=0.0)
    assert not contact.is_expired(1e9)
    cluster = Cluster()
    assert cluster.core.add_worker("10.0.0.0:1", cluster.now, registered_at=cluster.now) == 0
    assert cluster.core.connections[0].registered_at is None


def test_what_is_called_off_where_nobody_is_any_more_is_passed_over():
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
