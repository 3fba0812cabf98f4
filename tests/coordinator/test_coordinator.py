"""What users of a coordinator see: values, errors, data for workers, which live in this process."""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator import (
    ClosureWorker,
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValueStatus,
    failure,
    get_current_worker_index,
    shell,
)
from headrace.coordinator.cluster import Workers
from headrace.coordinator.reception import Announce, Announced, ReceptionReply
from headrace.data.iterator import DatasetIterator
from headrace.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    UserFunctionError,
)
from headrace.transport import zeromq
from headrace.transport.security import Security, new_keys

SECONDS = 30.0


@contextmanager
def _coordinator(num_workers: int = 2, **options: Any) -> Iterator[ClusterCoordinator]:
    with ExitStack() as stack:
        workers = [stack.enter_context(ClosureWorker(index)) for index in range(num_workers)]
        strategy = Workers([worker.address for worker in workers])
        yield stack.enter_context(ClusterCoordinator(strategy, **options))


@pytest.fixture
def coordinator() -> Iterator[ClusterCoordinator]:
    with _coordinator() as made:
        yield made


def _wait_until(is_met: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Point(NamedTuple):
    x: int
    y: int


# --- values ------------------------------------------------------------------------------------


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
def test_arrays_come_as_they_are_and_belong_to_whoever_has_them(
    coordinator: ClusterCoordinator, array: Any
):
    there, back = coordinator.schedule(
        lambda given: (given.flags.writeable, given), (array,)
    ).fetch(SECONDS)
    assert there
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    if back.size and back.dtype.kind in "if":
        back[...] = 0


def test_fetch_takes_values_out_of_structures(coordinator: ClusterCoordinator):
    values = [coordinator.schedule(lambda n: n * n, (n,)) for n in range(5)]
    structure = {"a": values, "b": (values[2], "as it is"), "c": Point(values[3], 7)}
    assert coordinator.fetch(structure) == {
        "a": [0, 1, 4, 9, 16],
        "b": (4, "as it is"),
        "c": Point(9, 7),
    }
    assert values[0].get() == 0
    assert values[0].status is RemoteValueStatus.READY


def test_arguments_are_those_of_the_moment_of_the_call(coordinator: ClusterCoordinator):
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


def test_a_function_is_loaded_once_by_a_worker_and_keeps_its_caches():
    with _coordinator(1) as coordinator:
        calls: list[int] = []

        def count() -> int:
            calls.append(1)
            return len(calls)

        values = [coordinator.schedule(count) for _ in range(5)]
        assert coordinator.fetch(values) == [1, 2, 3, 4, 5]
        assert calls == []


def test_a_value_as_an_argument_waits_for_its_function(coordinator: ClusterCoordinator):
    slow = coordinator.schedule(lambda: (time.sleep(0.1), np.arange(100_000))[1])
    total = coordinator.schedule(lambda parts: sum(each.sum() for each in parts), ([slow, slow],))
    assert total.fetch(SECONDS) == 2 * np.arange(100_000).sum()
    again = coordinator.schedule(lambda a, b: (a.sum(), b), (slow,), {"b": total})
    assert again.fetch(SECONDS)[1] == 2 * np.arange(100_000).sum()


def test_a_value_that_is_captured_is_refused_with_what_would_do(coordinator: ClusterCoordinator):
    value = coordinator.schedule(lambda: 1)
    with pytest.raises(FailedPreconditionError, match="travels only as an argument"):
        coordinator.schedule(lambda: value)
    coordinator.join(SECONDS)


# --- join, done --------------------------------------------------------------------------------


def test_join_and_done_where_nothing_was_scheduled(coordinator: ClusterCoordinator):
    coordinator.join()
    assert coordinator.done()


def test_done_says_whether_all_have_run(coordinator: ClusterCoordinator):
    coordinator.schedule(time.sleep, (0.1,))
    assert not coordinator.done()
    coordinator.join(SECONDS)
    assert coordinator.done()


def test_a_join_that_takes_too_long_says_what_runs_where(coordinator: ClusterCoordinator):
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


def test_a_queue_of_two_takes_many():
    with _coordinator(most_queued=2) as coordinator:
        values = [coordinator.schedule(lambda n: n, (n,)) for n in range(200)]
        assert coordinator.fetch(values) == list(range(200))


def test_a_long_wait_says_for_what(
    coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    monkeypatch.setattr("headrace.serving.reminder.FIRST_WORD", 0.1)
    monkeypatch.setattr(shell, "_SLICE_SECONDS", 0.05)
    release = threading.Event()
    _shared["release"] = release

    coordinator.schedule(_wait_for_release)
    thread = threading.Thread(target=coordinator.join)
    thread.start()
    _wait_until(lambda: "waiting for functions" in caplog.text)
    release.set()
    thread.join()
    assert "_wait_for_release" in caplog.text
    assert "has been running on worker" in caplog.text


#: Reached by functions of this module, which workers of this process import and do not copy.
_shared: dict[str, Any] = {}


def _wait_for_release() -> None:
    _shared["release"].wait(SECONDS)


# --- errors ------------------------------------------------------------------------------------


def _begin_and_wait() -> str:
    _shared["begun"].set()
    _shared["release"].wait(SECONDS)
    return "done"


def _divide(a: int, b: int) -> float:
    return a / b


def test_an_error_has_the_traceback_of_the_function(coordinator: ClusterCoordinator):
    value = coordinator.schedule(_divide, (1, 0))
    with pytest.raises(UserFunctionError) as raised:
        coordinator.join(SECONDS)
    error = raised.value
    assert error.original_type == "ZeroDivisionError"
    assert "return a / b" in error.original_traceback
    assert "headrace/coordinator" not in error.original_traceback
    assert "on worker" in str(error)
    assert "_divide" in str(error)
    for _ in range(2):
        with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
            value.fetch()
    coordinator.join(SECONDS)
    assert coordinator.done()


@pytest.mark.parametrize("way", ["schedule", "join", "done"])
def test_an_error_is_raised_once_and_cancels_what_waits(way: str):
    with _coordinator(1, closures_in_flight=1) as coordinator:
        coordinator.schedule(time.sleep, (0.05,))
        failing = coordinator.schedule(_divide, (1, 0))
        waiting = [coordinator.schedule(_divide, (1, 1)) for _ in range(30)]
        _wait_until(lambda: failing.status is RemoteValueStatus.READY)
        ways: dict[str, Any] = {
            "schedule": lambda: coordinator.schedule(_note, ("not taken",)),
            "join": coordinator.join,
            "done": coordinator.done,
        }
        with pytest.raises(UserFunctionError, match="ZeroDivisionError") as raised:
            ways[way]()
        assert "were cancelled; schedule them again" in "".join(raised.value.__notes__)
        with pytest.raises(CancelledError, match=r"function is cancelled\. Please reschedule"):
            waiting[-1].fetch()
        coordinator.join(SECONDS)
        assert coordinator.schedule(_divide, (4, 2)).fetch(SECONDS) == 2.0
        assert _noted == []


_noted: list[Any] = []


def _note(what: Any) -> None:
    _noted.append(what)


def test_scheduling_in_a_loop_raises_at_last(coordinator: ClusterCoordinator):
    def schedule_all() -> None:
        for number in range(100_000):
            coordinator.schedule(_divide, (1, number - 3))

    with pytest.raises(UserFunctionError):
        schedule_all()
    coordinator.join(SECONDS)


def test_what_runs_when_another_one_fails_is_waited_for_and_no_longer(
    coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(failure, "DRAIN_SECONDS", 0.2)
    _shared["release"] = threading.Event()
    long = coordinator.schedule(_wait_for_release)
    coordinator.schedule(_divide, (1, 0))
    with pytest.raises(UserFunctionError):
        coordinator.join(SECONDS)
    with pytest.raises(CancelledError, match="function is cancelled"):
        long.fetch(SECONDS)
    values = [coordinator.schedule(_divide, (n, 1)) for n in range(10)]
    assert coordinator.fetch(values) == [float(n) for n in range(10)]
    _shared["release"].set()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_what_ends_a_program_is_an_error_of_the_function(
    coordinator: ClusterCoordinator, kind: type[BaseException]
):
    def leave() -> None:
        raise kind

    with pytest.raises(UserFunctionError, match=kind.__name__):
        coordinator.schedule(leave).fetch(SECONDS)
    with pytest.raises(UserFunctionError):
        coordinator.join(SECONDS)


def test_what_cannot_be_sent_is_said_by_name(coordinator: ClusterCoordinator):
    lock = threading.Lock()
    with pytest.raises(FailedPreconditionError, match=r"cannot be sent to a worker.*`lock`"):
        coordinator.schedule(lambda: lock)
    with pytest.raises(FailedPreconditionError, match=r"args\[1\], of type lock"):
        coordinator.schedule(_divide, (1, lock))
    with pytest.raises(FailedPreconditionError, match="cannot travel to a worker"):
        coordinator.schedule(lambda: coordinator.schedule(_divide))
    with pytest.raises(UserFunctionError, match="generator, cannot be sent to the coordinator"):
        coordinator.schedule(lambda: (n for n in range(3))).fetch(SECONDS)


def test_wrong_arguments_are_refused_at_once(coordinator: ClusterCoordinator):
    with pytest.raises(TypeError, match="`fn` must be a function"):
        coordinator.schedule(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"for one value write args=\(value,\)"):
        coordinator.schedule(_divide, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`kwargs`"):
        coordinator.schedule(_divide, (), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`retries`"):
        coordinator.schedule(_divide, retries=-1)


def test_a_variable_of_this_process_is_refused_by_name(coordinator: ClusterCoordinator):
    local = hr.Variable(1.0, name="weights")
    with pytest.raises(FailedPreconditionError, match="'weights'"):
        coordinator.schedule(lambda: local.read())
    with pytest.raises(FailedPreconditionError, match="'weights'"):
        coordinator.schedule(_divide, (local, 1))


# --- timeouts, cancellation --------------------------------------------------------------------


def test_a_function_that_takes_too_long_fails_and_its_worker_goes_on():
    with _coordinator(1) as coordinator:
        _shared["release"] = threading.Event()
        value = coordinator.schedule(_wait_for_release, timeout=0.1)
        with pytest.raises(DeadlineExceededError, match=r"took longer than its timeout of 0\.1 s"):
            coordinator.join(SECONDS)
        with pytest.raises(DeadlineExceededError):
            value.fetch()
        assert coordinator.schedule(_divide, (1, 1)).fetch(SECONDS) == 1.0
        _shared["release"].set()


def test_a_function_that_is_cancelled_is_let_go_and_is_no_error():
    with _coordinator(1) as coordinator:
        _shared["release"] = threading.Event()
        running = coordinator.schedule(_wait_for_release)
        waiting = coordinator.schedule(_divide, (1, 0))
        assert waiting.cancel()
        assert running.cancel()
        for value in (running, waiting):
            with pytest.raises(CancelledError):
                value.fetch()
            assert not value.cancel()
        coordinator.join(SECONDS)
        assert coordinator.schedule(_divide, (1, 1)).fetch(SECONDS) == 1.0
        _shared["release"].set()


def test_closing_ends_waits_and_threads():
    with _coordinator(1) as coordinator:
        _shared["release"] = threading.Event()
        value = coordinator.schedule(_wait_for_release)
        threading.Timer(0.1, coordinator.close).start()
        with pytest.raises(CancelledError, match="the coordinator is closed"):
            value.fetch(SECONDS)
        with pytest.raises(CancelledError, match="the coordinator is closed"):
            coordinator.schedule(_divide)
        _shared["release"].set()


# --- one coordinator ---------------------------------------------------------------------------


def test_a_strategy_has_one_coordinator():
    with ClosureWorker(0) as worker:
        strategy = Workers([worker.address])
        first = ClusterCoordinator(strategy)
        assert ClusterCoordinator(strategy) is first
        assert first.strategy is strategy
        with pytest.raises(ValueError, match="has a coordinator already"):
            ClusterCoordinator(strategy, closures_in_flight=5)
        first.close()
        second = ClusterCoordinator(strategy, closures_in_flight=5)
        assert second is not first
        assert second.schedule(_divide, (1, 1)).fetch(SECONDS) == 1.0
        second.close()


def test_a_coordinator_that_nobody_holds_ends():
    with ClosureWorker(0) as worker:
        coordinator = ClusterCoordinator(Workers([worker.address]))
        coordinator.schedule(_divide, (1, 1)).fetch(SECONDS)
        gone = weakref.ref(coordinator)
        del coordinator
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("strategy", [None, "x", hr.distribute.MirroredStrategy(["cpu:0"])])
def test_another_strategy_is_refused(strategy: Any):
    with pytest.raises(ValueError, match="Only a ParameterServerStrategy is supported"):
        ClusterCoordinator(strategy)


def test_a_newer_coordinator_takes_the_workers_and_the_older_one_says_so(
    caplog: pytest.LogCaptureFixture,
):
    with ClosureWorker(0) as worker:
        old = ClusterCoordinator(Workers([worker.address]))
        assert old.schedule(_divide, (1, 1)).fetch(SECONDS) == 1.0
        with ClusterCoordinator(Workers([worker.address])) as new:
            assert new.schedule(_divide, (2, 1)).fetch(SECONDS) == 2.0
            # Also where nobody asks it for anything.
            _wait_until(lambda: "this coordinator has no say any more" in caplog.text)
            other = f"a newer coordinator, in process [^ ]*:{os.getpid()} "
            assert re.search(other, caplog.text)
            with pytest.raises(AbortedError, match=other):
                old.schedule(_divide, (3, 1)).fetch(SECONDS)
            assert new.schedule(_divide, (4, 1)).fetch(SECONDS) == 4.0
        old.close()


# --- workers come and go -----------------------------------------------------------------------


def test_a_function_knows_its_worker(coordinator: ClusterCoordinator):
    seen: set[int] = set()
    _wait_until(
        lambda: seen.add(coordinator.schedule(get_current_worker_index).fetch()) or len(seen) == 2
    )
    assert seen == {0, 1}
    with pytest.raises(FailedPreconditionError, match="Cannot retrieve the worker index"):
        get_current_worker_index()


def test_functions_wait_for_a_worker_that_is_not_there_yet():
    with ClosureWorker(0) as worker:
        address = worker.address
    with ClusterCoordinator(Workers([address])) as coordinator:
        value = coordinator.schedule(_divide, (1, 1))
        with pytest.raises(DeadlineExceededError, match=r"worker 0 .* has not been there for"):
            value.fetch(0.2)
        with ClosureWorker(0, port=int(address.rpartition(":")[2])):
            assert value.fetch(SECONDS) == 1.0


def test_a_worker_that_stops_loses_a_function_that_runs_once():
    begun, release = _shared["begun"], _shared["release"] = threading.Event(), threading.Event()
    with ClosureWorker(0) as worker, ClusterCoordinator(Workers([worker.address])) as coordinator:
        value = coordinator.schedule(_begin_and_wait, retries=1)
        assert begun.wait(SECONDS)
        worker.stop()  # which takes a while, since the function runs
        release.set()
        with ClosureWorker(0, port=int(worker.address.rpartition(":")[2])):
            assert value.fetch(SECONDS) == "done"


def test_workers_are_added_and_removed_while_functions_run(coordinator: ClusterCoordinator):
    values = [coordinator.schedule(_where, (0.01,)) for _ in range(100)]
    with ClosureWorker(2) as third:
        assert coordinator.add_worker(third.address) == 2
        coordinator.remove_worker(0)
        _wait_until(lambda: 0 not in coordinator.workers)
        values += [coordinator.schedule(_where, (0.005,)) for _ in range(20)]
        coordinator.join(SECONDS)
        assert set(coordinator.workers) == {1, 2}
        seen = coordinator.fetch(values)
        assert set(seen[100:]) <= {1, 2}
        assert 2 in seen
        coordinator.remove_worker(2)
        _wait_until(lambda: set(coordinator.workers) == {1})
        assert coordinator.schedule(_where, (0.0,)).fetch(SECONDS) == 1
        with pytest.raises(ValueError, match="there is no worker 9; there are"):
            coordinator.remove_worker(9)


def test_workers_announce_themselves_to_a_coordinator_that_listens():
    with ClosureWorker(0) as first, ClusterCoordinator(Workers([first.address])) as coordinator:
        address = coordinator.listen()
        with ClosureWorker(1, coordinator=address) as second:
            _wait_until(lambda: coordinator.workers == {0: first.address, 1: second.address})
            _wait_until(lambda: all(each.is_there for each in coordinator.status().workers))
            coordinator.remove_worker(0)
            coordinator.remove_worker(1)
            _wait_until(lambda: coordinator.workers == {})
            again = Announce(address=second.address, life="another process")
            channel = zeromq.connect(address, reply_type=ReceptionReply)
            answer, _ = channel.call(again, timeout=SECONDS)
            channel.close()
            assert answer == Announced(worker=2)
            assert coordinator.schedule(_where, (0.0,)).fetch(SECONDS) == 2


def test_a_status_says_what_runs_where(coordinator: ClusterCoordinator):
    _shared["release"] = threading.Event()
    values = [coordinator.schedule(_wait_for_release) for _ in range(8)]
    _wait_until(lambda: sum(len(each.running) for each in coordinator.status().workers) == 2)
    status = coordinator.status()
    assert status.unsettled == 8
    assert status.waiting == 8 - sum(each.in_flight for each in status.workers)
    assert "_wait_for_release" in status.workers[0].running[0][0]
    _shared["release"].set()
    coordinator.fetch(values)
    coordinator.join(SECONDS)
    assert coordinator.status().finished >= 8
    assert coordinator.status().gap == 0


def _where(seconds: float) -> int:
    time.sleep(seconds)
    return get_current_worker_index()


def test_off_one_machine_workers_let_in_whom_they_know(tmp_path: Any):
    keys = new_keys(tmp_path / "keys")
    strangers = new_keys(tmp_path / "others")
    with pytest.raises(ValueError, match="needs security="):
        ClosureWorker(0, host="0.0.0.0")
    server = Security.load(keys, "server")
    with ClosureWorker(0, security=server) as worker:
        known = Workers([worker.address], security=Security.load(keys, "client"))
        with ClusterCoordinator(known) as coordinator:
            assert coordinator.schedule(_divide, (1, 1)).fetch(SECONDS) == 1.0
        for security in (None, Security.load(strangers, "client")):
            stranger = Workers([worker.address], security=security)
            with ClusterCoordinator(stranger) as coordinator:
                value = coordinator.schedule(_divide, (1, 1))
                with pytest.raises(DeadlineExceededError, match=r"worker 0 .* has not been"):
                    value.fetch(0.5)


# --- per-worker data ---------------------------------------------------------------------------


def _next(iterator: Any) -> int:
    return int(next(iterator))


def test_each_worker_reads_the_whole_of_a_per_worker_dataset():
    for made in (hr.Dataset.range(5), lambda: hr.Dataset.range(5)):
        with _coordinator(2, closures_in_flight=1) as coordinator:
            _wait_until(lambda c=coordinator: all(each.is_there for each in c.status().workers))
            iterator = iter(coordinator.create_per_worker_dataset(made))
            seen: dict[int, list[int]] = {0: [], 1: []}
            for _ in range(6):
                worker, element = coordinator.schedule(
                    lambda it: (get_current_worker_index(), int(next(it))), (iterator,)
                ).fetch(SECONDS)
                seen[worker].append(element)
            assert len(seen[0]) + len(seen[1]) == 6
            assert all(elements == list(range(len(elements))) for elements in seen.values())


def test_an_iterator_may_be_captured(coordinator: ClusterCoordinator):
    iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(1, 11).batch(4)))
    assert coordinator.schedule(lambda: next(iterator)).fetch(SECONDS).tolist() == [1, 2, 3, 4]


def test_each_iterator_begins_at_the_beginning(coordinator: ClusterCoordinator):
    dataset = coordinator.create_per_worker_dataset(hr.Dataset.range(1, 2))
    for _ in range(3):
        assert coordinator.schedule(_next, (iter(dataset),)).fetch(SECONDS) == 1


def test_workers_shuffle_differently(coordinator: ClusterCoordinator):
    dataset = coordinator.create_per_worker_dataset(hr.Dataset.range(100).shuffle(100).batch(100))
    iterator = iter(dataset)
    seen = {}
    while len(seen) < 2:
        worker, order = coordinator.schedule(
            lambda it: (get_current_worker_index(), next(it).tolist()), (iter(dataset),)
        ).fetch(SECONDS)
        seen[worker] = order
    assert seen[0] != seen[1]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(100))
    assert iterator.element_spec == dataset.element_spec


def test_a_dataset_function_knows_its_worker():
    with _coordinator(3) as coordinator:
        dataset = coordinator.create_per_worker_dataset(
            lambda: hr.Dataset.range(9).shard(3, get_current_worker_index())
        )
        assert dataset.element_spec == hr.Dataset.range(9).element_spec
        sums = {}
        while len(sums) < 3:
            worker, total = coordinator.schedule(
                lambda data: (get_current_worker_index(), sum(int(each) for each in data)),
                (dataset,),
            ).fetch(SECONDS)
            sums[worker] = total
        assert sums == {0: 9, 1: 12, 2: 15}


def test_the_end_of_a_per_worker_dataset_is_an_error(coordinator: ClusterCoordinator):
    iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(1)))
    coordinator.schedule(_next, (iterator,)).fetch(SECONDS)
    ends = [coordinator.schedule(time.sleep, (0.01,)) for _ in range(4)]

    def schedule_more() -> None:
        for _ in range(100):
            coordinator.schedule(_next, (iterator,))
        coordinator.join(SECONDS)

    with pytest.raises(OutOfRangeError):
        schedule_more()
    assert all(value.status is RemoteValueStatus.READY for value in ends)
    coordinator.join(SECONDS)


