"""The tasks of a worker, from the first request for one to its end. No thread, lock or clock.

Rule 1. A task begins with the first request for it. Requests that come before its plan is here, or
        before the worker is registered, are handed on in the order in which they came. None of them
        is refused meanwhile: those after it would get what was due to it.
Rule 2. The end of a task is said to the dispatcher until that has heard of it.
Rule 3. Of a task that is over its number and ticket are remembered: of a finished one, so that a
        late request gets its end; of a deleted one, so that it gets an explanation.
Rule 4. A task whose units the dispatcher does not say is called off: what became of it, the
        dispatcher says to its clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.messages import (
    CommitFiles,
    Done,
    FailTask,
    FinishTask,
    GetElements,
    GetElementsReply,
    GetPlan,
    GetPlanReply,
    GetSplit,
    GetSplitReply,
    GetTask,
    ReportDepartedClient,
    ReturnSplits,
    TaskDefinition,
)
from headrace.service.ranges import Ranges
from headrace.service.worker.agenda import Agenda, Start
from headrace.service.worker.failure import describe, for_clients
from headrace.service.worker.hand_out import Bounds, Left, Ready
from headrace.service.worker.plans import Lookups, PlanCache, Plans
from headrace.service.worker.portion import Portion
from headrace.service.worker.task import Task, is_ticket, was_deleted, wrong_ticket
from headrace.service.worker.ways import hand_out_of

__all__ = ["TaskTable"]

R = TypeVar("R")

_REMEMBERED = 10_000
_REPORT_SECONDS = 1.0
"""How long clients wait for the end because the dispatcher has not heard of it."""


@dataclass(frozen=True)
class _Gone:
    """How a task that is over ended."""

    ticket: str
    """Empty: not known."""
    is_finished: bool
    """False: deleted."""
    received: Ranges = ()
    """Units that its clients have (`Task.received`)."""


class TaskTable(Generic[R]):
    """All tasks of a registration, which begins with `clear`.

    Args:
        agenda: Where to write what is to be done.
        plans: Where plans are kept.
        bounds: How much of a task may be kept.
    """

    def __init__(self, agenda: Agenda[R], plans: PlanCache, bounds: Bounds | None) -> None:
        self._agenda = agenda
        self._bounds = bounds
        self._worker_id = ""
        self._is_registered = False
        self._lookups: Lookups[R] = Lookups(plans)
        self._tasks: dict[int, Task[R]] = {}
        #: The tasks whose producers run, by number of the producer.
        self._producers: dict[int, Task[R]] = {}
        self._started = 0
        #: The last tasks that are over, the oldest first.
        self._gone: dict[int, _Gone] = {}
        #: Whether tasks end where they are.
        self._is_cut = False

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers of the tasks that are not finished."""
        return tuple(task_id for task_id, task in self._tasks.items() if not task.is_finished)

    @property
    def ready(self) -> dict[int, Ready]:
        """What of each task is made and waits for clients."""
        return {task_id: task.ready for task_id, task in self._tasks.items()}

    @property
    def unsettled(self) -> int:
        """Number of tasks that somebody may still take something of."""
        return sum(not task.is_deserted for task in self._tasks.values()) + len(self._lookups)

    # --- clients --------------------------------------------------------------------------------

    def requested(self, request: R, message: GetElements, now: float) -> None:
        """Take a client's request."""
        task_id = message.task_id
        task, gone = self._tasks.get(task_id), self._gone.get(task_id)
        if task is not None:
            task.requested(request, message, now, self._agenda.actions)
            self._look_after(task, now)
        elif gone is not None:
            self._answer_late(request, message, gone)
        elif self._lookups.park(request, message) and self._is_registered:
            self._agenda.ask(GetTask(worker_id=self._worker_id, task_id=task_id), now)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def _answer_late(self, request: R, message: GetElements, gone: _Gone) -> None:
        task_id, answers = message.task_id, self._agenda.actions.answers
        if gone.ticket and not is_ticket(message.ticket, gone.ticket):
            answers.append((request, wrong_ticket(task_id)))
        elif gone.is_finished:
            answers.append(
                (request, GetElementsReply(first_element=0, num_elements=0, end_of_task=True))
            )
        else:
            answers.append((request, _not_here(task_id)))

    def _refuse(self, requests: Iterable[tuple[R, GetElements]], why: Exception) -> None:
        self._agenda.actions.answers += [(request, why) for request, _ in requests]

    # --- the beginning of tasks -----------------------------------------------------------------

    def begin(self, task_id: int, now: float) -> None:
        """Begin a task that no client asks for."""
        if task_id not in self._tasks and task_id not in self._gone and self._lookups.add(task_id):
            self._agenda.ask(GetTask(worker_id=self._worker_id, task_id=task_id), now)

    def defined(self, asked: GetTask, answer: TaskDefinition | Exception, now: float) -> None:
        """Take what the dispatcher says of a task."""
        if isinstance(answer, NotFoundError):
            self._refuse(self._lookups.release(asked.task_id), _not_here(asked.task_id))
        elif isinstance(answer, Exception):
            self._refuse(self._lookups.release(asked.task_id), for_clients(answer))
        elif asked.task_id in self._lookups:
            self._look_up(answer, now)

    def fetched(self, asked: GetPlan, answer: GetPlanReply | Exception, now: float) -> None:
        """Take a part of a plan."""
        try:
            if isinstance(answer, Exception):
                raise answer
            found = self._lookups.fetched(asked, answer)
        except Exception as error:
            for definition in self._lookups.take_waiting(asked.digest):
                self._cannot_start(definition, error, now)
            return
        if isinstance(found, GetPlan):
            self._agenda.ask(found, now)
        else:
            for definition in found:
                self._look_up(definition, now)

    def _look_up(self, definition: TaskDefinition, now: float) -> None:
        """Start a task once its plans are here."""
        found = self._lookups.defined(definition)
        if isinstance(found, GetPlan):
            self._agenda.ask(found, now)
        elif found is not None:
            self._start(definition, found, now)

    def _cannot_start(self, definition: TaskDefinition, error: Exception, now: float) -> None:
        task_id = definition.task_id
        waiting = self._lookups.release(task_id)
        if isinstance(error, UnavailableError):
            self._refuse(waiting, error)
        elif isinstance(error, NotFoundError):
            self._refuse(waiting, _not_here(task_id))
        else:
            self._refuse(waiting, for_clients(error))
            self._remember(task_id, _Gone(definition.task_token, is_finished=True))
            failed = FailTask(
                worker_id=self._worker_id,
                task_id=task_id,
                task_token=definition.task_token,
                reason=f"it cannot be started: {describe(error)}",
            )
            self._agenda.ask(failed, now)

    def _start(self, definition: TaskDefinition, plans: Plans, now: float) -> None:
        try:
            hand_out = hand_out_of(definition, self._bounds)
        except FailedPreconditionError as error:
            self._cannot_start(definition, error, now)
            return
        waiting = self._lookups.release(definition.task_id)
        self._started += 1
        task: Task[R] = Task(definition, self._worker_id, self._started, hand_out)
        self._tasks[task.task_id] = self._producers[task.producer] = task
        actions = self._agenda.actions
        actions.starts.append(
            Start(
                producer=task.producer,
                definition=definition,
                plan=plans.plan,
                cost_plan=plans.cost_plan,
                portion_bytes=hand_out.portion_bytes,
            )
        )
        for request, message in waiting:
            task.requested(request, message, now, actions)
        if self._is_cut:
            task.cut(actions)

    # --- producers ------------------------------------------------------------------------------

    def produced(self, producer: int, portion: Portion, now: float) -> None:
        """Take a portion."""
        task = self._producers.get(producer)
        if task is not None:
            task.produced(portion, self._agenda.actions)
            self._say_files(task, now)

    def needs_units(self, producer: int, now: float) -> None:
        """Take note that a producer waits for units."""
        task = self._producers.get(producer)
        if task is not None:
            task.needs_units(now, self._agenda.actions)
            self._look_after(task, now)

    def ended(self, producer: int, failure: str | None, now: float) -> None:
        """Take note that a producer makes no more portions, and why, if its task failed."""
        task = self._producers.pop(producer, None)
        if task is not None:
            task.ended(failure, self._agenda.actions)
            self._look_after(task, now)

    # --- tasks that run -------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Do what is due by time alone."""
        for task in list(self._tasks.values()):
            if now >= task.finish_at:
                task.finish(self._agenda.actions)
            self._look_after(task, now)

    def _look_after(self, task: Task[R], now: float) -> None:
        """Do what is due for a task: ask for units, report its end, forget it."""
        self._say_files(task, now)
        asked = task.ask_for_units(now)
        if asked is not None:
            self._agenda.ask(asked, now)
        if task.may_report:
            task.finish_at = now + _REPORT_SECONDS
            self._agenda.ask(task.report(), now)
        if task.is_over and self._tasks.get(task.task_id) is task:
            del self._tasks[task.task_id]
            self._remember(
                task.task_id, _Gone(task.ticket, is_finished=True, received=task.received)
            )
        self._agenda.at(min(task.ask_at, task.finish_at))

    def _say_files(self, task: Task[R], now: float) -> None:
        files = task.files_to_say()
        if files is not None:
            self._agenda.ask(files, now)

    def files_heard(self, asked: CommitFiles, answer: Done | Exception, now: float) -> None:
        """Take note that files count, or that the dispatcher does not want them."""
        task = self._tasks.get(asked.task_id)
        if task is None:
            return
        if not isinstance(answer, Exception):
            task.files_heard(asked.report_number, self._agenda.actions)
            self._look_after(task, now)
            return
        self.delete(task.task_id)
        if not isinstance(answer, NotFoundError | FailedPreconditionError):
            self._agenda.ask(task.failed(f"its files do not count: {describe(answer)}"), now)

    def granted(self, asked: GetSplit, answer: GetSplitReply | Exception, now: float) -> bool:
        """Take units; return whether the dispatcher still knows the task, as far as it said."""
        task = self._tasks.get(asked.task_id)
        if task is None:
            return True
        if isinstance(answer, GetSplitReply):
            task.granted(asked, answer, now, self._agenda.actions)
            self._look_after(task, now)
        elif task.left is None:
            self.delete(task.task_id)
            if not isinstance(answer, NotFoundError | FailedPreconditionError):
                self._agenda.ask(task.failed(f"it gets no units: {describe(answer)}"), now)
            return False
        return True

    def reported(self, asked: FinishTask | FailTask, answer: Done | Exception, now: float) -> None:
        """Take note that the dispatcher heard of a task's end, or that it cannot hear now."""
        task = self._tasks.get(asked.task_id)
        if task is not None and task.finish_at < math.inf:
            task.finish(self._agenda.actions)
            self._look_after(task, now)

    def departed(self, task_id: int, client_id: str, now: float) -> None:
        """Say to the dispatcher what a client that is gone was sent and had not acknowledged."""
        task, gone = self._tasks.get(task_id), self._gone.get(task_id)
        if task is not None:
            self._agenda.ask(task.depart(client_id, self._agenda.actions), now)
            self._look_after(task, now)
        elif gone is not None:
            nothing = ReportDepartedClient(
                worker_id=self._worker_id,
                task_id=task_id,
                task_token=gone.ticket,
                client_id=client_id,
                unacknowledged=(),
                possibly_lost=(),
                delivered=gone.received,
                partially_delivered=gone.received,
            )
            self._agenda.ask(nothing, now)

    def dropped(self, asked: ReportDepartedClient, answer: Done | Exception, now: float) -> None:
        """Take note that the dispatcher has heard of a client that is gone."""
        task = self._tasks.get(asked.task_id)
        if task is not None:
            task.forget(asked.client_id, self._agenda.actions)
            self._look_after(task, now)

    def forget_silent(self, now: float) -> None:
        """Drop what clients of copies hold that were not heard of for long."""
        for task in list(self._tasks.values()):
            task.forget_silent(now, self._agenda.actions)
            self._look_after(task, now)

    # --- the end of tasks -----------------------------------------------------------------------

    def delete(self, task_id: int) -> None:
        """Call a task off, because the dispatcher wants it no more."""
        self._refuse(self._lookups.release(task_id), _not_here(task_id))
        self._agenda.calls.forget(lambda call: getattr(call, "task_id", None) == task_id)
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self._call_off(task, was_deleted(task_id))
            self._remember(task_id, _Gone(task.ticket, task.is_finished))
        elif task_id not in self._gone:
            self._remember(task_id, _Gone("", is_finished=False))

    def cut(self, now: float) -> None:
        """Let all tasks, also those to come, end where they are."""
        self._is_cut = True
        for task in list(self._tasks.values()):
            task.cut(self._agenda.actions)
            self._look_after(task, now)

    def call_off(self, refusal: Exception) -> None:
        """Call all tasks off."""
        self._refuse(self._lookups.release_all(), refusal)
        for task in self._tasks.values():
            self._call_off(task, refusal)

    def _call_off(self, task: Task[R], refusal: Exception) -> None:
        task.call_off(refusal, self._agenda.actions)
        self._producers.pop(task.producer, None)

    def undelivered(self) -> tuple[list[Left], list[ReturnSplits]]:
        """Return what the tasks had not delivered when they were called off."""
        tasks = list(self._tasks.values())
        left = [task.left for task in tasks if task.left is not None]
        return left, [word for task in tasks if (word := task.hand_back()) is not None]

    def clear(self, worker_id: str) -> None:
        """Forget all tasks: the worker registers under an id. Requests wait until it has."""
        self._worker_id, self._is_registered = worker_id, False
        self._tasks.clear()
        self._gone.clear()

    def open(self, now: float) -> None:
        """Look up what was asked for: the worker is registered."""
        self._is_registered = True
        for task_id in self._lookups:
            self._agenda.ask(GetTask(worker_id=self._worker_id, task_id=task_id), now)

    def not_taken(self) -> None:
        """Refuse what was asked for: the worker was not registered, so it has no tasks for now."""
        for task_id in list(self._lookups):
            self._refuse(self._lookups.release(task_id), _not_here(task_id))

    def _remember(self, task_id: int, gone: _Gone) -> None:
        self._gone[task_id] = gone
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]


def _not_here(task_id: int) -> CancelledError:
    return CancelledError(f"task {task_id} is not on this worker, or has been deleted")
