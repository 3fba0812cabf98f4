"""A worker's session: who it is to the dispatcher, its tasks, its end; without thread or clock.

    answered                          what the dispatcher said to a call, or that it is not there
    requested                         a client asks for elements
    produced, needs_units, ended      what producers do
    drain, stop                       what the owner wants
    act(now) -> Actions               what is to be sent, answered, started, granted and said now

Rule 1. A call is repeated until it is answered, so that nothing depends on a connection that holds.
Rule 2. A worker registers under a new id each time; the tasks of an earlier id are called off.
Rule 3. A worker that drains takes no units and delivers what it has; one that stops hands back
        what nobody was given, and says that it has left. A second later it is over in any case.
Rule 4. Whoever waits for ten seconds says for what. Time in which the worker itself did not run
        does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from headrace.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    HeadraceError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.service.messages import (
    CommitFiles,
    DispatcherReply,
    DispatcherRequest,
    DrainWorker,
    FailTask,
    FinishTask,
    GetElements,
    GetPlan,
    GetSplit,
    GetSplitReply,
    GetTask,
    RegisterWorker,
    RegisterWorkerReply,
    ReportDepartedClient,
    ReturnSplits,
    TaskActivity,
    UnregisterWorker,
    WorkerHeartbeat,
    WorkerHeartbeatReply,
)
from headrace.service.worker.agenda import Actions, Agenda, Calls
from headrace.service.worker.failure import describe
from headrace.service.worker.hand_out import Bounds, ReadyByTask
from headrace.service.worker.leaving import Leaving, Phase, Undelivered
from headrace.service.worker.plans import PlanCache
from headrace.service.worker.registration import Registration
from headrace.service.worker.task_table import TaskTable
from headrace.serving.call import reply_type

__all__ = ["Session"]

R = TypeVar("R")

_LOST = (UnavailableError, DeadlineExceededError, UnauthenticatedError)


class Session(Generic[R]):
    """What one worker knows. `R` is whatever stands for a client's request.

    Every `now` is the time in seconds of one steady clock. Nothing is done before `act` is called,
    which is to happen after every event, and when the time that it last named has passed.

    Args:
        address: Where clients reach the worker.
        dispatcher: The dispatcher's address, for messages.
        now: The time.
        new_id: Returns another id each time that the worker registers.
        chance: Returns a number of 0 <= x < 1, another one each time.
        tags: See `WorkerConfig.worker_tags`.
        heartbeat_interval: Seconds; None: what the dispatcher wishes.
        patience: Seconds without an answer of the dispatcher after which what waits for one fails.
        bounds: How much of a task may be kept.
        plans: Where plans are kept.
        activity: Returns what changed of the work on tasks since it was asked last; it is given
            what of each waits for clients.

    Attributes:
        address: Where clients reach the worker.
        tasks: Its tasks, which hear of requests, portions and ends.
    """

    def __init__(
        self,
        address: str,
        dispatcher: str,
        now: float,
        *,
        new_id: Callable[[], str],
        chance: Callable[[], float],
        tags: tuple[str, ...] = (),
        heartbeat_interval: float | None = None,
        patience: float = 3600.0,
        bounds: Bounds | None = None,
        plans: PlanCache | None = None,
        activity: Callable[[ReadyByTask], tuple[TaskActivity, ...]] | None = None,
    ) -> None:
        self.address = address
        self._activity = activity
        self._dispatcher = dispatcher
        self._patience = patience
        self._calls = Calls(patience, now, chance)
        self._agenda: Agenda[R] = Agenda(self._calls)
        self._registration = Registration(address, tags, new_id, heartbeat_interval)
        self.tasks: TaskTable[R] = TaskTable(self._agenda, plans or PlanCache(), bounds)
        self._leaving = Leaving(address, dispatcher)
        self._failure: HeadraceError | None = None
        self._last_loss = ""
        self._register(now)

    # --- what is the case -----------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        """Whether the dispatcher knows this worker, as far as it said."""
        return self._registration.is_registered

    @property
    def failure(self) -> HeadraceError | None:
        """Why the worker could not register for the first time; the session is over with it."""
        return self._failure

    # --- the dispatcher -------------------------------------------------------------------------

    def answered(
        self, asked: DispatcherRequest, answer: DispatcherReply | Exception, now: float
    ) -> None:
        """Take what the dispatcher said to a call, or the error in its place.

        An answer that nobody waits for (it came late, or twice) changes nothing. One that is lost
        need not be reported; if it is known to be lost, `UnavailableError` says so sooner.
        """
        if isinstance(asked, RegisterWorker) and isinstance(answer, AbortedError):
            # It waits for a place in the fixed list of workers.
            self._calls.heard(now)
            self._lost(asked, answer, now)
        elif isinstance(answer, _LOST) and not self._is_turned_away(asked, answer):
            self._lost(asked, answer, now)
        elif self._calls.answered(asked, now):
            self._leaving.is_hopeless = False
            self._hear(asked, answer, now)

    def _is_turned_away(self, asked: DispatcherRequest, answer: Exception) -> bool:
        """Whether the dispatcher does not let the worker in, which never was."""
        first = isinstance(asked, RegisterWorker) and not self._registration.was_ever
        return first and isinstance(answer, UnauthenticatedError)

    def _lost(self, asked: DispatcherRequest, error: Exception, now: float) -> None:
        losses = self._calls.lost(asked, now)
        if not losses:
            return
        self._last_loss = f" The last try: {error}"
        self._agenda.at(self._calls.next_at)
        if isinstance(asked, FinishTask | FailTask):
            # It is said again; the clients need not wait for that.
            self.tasks.reported(asked, error, now)
        # When the worker leaves, there is no time to wait for somebody to come back.
        self._leaving.is_hopeless |= losses > 1

    def _hear(self, asked: DispatcherRequest, answer: Any, now: float) -> None:
        expected = reply_type(type(asked))
        if not isinstance(answer, expected | Exception):
            answer = HeadraceError(
                f"the dispatcher at {self._dispatcher} answered {type(asked).__name__} with "
                f"{type(answer).__name__}; is it of another version of Headrace?"
            )
        _HEAR[type(asked)](self, asked, answer, now)

    # --- registration ---------------------------------------------------------------------------

    def _register(self, now: float) -> None:
        message = self._registration.begin()
        self.tasks.clear(message.worker_id)
        self._agenda.ask(message, now)

    def _registered(
        self, asked: RegisterWorker, answer: RegisterWorkerReply | Exception, now: float
    ) -> None:
        if isinstance(answer, RegisterWorkerReply):
            self._registration.registered(answer, now)
            self.tasks.open(now)
        elif self._registration.was_ever:
            self._agenda.actions.warnings.append(
                f"the worker at {self.address} cannot register again with the dispatcher at "
                f"{self._dispatcher}: {describe(answer)}"
            )
            self._registration.refused(now)
            self.tasks.not_taken()
        else:
            self._failure = HeadraceError(describe(answer))
            if isinstance(answer, HeadraceError):
                self._failure = answer
            self._end()
        self._agenda.at(self._registration.due_at)

    def _beaten(
        self, asked: WorkerHeartbeat, answer: WorkerHeartbeatReply | Exception, now: float
    ) -> None:
        self._registration.beaten(answer, now)
        self._agenda.at(self._registration.due_at)
        if isinstance(answer, WorkerHeartbeatReply):
            is_known = self._registration.is_known_to(answer)
        else:
            is_known = not isinstance(answer, NotFoundError)
        if not is_known:
            if self._leaving.is_wished:
                # Its units went to others, and no client comes any more.
                self.stop(now)
            else:
                self._register_again(now)
        elif isinstance(answer, WorkerHeartbeatReply):
            for task_id, client_id in answer.departed_clients:
                self.tasks.departed(task_id, client_id, now)
            for task_id in answer.tasks_to_delete:
                self.tasks.delete(task_id)
            if not self._leaving.is_wished:
                for task_id in answer.tasks_to_start:
                    self.tasks.begin(task_id, now)

    def _register_again(self, now: float) -> None:
        self._agenda.actions.warnings.append(
            f"the dispatcher at {self._dispatcher} does not know this worker any more (it was "
            "restarted, or took the worker for lost); registering again"
        )
        self.tasks.call_off(
            CancelledError(
                f"the worker at {self.address} registers again: the dispatcher does not know "
                "what it worked on before"
            )
        )
        self._calls.forget()
        self._register(now)

    # --- tasks ----------------------------------------------------------------------------------

    def requested(self, request: R, message: GetElements, now: float) -> None:
        """Take a client's request; it is answered once, now or later."""
        if self._leaving.has_begun and message.task_id not in self.tasks:
            self._agenda.actions.answers.append((request, _stops()))
        else:
            self.tasks.requested(request, message, now)

    def _granted(self, asked: GetSplit, answer: GetSplitReply | Exception, now: float) -> None:
        if not self.tasks.granted(asked, answer, now):
            # Perhaps it is the worker that the dispatcher does not know.
            self._registration.due_at = now
            self._agenda.at(now)

    # --- leaving --------------------------------------------------------------------------------

    def drain(self, seconds: float, now: float) -> None:
        """Deliver what there is, for so many seconds at most, then stop."""
        if self._leaving.is_wished:
            return
        if not self.is_registered:
            self.stop(now)
            return
        self._leaving.drain(seconds, now)
        self._agenda.ask(DrainWorker(worker_id=self._registration.worker_id), now)
        self.tasks.cut(now)

    def stop(self, now: float) -> None:
        """Hand back what was not delivered, and leave; over within a second."""
        if self._leaving.has_begun:
            return
        self._leaving.settle(now)
        self.tasks.call_off(_stops())
        self._registration.due_at = math.inf
        # Units that are granted now are handed back, and the ends of tasks are worth saying.
        self._calls.forget(lambda call: not isinstance(call, GetSplit | FinishTask | FailTask))

    def _go_on_leaving(self, now: float) -> None:
        leaving, calls = self._leaving, self._calls
        if leaving.phase is Phase.DRAINING:
            unsettled = self.tasks.unsettled
            self._agenda.actions.warnings += leaving.wait_to_warn_of(unsettled, now)
            if not unsettled or leaving.is_due(now):
                self.stop(now)
        if leaving.phase is Phase.SETTLING and (leaving.is_due(now) or not calls.of(GetSplit)):
            calls.forget(lambda call: isinstance(call, GetSplit))
            left, words = self.tasks.undelivered()
            leaving.hand_back(Undelivered.of(left, words))
            for word in words:
                self._agenda.ask(word, now)
        if leaving.phase is Phase.HANDING_BACK and not calls.of(ReturnSplits, FinishTask, FailTask):
            leaving.phase = Phase.SAYING_SO
            self._agenda.ask(UnregisterWorker(worker_id=self._registration.worker_id), now)
        has_said_so = leaving.phase is Phase.SAYING_SO and not calls.of(UnregisterWorker)
        if has_said_so or (leaving.has_begun and leaving.is_due(now)):
            self._end()
        self._agenda.at(leaving.next_at)

    def _end(self) -> None:
        self._agenda.actions.warnings += self._leaving.end()
        self._calls.forget()
        self._registration.due_at = math.inf

    # --- acting ---------------------------------------------------------------------------------

    def act(self, now: float) -> Actions[R]:
        """Return what is to be done now. What was returned counts as done."""
        if self._agenda.is_due(now):
            self._look(now)
        if self._leaving.is_wished and not self._leaving.is_over:
            self._go_on_leaving(now)
        actions = self._agenda.take(now)
        if self._leaving.is_over:
            actions.over, actions.wake_in = True, math.inf
        return actions

    def _look(self, now: float) -> None:
        """Do what is due by time alone."""
        agenda, registration = self._agenda, self._registration
        if now >= registration.due_at:
            if registration.is_registered:
                activity = () if self._activity is None else self._activity(self.tasks.ready)
                agenda.ask(registration.beat(self.tasks.running, activity), now)
                self.tasks.forget_silent(now)
            else:
                self._register(now)
        self.tasks.look(now)
        for call in self._calls.give_up(now):
            self._give_up(call, now)
        agenda.actions.calls += self._calls.due(now)
        silence = self._calls.silence_to_warn_of(now)
        if silence:
            agenda.actions.warnings.append(
                f"the dispatcher at {self._dispatcher} has not answered the worker at "
                f"{self.address} for {silence:.0f} s: is it running, and is this its address?"
            )
        refusal = self._calls.refusal_to_warn_of(now)
        if refusal is not None:
            agenda.actions.warnings.append(
                f"the dispatcher at {self._dispatcher} answers the worker at {self.address}, but "
                f"not its {type(refusal[0]).__name__}, for {refusal[1]:.0f} s.{self._last_loss}"
            )
        agenda.at(min(registration.due_at, self._calls.next_at))

    def _give_up(self, asked: DispatcherRequest, now: float) -> None:
        """Let those who wait know that nobody answers; what nobody waits for is said again."""
        registers = isinstance(asked, RegisterWorker) and not self._registration.was_ever
        if not (registers or isinstance(asked, GetTask | GetPlan | GetSplit)):
            self._agenda.ask(asked, now)
            return
        wish = f", with which the worker at {self.address} wants to register," * registers
        error = UnavailableError(
            f"the dispatcher at {self._dispatcher}{wish} did not answer for {self._patience:g} s: "
            f"is it running, and is this its address?{self._last_loss}"
        )
        self._hear(asked, error, now)


def _stops() -> CancelledError:
    return CancelledError("the worker stops")


def _heard(session: Session[Any], asked: Any, answer: Any, now: float) -> None:
    """Take note of an answer that was only waited for."""


_HEAR: dict[type, Callable[[Session[Any], Any, Any, float], None]] = {
    RegisterWorker: Session._registered,
    WorkerHeartbeat: Session._beaten,
    GetTask: lambda session, *answer: session.tasks.defined(*answer),
    GetPlan: lambda session, *answer: session.tasks.fetched(*answer),
    GetSplit: Session._granted,
    # One that the dispatcher has no use for (its iteration was closed) is answered, too.
    FinishTask: lambda session, *answer: session.tasks.reported(*answer),
    FailTask: lambda session, *answer: session.tasks.reported(*answer),
    ReportDepartedClient: lambda session, *answer: session.tasks.dropped(*answer),
    CommitFiles: lambda session, *answer: session.tasks.files_heard(*answer),
    ReturnSplits: _heard,
    DrainWorker: _heard,
    UnregisterWorker: _heard,
}
"""What is to be done with the answer to a call."""
