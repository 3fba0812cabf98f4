"""A consumer's session: one iteration read in rounds, without thread, socket or clock.

It has the face of `session.Session`, and differs in what it delivers:

Rule 1. Rounds are delivered in their order (`rounds`), each when the worker has said that it
        arrived at every consumer (`worker.rounds`, rule 2). So each consumer yields the same ones.
Rule 2. Rounds are asked for ahead, in the order in which they will be used; rounds that were asked
        for or arrived, and are not used up, are at most `max_outstanding`.
Rule 3. A task that is lost is settled: the dispatcher learns how many rounds arrived here, and says
        how many arrived everywhere. Those are used, and the others by nobody.
Rule 4. The dispatcher is told how far this consumer would like to go, before it gets there: so many
        rounds as it is likely to use in `_LEASE_SECONDS`.
Rule 5. A wait for other consumers ends in an error after `wait_timeout`, and where one of them has
        left, as soon as no round is left that all of them have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headrace.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    NotFoundError,
    UnavailableError,
)
from headrace.service.client.actions import Actions, Ask, Delivery
from headrace.service.client.contact import Contact
from headrace.service.client.packing_pace import PackingPace
from headrace.service.client.round_task import RoundTask
from headrace.service.client.rounds import Rounds
from headrace.service.client.waiting import Waiting, describe_missing
from headrace.service.messages import (
    WORD,
    ClientHeartbeat,
    ClientUpdate,
    DispatcherReply,
    DispatcherRequest,
    Elements,
    IterationOpened,
    LostUnits,
    ReportUnreachable,
    SettleTask,
    TaskAddress,
)
from headrace.transport.channel import Buffer

__all__ = ["RoundSession"]

_OWN_LATENESS = 2.0
"""Seconds after the time that it named at which the session notices that it is called late."""
_LEASE_SECONDS = 4.0
_FEWEST_ROUNDS = 16
_LOOK_SECONDS = 2.0
"""How often to ask, in a wait, who keeps the next round."""
_LAST_ROUNDS_SECONDS = 1.0
"""How long to wait, after another consumer has left, for rounds that all of them have."""


class RoundSession:
    """What one consumer knows of the iteration that it reads.

    Args:
        client_id: Who asks.
        dispatcher: Its address, for messages.
        max_outstanding: Rounds that may be asked for or kept.
        now: The time, in seconds of a steady clock; so is every other `now`.
        consumer: Which consumer this is.
        consumers: How many there are.
        wait_timeout: Seconds after which a wait for other consumers is an error, and a wait with
            nobody who could deliver.
    """

    def __init__(
        self,
        client_id: str,
        dispatcher: str,
        max_outstanding: int,
        now: float,
        *,
        consumer: int,
        consumers: int,
        wait_timeout: float = 3600.0,
    ) -> None:
        self.client_id = client_id
        #: For those alone who read alone: here nothing is skipped, packed or left to others.
        self.skipped = 0
        self.passed_over: tuple[str, ...] = ()
        self.given_up: tuple[tuple[int, int], ...] = ()
        self.pace = PackingPace("", now)
        #: Seconds for which the consumer waited for elements, less the wait that goes on.
        self._waited = 0.0
        self._dispatcher = dispatcher
        self._max_outstanding = max_outstanding
        self._consumer, self._consumers = consumer, consumers
        self._wait_timeout = wait_timeout
        self._contact = Contact(now)
        self._waiting = Waiting(wait_timeout)
        self._rounds = Rounds()
        #: Every task that was ever listed, and those of them that are read.
        self._tasks: dict[int, RoundTask] = {}
        self._open: dict[int, RoundTask] = {}
        #: Rounds that were delivered and are not used up.
        self._in_use: set[tuple[int, int]] = set()
        #: What the dispatcher said last.
        self._known = -1
        self._listed: set[int] = set()
        self._kept: set[int] = set()
        #: The last attempt at whole copies.
        self._attempts = 0
        self._finished = False
        self._silent: tuple[str, ...] = ()
        self._left = ""
        #: Since when it is known that a consumer has left.
        self._left_since = math.inf
        self.lost: tuple[LostUnits, ...] = ()
        #: What it must hear.
        self._to_settle: set[int] = set()
        self._to_report: dict[int, bool] = {}
        #: How far was asked for; and when the rounds were counted last, with their number then.
        self._asked_until = 0
        self._counted_at, self._counted, self._rate = now, 0, 0.0
        self._look_at = 0.0
        self._drops: list[int] = []
        self._warnings: list[str] = []
        self.failure: HeadraceError | None = None
        #: When it asked to act again, at the latest.
        self._expected = math.inf

    # --- the dispatcher -----------------------------------------------------------------------

    def opened(self, reply: IterationOpened, now: float) -> None:
        """Begin with what the dispatcher answered to `OpenIteration`."""
        self._list(reply.tasks)
        self._rounds.extend(math.inf if reply.finished else reply.horizon)
        self._finished, self._contact.lease = reply.finished, reply.lease
        self._contact.hurry()

    def heard(
        self, asked: DispatcherRequest | None, answer: DispatcherReply | Exception, now: float
    ) -> None:
        """Take what the dispatcher said to a call, or the error in its place."""
        if isinstance(answer, ClientUpdate):
            self.updated(answer, now)
        elif isinstance(answer, UnavailableError):
            self.unheard(now)
        elif isinstance(asked, SettleTask):
            self._to_settle.discard(asked.task_id)
            self._contact.hurry()
        elif isinstance(asked, ReportUnreachable):
            self._to_report.pop(asked.task_id, None)
            self._contact.hurry()
        elif isinstance(answer, NotFoundError):
            self.fail(
                FailedPreconditionError(
                    f"the dispatcher at {self._dispatcher} does not know this reader any more "
                    f"({answer}): it was restarted without `fault_tolerant_mode`, or this process "
                    "was not heard from for too long. Iterate over the dataset again, on all "
                    "consumers"
                )
            )
        elif isinstance(answer, HeadraceError):
            self.fail(answer)

    def updated(self, update: ClientUpdate, now: float) -> None:
        """Take the answer to a heartbeat."""
        self._contact.answered(now)
        if not update.same:
            self._take_news(update, now)
        for task_id, task in [*self._open.items()]:
            if task.problem and task_id not in self._listed | self._kept:
                # It is finished, so that all of it arrived.
                self._end(task_id, task.received)
        # At last: the tasks up to there are known now.
        self._rounds.extend(math.inf if self._finished else update.horizon)
        waits = bool(self._to_report or self._to_settle) or any(
            task.problem or not (task_id in self._open or self._rounds.is_known_to_end(task_id))
            for task_id, task in self._tasks.items()
        )
        stuck = not self._open and not self._finished
        self._contact.rest(now, waits=waits or stuck)

    def _take_news(self, update: ClientUpdate, now: float) -> None:
        self._known = update.version
        self._list(update.tasks)
        self._kept = set(update.kept)
        for task_id, rounds in update.rounds:
            self._end(task_id, rounds)
        for task_id in update.settle:
            self._to_settle.add(task_id)
            self._close(task_id)
        self._finished, self.lost = update.finished, update.lost
        self._silent = update.silent
        if update.left and not self._left:
            self._left, self._left_since = update.left, now
        if update.failed:
            self.fail(FailedPreconditionError(update.failed))

    def _list(self, tasks: tuple[TaskAddress, ...]) -> None:
        self._listed = {task.task_id for task in tasks}
        for address in tasks:
            task_id = address.task_id
            if task_id not in self._tasks:
                self._tasks[task_id] = self._open[task_id] = RoundTask(address, self._consumer)
                self._rounds.add(task_id, address.starting_round or 0)
            if address.attempt > self._attempts:
                self._attempts = address.attempt
                self._warnings.append(
                    "every worker that read a copy of the dataset was lost, for the "
                    f"{address.attempt}. time: the worker at {address.worker_address} reads it "
                    "again from the start, and elements come again. If a function of the dataset "
                    "ends its process, the workers' logs may say more"
                )

    def unheard(self, now: float) -> None:
        """Take note that the dispatcher did not answer a call."""
        self._contact.unheard(now)

    def fail(self, error: HeadraceError) -> None:
        """End with an error: nothing can be read any more."""
        self.failure = self.failure or error

    # --- workers ------------------------------------------------------------------------------

    def answered(
        self, task_id: int, number: int, answer: Elements | Exception, payload: Any, now: float
    ) -> list[Delivery]:
        """Take an answer; return the rounds whose turn has come with it."""
        task = self._open.get(task_id)
        if task is None:
            return []
        task.heard()
        self._waiting.helped()
        if isinstance(answer, CancelledError):
            # As if the worker were lost: what becomes of its rounds, the dispatcher says.
            self._close(task_id)
            self._contact.hurry()
        elif isinstance(answer, UnavailableError):
            task.put_off(number, now)
        elif isinstance(answer, AbortedError):
            pass  # another request took its place
        elif isinstance(answer, HeadraceError):
            self.fail(answer)
        elif isinstance(answer, Exception):
            self.fail(HeadraceError(str(answer)))
        else:
            self._take_answer(task, number, answer, payload)
        return self.due(now)

    def _take_answer(self, task: RoundTask, number: int, answer: Elements, payload: Any) -> None:
        task.word_came(answer)
        if answer.end:
            self._end(task.address.task_id, task.received)
            self._contact.hurry()
        elif number == WORD:
            task.word_answered(answer)
        else:
            delivery = Delivery(task.address, number, answer.count, payload)
            task.arrive(number, answer, delivery)

    def due(self, now: float) -> list[Delivery]:
        """Return the rounds whose turn has come."""
        deliveries: list[Delivery] = []
        while (found := self._rounds.next()) is not None:
            task_id, number = found
            task = self._tasks[task_id]
            if number >= task.whole or number not in task.parts:
                break
            self._rounds.take()
            self._in_use.add(found)
            task.behind = ()
            deliveries.append(task.parts.pop(number))
        if deliveries and self._waiting.is_going_on:
            self._waiting.begin(now)
        return deliveries

    def measured(self, task_id: int, buffers: Sequence[Buffer], now: float) -> None:
        """Take note of the elements of an answer: nothing depends on their bytes."""

    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        """Take note that the connection to a task's worker was lost, or could not be made."""
        task = self._open.get(task_id)
        if task is None:
            return
        task.disconnected(error, now)
        self._to_report[task_id] = task.refused
        self._contact.hurry()

    @property
    def reading(self) -> set[int]:
        """Tasks that are being read."""
        return set(self._open)

    def allow(self, task_ids: set[int] | None) -> bool:
        """Each task is asked when its turn comes, whatever is said here."""
        return False

    @property
    def unended(self) -> tuple[list[TaskAddress], list[TaskAddress]]:
        """Tasks whose end did not come, for who reads the workers of one process: not here."""
        return [], []

    # --- the consumer -------------------------------------------------------------------------

    def used_up(self, task_id: int, number: int) -> bool:
        """Take note that nothing of a delivery is left; act on it at once. May be said twice."""
        self._in_use.discard((task_id, number))
        return True

    def waited(self, seconds: float) -> None:
        """Take note that the consumer has waited for so long, and does no more."""
        self._waited += seconds

    def waiting(self, now: float | None) -> None:
        """Take note that the consumer waits for an element since `now`; None: it does not."""
        if now is None:
            self._waiting.end()
        elif not self._waiting.is_going_on:
            self._waiting.begin(now)
            self._look_at = now + min(_LOOK_SECONDS, self._wait_timeout / 2)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be delivered."""
        return self.failure is not None or (
            self._finished and not self._to_settle and self._rounds.next() is None
        )

    def may_use(self, now: float) -> bool:
        """Whether what was delivered is still this client's: see `Session.may_use`."""
        if self._contact.doubt(now - self._expected):
            self._expected = now
        return self.is_over or not self._contact.is_in_doubt

    def leave(self, begun: tuple[int, int, int] | None) -> list[SettleTask]:
        """Return what is to be said before this client leaves: nothing, for nobody reads on."""
        return []

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

    def _ask(self, now: float, actions: Actions) -> None:
        urgent = None
        if self._waiting.is_going_on and now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            urgent = self._rounds.next()
        for task_id, number in self._rounds.upcoming(self._max_outstanding - len(self._in_use)):
            task = self._open.get(task_id)
            if task is not None and task.wants(number):
                task.asked.add(number)
                task.to_send.append(number)
        for task_id, task in self._open.items():
            if now < task.retry_at:
                actions.wake_within(task.retry_at - now)
                continue
            task.try_again()
            is_urgent = urgent is not None and urgent[0] == task_id
            for number, message in task.questions(self.client_id, now, urgent=is_urgent):
                actions.asks.append(Ask(task.address, number, message))
            actions.wake_within(task.owes_until - now)

    def _call(self, now: float, actions: Actions) -> None:
        """Call the dispatcher, with everything that it should know, in its rhythm."""
        wanted = self._wanted(now)
        if wanted > self._asked_until:
            self._contact.hurry()
        if self._contact.may_ask(now):
            client_id = self.client_id
            for task_id in sorted(self._to_settle):
                task = self._tasks.get(task_id)
                nothing = SettleTask(client_id=client_id, task_id=task_id, received=(), rounds=0)
                actions.calls.append(nothing if task is None else task.settlement(client_id))
            for task_id, refused in sorted(self._to_report.items()):
                actions.calls.append(
                    ReportUnreachable(client_id=client_id, task_id=task_id, refused=refused)
                )
            actions.calls.append(
                ClientHeartbeat(
                    client_id=client_id,
                    known=self._known,
                    horizon=wanted,
                    elements=self._rounds.number,
                    waited=self._waited + self._waiting.seconds(now),
                    buffers=len(self._in_use),
                )
            )
            self._asked_until = max(self._asked_until, wanted)
            self._contact.asked(now)
        actions.wake_within(self._contact.next_in(now))

    def _wanted(self, now: float) -> int:
        """Return up to which round to go; 0: what is known suffices for now."""
        number, seconds = self._rounds.number, now - self._counted_at
        if seconds >= 1.0:
            self._rate = (number - self._counted) / seconds
            self._counted_at, self._counted = now, number
        rate = max(self._rate, float(number - self._counted))
        ahead = max(_FEWEST_ROUNDS, 2 * self._max_outstanding, math.ceil(_LEASE_SECONDS * rate))
        reached = self._rounds.reached
        if reached is None or self._rounds.horizon - reached >= ahead / 2:
            return 0
        return reached + ahead

    def _look_after_waiting(self, now: float, actions: Actions) -> None:
        waiting = self._waiting
        if any(not task.problem for task in self._open.values()):
            waiting.helped()
        else:
            waiting.helpless(now)
        if not waiting.is_going_on:
            return
        problem = self._problem(now)
        if problem is not None:
            self.fail(problem)
            return
        if waiting.is_worth_a_warning(now):
            actions.warnings.append(
                f"waited {waiting.seconds(now):.0f} s for round {self._rounds.number}: "
                f"{self._what_is_missing(now)}"
            )
        actions.wake_within(waiting.next_in(now))
        actions.wake_within(max(0.0, self._look_at - now))
        if self._left:
            actions.wake_within(_LAST_ROUNDS_SECONDS)

    def _problem(self, now: float) -> HeadraceError | None:
        """Return why there is no use in waiting any longer."""
        number, seconds = self._rounds.number, self._waiting.seconds(now)
        since = min(seconds, now - self._left_since)
        if self._left and since >= _LAST_ROUNDS_SECONDS:
            return FailedPreconditionError(
                f"consumer {self._consumer} of {self._consumers} cannot go on with round {number}: "
                f"{self._left}. Rounds are read by all consumers together; start all of them again"
            )
        if self._waiting.is_hopeless(now):
            return UnavailableError(
                f"no element came for {seconds:.0f} s, and nobody is there to send one: "
                f"{self._what_is_missing(now)}"
            )
        behind = self._behind()
        if behind and seconds >= self._wait_timeout:
            return DeadlineExceededError(
                f"round {number} did not come for {seconds:.0f} s (`wait_timeout`): "
                f"{self._laggards(behind)}"
            )
        return None

    def _behind(self) -> tuple[int, ...]:
        found = self._rounds.next()
        task = None if found is None else self._open.get(found[0])
        return () if task is None else task.behind

    def _laggards(self, behind: tuple[int, ...]) -> str:
        names = " and ".join(str(each) for each in behind[:3])
        more = f" and {len(behind) - 3} more" if len(behind) > 3 else ""
        word = "consumer" if len(behind) == 1 else "consumers"
        return (
            f"{word} {names}{more} of {self._consumers} did not take part in round "
            f"{self._rounds.number}, and all others wait. Does each of them run, and iterate as "
            "often?"
        )

    def _what_is_missing(self, now: float) -> str:
        behind = self._behind()
        if behind:
            return self._laggards(behind)
        if self._silent:
            names = " and ".join(self._silent[:3])
            return (
                f"{names} of the same job cannot be heard, and must say first what they received "
                "of a worker that is gone"
            )
        silence = self._contact.silence(now)
        return describe_missing(self._dispatcher, silence, self._open.values(), (), now)

    # --- tasks --------------------------------------------------------------------------------

    def _close(self, task_id: int) -> None:
        """Read no more of a task."""
        if self._open.pop(task_id, None) is not None:
            self._to_report.pop(task_id, None)
            self._drops.append(task_id)

    def _end(self, task_id: int, rounds: int) -> None:
        """Take note how many rounds a task gives in all: those are whole, and no others."""
        self._rounds.end(task_id, rounds)
        self._close(task_id)
        task = self._tasks.get(task_id)
        if task is not None:
            task.whole = rounds
            task.parts = {each: part for each, part in task.parts.items() if each < rounds}
