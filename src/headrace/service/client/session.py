"""A client's session: one iteration read from all of its tasks, without thread, socket or clock.

    opened, heard                      what the dispatcher said, or that it did not answer
    answered, disconnected             what became of a request to a worker
    used_up, waiting                   what the consumer does
    act(now) -> Actions                what is to be sent, dropped and said now

Rule 1. A request to a worker is repeated under its own number until it is answered or the task is
        over, so nothing that a worker keeps is lost or doubled by a connection that breaks.
Rule 2. A task is over when its worker says that nothing is left, or calls it off; or when the
        dispatcher has declared it lost; or when its worker cannot be reached, and the dispatcher
        neither lists it nor says that its worker is still there with the rest of it.
        What arrives for a task that is over is dropped: it may have gone to somebody else.
Rule 3. A lost task is settled: the dispatcher learns which of its units arrived here, all of which
        the consumer will see.

How the dispatcher is asked is in `contact`, how long the consumer waits in `waiting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from headrace.element.packing import raw_size
from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.client.actions import Actions, Ask, Delivery
from headrace.service.client.contact import Contact
from headrace.service.client.falling_behind import FallingBehind
from headrace.service.client.packing_pace import PackingPace
from headrace.service.client.schedule import Budget
from headrace.service.client.settling import Settling
from headrace.service.client.task import Task
from headrace.service.client.turns import Turns
from headrace.service.client.waiting import Waiting, describe_missing
from headrace.service.messages import (
    ClientHeartbeat,
    ClientUpdate,
    DispatcherReply,
    DispatcherRequest,
    Elements,
    GetElements,
    IterationOpened,
    LostUnits,
    ReportUnreachable,
    SettleTask,
    TaskAddress,
)
from headrace.transport.channel import Buffer

__all__ = ["Session"]

_ENOUGH_ON_THE_WAY = 2
"""Answers of a task under way with which there is no haste to ask for another one."""
_OWN_LATENESS = 2.0
"""Seconds after the time that it named at which the session notices that it is called late."""


class Session:
    """What one client knows of the iteration that it reads.

    Args:
        client_id: Who asks.
        dispatcher: Its address, for messages.
        max_outstanding: Requests and unused answers that may be outstanding.
        counts_elements: Whether so many elements may be, and not requests with whatever they bring.
        now: The time, in seconds of a steady clock; so is every other `now`.
        wait_timeout: Seconds without anybody who could deliver, after which waiting is an error.
        trainer_id: For whom it reads, where trainers share what workers make.
        codec: What answers may be packed with where the wire is slow; empty: they are not.
        is_far: Whether a worker's address is that of another machine.
        has_shares: Whether each worker has a share that no other reads meanwhile.
        wants_all: Whether answers without elements are delivered, too: they say of units.
    """

    def __init__(
        self,
        client_id: str,
        dispatcher: str,
        max_outstanding: int,
        now: float,
        *,
        wait_timeout: float = 3600.0,
        trainer_id: str = "",
        counts_elements: bool = False,
        codec: str = "",
        is_far: Callable[[str], bool] = lambda address: True,
        has_shares: bool = False,
        wants_all: bool = False,
    ) -> None:
        self.client_id = client_id
        self.pace = PackingPace(codec, now)
        self._is_far = is_far
        #: Those that are read through a wire that may be slow.
        self._far: set[int] = set()
        self._trainer_id = trainer_id
        self._behind = FallingBehind(trainer_id)
        self._dispatcher = dispatcher
        self._wants_all = wants_all
        self._turns = Turns(Budget(max_outstanding, counts_elements=counts_elements))
        self._contact = Contact(now)
        self._waiting = Waiting(wait_timeout)
        #: Elements that were received, and seconds for which the consumer waited for them, less the
        #: wait that goes on.
        self._elements = 0
        self._waited = 0.0
        #: Tasks that are being read.
        self._tasks: dict[int, Task] = {}
        self._settling = Settling(client_id)
        #: Those whose end did not come.
        self._unended: dict[int, TaskAddress] = {}
        #: What the dispatcher said last.
        self._known = -1
        self._listed: set[int] = set()
        self._kept: set[int] = set()
        #: The last attempt at each shard; None: at whole copies.
        self._attempts: dict[int | None, int] = {}
        self._has_shares = has_shares
        self._finished = False
        self._silent: tuple[str, ...] = ()
        self.lost: tuple[LostUnits, ...] = ()
        self.passed_over: tuple[str, ...] = ()
        """Addresses of workers that it is not to read."""
        #: Units of the stream that are dealt no more, where they come in order.
        self.given_up: tuple[tuple[int, int], ...] = ()
        #: Tasks that are over, whose connections are still open.
        self._drops: list[int] = []
        self._warnings: list[str] = []
        self.failure: HeadraceError | None = None
        #: When it asked to act again, at the latest.
        self._expected = math.inf

    # --- the dispatcher -----------------------------------------------------------------------

    def opened(self, reply: IterationOpened, now: float) -> None:
        """Begin with what the dispatcher answered to `OpenIteration`."""
        self._list(reply.tasks, now)
        self._finished, self._contact.lease = reply.finished, reply.lease

    def heard(
        self, asked: DispatcherRequest | None, answer: DispatcherReply | Exception, now: float
    ) -> None:
        """Take what the dispatcher said to a call, or the error in its place.

        Args:
            asked: The call; None: it is not known, or it was all that were under way.
            answer: What came.
            now: The time.
        """
        if isinstance(answer, ClientUpdate):
            self.updated(answer, now)
        elif isinstance(answer, UnavailableError):
            self.unheard(now)
        elif isinstance(asked, SettleTask):
            self._settling.said(asked)
            if not asked.used:
                self._contact.hurry()
        elif isinstance(asked, ReportUnreachable):
            self._settling.reported(asked.task_id)
            self._contact.hurry()
        elif isinstance(answer, NotFoundError):
            self.fail(
                FailedPreconditionError(
                    f"the dispatcher at {self._dispatcher} does not know this reader any more "
                    f"({answer}): it was restarted without `fault_tolerant_mode`, or this process "
                    "was not heard from for too long. Iterate over the dataset again; give the "
                    "dispatcher a `work_dir` and `fault_tolerant_mode=True` so that it survives "
                    "restarts"
                )
            )
        elif isinstance(answer, HeadraceError):
            self.fail(answer)

    def updated(self, update: ClientUpdate, now: float) -> None:
        """Take the answer to a heartbeat."""
        self._contact.answered(now)
        if not update.same:
            self._known = update.version
            self._list(update.tasks, now)
            was_kept, self._kept = self._kept, set(update.kept)
            for task_id in update.settle:
                self._settling.lose(task_id, self._tasks.get(task_id))
                self._over(task_id)
            self._finished, self.lost = update.finished, update.lost
            self._silent, self.given_up = update.silent, update.given_up
            if update.failed:
                self.fail(FailedPreconditionError(update.failed))
        unsettled = self._settling.is_urgent or any(task.problem for task in self._tasks.values())
        stuck = not self._tasks and not self._finished
        self._contact.rest(now, waits=unsettled or stuck)
        if not update.same:
            self._warn_of(was_kept - self._kept, now)
        for task in list(self._tasks.values()):
            if task.problem and task.address.task_id not in self._listed | self._kept:
                self._over(task.address.task_id)

    def _warn_of(self, task_ids: set[int], now: float) -> None:
        """Say of finished tasks whose workers are gone that their last answers may be lost."""
        for task_id in sorted(task_ids):
            task = self._tasks.get(task_id)
            if task is not None and task.problem:
                self._warnings.append(
                    f"the worker at {task.address.worker_address}, whose task {task_id} was "
                    f"finished, cannot be reached since {now - task.problem_since:.0f} s "
                    f"({task.problem}), and is waited for no more: what it sent last and did not "
                    "arrive is lost"
                )

    def _list(self, tasks: tuple[TaskAddress, ...], now: float) -> None:
        self._listed = {task.task_id for task in tasks}
        for address in tasks:
            if not self._settling.knows(address.task_id):
                task = Task(address)
                if self.pace.is_open and self._is_far(address.worker_address):
                    self._far.add(address.task_id)
                # In this order: an interruption may repeat it, and not leave out a part.
                self._turns.add(address.task_id)
                self._tasks[address.task_id] = task
                self._unended[address.task_id] = address
                self._settling.begin(address.task_id, task.arrived)
            if address.attempt > self._attempts.get(address.shard, 0):
                self._attempts[address.shard] = address.attempt
                lost = (
                    "every worker that read a copy of the dataset"
                    if address.shard is None
                    else f"the worker that read share {address.shard} of the dataset"
                )
                self._warnings.append(
                    f"{lost} was lost, for the {address.attempt}. time: the worker at "
                    f"{address.worker_address} reads it again from the start, and elements come "
                    "again. If a function of the dataset ends its process, the workers' logs may "
                    "say more"
                )

    def unheard(self, now: float) -> None:
        """Take note that the dispatcher did not answer a call."""
        self._contact.unheard(now)

    def fail(self, error: HeadraceError) -> None:
        """End with an error: nothing can be read any more."""
        self.failure = self.failure or error

    # --- workers ------------------------------------------------------------------------------

    def measured(self, task_id: int, buffers: Sequence[Buffer], now: float) -> None:
        """Take note of the elements that came with an answer, before it is taken."""
        if task_id in self._far and task_id in self._tasks:
            size = raw_size(buffers)
            outstanding = sum(task.window.unanswered for task in self._tasks.values())
            self.pace.arrived(size, self._waiting.seconds(now), outstanding, now)

    def answered(
        self, task_id: int, number: int, answer: Elements | Exception, payload: Any, now: float
    ) -> list[Delivery]:
        """Take an answer; return those whose turn has come with it.

        Args:
            task_id: Whose.
            number: The number of the request.
            answer: What the worker said; an error is about the request, not of an element.
            payload: What came with it, for the consumer; an element's error, to raise.
            now: The time.
        """
        task = self._tasks.get(task_id)
        if task is None:
            return []
        task.heard()
        self._turns.touch(task_id)
        self._waiting.helped()
        if isinstance(answer, CancelledError):
            # As if the worker were lost: whether the iteration goes on, the dispatcher knows.
            self._over(task_id)
            self._contact.hurry()
            return []
        if isinstance(answer, UnavailableError | AbortedError):
            # Not now: the worker is not ready, its answers wait to be read, or it took this for an
            # earlier request, when that came over the connection before this one and was late.
            task.put_off(number, now)
            return []
        if isinstance(answer, Exception):
            entry: tuple[Elements | None, Any] = (None, answer)
        else:
            entry = (answer, payload)
            task.ending = task.ending or answer.end
            if task.window.awaits(number):
                self._behind.skipped(answer.skipped, task.address.worker_address)
            # With nothing in it the end is near, and waits until the dispatcher has heard of each
            # client; or all that was held was given, and more is dealt when that is used.
            task.draining = not (answer.count or answer.error)
            if task.draining:
                self._contact.hurry()
        deliveries = []
        for due, (elements, value) in task.window.take(number, entry):
            self._turns.answered(task_id, due, 1 if elements is None else elements.count)
            delivery = self._due(task, due, elements, value)
            if delivery is not None:
                deliveries.append(delivery)
        # In order, what came may not be what is waited for.
        if deliveries and self._waiting.is_going_on and not self._wants_all:
            self._waiting.begin(now)
        if task.ending:
            self._ended(task.address)
        if task.ending and not task.window.unanswered:
            self._over(task_id)
            self._contact.hurry()
        return deliveries

    def due(self, now: float) -> list[Delivery]:
        """Return deliveries whose turn has come without an answer: none."""
        return []

    def _due(
        self, task: Task, number: int, elements: Elements | None, value: Any
    ) -> Delivery | None:
        if elements is not None and not task.receive(number, elements):
            self._give_back(task, number)
            if not self._wants_all or elements.count or elements.error:
                return None
            value = None
        count = 0 if elements is None else elements.count
        self._elements += count
        return Delivery(task.address, number, count, value, elements)

    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        """Take note that the connection to a task's worker was lost, or could not be made."""
        task = self._tasks.get(task_id)
        if task is None:
            return
        task.disconnected(error, now)
        self._turns.touch(task_id)
        self._settling.cannot_reach(task_id, refused=task.refused)
        self._contact.hurry()

    @property
    def reading(self) -> set[int]:
        """Tasks that are being read."""
        return set(self._tasks)

    def allow(self, task_ids: set[int] | None) -> bool:
        """Ask none but these tasks from now on, or None: any; return whether that changes."""
        return self._turns.allow(task_ids)

    # --- the consumer -------------------------------------------------------------------------

    def used_up(self, task_id: int, number: int) -> bool:
        """Take note that nothing of a delivery is left; return whether to act on it at once.

        Where several answers are on the way, that has time until the next of them has come.
        """
        task = self._tasks.get(task_id)
        if task is not None:
            self._give_back(task, number)
            return task.draining or task.window.unanswered < _ENOUGH_ON_THE_WAY
        self._settling.use_up(task_id, number)
        return True

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
    def skipped(self) -> int:
        """Elements that were gone when this client came for them: its trainer fell behind."""
        return self._behind.total

    @property
    def unended(self) -> tuple[list[TaskAddress], list[TaskAddress]]:
        """Tasks whose end did not come: those that are read, and those that were given up."""
        reading = [each for task_id, each in self._unended.items() if task_id in self._tasks]
        gone = [each for task_id, each in self._unended.items() if task_id not in self._tasks]
        return reading, gone

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be delivered."""
        return self.failure is not None or (
            self._finished and not self._tasks and not self._settling.is_unsettled
        )

    def may_use(self, now: float) -> bool:
        """Whether what was delivered is still this client's.

        After a pause of half the time after which it counts as gone, the dispatcher is asked first.
        """
        if self._contact.doubt(now - self._expected):
            self._expected = now
        return not self._contact.is_in_doubt or self.is_over

    # --- acting -------------------------------------------------------------------------------

    def act(self, now: float) -> Actions:
        """Return what is to be done now. What was returned counts as done."""
        actions = Actions(drops=self._drops, warnings=self._warnings)
        self._drops, self._warnings = [], []
        if self.is_over:
            return actions
        if now - self._expected > _OWN_LATENESS:
            self._forgive(now - self._expected, now)
        turn = self._turns.take(self._tasks, now)
        actions.asks += [self._question(task, number) for task, number in turn.asks]
        actions.wake_within(turn.wake_in)
        actions.warnings += self._behind.due(now)
        self._call(now, actions)
        self._look_after_waiting(now, actions)
        self._expected = now + actions.wake_in
        return actions

    def _forgive(self, pause: float, now: float) -> None:
        """Leave out of all waiting that this client did not run for a while."""
        self.may_use(now)
        self._contact.forgive(pause, now)
        self._waiting.forgive(pause, now)
        for task in self._tasks.values():
            task.problem_since = min(now, task.problem_since + pause)

    def _question(self, task: Task, number: int) -> Ask:
        message = GetElements(
            task_id=task.address.task_id,
            ticket=task.address.ticket,
            client_id=self.client_id,
            number=number,
            acknowledged=task.window.acknowledged,
            most=self._turns.most(task.address.task_id, number),
            trainer_id=self._trainer_id,
            codec=self.pace.codec if task.address.task_id in self._far else "",
        )
        return Ask(task.address, number, message)

    def _call(self, now: float, actions: Actions) -> None:
        """Call the dispatcher, with everything that it should know, in its rhythm."""
        if self._contact.may_ask(now):
            actions.calls += self._settling.calls()
            actions.calls.append(
                ClientHeartbeat(
                    client_id=self.client_id,
                    known=self._known,
                    elements=self._elements,
                    waited=self._waited + self._waiting.seconds(now),
                    buffers=sum(len(task.in_use) for task in self._tasks.values()),
                )
            )
            self._contact.asked(now)
        actions.wake_within(self._contact.next_in(now))

    def leave(self, begun: tuple[int, int, int] | None) -> list[SettleTask]:
        """Return what is to be said before this client leaves: what was used of each task.

        Of a task that is over all that came was used, or was said to have come when it was lost.

        Args:
            begun: The task and the number of the delivery that the consumer has begun to use, and
                how many of its elements it has used.
        """
        return self._settling.last_words(self._tasks, begun)

    def _look_after_waiting(self, now: float, actions: Actions) -> None:
        waiting = self._waiting
        if any(not task.problem for task in self._tasks.values()):
            waiting.helped()
        else:
            waiting.helpless(now)
        if not waiting.is_going_on:
            return
        if waiting.is_hopeless(now):
            self.fail(
                UnavailableError(
                    f"no element came for {waiting.seconds(now):.0f} s, and nobody is there "
                    f"to send one: {self._what_is_missing(now)}"
                )
            )
            return
        if waiting.is_worth_a_warning(now):
            actions.warnings.append(
                f"waited {waiting.seconds(now):.0f} s for an element: {self._what_is_missing(now)}"
            )
        actions.wake_within(waiting.next_in(now))

    def _what_is_missing(self, now: float) -> str:
        silence = self._contact.silence(now)
        return describe_missing(
            self._dispatcher,
            silence,
            self._tasks.values(),
            self._silent,
            now,
            self.passed_over,
            has_shares=self._has_shares,
        )

    # --- tasks --------------------------------------------------------------------------------

    def _ended(self, task: TaskAddress) -> None:
        """Take note that a task came to its end, and with it whoever read its shard before."""
        for task_id, other in list(self._unended.items()):
            if task_id == task.task_id or (task.shard is not None and other.shard == task.shard):
                del self._unended[task_id]

    def _give_back(self, task: Task, number: int) -> None:
        task.use_up(number)
        self._turns.used_up(task.address.task_id, number)

    def _over(self, task_id: int) -> None:
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self._settling.finish(task_id, task)
            self._turns.remove(task_id)
            self._drops.append(task_id)