def test_an_iterator_outlives_an_error_of_a_function():
    with _coordinator(1) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(10)))
        assert coordinator.schedule(_next, (iterator,)).fetch(SECONDS) == 0
        coordinator.schedule(_divide, (1, 0))
        with pytest.raises(UserFunctionError):
            coordinator.join(SECONDS)
        assert coordinator.schedule(_next, (iterator,)).fetch(SECONDS) == 1


def test_a_dataset_that_fails_fails_who_uses_it_and_nobody_else(coordinator: ClusterCoordinator):
    def broken() -> Any:
        raise LookupError("no files")

    iterator = iter(coordinator.create_per_worker_dataset(broken))
    assert coordinator.schedule(_divide, (1, 1)).fetch(SECONDS) == 1.0
    coordinator.join(SECONDS)
    value = coordinator.schedule(_next, (iterator,))
    with pytest.raises(UserFunctionError, match="no files"):
        coordinator.join(SECONDS)
    with pytest.raises(UserFunctionError, match="no files"):
        value.fetch()
    wrong = coordinator.create_per_worker_dataset(lambda: [1, 2])
    with pytest.raises(InvalidArgumentError, match="must return a Dataset"):
        coordinator.schedule(_next, (iter(wrong),)).fetch(SECONDS)


def test_a_per_worker_dataset_is_not_read_here(coordinator: ClusterCoordinator):
    iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(3)))
    with pytest.raises(NotImplementedError, match="not supported right now"):
        next(iterator)
    with pytest.raises(NotImplementedError, match="not supported right now"):
        iterator.get_next()
    for wrong in (3, [1, 2], None):
        with pytest.raises(ValueError, match="Unexpected dataset type!"):
            coordinator.create_per_worker_dataset(wrong)


