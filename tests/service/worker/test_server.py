"""Lifecycle of a worker server: registration, heartbeats, drain and stop, with errors."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
)
from headrace.plan.serialize import dump_plan
from headrace.service.config import WorkerConfig
from headrace.service.messages import (
    DispatcherRequest,
    Done,
    DrainWorker,
    FailTask,
    GetElements,
    GetElementsReply,
    GetPlan,
    GetPlanReply,
    GetTask,
    RegisterWorker,
    RegisterWorkerReply,
    UnregisterWorker,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
    WorkerReply,
)
from headrace.service.worker.producer import Producer
from headrace.service.worker.server import WorkerServer
from headrace.serving.connections import PeerConnections
from headrace.transport import zeromq
from headrace.transport.channel import Channel, Request
from headrace.transport.envelope import decode_error
from tests.service.reading import wait_until
from tests.service.worker.core_driver import TASK_TOKEN, definition
from tests.service.worker.scripted_iterator import SECONDS
from tests.stopwatch import Stopwatch


class Dispatcher:
    """Dispatcher that accepts every registration, has one dataset, and records messages."""

    def __init__(self, dataset: hr.Dataset | None = None) -> None:
        self.messages: list[Any] = []
        #: If not None, receives heartbeats, which the test answers.
        self.held_heartbeats: SimpleQueue[Request] | None = None
        self.dispatcher_id = "first"
        self.to_delete: tuple[int, ...] = ()
        self._plan = b"" if dataset is None else dump_plan(dataset.plan)
        self._answers: dict[type, Callable[[Any], msgspec.Struct]] = {
            RegisterWorker: lambda _: RegisterWorkerReply(
                heartbeat_interval=0.01, dispatcher_id=self.dispatcher_id
            ),
            WorkerHeartbeat: lambda _: WorkerHeartbeatReply(
                tasks_to_delete=self.to_delete, dispatcher_id=self.dispatcher_id
            ),
            GetTask: lambda asked: definition(asked.task_id, plan=self._plan),
            GetPlan: lambda asked: GetPlanReply(
                chunk=self._plan[asked.offset :], total_bytes=len(self._plan)
            ),
        }

    def handle(self, requests: Sequence[Request]) -> None:
        for request in requests:
            message = request.message
            self.messages.append(message)
            if isinstance(message, WorkerHeartbeat) and self.held_heartbeats is not None:
                self.held_heartbeats.put(request)
            else:
                request.reply(self._answers.get(type(message), lambda _: Done())(message))

    def count(self, kind: type) -> int:
        """Return the number of received messages of a type."""
        return sum(isinstance(message, kind) for message in list(self.messages))


@contextmanager
def serving(dispatcher: Dispatcher) -> Iterator[str]:
    server = zeromq.serve(dispatcher.handle, request_type=DispatcherRequest)
    try:
        yield server.address
    finally:
        server.close()


@contextmanager
def reading(worker: WorkerServer) -> Iterator[Channel]:
    channel = zeromq.connect(worker.address, reply_type=WorkerReply, shared_memory=False)
    try:
        yield channel
    finally:
        channel.close()


def get(number: int, acknowledged: int, task_id: int = 1) -> GetElements:
    return GetElements(
        task_id=task_id,
        task_token=TASK_TOKEN,
        client_id="c",
        request_number=number,
        acknowledged=acknowledged,
    )


def read(channel: Channel, task_id: int) -> int:
    """Read a task to its end; return the number of its elements."""
    number = elements = 0
    while True:
        message, _ = channel.call(get(number, number, task_id), timeout=SECONDS)
        assert isinstance(message, GetElementsReply)
        if message.error is not None:
            raise decode_error(message.error)
        if message.end_of_task:
            return elements
        elements += message.num_elements
        number += 1


def threads(name: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(name)]


def test_a_worker_stopped_before_registering_again_leaves_no_thread() -> None:
    dispatcher = Dispatcher()
    dispatcher.held_heartbeats = SimpleQueue()
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        beat = dispatcher.held_heartbeats.get(timeout=SECONDS)
        stop = threading.Thread(target=worker.stop)
        stop.start()
        wait_until(lambda: dispatcher.count(UnregisterWorker) == 1)
        # The worker has unregistered, and its pending heartbeat is rejected.
        beat.fail(NotFoundError("unknown worker"))
        stop.join(SECONDS)

        assert not stop.is_alive()
        wait_until(lambda: not threads("headrace-worker"))
        assert dispatcher.count(RegisterWorker) == 1


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), SystemExit()])
def test_heartbeats_continue_after_any_error(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = Dispatcher()
    with serving(dispatcher) as address, WorkerServer(WorkerConfig(address)):
        failed = threading.Event()

        def connect(*arguments: Any) -> Any:
            failed.set()
            raise error

        waits = PeerConnections.wait
        waited = threading.Event()

        def wait(*arguments: Any) -> Any:
            if waited.is_set():
                return waits(*arguments)
            waited.set()
            raise error

        with monkeypatch.context() as patch:
            # Both calls of the I/O thread that may lack resources.
            patch.setattr(PeerConnections, "add", connect)
            patch.setattr(PeerConnections, "wait", wait)
            assert failed.wait(SECONDS)
        before = dispatcher.count(WorkerHeartbeat)
        wait_until(lambda: dispatcher.count(WorkerHeartbeat) > before + 1)
    assert "heartbeats are delayed" in caplog.text


def test_a_worker_without_a_dispatcher_stops_within_a_second() -> None:
    with serving(Dispatcher()) as address:
        worker = WorkerServer(WorkerConfig(address))
    with Stopwatch() as watch:
        worker.stop()
    assert watch.seconds < 2.0


RELEASED = threading.Event()
STARTED = threading.Event()


def block_until_released(x: Any) -> Any:
    """Block positive elements until `RELEASED` is set."""
    if x > 0:
        STARTED.set()
        RELEASED.wait(SECONDS)
    return x


@pytest.mark.parametrize("end", ["stop", "drain"])
def test_a_function_that_does_not_return_does_not_delay_the_stop(end: str) -> None:
    RELEASED.clear()
    STARTED.clear()
    dispatcher = Dispatcher(hr.Dataset.range(3).map(block_until_released))
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        with reading(worker) as channel:
            channel.send(get(0, 0))
            assert STARTED.wait(SECONDS)
            with Stopwatch() as watch:
                if end == "stop":
                    worker.stop()
                else:
                    worker.drain(0.3)
            assert watch.seconds < 2.5
        RELEASED.set()
        wait_until(lambda: not threads("headrace-task"))
    assert dispatcher.count(UnregisterWorker) == 1


def test_a_drain_ends_at_once_when_the_worker_is_stopped() -> None:
    dispatcher = Dispatcher(hr.Dataset.range(100))
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        with reading(worker) as channel:
            channel.call(get(0, 0), timeout=SECONDS)
            drain = threading.Thread(target=worker.drain, args=(60.0,))
            drain.start()
            wait_until(lambda: dispatcher.count(DrainWorker) > 0)
            worker.stop()
            drain.join(SECONDS)
            assert not drain.is_alive()


def test_a_finished_task_releases_its_memory() -> None:
    rows = np.arange(500_000, dtype=np.float64)
    dispatcher = Dispatcher(hr.Dataset.from_tensor_slices(rows).batch(50_000))
    with (
        serving(dispatcher) as address,
        WorkerServer(WorkerConfig(address)) as worker,
        reading(worker) as channel,
    ):
        read(channel, 1)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for task_id in range(2, 10):
                assert read(channel, task_id) == 10
            wait_until(lambda: not threads("headrace-task"))
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        # Eight tasks with 4 MB each were read.
        assert grown < rows.nbytes // 2
        assert dispatcher.count(GetPlan) == 1
        assert read(channel, 3) == 0


def test_a_task_whose_thread_cannot_start_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread_left(_: object) -> None:
        raise RuntimeError("can't start new thread")

    dispatcher = Dispatcher(hr.Dataset.range(3))
    with (
        serving(dispatcher) as address,
        WorkerServer(WorkerConfig(address)) as worker,
        reading(worker) as channel,
    ):
        monkeypatch.setattr(Producer, "start", no_thread_left)
        with pytest.raises(HeadraceError, match="can't start new thread"):
            read(channel, 1)
        assert channel.call(get(1, 1), timeout=SECONDS)[0] == GetElementsReply(
            first_element=0, num_elements=0, end_of_task=True
        )
        assert "can't start new thread" in next(
            message.reason for message in dispatcher.messages if isinstance(message, FailTask)
        )
        assert worker.num_tasks() == 0


def test_the_error_of_a_missing_module_names_worker_module_and_fix() -> None:
    lonely = types.ModuleType("lonely_module")
    exec("def same(x): return x", lonely.__dict__)
    lonely.same.__module__ = "lonely_module"
    sys.modules["lonely_module"] = lonely
    try:
        dispatcher = Dispatcher(hr.Dataset.range(3).map(lonely.same))
    finally:
        del sys.modules["lonely_module"]
    with (
        serving(dispatcher) as address,
        WorkerServer(WorkerConfig(address)) as worker,
        reading(worker) as channel,
        pytest.raises(FailedPreconditionError) as caught,
    ):
        read(channel, 1)
    assert f"worker {worker.address} cannot load the dataset" in str(caught.value)
    assert "No module named 'lonely_module'" in str(caught.value)
    assert 'modules=["lonely_module"]' in str(caught.value)


def test_a_deleted_task_closes_its_iterator_and_fails_waiting_requests() -> None:
    RELEASED.clear()
    STARTED.clear()
    dispatcher = Dispatcher(hr.Dataset.range(3).map(block_until_released))
    with (
        serving(dispatcher) as address,
        WorkerServer(WorkerConfig(address)) as worker,
        reading(worker) as channel,
    ):
        for number in range(4):
            channel.send(get(number, 0))
        assert STARTED.wait(SECONDS)
        dispatcher.to_delete = (1,)
        errors = 0
        while errors < 3:
            reply = channel.receive(SECONDS)
            assert reply is not None
            errors += isinstance(reply.message, CancelledError)
        RELEASED.set()
        wait_until(lambda: not threads("headrace-task"))


def test_a_worker_that_is_not_started_can_be_drained_and_stopped() -> None:
    worker = WorkerServer(WorkerConfig("127.0.0.1:1"), start=False)
    worker.drain()
    worker.stop()
    with pytest.raises(RuntimeError, match="cannot be started after"):
        worker.start()
