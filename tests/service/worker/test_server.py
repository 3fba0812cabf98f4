"""The worker's life: it registers, beats, drains, stops; whatever happens in between."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

import headrace as hr
from headrace.errors import NotFoundError
from headrace.plan.serialize import dump_plan
from headrace.service.config import WorkerConfig
from headrace.service.messages import (
    DispatcherRequest,
    Done,
    Elements,
    FinishTask,
    GetElements,
    GetPlan,
    GetTask,
    PlanBytes,
    RegisterWorker,
    WorkerHeartbeat,
    WorkerLeaving,
    WorkerLeft,
    WorkerRegistered,
    WorkerReply,
    WorkerUpdate,
)
from headrace.service.worker import server as worker_server
from headrace.service.worker.server import WorkerServer
from headrace.transport import zeromq
from headrace.transport.channel import Channel, Request
from tests.service.reading import wait_until
from tests.service.worker.asking import SECONDS, TICKET, definition


class Dispatcher:
    """A dispatcher that takes every registration, knows one dataset, and notes what it hears."""

    def __init__(self, dataset: hr.Dataset | None = None) -> None:
        self.heard: list[Any] = []
        #: Heartbeats are put here while they are to be answered by the test.
        self.held: SimpleQueue[Request] | None = None
        self.incarnation = "first"
        self._plan = b"" if dataset is None else dump_plan(dataset.plan)
        self._answers: dict[type, Callable[[Any], msgspec.Struct]] = {
            RegisterWorker: lambda _: WorkerRegistered(
                heartbeat_interval=0.01, incarnation=self.incarnation
            ),
            WorkerHeartbeat: lambda _: WorkerUpdate(
                tasks_to_delete=(), incarnation=self.incarnation
            ),
            GetTask: lambda _: definition(digest=hashlib.sha256(self._plan).digest()),
            GetPlan: lambda asked: PlanBytes(
                part=self._plan[asked.offset :], total=len(self._plan)
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


def get(number: int, acknowledged: int) -> GetElements:
    return GetElements(
        task_id=1, ticket=TICKET, client_id="c", number=number, acknowledged=acknowledged
    )


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
        # The tasks are closed, and the heartbeat waits still for its answer: register again.
        wait_until(lambda: not threads("headrace-task-starter"))
        beat.fail(NotFoundError("who are you?"))
        stop.join(SECONDS)

        assert not stop.is_alive()
        wait_until(lambda: not threads("headrace-worker-heartbeat"))
        assert not threads("headrace-task-starter")
        assert dispatcher.count(RegisterWorker) == 1


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError(), SystemExit()])
def test_the_heartbeat_survives_everything(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = Dispatcher()
    with serving(dispatcher) as address, WorkerServer(WorkerConfig(address)) as worker:
        failed = threading.Event()

        def connect() -> Any:
            failed.set()
            raise error

        with monkeypatch.context() as patch:
            # Both ways in which a heartbeat asks for what may be short.
            patch.setattr(worker, "_connect", connect)
            patch.setattr(worker_server.TaskSet, "tick", lambda _: connect())
            assert failed.wait(SECONDS)
        before = dispatcher.count(WorkerHeartbeat)
        wait_until(lambda: dispatcher.count(WorkerHeartbeat) > before + 1)
    assert "no heartbeat" in caplog.text


def test_a_worker_registers_again_with_another_incarnation_of_the_dispatcher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = Dispatcher()
    with serving(dispatcher) as address, WorkerServer(WorkerConfig(address)):
        dispatcher.incarnation = "second"
        wait_until(lambda: dispatcher.count(RegisterWorker) == 2)
        before = dispatcher.count(WorkerHeartbeat)
        wait_until(lambda: dispatcher.count(WorkerHeartbeat) > before + 1)
        assert dispatcher.count(RegisterWorker) == 2
    assert "registering again" in caplog.text


def test_a_worker_that_stops_says_that_it_has_left() -> None:
    dispatcher = Dispatcher()
    with serving(dispatcher) as address:
        WorkerServer(WorkerConfig(address)).stop()
    assert dispatcher.count(WorkerLeft) == 1
    assert dispatcher.count(WorkerLeaving) == 0


def test_a_worker_without_a_dispatcher_stops_within_a_second() -> None:
    with serving(Dispatcher()) as address:
        worker = WorkerServer(WorkerConfig(address))
    since = time.monotonic()
    worker.stop()
    assert time.monotonic() - since < 2.0


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
            since = time.monotonic()
            if end == "stop":
                worker.stop()
            else:
                worker.drain(0.3)
            assert time.monotonic() - since < 2.5
        GO_ON.set()
        wait_until(lambda: not threads("headrace-task"))
    assert dispatcher.count(WorkerLeft) == 1


def test_a_worker_that_drains_delivers_until_everything_is_acknowledged() -> None:
    dispatcher = Dispatcher(hr.Dataset.range(1 << 40))
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        with reading(worker) as channel:
            channel.call(get(0, 0), timeout=SECONDS)
            drain = threading.Thread(target=worker.drain)
            drain.start()
            wait_until(lambda: dispatcher.count(WorkerLeaving) > 0)
            elements = number = 1
            while True:
                message, _ = channel.call(get(number, number), timeout=SECONDS)
                assert isinstance(message, Elements)
                if message.end:
                    break
                assert message.first == elements or not message.count
                elements += message.count
                number += 1
                assert drain.is_alive()
            drain.join(SECONDS)
            assert not drain.is_alive()
        assert elements > 1
    kinds = [type(message) for message in dispatcher.heard]
    assert kinds.index(WorkerLeaving) < kinds.index(FinishTask) < kinds.index(WorkerLeft)


def test_a_drain_that_has_no_more_time_says_how_much_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = Dispatcher(hr.Dataset.range(100))
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        with reading(worker) as channel:
            channel.call(get(0, 0), timeout=SECONDS)
            with caplog.at_level(logging.WARNING):
                worker.drain(0.1)
    assert "1 were sent and not acknowledged" in caplog.text


def test_a_drain_ends_at_once_when_the_worker_is_stopped() -> None:
    dispatcher = Dispatcher(hr.Dataset.range(100))
    with serving(dispatcher) as address:
        worker = WorkerServer(WorkerConfig(address))
        with reading(worker) as channel:
            channel.call(get(0, 0), timeout=SECONDS)
            drain = threading.Thread(target=worker.drain, args=(60.0,))
            drain.start()
            wait_until(lambda: dispatcher.count(WorkerLeaving) > 0)
            worker.stop()
            drain.join(SECONDS)
            assert not drain.is_alive()


def test_a_worker_that_is_not_started_can_be_drained_and_stopped() -> None:
    worker = WorkerServer(WorkerConfig("127.0.0.1:1"), start=False)
    worker.drain()
    worker.stop()
    with pytest.raises(RuntimeError, match="cannot be started after"):
        worker.start()