def test_a_distributed_dataset_may_be_per_worker(coordinator: ClusterCoordinator):
    strategy = hr.distribute.OneDeviceStrategy("cpu:0")
    distributed = strategy.distribute_dataset(hr.Dataset.range(1, 11).batch(4))
    iterator = iter(coordinator.create_per_worker_dataset(distributed))
    assert coordinator.schedule(lambda it: next(it), (iterator,)).fetch(SECONDS).tolist() == [
        1, 2, 3, 4,
    ]  # fmt: skip


def test_what_nobody_holds_is_let_go_by_workers(coordinator: ClusterCoordinator):
    dataset = coordinator.create_per_worker_dataset(hr.Dataset.range(1000))
    for _ in range(5):
        iterator = iter(dataset)
        coordinator.fetch([coordinator.schedule(_next, (iterator,)) for _ in range(3)])
    held = coordinator._shell.core.resources
    assert len(held) <= 6
    del iterator
    gc.collect()
    coordinator._shell.wake()
    _wait_until(lambda: len(held) == 1)
    last = coordinator.schedule(_next, (iter(dataset),))
    assert last.fetch(SECONDS) == 0, "held as long as a function needs it"


def test_values_for_each_worker(coordinator: ClusterCoordinator):
    mine = PerWorkerValues(["first", "second"])
    values = [
        coordinator.schedule(lambda v: (get_current_worker_index(), v), (mine,)) for _ in range(9)
    ]
    assert set(coordinator.fetch(values)) <= {(0, "first"), (1, "second")}
    made = coordinator.create_per_worker_values(lambda start: [start], (10,))

    def add(cell: list[int]) -> None:
        cell[0] += 1

    for _ in range(10):
        coordinator.schedule(add, (made,))
    coordinator.join(SECONDS)
    totals = {}
    while len(totals) < 2:
        worker, total = coordinator.schedule(
            lambda cell: (get_current_worker_index(), cell[0]), (made,)
        ).fetch(SECONDS)
        totals[worker] = total
    assert sum(totals.values()) == 10 + 10 + 10
    assert made.statuses == (RemoteValueStatus.READY,) * 2


