"""The tasks of a worker: requests that wait for a task to start keep their order."""

from __future__ import annotations

import threading
from typing import Any

import headrace as hr
from headrace.plan.serialize import dump_plan
from headrace.service.config import ShardingPolicy
from headrace.service.messages import Done, GetElements, PlanBytes, TaskDefinition
from headrace.service.worker.task_set import TaskSet
from tests.service.worker.test_task_runner import Asked


class KnownTask:
    """A dispatcher that knows one task, and tells of it when it is let."""

    def __init__(self, dataset: hr.Dataset) -> None:
        self.let = threading.Event()
        self._plan = dump_plan(dataset.plan)

    def get_task(self, request: Any, *, timeout: float) -> TaskDefinition:
        self.let.wait(timeout)
        mode = int(ShardingPolicy.OFF)
        return TaskDefinition(task_id=1, iteration_id=1, dataset_id="1", processing_mode=mode)

    def get_plan(self, request: Any, *, timeout: float) -> PlanBytes:
        return PlanBytes(plan=self._plan)

    def finish_task(self, request: Any, *, timeout: float) -> Done:
        return Done()

    def close(self) -> None:
        return


class Overtaken(Asked):
    """While the task set hands this request on, the client's next one arrives."""

    def __init__(self, tasks: TaskSet, number: int, later: Asked) -> None:
        self._tasks, self._later, self._looked = tasks, later, 0
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
    tasks = TaskSet("w", lambda: dispatcher, 10.0)  # type: ignore[arg-type,return-value]
    try:
        last = Asked("c", 3)
        overtaken = Overtaken(tasks, 1, last)
        asked = [Asked("c", 0), overtaken, Asked("c", 2)]
        for request in asked:
            tasks.take(request)
        dispatcher.let.set()
        got = [request.elements() for request in (*asked, last)]
        overtaken.finish()
    finally:
        tasks.close()
    together = [value for values in got for value in values]
    assert together == list(range(len(together)))
