"""A coordinator with workers in this process: values, errors and waits."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator import (
    ClusterCoordinator,
    RemoteValueStatus,
    closure,
)
from headrace.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    UserFunctionError,
)
from tests.coordinator.in_process import (
    SECONDS,
    coordinating,
    divide,
    note,
    noted,
    shared_here,
    wait_for_release,
    wait_until,
)


class Point(NamedTuple):
    x: int
    y: int


# --- values ------------------------------------------------------------------------------------


@pytest.mark.catalogue("1.9.2", "3.1.15", "3.1.16", "3.1.25")
@pytest.mark.parametrize(
    "value",
    [2, (3, 4), [5], {"v": 1}, None, True, "text", b"x", 2j, Point(1, 2), set(), {(1,): [None]}],
)  # fmt: skip
def test_a_function_may_return_anything(coordinator: ClusterCoordinator, value: Any):
    fetched = coordinator.schedule(lambda: value).fetch(SECONDS)
    assert fetched == value
    assert type(fetched) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(0),
        np.array(3),
        np.arange(6).reshape(2, 3)[:, ::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([np.nan, np.inf]),
        np.array([True, False]),
        np.array(["a", None], dtype=object),
        np.arange(5_000),
        np.arange(500_000),
        np.arange(12).astype("M8[D]"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_returned_arrays_are_equal_and_writable(coordinator: ClusterCoordinator, array: Any):
    there, back = coordinator.schedule(
        lambda given: (given.flags.writeable, given), (array,)
    ).fetch(SECONDS)
    assert there
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    if back.size and back.dtype.kind in "if":
        back[...] = 0


@pytest.mark.catalogue("1.9.7", "3.1.15", "3.1.16")
def test_fetch_replaces_values_in_structures(coordinator: ClusterCoordinator):
    values = [coordinator.schedule(lambda n: n * n, (n,)) for n in range(5)]
    structure = {"a": values, "b": (values[2], "as it is"), "c": Point(values[3], 7)}
    assert coordinator.fetch(structure) == {
        "a": [0, 1, 4, 9, 16],
        "b": (4, "as it is"),
        "c": Point(9, 7),
    }
    ordered = coordinator.fetch(OrderedDict(a=values[1]))
    assert (ordered, type(ordered)) == ({"a": 1}, OrderedDict)
    assert values[0].get() == 0
    assert values[0].status is RemoteValueStatus.READY


def test_arguments_are_copied_when_scheduled(coordinator: ClusterCoordinator):
    small, large, captured = [0], np.zeros(100_000), [0]

    def total(a: list[int], *, b: Any) -> float:
        return float(a[0] + b.sum() + captured[0])

    coordinator.schedule(time.sleep, (0.05,))
    coordinator.schedule(time.sleep, (0.05,))
    value = coordinator.schedule(total, (small,), {"b": large})
    small[0], large[0] = 1, 1.0
    assert value.fetch(SECONDS) == 0.0
    captured[0] = 100
    assert coordinator.schedule(total, (small,), {"b": large}).fetch(SECONDS) == 2.0


@pytest.mark.catalogue("2.8.10")
def test_a_function_is_loaded_once_by_a_worker_and_keeps_its_caches():
    with coordinating(1) as coordinator:
        calls: list[int] = []

        def count() -> int:
            calls.append(1)
            return len(calls)

        values = [coordinator.schedule(count) for _ in range(5)]
        assert coordinator.fetch(values) == [1, 2, 3, 4, 5]
        assert calls == []


@pytest.mark.catalogue("1.9.3", "3.1.24")
def test_a_value_as_an_argument_waits_for_its_function(coordinator: ClusterCoordinator):
    slow = coordinator.schedule(lambda: (time.sleep(0.1), np.arange(100_000))[1])
    total = coordinator.schedule(lambda parts: sum(each.sum() for each in parts), ([slow, slow],))
    assert total.fetch(SECONDS) == 2 * np.arange(100_000).sum()
    again = coordinator.schedule(lambda a, b: (a.sum(), b), (slow,), {"b": total})
    assert again.fetch(SECONDS)[1] == 2 * np.arange(100_000).sum()


@pytest.mark.catalogue("3.1.24")
def test_a_captured_remote_value_is_rejected_with_a_fix(coordinator: ClusterCoordinator):
    value = coordinator.schedule(lambda: 1)
    with pytest.raises(
        FailedPreconditionError, match="can be sent to a worker only as an argument"
    ):
        coordinator.schedule(lambda: value)
    coordinator.join(SECONDS)


# --- join, done --------------------------------------------------------------------------------


@pytest.mark.catalogue("3.1.4")
def test_join_and_done_without_scheduled_functions(coordinator: ClusterCoordinator):
    coordinator.join()
    assert coordinator.done()


def test_done_says_whether_all_have_run(coordinator: ClusterCoordinator):
    coordinator.schedule(time.sleep, (0.1,))
    assert not coordinator.done()
    coordinator.join(SECONDS)
    assert coordinator.done()


@pytest.mark.catalogue("4.3.21")
def test_a_join_timeout_names_running_functions_and_workers(coordinator: ClusterCoordinator):
    def sluggish() -> None:
        time.sleep(0.3)

    coordinator.schedule(sluggish)
    with pytest.raises(DeadlineExceededError, match=r"sluggish.* has been running on worker \d \("):
        coordinator.join(0.1)
    with pytest.raises(DeadlineExceededError, match="sluggish"):
        coordinator.schedule(sluggish).fetch(0.01)
    coordinator.join(SECONDS)


@pytest.mark.parametrize("value", [0, -1, "1", float("nan")])
def test_timeouts_are_checked(coordinator: ClusterCoordinator, value: Any):
    with pytest.raises((TypeError, ValueError), match="`timeout`"):
        coordinator.join(value)
    with pytest.raises((TypeError, ValueError), match="`timeout`"):
        coordinator.schedule(time.time, timeout=value)


@pytest.mark.catalogue("2.8.2", "3.1.30")
def test_schedule_blocks_with_a_queue_of_two():
    with coordinating(max_queued=2) as coordinator:
        values = [coordinator.schedule(lambda n: n, (n,)) for n in range(200)]
        assert coordinator.fetch(values) == list(range(200))


@pytest.mark.catalogue("2.8.27", "3.6.2")
def test_a_long_wait_logs_its_cause(
    coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.1)
    monkeypatch.setattr("headrace.serving.session_runner._SLICE_SECONDS", 0.05)
    release = threading.Event()
    shared_here["release"] = release

    coordinator.schedule(wait_for_release)
    thread = threading.Thread(target=coordinator.join)
    thread.start()
    wait_until(lambda: "waiting for scheduled functions" in caplog.text)
    release.set()
    thread.join()
    assert "wait_for_release" in caplog.text
    assert "has been running on worker" in caplog.text


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.catalogue("1.9.7", "3.1.36")
def test_an_error_has_the_traceback_of_the_function(coordinator: ClusterCoordinator):
    value = coordinator.schedule(divide, (1, 0))
    with pytest.raises(UserFunctionError) as raised:
        coordinator.join(SECONDS)
    error = raised.value
    assert error.original_type == "ZeroDivisionError"
    assert "return a / b" in error.original_traceback
    assert "headrace/coordinator" not in error.original_traceback
    assert "on worker" in str(error)
    assert "divide" in str(error)
    for _ in range(2):
        with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
            value.fetch()
    coordinator.join(SECONDS)
    assert coordinator.done()


@pytest.mark.catalogue("2.8.11", "2.8.12", "3.1.5-8", "3.1.11", "3.1.32", "4.3.15", "4.3.22")
@pytest.mark.parametrize("way", ["schedule", "join", "done"])
def test_an_error_is_raised_once_and_cancels_waiting_functions(way: str):
    with coordinating(1, closures_in_flight=1) as coordinator:
        coordinator.schedule(time.sleep, (0.05,))
        failing = coordinator.schedule(divide, (1, 0))
        waiting = [coordinator.schedule(divide, (1, 1)) for _ in range(30)]
        wait_until(lambda: failing.status is RemoteValueStatus.READY)
        ways: dict[str, Any] = {
            "schedule": lambda: coordinator.schedule(note, ("not taken",)),
            "join": coordinator.join,
            "done": coordinator.done,
        }
        with pytest.raises(UserFunctionError, match="ZeroDivisionError") as raised:
            ways[way]()
        assert "were cancelled; schedule them again" in "".join(raised.value.__notes__)
        with pytest.raises(CancelledError, match=r"function is cancelled\. Please reschedule"):
            waiting[-1].fetch()
        coordinator.join(SECONDS)
        assert coordinator.schedule(divide, (4, 2)).fetch(SECONDS) == 2.0
        assert noted == []


@pytest.mark.catalogue("3.1.33", "3.1.34")
def test_scheduling_in_a_loop_eventually_raises(coordinator: ClusterCoordinator):
    def schedule_all() -> None:
        for number in range(100_000):
            coordinator.schedule(divide, (1, number - 3))

    with pytest.raises(UserFunctionError):
        schedule_all()
    coordinator.join(SECONDS)


@pytest.mark.catalogue("2.8.13", "3.1.39")
def test_functions_running_when_another_fails_are_awaited(
    coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(closure, "DRAIN_SECONDS", 0.2)
    shared_here["release"] = threading.Event()
    long = coordinator.schedule(wait_for_release)
    coordinator.schedule(divide, (1, 0))
    with pytest.raises(UserFunctionError):
        coordinator.join(SECONDS)
    with pytest.raises(CancelledError, match="function is cancelled"):
        long.fetch(SECONDS)
    values = [coordinator.schedule(divide, (n, 1)) for n in range(10)]
    assert coordinator.fetch(values) == [float(n) for n in range(10)]
    shared_here["release"].set()


@pytest.mark.catalogue("2.8.24")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_system_exit_is_an_error_of_the_function(
    coordinator: ClusterCoordinator, kind: type[BaseException]
):
    def leave() -> None:
        raise kind

    with pytest.raises(UserFunctionError, match=kind.__name__):
        coordinator.schedule(leave).fetch(SECONDS)
    with pytest.raises(UserFunctionError):
        coordinator.join(SECONDS)


@pytest.mark.catalogue("1.9.2")
def test_objects_that_cannot_be_sent_are_named(coordinator: ClusterCoordinator):
    lock = threading.Lock()
    with pytest.raises(FailedPreconditionError, match=r"cannot be sent to a worker.*`lock`"):
        coordinator.schedule(lambda: lock)
    with pytest.raises(FailedPreconditionError, match=r"args\[1\], of type lock"):
        coordinator.schedule(divide, (1, lock))
    with pytest.raises(UserFunctionError, match="generator, cannot be sent to the coordinator"):
        coordinator.schedule(lambda: (n for n in range(3))).fetch(SECONDS)


def test_methods_of_objects_that_reference_a_coordinator_run(coordinator: ClusterCoordinator):
    class Trainer:
        def __init__(self) -> None:
            self.coordinator, self.strategy, self.rate = coordinator, coordinator.strategy, 0.5

        def step(self, number: int) -> float:
            return self.rate * number

        def schedule_another(self) -> None:
            self.coordinator.schedule(divide)

    trainer = Trainer()
    assert coordinator.schedule(trainer.step, (4,)).fetch(SECONDS) == 2
    with pytest.raises(
        FailedPreconditionError, match=r"`schedule` .* in the coordinator's process"
    ):
        coordinator.schedule(trainer.schedule_another).fetch(SECONDS)


@pytest.mark.catalogue("1.9.2")
def test_invalid_arguments_are_rejected_at_once(coordinator: ClusterCoordinator):
    with pytest.raises(TypeError, match="`fn` must be callable"):
        coordinator.schedule(3)  # type: ignore[arg-type]
    for wrong in (3, np.zeros(3)):
        with pytest.raises(TypeError, match=r"`args` must be a tuple.*use args=\(value,\)"):
            coordinator.schedule(divide, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`kwargs`"):
        coordinator.schedule(divide, (), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`retries`"):
        coordinator.schedule(divide, retries=-1)


def test_a_variable_of_this_process_is_rejected_by_name(coordinator: ClusterCoordinator):
    local = hr.Variable(1.0, name="weights")
    with pytest.raises(FailedPreconditionError, match="'weights'"):
        coordinator.schedule(lambda: local.read())
    with pytest.raises(FailedPreconditionError, match="'weights'"):
        coordinator.schedule(divide, (local, 1))


# --- timeouts, cancellation --------------------------------------------------------------------


@pytest.mark.catalogue("4.3.21")
def test_a_function_beyond_its_timeout_fails_and_its_worker_continues():
    with coordinating(1) as coordinator:
        shared_here["release"] = threading.Event()
        value = coordinator.schedule(wait_for_release, timeout=0.1)
        with pytest.raises(DeadlineExceededError, match=r"took longer than its timeout of 0\.1 s"):
            coordinator.join(SECONDS)
        with pytest.raises(DeadlineExceededError):
            value.fetch()
        assert coordinator.schedule(divide, (1, 1)).fetch(SECONDS) == 1.0
        shared_here["release"].set()


@pytest.mark.catalogue("4.3.21")
def test_a_cancelled_function_is_abandoned_without_failure():
    with coordinating(1) as coordinator:
        shared_here["release"] = threading.Event()
        running = coordinator.schedule(wait_for_release)
        waiting = coordinator.schedule(divide, (1, 0))
        assert waiting.cancel()
        assert running.cancel()
        for value in (running, waiting):
            with pytest.raises(CancelledError):
                value.fetch()
            assert not value.cancel()
        coordinator.join(SECONDS)
        assert coordinator.schedule(divide, (1, 1)).fetch(SECONDS) == 1.0
        shared_here["release"].set()


@pytest.mark.catalogue("2.8.1")
def test_close_ends_waits_and_threads():
    with coordinating(1) as coordinator:
        shared_here["release"] = threading.Event()
        value = coordinator.schedule(wait_for_release)
        threading.Timer(0.1, coordinator.close).start()
        with pytest.raises(CancelledError, match="the coordinator is closed"):
            value.fetch(SECONDS)
        with pytest.raises(CancelledError, match="the coordinator is closed"):
            coordinator.schedule(divide)
        shared_here["release"].set()


def test_a_package_missing_on_the_worker_is_named(coordinator: ClusterCoordinator):
    def uses() -> None:
        import no_such_package  # type: ignore[import-not-found] # noqa: F401, PLC0415

    with pytest.raises(
        UserFunctionError, match=r"no_such_package'; it is not installed on the worker: .*--pre"
    ):
        coordinator.schedule(uses).fetch(SECONDS)