def test_threads_of_a_worker_share_an_iterator():
    with _coordinator(1, threads_per_worker=4) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(hr.Dataset.range(200)))
        values = [coordinator.schedule(_next, (iterator,)) for _ in range(200)]
        assert sorted(coordinator.fetch(values)) == list(range(200))


# --- shared data -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 6, 25, 100])
@pytest.mark.parametrize("each", [1, 3])
def test_an_epoch_deals_out_each_element_once(
    coordinator: ClusterCoordinator, size: int, each: int
):
    _noted.clear()
    shared = coordinator.create_shared_dataset(hr.Dataset.range(size))

    def take(elements: Any, count: int) -> None:
        for _ in range(count):
            _note(int(next(elements)))

    for _ in range(2):
        _noted.clear()
        steps = coordinator.run_epoch(take, (shared, each))
        assert sorted(_noted) == list(range(size))
        assert size // each - 2 <= steps <= size // each
    _noted.clear()
    assert coordinator.done()


def test_what_a_call_leaves_over_is_dealt_to_another(coordinator: ClusterCoordinator):
    _noted.clear()
    shared = coordinator.create_shared_dataset(hr.Dataset.range(60))

    def take(elements: Any) -> None:
        first = int(next(elements))
        _note(first)
        for _ in range(first % 4):
            element = elements.get_next_as_optional()
            if element.has_value():
                _note(int(element.get_value()))

    assert coordinator.run_epoch(take, (shared,)) >= 15
    assert sorted(_noted) == list(range(60))
    _noted.clear()


