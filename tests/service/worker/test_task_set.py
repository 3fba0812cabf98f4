"""The tasks of a worker: how they are started, what is kept of them, how they end."""

from __future__ import annotations

import gc
import hashlib
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.plan.serialize import dump_plan
from headrace.service.messages import (
    Done,
    FailTask,
    FinishTask,
    GetElements,
    GetPlan,
    GetTask,
    PlanBytes,
    TaskDefinition,
)
from headrace.service.worker.connections import Connections
from headrace.service.worker.plans import PlanCache
from headrace.service.worker.task_set import TaskSet
from tests.service.reading import wait_until
from tests.service.worker.asking import SECONDS, Asked, definition


class KnownTask:
    """A dispatcher that knows one task under every number, and tells of it when it is let."""

    def __init__(self, dataset: hr.Dataset) -> None:
        self.let = threading.Event()
        self.let.set()
        self.plan = dump_plan(dataset.plan)
        self.fetched = 0
        self.ended: list[FinishTask | FailTask] = []
        self.error: BaseException | None = None
        self.away = False

    def call(self, request: Any, *, timeout: float) -> Any:
        match request:
            case GetTask():
                return self.get_task(request, timeout=timeout)
            case GetPlan():
                return self.get_plan(request)
            case FinishTask() | FailTask():
                return self._end(request)
        raise AssertionError(request)

    def get_task(self, request: Any, *, timeout: float) -> TaskDefinition:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if not self.let.wait(timeout):
            raise hr.errors.DeadlineExceededError("not yet")
        found = definition(digest=hashlib.sha256(self.plan).digest())
        return TaskDefinition(
            **{
                **{name: getattr(found, name) for name in found.__struct_fields__},
                "task_id": request.task_id,
            }
        )

    def get_plan(self, request: Any) -> PlanBytes:
        self.fetched += 1
        return PlanBytes(part=self.plan[request.offset :], total=len(self.plan))

    def _end(self, request: FinishTask | FailTask) -> Done:
        if self.away:
            raise hr.errors.UnavailableError("away")
        self.ended.append(request)
        return Done()

    def close(self) -> None:
        return


@contextmanager
def tasks_of(dispatcher: KnownTask) -> Iterator[TaskSet]:
    connections = Connections(lambda: dispatcher, 10.0)  # type: ignore[arg-type,return-value]
    tasks = TaskSet("w", connections, PlanCache())
    try:
        yield tasks
    finally:
        tasks.close(timeout=SECONDS)


def of(task_id: int, number: int, acknowledged: int = 0, ticket: str = "ticket") -> Asked:
    request = Asked("c", number, acknowledged, ticket)
    message = request.message
    assert isinstance(message, GetElements)
    request.message = GetElements(
        task_id=task_id,
        ticket=message.ticket,
        client_id=message.client_id,
        number=number,
        acknowledged=acknowledged,
    )
    return request


def ask(tasks: TaskSet, task_id: int, number: int, acknowledged: int = 0) -> Asked:
    request = of(task_id, number, acknowledged)
    tasks.take(request)
    return request


def read(tasks: TaskSet, task_id: int) -> int:
    """Read a task to its end; return the number of its elements."""
    number = elements = 0
    while True:
        message, _ = ask(tasks, task_id, number, number).answer()
        if message.end:
            return elements
        elements += message.count
        number += 1


class Overtaken(Asked):
    """While the task set hands this request on, the client's next one arrives."""

    def __init__(self, tasks: TaskSet, number: int, later: Asked) -> None:
        self._looked = 0
        self._overtaker = threading.Thread(target=lambda: tasks.take(later))
        super().__init__("c", number)

    @property
    def message(self) -> GetElements:  # type: ignore[override]
        self._looked += 1
        if self._looked == 2:  # the first look is that of the task set when the request arrives
            self._overtaker.start()
            self._overtaker.join(0.5)
        return self._message

    @message.setter
    def message(self, value: GetElements) -> None:
        self._message = value

    def finish(self) -> None:
        self._overtaker.join(10)


def test_a_clients_next_request_does_not_overtake_those_that_wait_for_the_start() -> None:
    dispatcher = KnownTask(hr.Dataset.range(1000).map(lambda x: x if x else x + 0))
    dispatcher.let.clear()
    with tasks_of(dispatcher) as tasks:
        last = Asked("c", 3)
        overtaken = Overtaken(tasks, 1, last)
        asked = [Asked("c", 0), overtaken, Asked("c", 2)]
        for request in asked:
            tasks.take(request)
        dispatcher.let.set()
        got = [request.elements() for request in (*asked, last)]
        overtaken.finish()
    together = [value for values in got for value in values]
    assert together == list(range(len(together)))


