"""Drives a worker's core by hand; time passes only when the test advances it."""

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
UNREACHABLE = UnavailableError("connection refused")


def definition(
    task_id: int = 1,
    *,
    assigns_splits: bool = False,
    with_ids: bool = False,
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
        assigns_splits=assigns_splits,
        has_element_ids=with_ids,
    )


def batch(first: int, count: int = 1, **fields: Any) -> ResultBatch:
    """Return a batch; its size in bytes is its number of elements unless `size` is given."""
    return ResultBatch(first_element=first, num_elements=count, **{"size": count, **fields})


def split_batch(first: int, count: int = 1) -> ResultBatch:
    """Return a batch of `count` splits with one element each."""
    return batch(first, count, done_from=first, done_to=first + count, delivered_end=first + count)


class CoreDriver:
    """A core and its recorded actions."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self._ids = iter(f"w{n}" for n in range(1, 100))
        self.core: DataWorkerCore[str] = DataWorkerCore(
            "h:1",
            "d:1",
            self.now,
            new_id=lambda: next(self._ids),
            **{"random": lambda: 0.0, **options},
        )
        self.calls: list[Any] = []
        """All calls to the dispatcher, in order."""
        self.replies: dict[str, Any] = {}
        """Replies by request."""
        self.starts: list[StartProducer] = []
        self.warnings: list[str] = []
        self.wake_in = 0.0
        self.is_finished = False
        self._requests = 0
        self.act()

    # --- actions --------------------------------------------------------------------------------

    def act(self, after: float = 0.0) -> WorkerActions[str]:
        """Advance the time, and act."""
        self.now += after
        actions = self.core.act(self.now)
        self.calls += actions.calls
        for request, content in actions.replies:
            assert request not in self.replies, f"{request} was answered twice"
            self.replies[request] = content
        self.starts += actions.starts
        self.warnings += actions.warnings
        self.wake_in, self.is_finished = actions.wake_in, actions.is_finished
        return actions

    def pass_time(self, seconds: float) -> list[Any]:
        """Advance the time, acting whenever a check is due; return the calls made."""
        before, until = len(self.calls), self.now + seconds
        while not self.is_finished and self.now + self.wake_in <= until:
            self.act(self.wake_in)
        self.act(until - self.now)
        return self.calls[before:]

    # --- the dispatcher -------------------------------------------------------------------------

    def calls_of(self, kind: type[M]) -> list[M]:
        """Return all calls of a type so far."""
        return [call for call in self.calls if isinstance(call, kind)]

    def reply(self, kind: type, answer: Any) -> WorkerActions[str]:
        """Reply to the last call of a type."""
        self.core.reply_received(self.calls_of(kind)[-1], answer, self.now)
        return self.act()

    def register(self, dispatcher_id: str = "first") -> CoreDriver:
        """Accept the worker's registration."""
        self.reply(
            RegisterWorker,
            RegisterWorkerReply(heartbeat_interval=INTERVAL, dispatcher_id=dispatcher_id),
        )
        return self

    def heartbeat(self, *to_delete: int, dispatcher_id: str = "first") -> WorkerActions[str]:
        """Wait for the next heartbeat and reply to it."""
        before = len(self.calls_of(WorkerHeartbeat))
        self.pass_time(INTERVAL)
        assert len(self.calls_of(WorkerHeartbeat)) > before
        update = WorkerHeartbeatReply(tasks_to_delete=to_delete, dispatcher_id=dispatcher_id)
        return self.reply(WorkerHeartbeat, update)

    def define_task(self, found: TaskDefinition, plan: bytes = PLAN) -> WorkerActions[str]:
        """Reply with a task's definition, and with its plan if that is requested."""
        before = len(self.calls_of(GetPlan))
        actions = self.reply(GetTask, found)
        if len(self.calls_of(GetPlan)) > before:
            actions = self.reply(GetPlan, GetPlanReply(chunk=plan, total_bytes=len(plan)))
        return actions

    def grant_splits(self, start: int, stop: int, **fields: Any) -> WorkerActions[str]:
        """Reply to the last split request."""
        return self.reply(GetSplit, GetSplitReply(start=start, stop=stop, **fields))

    def acknowledge(self, kind: type) -> WorkerActions[str]:
        """Acknowledge the last call of a type."""
        return self.reply(kind, Done())

    # --- clients and producers ------------------------------------------------------------------

    def request(
        self,
        client: str = "a",
        number: int = 0,
        acknowledged: int | None = None,
        *,
        task_id: int = 1,
        task_token: str = TASK_TOKEN,
    ) -> str:
        """Send a request, by default acknowledging all earlier replies; return its name."""
        self._requests += 1
        request = f"{client}{number} ({self._requests})"
        message = GetElements(
            task_id=task_id,
            task_token=task_token,
            client_id=client,
            request_number=number,
            acknowledged=number if acknowledged is None else acknowledged,
        )
        self.core.request_received(request, message, self.now)
        self.act()
        return request

    def start_task(
        self, *, assigns_splits: bool = False, with_ids: bool = False, task_id: int = 1
    ) -> int:
        """Start a task with a first request; return the number of its producer."""
        self.request(task_id=task_id)
        self.define_task(definition(task_id, assigns_splits=assigns_splits, with_ids=with_ids))
        return self.starts[-1].producer

    def produce(self, producer: int, *batches: ResultBatch) -> WorkerActions[str]:
        """Output batches of a producer."""
        for each in batches:
            self.core.tasks.batch_produced(producer, each, self.now)
        return self.act()

    def need_splits(self, producer: int) -> WorkerActions[str]:
        """Let a producer wait for splits."""
        self.core.tasks.splits_needed(producer, self.now)
        return self.act()

    def end_producer(self, producer: int, failure: str | None = None) -> WorkerActions[str]:
        """End a producer."""
        self.core.tasks.producer_ended(producer, failure, self.now)
        return self.act()