def test_large_elements_are_dealt_as_they_are(coordinator: ClusterCoordinator):
    _noted.clear()
    rows = np.arange(6 * 40_000, dtype=np.float32).reshape(6, 40_000)
    shared = coordinator.create_shared_dataset(hr.Dataset.from_tensor_slices({"x": rows}))
    coordinator.run_epoch(lambda it: [_note(next(it)["x"]) for _ in range(2)], (shared,))
    np.testing.assert_array_equal(sorted(_noted, key=lambda row: row[0]), rows)
    _noted.clear()


def test_an_error_in_an_epoch_is_raised(coordinator: ClusterCoordinator):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(50))
    with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
        coordinator.run_epoch(lambda it: 1 / (int(next(it)) - 20), (shared,))
    coordinator.join(SECONDS)
    broken = hr.Dataset.range(50).map(lambda n: 1 // (int(n) - 7))
    with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
        coordinator.run_epoch(_next, (coordinator.create_shared_dataset(broken),))
    coordinator.join(SECONDS)


def test_a_shared_dataset_belongs_to_an_epoch(coordinator: ClusterCoordinator):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(5))
    with pytest.raises(FailedPreconditionError, match="run_epoch"):
        coordinator.schedule(_next, (shared,))
    with pytest.raises(FailedPreconditionError, match="run_epoch"):
        iter(shared)
    with pytest.raises(ValueError, match="needs one shared dataset among `args`, and found 0"):
        coordinator.run_epoch(_next, (3,))
    with pytest.raises(TypeError, match="`dataset`"):
        coordinator.create_shared_dataset([1, 2])  # type: ignore[arg-type]


