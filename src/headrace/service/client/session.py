"""A client's session: one iteration read from all of its tasks, without thread, socket or clock.

    opened, updated, unheard           what the dispatcher said, or that it did not answer
    answered, disconnected             what became of a request to a worker
    used_up, waiting                   what the consumer does
    act(now) -> Actions                what is to be sent, dropped and said now

Rule 1. A request to a worker is repeated under its own number until it is answered or the task is
        over, so nothing that a worker keeps is lost or doubled by a connection that breaks.
Rule 2. A task is over when its worker says that nothing is left, or calls it off; or when the
        dispatcher has declared it lost, or no longer lists it while its worker cannot be reached
        again and again.
        What arrives for a task that is over is dropped: it may have gone to somebody else.
Rule 3. A lost task is settled: the dispatcher learns which of its units arrived here, all of which
        the consumer will see.
Rule 4. A wait of ten seconds without an element says what is missing, then once a minute. It ends
        in an error only if for `wait_timeout` seconds there was nobody who could deliver. Time
        in which this client itself did not run does not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
)
from headrace.service.client.receipt import Receipt
from headrace.service.client.schedule import Budget
from headrace.service.messages import (
    ClientHeartbeat,
    ClientUpdate,
    DispatcherRequest,
    Elements,
    GetElements,
    IterationOpened,
    LostUnits,
    ReportUnreachable,
    SettleTask,
    TaskAddress,
)
from headrace.serving.conversation import Window

__all__ = ["Actions", "Ask", "Delivery", "Session"]

_HEARTBEAT_SECONDS = 1.0
_CALL_SECONDS = 2.0
_FIRST_DELAY = 0.02
_LAST_DELAY = 1.0
_FIRST_WARNING = 10.0
_NEXT_WARNING = 60.0
_ALIVE_SECONDS = 60.0
"""A dispatcher that was heard from within so many seconds counts as one that may list workers."""
_OWN_LATENESS = 2.0
"""Seconds after the time that it asked for at which the session notices that it is called late."""
_NOT_NOW_SECONDS = 0.1
_RESETS = 5
_SILENCES = 2
"""Attempts after which a worker that refuses connections, or does not answer, counts as gone if its
task is no longer listed: a task of several clients may be finished while an answer is on its way,
and if that is lost with its connection, the worker gives it again."""
_BUDGET_SECONDS = 0.25
"""How soon to look again while a task waits for credit that others may lend it with time."""


class Ask(NamedTuple):
    """A request to send to a task's worker."""

    task: TaskAddress
    number: int
    message: GetElements


@dataclass(frozen=True)
class Delivery:
    """An answer whose turn has come, for the consumer."""

    task: TaskAddress
    number: int
    count: int
    payload: Any
    """What the shell gave with the answer, or an error to raise."""


@dataclass
class Actions:
    """What is to be done now."""

    asks: list[Ask] = field(default_factory=list)
    calls: list[DispatcherRequest] = field(default_factory=list)
    """Requests to the dispatcher; each may be repeated."""
    drops: list[int] = field(default_factory=list)
    """Tasks whose connection is no longer needed."""
    warnings: list[str] = field(default_factory=list)
    wake_in: float = math.inf
    """Seconds after which to act again, if nothing happens before."""


class _Task:
    """One task, as this client sees it."""

    def __init__(self, address: TaskAddress) -> None:
        self.address = address
        self.window: Window[tuple[Elements | None, Any]] = Window()
        #: Numbers to be sent (again), in order.
        self.to_send: list[int] = []
        #: The worker has handed out everything, and waits until it is used up.
        self.draining = False
        #: The worker said that nothing is left; answers to other numbers may be under way.
        self.ending = False
        #: Answers that were delivered to the consumer and are not used up.
        self.in_use: dict[int, Elements] = {}
        self.arrived = Receipt()
        #: What the consumer has used up.
        self.used = Receipt()
        #: Not before this time is the worker asked again; 0.0 unless its connection was lost.
        self.retry_at = 0.0
        self.delay = _FIRST_DELAY
        #: The connection was lost, and nothing was heard since; how, and since when.
        self.problem: str = ""
        self.problem_since = 0.0
        self.refused = False
        #: Connections that were lost in a row.
        self.losses = 0

    @property
    def is_out_of_reach(self) -> bool:
        """Whether attempts enough have failed in a row, since the connection was lost."""
        return self.losses >= (_RESETS if self.refused else _SILENCES) and bool(self.problem)

    def answered(self) -> None:
        if self.problem:
            self.retry_at = 0.0
        self.delay, self.problem, self.losses = _FIRST_DELAY, "", 0


