"""The worker's life: it registers, beats, drains, stops; whatever happens in between."""

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
from tests.service.worker.driving import TASK_TOKEN, definition
from tests.service.worker.listed import SECONDS
from tests.stopwatch import Stopwatch


class Dispatcher:
    """A dispatcher that takes every registration, knows one dataset, and notes what it hears."""

    def __init__(self, dataset: hr.Dataset | None = None) -> None:
        self.heard: list[Any] = []
        #: Heartbeats are put here while they are to be answered by the test.
        self.held: SimpleQueue[Request] | None = None
        self.incarnation = "first"
        self.to_delete: tuple[int, ...] = ()
        self._plan = b"" if dataset is None else dump_plan(dataset.plan)
        self._answers: dict[type, Callable[[Any], msgspec.Struct]] = {
            RegisterWorker: lambda _: RegisterWorkerReply(
                heartbeat_interval=0.01, dispatcher_id=self.incarnation
            ),
            WorkerHeartbeat: lambda _: WorkerHeartbeatReply(
                tasks_to_delete=self.to_delete, dispatcher_id=self.incarnation
            ),
            GetTask: lambda asked: definition(asked.task_id, plan=self._plan),
            GetPlan: lambda asked: GetPlanReply(
                chunk=self._plan[asked.offset :], total_bytes=len(self._plan)
            ),
        }

    def handle(self, requests: Sequence[Request]) -> None:
        for request in requests:
            message = request.message
            self.heard.append(message)
            if isinstance(message, WorkerHeartbeat) and self.held is not None:
                self.held.put(request)
            else:
                request.reply(self._answers.get(type(message), lambda _: Done())(message))

    def count(self, kind: type) -> int:
        """Return how many messages of a kind were heard."""
        return sum(isinstance(message, kind) for message in list(self.heard))


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


def test_a_worker_that_stops_while_it_is_to_register_again_leaves_no_thread() -> None:
    dispatcher = Dispatcher()
    dispatcher.held = SimpleQueue()
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        beat = dispatcher.held.get(timeout=SECONDS)
        stop = threading.Thread(target=worker.stop)
        stop.start()
        wait_until(lambda: dispatcher.count(UnregisterWorker) == 1)
        # The worker has left, and the heartbeat waits still for its answer: register again.
        beat.fail(NotFoundError("who are you?"))
        stop.join(SECONDS)

        assert not stop.is_alive()
        wait_until(lambda: not threads("headrace-worker"))
        assert dispatcher.count(RegisterWorker) == 1


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), SystemExit()])
def test_the_heartbeat_survives_everything(
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
            # Both ways in which a heartbeat asks for what may be short.
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


GO_ON = threading.Event()
BEGAN = threading.Event()


def until_told(x: Any) -> Any:
    """Return when the test says so."""
    if x > 0:
        BEGAN.set()
        GO_ON.wait(SECONDS)
    return x


@pytest.mark.parametrize("end", ["stop", "drain"])
def test_a_function_that_does_not_return_holds_up_no_worker(end: str) -> None:
    GO_ON.clear()
    BEGAN.clear()
    dispatcher = Dispatcher(hr.Dataset.range(3).map(until_told))
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        with reading(worker) as channel:
            channel.send(get(0, 0))
            assert BEGAN.wait(SECONDS)
            with Stopwatch() as watch:
                if end == "stop":
                    worker.stop()
                else:
                    worker.drain(0.3)
            assert watch.seconds < 2.5
        GO_ON.set()
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


def test_of_a_finished_task_nothing_but_its_end_is_kept() -> None:
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
        # Eight tasks of 4 MB.
        assert grown < rows.nbytes // 2
        assert dispatcher.count(GetPlan) == 1
        assert read(channel, 3) == 0


def test_a_task_whose_thread_cannot_be_started_fails_and_its_clients_hear_why(
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
            message.reason for message in dispatcher.heard if isinstance(message, FailTask)
        )
        assert worker.num_tasks() == 0


def test_a_module_that_is_missing_on_a_worker_is_named_with_the_worker_and_a_cure() -> None:
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


def test_a_task_that_is_deleted_closes_its_iterator_and_answers_who_waits() -> None:
    GO_ON.clear()
    BEGAN.clear()
    dispatcher = Dispatcher(hr.Dataset.range(3).map(until_told))
    with (
        serving(dispatcher) as address,
        WorkerServer(WorkerConfig(address)) as worker,
        reading(worker) as channel,
    ):
        for number in range(4):
            channel.send(get(number, 0))
        assert BEGAN.wait(SECONDS)
        dispatcher.to_delete = (1,)
        errors = 0
        while errors < 3:
            reply = channel.receive(SECONDS)
            assert reply is not None
            errors += isinstance(reply.message, CancelledError)
        GO_ON.set()
        wait_until(lambda: not threads("headrace-task"))


def test_a_worker_that_is_not_started_can_be_drained_and_stopped() -> None:
    worker = WorkerServer(WorkerConfig("127.0.0.1:1"), start=False)
    worker.drain()
    worker.stop()
    with pytest.raises(RuntimeError, match="cannot be started after"):
        worker.start()