def _note_until(elements: Any, last: int) -> None:
    element = int(next(elements))
    if element == last:
        raise ValueError("once")
    _note(element)


def test_an_epoch_that_was_interrupted_goes_on_in_another_program_with_what_was_not_used(
    coordinator: ClusterCoordinator,
):
    _noted.clear()
    dataset = hr.Dataset.range(300).shuffle(300, seed=4)
    shared = coordinator.create_shared_dataset(dataset)
    assert shared.get_state() == {"version": 1, "pass": 0}
    last = [int(element) for element in DatasetIterator(dataset.plan)][200]
    with pytest.raises(UserFunctionError, match="once"):
        coordinator.run_epoch(_note_until, (shared, last))
    before = list(_noted)
    assert len(before) >= 150
    state = json.loads(json.dumps(shared.get_state()))
    with _coordinator(1) as other:
        again = other.create_shared_dataset(hr.Dataset.range(300).shuffle(300, seed=4))
        again.set_state(state)
        assert again.get_state() == state
        assert other.run_epoch(_note_until, (again, -1)) == 300 - len(before)
        assert sorted(_noted) == list(range(300))
        # The next epoch is another one, as it would have been in the first program.
        assert again.get_state() == {"version": 1, "pass": 1}
        _noted.clear()
        assert other.run_epoch(_note_until, (again, -1)) == 300
        assert _noted == [int(element) for element in DatasetIterator(dataset.plan, 1)]
    _noted.clear()