def test_a_plan_is_fetched_once_for_all_tasks_that_read_it() -> None:
    dispatcher = KnownTask(hr.Dataset.range(10))
    with tasks_of(dispatcher) as tasks:
        assert [read(tasks, task_id) for task_id in range(1, 6)] == [10] * 5
    assert dispatcher.fetched == 1
    assert [word.task_id for word in dispatcher.ended] == [1, 2, 3, 4, 5]


def test_of_a_finished_task_nothing_but_its_end_is_kept() -> None:
    rows = np.arange(500_000, dtype=np.float64)
    dispatcher = KnownTask(hr.Dataset.from_tensor_slices(rows).batch(50_000))
    with tasks_of(dispatcher) as tasks:
        read(tasks, 1)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for task_id in range(2, 10):
                assert read(tasks, task_id) == 10
            wait_until(lambda: tasks.is_settled)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        # Eight tasks of 4 MB; what one of them left in a thread that ends just now may be there.
        assert grown < rows.nbytes // 2
        assert ask(tasks, 3, 99, 99).nothing() is True


def test_a_late_request_with_another_ticket_is_refused() -> None:
    with tasks_of(KnownTask(hr.Dataset.range(1))) as tasks:
        read(tasks, 1)
        wait_until(lambda: tasks.is_settled)
        stranger = of(1, 0, ticket="another")
        tasks.take(stranger)
        with pytest.raises(hr.errors.FailedPreconditionError, match="incarnation"):
            stranger.elements()


@pytest.mark.parametrize("error", [SystemExit(1), MemoryError("full"), OSError(24, "EMFILE")])
def test_the_thread_that_starts_tasks_survives_everything(error: BaseException) -> None:
    dispatcher = KnownTask(hr.Dataset.range(3))
    dispatcher.error = error
    with tasks_of(dispatcher) as tasks:
        with pytest.raises(hr.errors.HeadraceError):
            ask(tasks, 1, 0).elements()
        assert read(tasks, 1) == 3


def test_a_task_whose_plan_arrives_damaged_fails_and_its_clients_hear_why() -> None:
    dispatcher = KnownTask(hr.Dataset.range(3))
    dispatcher.get_plan = lambda request: PlanBytes(part=b"?", total=1)  # type: ignore[method-assign]
    with tasks_of(dispatcher) as tasks:
        with pytest.raises(hr.errors.DataLossError, match="arrived damaged"):
            ask(tasks, 1, 0).elements()
        assert ask(tasks, 1, 1, 1).nothing() is True
    (word,) = dispatcher.ended
    assert isinstance(word, FailTask)
    assert "arrived damaged" in word.reason


def test_a_task_that_ends_while_the_dispatcher_is_away_is_reported_later() -> None:
    dispatcher = KnownTask(hr.Dataset.range(3))
    dispatcher.away = True
    with tasks_of(dispatcher) as tasks:
        assert read(tasks, 1) == 3
        dispatcher.away = False
        wait_until(lambda: not tasks.running)
        tasks.report_finished(lambda word: dispatcher.ended.append(word))
    assert [word.task_id for word in dispatcher.ended] == [1]


def test_copies_are_shuffled_differently_on_two_workers() -> None:
    dataset = hr.Dataset.range(1000).shuffle(1000).batch(1000)
    orders = []
    for worker in ("v", "w"):
        dispatcher = KnownTask(dataset)
        connections = Connections(lambda d=dispatcher: d, 10.0)  # type: ignore[arg-type,misc]
        tasks = TaskSet(worker, connections, PlanCache())
        try:
            _, buffers = ask(tasks, 1, 0).answer()
            orders.append(bytes(buffers[-1]))
        finally:
            tasks.close(timeout=SECONDS)
    assert orders[0] != orders[1]


def test_a_task_that_is_asked_for_while_the_worker_drains_ends_at_once() -> None:
    dispatcher = KnownTask(hr.Dataset.range(1 << 40))
    with tasks_of(dispatcher) as tasks:
        tasks.drain()
        assert read(tasks, 1) == 0
        wait_until(lambda: tasks.is_settled)
    assert [type(word) for word in dispatcher.ended] == [FinishTask]


def test_who_asks_a_worker_that_has_stopped_hears_so() -> None:
    with tasks_of(KnownTask(hr.Dataset.range(1))) as tasks:
        tasks.call_off()
        with pytest.raises(hr.errors.CancelledError, match="the worker stops"):
            ask(tasks, 1, 0).elements()
