"""What the sessions of clients have in common: one iteration, read from all of its tasks.

    opened, heard                      what the dispatcher said, or that it did not answer
    answered, disconnected             what became of a request to a worker
    used_up, waiting                   what the consumer does
    act(now) -> Actions                what is to be sent, dropped and said now

A session has no thread, socket or clock. Here is what does not depend on how elements come: the
dispatcher's rhythm (`contact`), the consumer's wait (`waiting`), and pauses of this process.
`session` delivers whatever is there, `round_session` one round after another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    JournalUnavailableError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.client.actions import Actions, Delivery
from headrace.service.client.contact import Contact, Waiting
from headrace.service.client.packing_pace import PackingPace
from headrace.service.client.task import Task
from headrace.service.messages import (
    ClientHeartbeat,
    ClientHeartbeatReply,
    DispatcherReply,
    DispatcherRequest,
    GetElementsReply,
    LostSplits,
    OpenIterationReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)
from headrace.transport.channel import Buffer

__all__ = ["Reading"]

T = TypeVar("T", bound=Task)

_OWN_LATENESS = 2.0
"""Seconds after the time that it named at which the session notices that it is called late."""


class Reading(ABC, Generic[T]):
    """What one client knows of the iteration that it reads.

    Args:
        client_id: Who asks.
        dispatcher: Its address, for messages.
        now: The time, in seconds of a steady clock; so is every other `now`.
        wait_timeout: Seconds without anybody who could deliver, after which waiting is an error.
        codec: What answers may be packed with where the wire is slow; empty: they are not.
    """

    #: What to do where the dispatcher does not know this client.
    _cure: str

    def __init__(
        self,
        client_id: str,
        dispatcher: str,
        now: float,
        *,
        wait_timeout: float,
        codec: str = "",
    ) -> None:
        self.client_id = client_id
        self.pace = PackingPace(codec, now)
        self._dispatcher = dispatcher
        self._contact = Contact(now)
        self._waiting = Waiting(wait_timeout)
        self._waiting.idle(now, is_so=True)
        #: Seconds for which the consumer waited for elements, less the wait that goes on.
        self._waited = 0.0
        #: Tasks that are being read.
        self._open: dict[int, T] = {}
        #: What the dispatcher said last.
        self._known = -1
        #: Tasks of the iteration, with the addresses of their workers.
        self._listed: dict[int, str] = {}
        self._kept: set[int] = set()
        self._finished = False
        self._silent: tuple[str, ...] = ()
        #: Why the dispatcher records nothing, and so assigns nothing; empty: it does.
        self._journal_problem = ""
        self.lost: tuple[LostSplits, ...] = ()
        self.passed_over: tuple[str, ...] = ()
        """Addresses of workers that it is not to read."""
        self.given_up: tuple[tuple[int, int], ...] = ()
        """Units of the stream that are dealt no more, where they come in order."""
        self.helpers: frozenset[int] = frozenset()
        """Tasks that may be asked for what is waited for, as the dispatcher says."""
        #: Tasks that are over, whose connections are still open.
        self._drops: list[int] = []
        self._warnings: list[str] = []
        self.failure: HeadraceError | None = None
        #: When it asked to act again, at the latest.
        self._expected = math.inf

    # --- the dispatcher -----------------------------------------------------------------------

    @abstractmethod
    def opened(self, reply: OpenIterationReply, now: float) -> None:
        """Begin with what the dispatcher answered to `OpenIteration`."""

    def heard(
        self, asked: DispatcherRequest | None, answer: DispatcherReply | Exception, now: float
    ) -> None:
        """Take what the dispatcher said to a call, or the error in its place.

        Args:
            asked: The call; None: it is not known, or it was all that were under way.
            answer: What came.
            now: The time.
        """
        if isinstance(answer, ClientHeartbeatReply):
            self.updated(answer, now)
        elif isinstance(answer, UnavailableError):
            is_journals = isinstance(answer, JournalUnavailableError)
            self._journal_problem = str(answer) if is_journals else ""
            self.unheard(now)
        elif isinstance(asked, ReportDelivery):
            self._settled(asked)
        elif isinstance(asked, ReportUnreachable):
            self._reported(asked.task_id)
            self._contact.hurry()
        elif isinstance(answer, NotFoundError):
            self.fail(
                FailedPreconditionError(
                    f"the dispatcher at {self._dispatcher} does not know this reader any more "
                    f"({answer}): it was restarted without `fault_tolerant_mode`, or this process "
                    f"was not heard from for too long. {self._cure}"
                )
            )
        elif isinstance(answer, HeadraceError):
            self.fail(answer)

    @abstractmethod
    def updated(self, update: ClientHeartbeatReply, now: float) -> None:
        """Take the answer to a heartbeat."""

    @abstractmethod
    def _settled(self, asked: ReportDelivery) -> None:
        """Take note that the dispatcher heard what became of a task."""

    @abstractmethod
    def _reported(self, task_id: int) -> None:
        """Take note that the dispatcher heard that a task's worker cannot be reached."""

    def unheard(self, now: float) -> None:
        """Take note that the dispatcher did not answer a call."""
        self._contact.unheard(now)

    def fail(self, error: HeadraceError) -> None:
        """End with an error: nothing can be read any more."""
        self.failure = self.failure or error

    def _warn_of_attempt(self, address: TaskAddress, lost: str) -> None:
        self._warnings.append(
            f"{lost} was lost (loss {address.attempt}): the worker at "
            f"{address.worker_address} reads it again from the start, and elements come again. If "
            "a function of the dataset ends its process, the workers' logs may say more"
        )

    # --- workers ------------------------------------------------------------------------------

    def measured(self, task_id: int, buffers: Sequence[Buffer], now: float) -> None:
        """Take note of the elements that came with an answer, before it is taken."""

    @abstractmethod
    def answered(
        self,
        task_id: int,
        number: int,
        answer: GetElementsReply | Exception,
        payload: Any,
        now: float,
    ) -> list[Delivery]:
        """Take an answer; return what is to be delivered now that it came.

        Args:
            task_id: Whose.
            number: The number of the request.
            answer: What the worker said; an error is about the request, not of an element.
            payload: What came with it, for the consumer; an element's error, to raise.
            now: The time.
        """

    def due(self, now: float) -> list[Delivery]:
        """Return what is to be delivered now, though no answer came."""
        return []

    @abstractmethod
    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        """Take note that the connection to a task's worker was lost, or could not be made."""

    @property
    def reading(self) -> set[int]:
        """Tasks that are being read."""
        return set(self._open)

    def allow(self, task_ids: set[int] | None, wanted: int | None, now: float) -> bool:
        """Ask none but these tasks from now on, or None: any; return whether that changes.

        Args:
            task_ids: The tasks.
            wanted: The unit that the consumer waits for; None: none.
            now: The time.
        """
        return False

    @property
    def skipped(self) -> int:
        """Elements that were gone when this client came for them: its trainer fell behind."""
        return 0

    @property
    def unended(self) -> tuple[list[TaskAddress], list[TaskAddress]]:
        """Tasks whose end did not come: those that are read, and those that were given up."""
        return [], []

    # --- the consumer -------------------------------------------------------------------------

    @abstractmethod
    def used_up(self, task_id: int, number: int) -> bool:
        """Take note that nothing of a delivery is left; return whether to act on it at once."""

    def waiting(self, now: float | None) -> None:
        """Take note that the consumer waits for an element since `now`; None: it does not."""
        if now is None:
            self._waiting.end()
        elif not self._waiting.is_going_on:
            self._waiting.begin(now)

    def waited(self, seconds: float) -> None:
        """Take note that the consumer has waited for so long, and does no more."""
        self._waited += seconds
        self.waiting(None)

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing more will be delivered."""

    def may_use(self, now: float) -> bool:
        """Whether what was delivered is still this client's.

        After a pause of half the time after which it counts as gone, the dispatcher is asked first.
        """
        if self._contact.doubt(now - self._expected):
            self._expected = now
        return not self._contact.is_in_doubt or self.is_over

    @abstractmethod
    def leave(self, begun: tuple[int, int, int] | None) -> list[ReportDelivery]:
        """Return what is to be said before this client leaves.

        Args:
            begun: The task and the number of the delivery that the consumer has begun to use, and
                how many of its elements it has used.
        """

    # --- acting -------------------------------------------------------------------------------

    def act(self, now: float) -> Actions:
        """Return what is to be done now. What was returned counts as done."""
        actions = Actions(drops=self._drops, warnings=self._warnings)
        self._drops, self._warnings = [], []
        if self.is_over:
            return actions
        if now - self._expected > _OWN_LATENESS:
            self._forgive(now - self._expected, now)
        self._ask(now, actions)
        self._call(now, actions)
        self._look_after_waiting(now, actions)
        self._expected = now + actions.wake_in
        return actions

    def _forgive(self, pause: float, now: float) -> None:
        """Leave out of all waiting that this client did not run for a while."""
        self.may_use(now)
        self._contact.forgive(pause, now)
        self._waiting.forgive(pause, now)
        for task in self._open.values():
            task.problem_since = min(now, task.problem_since + pause)

    @abstractmethod
    def _ask(self, now: float, actions: Actions) -> None:
        """Ask workers for what is wanted now."""

    @abstractmethod
    def _call(self, now: float, actions: Actions) -> None:
        """Call the dispatcher, with everything that it should know, in its rhythm."""

    def _heartbeat(
        self, now: float, *, elements: int, buffers: int, horizon: int = 0, wanted: int = -1
    ) -> ClientHeartbeat:
        return ClientHeartbeat(
            client_id=self.client_id,
            known_version=self._known,
            horizon=horizon,
            elements=elements,
            wait_seconds=self._waited + self._waiting.seconds(now),
            buffered_batches=buffers,
            wanted_split=wanted,
        )

    def _look_after_waiting(self, now: float, actions: Actions) -> None:
        waiting = self._waiting
        if any(self._may_deliver(task, now) for task in self._open.values()):
            waiting.helped()
        else:
            waiting.helpless(now)
        waiting.idle(now, is_so=not (self._open or self._kept or self._silent))
        if not waiting.is_going_on:
            return
        problem = self._problem(now)
        if problem is not None:
            self.fail(problem)
            return
        if waiting.is_worth_a_warning(now):
            actions.warnings.append(
                f"waited {waiting.seconds(now):.0f} s for {self._what_is_next}: "
                f"{self._what_is_missing(now)}"
            )
        actions.wake_within(waiting.next_in(now))

    def _may_deliver(self, task: T, now: float) -> bool:
        if task.problem:
            return False
        is_dispatcher_away = self._contact.silence(now) or self._journal_problem
        return not (is_dispatcher_away and self._needs_dispatcher(task))

    @abstractmethod
    def _needs_dispatcher(self, task: T) -> bool:
        """Whether a task may give nothing more before the dispatcher has answered its worker."""

    def _problem(self, now: float) -> HeadraceError | None:
        """Return why there is no use in waiting any longer."""
        if not self._waiting.is_hopeless(now):
            return None
        return UnavailableError(
            f"no element came for {self._waiting.seconds(now):.0f} s, and nobody is there to send "
            f"one: {self._what_is_missing(now)}"
        )

    @property
    def _what_is_next(self) -> str:
        return "an element"

    @abstractmethod
    def _what_is_missing(self, now: float) -> str:
        """Return what stands between the consumer and what is next."""
