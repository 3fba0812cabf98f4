"""A worker's session that a test drives by hand; time stands still unless the test moves it."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

from headrace.errors import UnavailableError
from headrace.service.messages import (
    Done,
    GetElements,
    GetPlan,
    GetPlanReply,
    GetSplit,
    GetSplitReply,
    GetTask,
    RegisterWorker,
    RegisterWorkerReply,
    TaskDefinition,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from headrace.service.worker.core import DataWorkerCore
from headrace.service.worker.pending_actions import StartProducer, WorkerActions
from headrace.service.worker.result_batch import ResultBatch

M = TypeVar("M")

PLAN = b"a pickled plan"
INTERVAL = 5.0
TASK_TOKEN = "token"
AWAY = UnavailableError("connection refused")


def definition(
    task_id: int = 1,
    *,
    dealt: bool = False,
    origins: bool = False,
    plan: bytes = PLAN,
    task_token: str = TASK_TOKEN,
) -> TaskDefinition:
    return TaskDefinition(
        task_id=task_id,
        iteration_id=1,
        dataset_id="1",
        digest=hashlib.sha256(plan).digest(),
        epoch=(0,),
        seed=1,
        task_token=task_token,
        assigns_splits=dealt,
        has_element_ids=origins,
    )


def portion(first: int, count: int = 1, **fields: Any) -> ResultBatch:
    """Return a portion, of as many bytes as elements unless `size` says how many."""
    return ResultBatch(first_element=first, num_elements=count, **{"size": count, **fields})


def units(first: int, count: int = 1) -> ResultBatch:
    """Return a portion that is so many units, an element each."""
    return portion(
        first, count, done_from=first, done_to=first + count, delivered_end=first + count
    )


class Driven:
    """A session with what it wanted so far."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self._ids = iter(f"w{n}" for n in range(1, 100))
        self.session: DataWorkerCore[str] = DataWorkerCore(
            "h:1",
            "d:1",
            self.now,
            new_id=lambda: next(self._ids),
            **{"random": lambda: 0.0, **options},
        )
        self.calls: list[Any] = []
        """All calls, in order."""
        self.answers: dict[str, Any] = {}
        """By request: what answered it."""
        self.starts: list[StartProducer] = []
        self.warnings: list[str] = []
        self.wake_in = 0.0
        self.over = False
        self._requests = 0
        self.act()

    # --- acting ---------------------------------------------------------------------------------

    def act(self, after: float = 0.0) -> WorkerActions[str]:
        """Let so many seconds pass, and act."""
        self.now += after
        actions = self.session.act(self.now)
        self.calls += actions.calls
        for request, content in actions.replies:
            assert request not in self.answers, f"{request} was answered twice"
            self.answers[request] = content
        self.starts += actions.starts
        self.warnings += actions.warnings
        self.wake_in, self.over = actions.wake_in, actions.is_finished
        return actions

    def pass_time(self, seconds: float) -> list[Any]:
        """Let time pass as a shell does, which acts when it is asked to; return the calls made."""
        before, until = len(self.calls), self.now + seconds
        while not self.over and self.now + self.wake_in <= until:
            self.act(self.wake_in)
        self.act(until - self.now)
        return self.calls[before:]

    # --- the dispatcher -------------------------------------------------------------------------

    def of(self, kind: type[M]) -> list[M]:
        """Return all calls of a kind so far."""
        return [call for call in self.calls if isinstance(call, kind)]

    def say(self, kind: type, answer: Any) -> WorkerActions[str]:
        """Answer the last call of a kind."""
        self.session.reply_received(self.of(kind)[-1], answer, self.now)
        return self.act()

    def registered(self, incarnation: str = "first") -> Driven:
        """Let the dispatcher take the worker."""
        self.say(
            RegisterWorker,
            RegisterWorkerReply(heartbeat_interval=INTERVAL, dispatcher_id=incarnation),
        )
        return self

    def beat(self, *to_delete: int, incarnation: str = "first") -> WorkerActions[str]:
        """Let a heartbeat be due, and answer it."""
        before = len(self.of(WorkerHeartbeat))
        self.pass_time(INTERVAL)
        assert len(self.of(WorkerHeartbeat)) > before
        update = WorkerHeartbeatReply(tasks_to_delete=to_delete, dispatcher_id=incarnation)
        return self.say(WorkerHeartbeat, update)

    def defines(self, found: TaskDefinition, plan: bytes = PLAN) -> WorkerActions[str]:
        """Let the dispatcher say what a task is, and its plan if it is asked for that."""
        before = len(self.of(GetPlan))
        actions = self.say(GetTask, found)
        if len(self.of(GetPlan)) > before:
            actions = self.say(GetPlan, GetPlanReply(chunk=plan, total_bytes=len(plan)))
        return actions

    def grants(self, start: int, stop: int, **fields: Any) -> WorkerActions[str]:
        """Answer the last request for units."""
        return self.say(GetSplit, GetSplitReply(start=start, stop=stop, **fields))

    def done(self, kind: type) -> WorkerActions[str]:
        """Let the dispatcher take note of the last call of a kind."""
        return self.say(kind, Done())

    # --- clients and producers ------------------------------------------------------------------

    def ask(
        self,
        client: str = "a",
        number: int = 0,
        acknowledged: int | None = None,
        *,
        task_id: int = 1,
        task_token: str = TASK_TOKEN,
    ) -> str:
        """Ask for elements, by default after all before were acknowledged; return the request."""
        self._requests += 1
        request = f"{client}{number} ({self._requests})"
        message = GetElements(
            task_id=task_id,
            task_token=task_token,
            client_id=client,
            request_number=number,
            acknowledged=number if acknowledged is None else acknowledged,
        )
        self.session.request_received(request, message, self.now)
        self.act()
        return request

    def begin(self, *, dealt: bool = False, origins: bool = False, task_id: int = 1) -> int:
        """Begin a task with a first request; return its producer."""
        self.ask(task_id=task_id)
        self.defines(definition(task_id, dealt=dealt, origins=origins))
        return self.starts[-1].producer

    def produce(self, producer: int, *portions: ResultBatch) -> WorkerActions[str]:
        """Let a producer make portions."""
        for each in portions:
            self.session.tasks.batch_produced(producer, each, self.now)
        return self.act()

    def need(self, producer: int) -> WorkerActions[str]:
        """Let a producer ask for units."""
        self.session.tasks.splits_needed(producer, self.now)
        return self.act()

    def end(self, producer: int, failure: str | None = None) -> WorkerActions[str]:
        """Let a producer end."""
        self.session.tasks.producer_ended(producer, failure, self.now)
        return self.act()