def test_the_state_of_a_shared_dataset_is_saved_while_an_epoch_runs(
    coordinator: ClusterCoordinator, tmp_path: Any
):
    _noted.clear()
    shared = coordinator.create_shared_dataset(hr.Dataset.range(400))
    checkpoint = hr.Checkpoint(data=shared)
    _saves[:] = [lambda: (list(_noted), checkpoint.save(tmp_path / "here"))]
    assert coordinator.run_epoch(_note_and_save, (shared,)) == 400
    noted, path = _saved.pop()
    again = coordinator.create_shared_dataset(hr.Dataset.range(400))
    hr.Checkpoint(data=again).restore(path).assert_consumed()
    _noted.clear()
    steps = coordinator.run_epoch(_note_until, (again, -1))
    # What was under way when it was saved comes again.
    assert 0 <= steps - (400 - len(noted)) <= 2 * 64
    assert set(noted) | set(_noted) == set(range(400))
    assert steps == len(set(_noted))
    with pytest.raises(InvalidArgumentError, match="no state of a shared dataset"):
        again.set_state({"place": 1})
    _noted.clear()


_saves: list[Any] = []
_saved: list[Any] = []


def _note_and_save(elements: Any) -> None:
    _note(int(next(elements)))
    if len(_noted) >= 200 and _saves:
        _saved.append(_saves.pop()())


def test_evaluation_by_shards_counts_each_element_once(coordinator: ClusterCoordinator):
    data = hr.Dataset.range(1024)

    def shard_fn(shard: hr.Dataset) -> tuple[int, int]:
        elements = [int(each) for each in shard]
        return sum(elements), len(elements)

    def merge(parts: list[tuple[int, int]]) -> float:
        return sum(total for total, _ in parts) / sum(count for _, count in parts)

    assert coordinator.evaluate(shard_fn, data, 128, merge) == 511.5


def test_evaluation_of_a_shuffled_dataset_counts_each_element_once(coordinator: ClusterCoordinator):
    def elements(shard: hr.Dataset) -> list[int]:
        return [int(each) for each in shard]

    data = hr.Dataset.range(100).shuffle(100)
    assert sorted(coordinator.evaluate(elements, data, 4, np.concatenate)) == [*range(100)]