class Session:
    """What one client knows of the iteration that it reads.

    Args:
        client_id: Who asks.
        dispatcher: Its address, for messages.
        max_outstanding: Requests and unused answers that may be outstanding.
        now: The time, in seconds of a steady clock; so is every other `now`.
        wait_timeout: Seconds without anybody who could deliver, after which waiting is an error.
    """

    def __init__(
        self,
        client_id: str,
        dispatcher: str,
        max_outstanding: int,
        now: float,
        *,
        wait_timeout: float = 3600.0,
    ) -> None:
        self.client_id = client_id
        self._dispatcher = dispatcher
        self._budget = Budget(max_outstanding)
        self._wait_timeout = wait_timeout
        #: Tasks that are being read.
        self._tasks: dict[int, _Task] = {}
        #: Every task that was ever read, so that none is begun twice, with what arrived of it.
        self._arrived: dict[int, Receipt] = {}
        self._listed: set[int] = set()
        self._to_settle: set[int] = set()
        self._to_report: dict[int, bool] = {}
        self._drops: list[int] = []
        self._finished = False
        self.lost: tuple[LostUnits, ...] = ()
        self.failure: HeadraceError | None = None
        self._heard = now  # from the dispatcher
        self._known = -1  # the version of its last update
        self._beat_at = now + _HEARTBEAT_SECONDS  # the next heartbeat is due
        self._beat_delay = _FIRST_DELAY
        self._asked_at: float | None = None  # of a heartbeat without an answer
        self._urgent = False  # the dispatcher is asked sooner than its rhythm
        self._waiting_since: float | None = None
        self._warn_at = math.inf
        self._expected = math.inf  # when it asked to act again, at the latest
        self._lease = math.inf  # seconds of silence after which this client counts as gone
        #: This client did not run for so long that it may count as gone: nothing may be used before
        #: the dispatcher has answered so many heartbeats.
        self._renewals = 0
        self._silent: tuple[str, ...] = ()
        #: Since when there has been nobody who could deliver.
        self._helpless_since: float | None = None

    # --- the dispatcher -----------------------------------------------------------------------

    def opened(self, reply: IterationOpened, now: float) -> None:
        """Begin with what the dispatcher answered to `OpenIteration`."""
        self._list(reply.tasks, now)
        self._finished, self._lease = reply.finished, reply.lease

    def updated(self, update: ClientUpdate, now: float) -> None:
        """Take the answer to a heartbeat."""
        self._renewals = max(0, self._renewals - 1)
        self._urgent = self._urgent or self._renewals > 0
        self._heard, self._asked_at = now, None
        if not update.same:
            self._known = update.version
            self._list(update.tasks, now)
            for task_id in update.settle:
                self._to_settle.add(task_id)
                self._over(task_id)
            self._finished, self.lost = update.finished, update.lost
            self._silent = update.silent
            if update.failed:
                self.fail(FailedPreconditionError(update.failed))
        unsettled = bool(self._to_report or self._to_settle) or any(
            task.problem for task in self._tasks.values()
        )
        stuck = not self._tasks and not self._finished
        if unsettled or stuck:
            # Waiting for the dispatcher's verdict: soon, then more and more patiently.
            self._beat_at = now + self._beat_delay
            self._beat_delay = min(self._beat_delay * 2, _HEARTBEAT_SECONDS)
        else:
            self._beat_at, self._beat_delay = now + _HEARTBEAT_SECONDS, _FIRST_DELAY
        for task in list(self._tasks.values()):
            if task.is_out_of_reach and task.address.task_id not in self._listed:
                self._over(task.address.task_id)

    def _list(self, tasks: tuple[TaskAddress, ...], now: float) -> None:
        self._listed = {task.task_id for task in tasks}
        for address in tasks:
            if address.task_id not in self._arrived:
                task = _Task(address)
                # In this order: an interruption may repeat it, and not leave out a part.
                self._budget.add(address.task_id)
                self._tasks[address.task_id] = task
                self._arrived[address.task_id] = task.arrived

    def settled(self, task_id: int) -> None:
        """Take note that the dispatcher knows what arrived of a lost task."""
        self._to_settle.discard(task_id)
        self._urgent = True

    def reported(self, task_id: int) -> None:
        """Take note that the dispatcher knows that a task's worker cannot be reached."""
        self._to_report.pop(task_id, None)
        self._urgent = True

    def unheard(self, now: float) -> None:
        """Take note that the dispatcher did not answer a call."""
        self._asked_at = None
        self._beat_at = now + _HEARTBEAT_SECONDS

    def fail(self, error: HeadraceError) -> None:
        """End with an error: nothing can be read any more."""
        self.failure = self.failure or error

    # --- workers ------------------------------------------------------------------------------

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
        task.answered()
        self._helpless_since = None
        if isinstance(answer, CancelledError):
            # As if the worker were lost: whether the iteration goes on, the dispatcher knows.
            self._over(task_id)
            self._urgent = True
            return []
        if isinstance(answer, UnavailableError | AbortedError):
            # Not now: the worker is not ready, its answers wait to be read, or it took this for an
            # earlier request, when that came over the connection before this one and was late.
            task.to_send.append(number)
            task.retry_at = now + _NOT_NOW_SECONDS
            return []
        if isinstance(answer, Exception):
            entry: tuple[Elements | None, Any] = (None, answer)
        else:
            entry = (answer, payload)
            task.ending = task.ending or answer.end
            if not (answer.count or answer.error):
                # The end is near: it waits until the dispatcher has heard of each client.
                task.draining = self._urgent = True
        deliveries = []
        for due, (elements, value) in task.window.take(number, entry):
            self._budget.answered(task_id, due)
            delivery = self._due(task, due, elements, value)
            if delivery is not None:
                deliveries.append(delivery)
        if deliveries and self._waiting_since is not None:
            self._began_to_wait(now)
        if task.ending and not task.window.unanswered:
            self._over(task_id)
            self._urgent = True
        return deliveries

    def _due(
        self, task: _Task, number: int, elements: Elements | None, value: Any
    ) -> Delivery | None:
        if elements is not None:
            task.arrived.add(elements)
            empty = elements.end or not (elements.count or elements.error)
            if empty or not task.window.is_new(elements.first, elements.count):
                self._give_back(task, number)
                return None
            task.in_use[number] = elements
        count = 0 if elements is None else elements.count
        return Delivery(task.address, number, count, value)

    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        """Take note that the connection to a task's worker was lost, or could not be made."""
        task = self._tasks.get(task_id)
        if task is None:
            return
        if not task.problem:
            task.problem, task.problem_since = str(error), now
        task.refused = bool(getattr(error, "refused", False))
        task.losses += 1
        task.to_send = []
        task.retry_at = now + task.delay
        task.delay = min(task.delay * 2, _LAST_DELAY)
        self._to_report[task_id] = task.refused
        self._urgent = True

    # --- the consumer -------------------------------------------------------------------------

    def used_up(self, task_id: int, number: int) -> None:
        """Take note that nothing of a delivery is left."""
        task = self._tasks.get(task_id)
        if task is not None:
            self._give_back(task, number)

    def waiting(self, now: float | None) -> None:
        """Take note that the consumer waits for an element since `now`; None: it does not."""
        if now is None:
            self._waiting_since, self._warn_at = None, math.inf
        elif self._waiting_since is None:
            self._began_to_wait(now)

    def _began_to_wait(self, now: float) -> None:
        self._waiting_since, self._warn_at = now, now + _FIRST_WARNING

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be delivered."""
        return self.failure is not None or (
            self._finished and not self._tasks and not self._to_settle
        )

    def may_use(self, now: float) -> bool:
        """Whether what was delivered is still this client's.

        After a pause of half the time after which it counts as gone, the dispatcher is asked first.
        """
        if now - self._expected > self._lease / 2 and not self._renewals:
            # The answer to a heartbeat from before the pause says nothing.
            self._renewals = 1 if self._asked_at is None else 2
            self._urgent, self._expected = True, now
        return not self._renewals or self.is_over

    # --- acting -------------------------------------------------------------------------------

    def act(self, now: float) -> Actions:
        """Return what is to be done now. What was returned counts as done."""
        actions = Actions(drops=self._drops)
        self._drops = []
        if self.is_over:
            return actions
        if now - self._expected > _OWN_LATENESS:
            self._forgive(now - self._expected, now)
        for task_id, task in list(self._tasks.items()):
            # Of a thousand tasks, most wait in line at any time.
            is_quiet = not task.to_send and not task.retry_at
            if is_quiet and self._budget.must_wait(task_id, now):
                actions.wake_in = min(actions.wake_in, _BUDGET_SECONDS)
            else:
                self._ask(task, now, actions)
        self._call(now, actions)
        self._look_after_waiting(now, actions)
        self._expected = now + actions.wake_in
        return actions

    def _forgive(self, pause: float, now: float) -> None:
        """Leave out of all waiting that this client did not run for a while."""
        self.may_use(now)
        self._heard = min(now, self._heard + pause)
        if self._waiting_since is not None:
            # Less where what came meanwhile has begun the wait again.
            shift = min(pause, now - self._waiting_since)
            self._waiting_since += shift
            self._warn_at += shift
        if self._helpless_since is not None:
            self._helpless_since = min(now, self._helpless_since + pause)
        for task in self._tasks.values():
            task.problem_since = min(now, task.problem_since + pause)

    def _ask(self, task: _Task, now: float, actions: Actions) -> None:
        task_id = task.address.task_id
        if now < task.retry_at:
            actions.wake_in = min(actions.wake_in, task.retry_at - now)
            return
        if task.retry_at:
            task.retry_at = 0.0
            if task.problem:
                task.to_send = task.window.to_repeat()
        while not task.ending and not (task.draining and task.window.outstanding):
            if task.problem and task.to_send:
                break  # one sign of life first
            if not self._budget.may_ask(task_id, now):
                actions.wake_in = min(actions.wake_in, _BUDGET_SECONDS)
                break
            number = task.window.ask()
            self._budget.asked(task_id, number, now)
            task.to_send.append(number)
        acknowledged = task.window.acknowledged
        for number in task.to_send:
            message = GetElements(
                task_id=task_id,
                ticket=task.address.ticket,
                client_id=self.client_id,
                number=number,
                acknowledged=acknowledged,
            )
            actions.asks.append(Ask(task.address, number, message))
        task.to_send = []

    def _call(self, now: float, actions: Actions) -> None:
        """Call the dispatcher, with everything that it should know, in its rhythm."""
        if self._asked_at is not None and now - self._asked_at > _CALL_SECONDS:
            self.unheard(now)
        due = self._beat_at if not self._urgent else min(self._beat_at, now)
        if self._asked_at is None and now >= due:
            client_id = self.client_id
            for task_id in sorted(self._to_settle):
                arrived = self._arrived.get(task_id, Receipt())
                actions.calls.append(self._settlement(task_id, arrived))
            for task_id, refused in sorted(self._to_report.items()):
                actions.calls.append(
                    ReportUnreachable(client_id=client_id, task_id=task_id, refused=refused)
                )
            actions.calls.append(ClientHeartbeat(client_id=client_id, known=self._known))
            self._asked_at, self._urgent = now, False
        if self._asked_at is not None:
            actions.wake_in = min(actions.wake_in, self._asked_at + _CALL_SECONDS - now + 0.001)
        else:
            actions.wake_in = min(actions.wake_in, max(0.0, self._beat_at - now))

    def _settlement(self, task_id: int, receipt: Receipt) -> SettleTask:
        return SettleTask(
            client_id=self.client_id,
            task_id=task_id,
            received=receipt.whole,
            touched=receipt.touched,
        )

    def leave(self, begun: tuple[int, int] | None) -> list[SettleTask]:
        """Return what is to be said before this client leaves: what was used of each task.

        Of a task that is over all that came was used, or was said to have come when it was lost.

        Args:
            begun: The task and the number of the delivery that the consumer has begun to use.
        """
        words = [
            self._settlement(task_id, receipt)
            for task_id, receipt in self._arrived.items()
            if task_id not in self._tasks and receipt.touched
        ]
        for task_id, task in self._tasks.items():
            if begun is not None and begun[0] == task_id and begun[1] in task.in_use:
                task.used.touch(task.in_use[begun[1]])
            if task.used.touched:
                words.append(self._settlement(task_id, task.used))
        return words

    def _look_after_waiting(self, now: float, actions: Actions) -> None:
        if self._someone_may_deliver(now):
            self._helpless_since = None
        elif self._helpless_since is None:
            self._helpless_since = now
        if self._waiting_since is None:
            return
        helpless = 0.0 if self._helpless_since is None else now - self._helpless_since
        if helpless >= self._wait_timeout and now - self._waiting_since >= self._wait_timeout:
            self.fail(
                UnavailableError(
                    f"no element came for {now - self._waiting_since:.0f} s, and nobody is there "
                    f"to send one: {self._what_is_missing(now)}"
                )
            )
            return
        if now >= self._warn_at:
            self._warn_at = now + _NEXT_WARNING
            actions.warnings.append(
                f"waited {now - self._waiting_since:.0f} s for an element: "
                f"{self._what_is_missing(now)}"
            )
        actions.wake_in = min(actions.wake_in, max(0.0, self._warn_at - now))
        if self._helpless_since is not None:
            over = max(self._helpless_since, self._waiting_since) + self._wait_timeout
            actions.wake_in = min(actions.wake_in, max(0.0, over - now))

    def _someone_may_deliver(self, now: float) -> bool:
        return any(not task.problem for task in self._tasks.values())

    def _what_is_missing(self, now: float) -> str:
        parts = []
        silent = now - self._heard
        if silent > _HEARTBEAT_SECONDS + 2 * _CALL_SECONDS:
            parts.append(
                f"the dispatcher at {self._dispatcher} has not answered for {silent:.0f} s (is it "
                "running, and is this its address?)"
            )
        lost = [task for task in self._tasks.values() if task.problem]
        parts += [
            f"the worker at {task.address.worker_address} cannot be reached since "
            f"{now - task.problem_since:.0f} s ({task.problem})"
            for task in lost[:_MOST_NAMED]
        ]
        working = [task for task in self._tasks.values() if not task.problem]
        if working:
            names = ", ".join(task.address.worker_address for task in working[:_MOST_NAMED])
            more = f" and {len(working) - _MOST_NAMED} more" if len(working) > _MOST_NAMED else ""
            parts.append(
                f"connected to {names}{more}, from which nothing comes: a function of the dataset "
                "may take long, or wait for something"
            )
        if self._silent:
            parts.append(
                f"{' and '.join(self._silent[:_MOST_NAMED])} of the same job cannot be heard: what "
                "was sent there and not used comes here once it counts as gone "
                "(`client_timeout_ms` of the dispatcher)"
            )
        elif not self._tasks and silent <= _ALIVE_SECONDS:
            parts.append(
                f"no worker is registered with the dispatcher at {self._dispatcher}; start one, "
                f"for example with `headrace worker --dispatcher {self._dispatcher}`"
            )
        return "; ".join(parts)

    # --- tasks --------------------------------------------------------------------------------

    def _give_back(self, task: _Task, number: int) -> None:
        used = task.in_use.get(number)
        if used is not None:
            # In this order: an interruption in between may repeat it, and not leave it out.
            task.used.add(used)
            task.in_use.pop(number, None)
        task.window.use_up(number)
        self._budget.used_up(task.address.task_id, number)

    def _over(self, task_id: int) -> None:
        if self._tasks.pop(task_id, None) is not None:
            self._budget.remove(task_id)
            self._to_report.pop(task_id, None)
            self._drops.append(task_id)


_MOST_NAMED = 3
