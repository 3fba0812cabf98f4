"""A consumer's session: one round after another is delivered.

What does not depend on how elements come is in `reading`.

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
from typing import Any

from headrace.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    UnavailableError,
)
from headrace.service.client.actions import Actions, Ask, Delivery
from headrace.service.client.contact import describe_missing
from headrace.service.client.reading import Reading
from headrace.service.messages import (
    PROGRESS_REQUEST,
    ClientHeartbeatReply,
    GetElementsReply,
    OpenIterationReply,
    ReportDelivery,
    ReportUnreachable,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.session_task import RoundTask
from headrace.service.modes.coordinated_reads.turns import Rounds

__all__ = ["RoundSession"]

_LEASE_SECONDS = 4.0
_FEWEST_ROUNDS = 16
_ASKED_TOGETHER = 4
"""It asks once a quarter of the rounds that may be outstanding are used up, or when it is awake."""
_LOOK_SECONDS = 2.0
"""How often to ask, in a wait, who keeps the next round."""
_LAST_ROUNDS_SECONDS = 1.0
"""How long to wait, after another consumer has left, for rounds that all of them have."""


class RoundSession(Reading[RoundTask]):
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

    _cure = "Iterate over the dataset again, on all consumers"

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
        super().__init__(client_id, dispatcher, now, wait_timeout=wait_timeout)
        self._max_outstanding = max_outstanding
        self._consumer, self._consumers = consumer, consumers
        self._wait_timeout = wait_timeout
        self._rounds = Rounds()
        #: Every task that was ever listed.
        self._tasks: dict[int, RoundTask] = {}
        #: Rounds that were delivered and are not used up.
        self._in_use: set[tuple[int, int]] = set()
        #: Rounds that were used up since it asked last.
        self._used = 0
        #: The last attempt at whole copies.
        self._attempts = 0
        self._left = ""
        #: Since when it is known that a consumer has left.
        self._left_since = math.inf
        #: What it must hear.
        self._to_settle: set[int] = set()
        self._to_report: dict[int, bool] = {}
        #: How far was asked for; and when the rounds were counted last, with their number then.
        self._asked_until = 0
        self._counted_at, self._counted, self._rate = now, 0, 0.0
        self._look_at = 0.0

    # --- the dispatcher -----------------------------------------------------------------------

    def opened(self, reply: OpenIterationReply, now: float) -> None:
        self._list(reply.tasks)
        self._rounds.extend(math.inf if reply.finished else reply.horizon)
        self._finished, self._contact.lease = reply.finished, reply.lease
        if reply.failure_reason:
            self.fail(FailedPreconditionError(reply.failure_reason))
        self._contact.hurry()

    def _settled(self, asked: ReportDelivery) -> None:
        self._to_settle.discard(asked.task_id)
        self._contact.hurry()

    def _reported(self, task_id: int) -> None:
        self._to_report.pop(task_id, None)

    def updated(self, update: ClientHeartbeatReply, now: float) -> None:
        self._contact.answered(now, update.heartbeat_interval)
        self._journal_problem = update.journal_problem
        if not update.unchanged:
            self._take_news(update, now)
        for task_id, task in [*self._open.items()]:
            if task_id in self._listed.keys() | self._kept:
                continue
            if task.problem:
                # It is finished, so that all of it arrived.
                self._end(task_id, task.received)
            elif self._finished:
                # Nothing was dealt to it. A worker that never heard of it says nothing; of one that
                # could not open the dataset, others that ended do not take what it says of that.
                self._end(task_id, task.whole)
        # At last: the tasks up to there are known now.
        self._rounds.extend(math.inf if self._finished else update.horizon)
        waits = bool(self._to_report or self._to_settle) or any(
            task.problem or not (task_id in self._open or self._rounds.is_known_to_end(task_id))
            for task_id, task in self._tasks.items()
        )
        stuck = not self._open and not self._finished
        self._contact.rest(now, waits=waits or stuck)

    def _take_news(self, update: ClientHeartbeatReply, now: float) -> None:
        self._known = update.version
        self._list(update.tasks)
        self._kept = set(update.redeliverable)
        for task_id, rounds in update.complete_rounds:
            self._end(task_id, rounds)
        for task_id in update.reports_needed:
            self._to_settle.add(task_id)
            self._close(task_id)
        self._finished, self.lost = update.finished, update.lost
        self._silent = update.awaited_clients
        if update.missing_consumer and not self._left:
            self._left, self._left_since = update.missing_consumer, now
        if update.failure_reason:
            self.fail(FailedPreconditionError(update.failure_reason))

    def _list(self, tasks: tuple[TaskAddress, ...]) -> None:
        self._listed = {task.task_id: task.worker_address for task in tasks}
        for address in tasks:
            task_id = address.task_id
            if task_id not in self._tasks:
                self._tasks[task_id] = self._open[task_id] = RoundTask(address, self._consumer)
                self._rounds.add(task_id, address.starting_round or 0)
            if address.attempt > self._attempts:
                self._attempts = address.attempt
                self._warn_of_attempt(address, "every worker that read a copy of the dataset")

    # --- workers ------------------------------------------------------------------------------

    def answered(
        self,
        task_id: int,
        number: int,
        answer: GetElementsReply | Exception,
        payload: Any,
        now: float,
    ) -> list[Delivery]:
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
            task.aborted(number, now)
        elif isinstance(answer, HeadraceError):
            self.fail(answer)
        elif isinstance(answer, Exception):
            self.fail(HeadraceError(str(answer)))
        else:
            self._take_answer(task, number, answer, payload)
        return self.due(now)

    def _take_answer(
        self, task: RoundTask, number: int, answer: GetElementsReply, payload: Any
    ) -> None:
        task.word_came(answer)
        if answer.end_of_task:
            self._end(task.address.task_id, task.received)
            self._contact.hurry()
        elif number == PROGRESS_REQUEST:
            task.word_answered(answer)
        else:
            delivery = Delivery(task.address, number, answer.num_elements, payload)
            task.arrive(number, answer, delivery)

    def due(self, now: float) -> list[Delivery]:
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

    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        task = self._open.get(task_id)
        if task is None:
            return
        task.disconnected(error, now)
        self._to_report[task_id] = task.refused
        self._contact.hurry()

    # --- the consumer -------------------------------------------------------------------------

    def used_up(self, task_id: int, number: int) -> bool:
        self._in_use.discard((task_id, number))
        self._used += 1
        # Several at a time: what each round asks, says and hears then goes together.
        return self._used >= self._max_outstanding // _ASKED_TOGETHER

    def waiting(self, now: float | None) -> None:
        begins = now is not None and not self._waiting.is_going_on
        super().waiting(now)
        if now is not None and begins:
            self._look_at = now + min(_LOOK_SECONDS, self._wait_timeout / 2)

    @property
    def is_over(self) -> bool:
        return self.failure is not None or (
            self._finished and not self._to_settle and self._rounds.next() is None
        )

    def leave(self, begun: tuple[int, int, int] | None) -> list[ReportDelivery]:
        return []  # nobody reads on

    # --- acting -------------------------------------------------------------------------------

    def _ask(self, now: float, actions: Actions) -> None:
        self._used = 0
        urgent = None
        if self._waiting.is_going_on and now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            urgent = self._rounds.next()
        room = self._max_outstanding - len(self._in_use)
        # Not all of these need be among the next: a task that is lost takes its turns with it.
        asked = sum([len(task.asked) + len(task.parts) for task in self._open.values()])
        for place, (task_id, number) in enumerate(self._rounds.upcoming(room)):
            task = self._open.get(task_id)
            # The next one is owed in any case, or what comes after it would fill the room for ever.
            if task is not None and task.wants(number) and (asked < room or place == 0):
                task.asked.add(number)
                task.to_send.append(number)
                asked += 1
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
        wanted = self._wanted(now)
        if wanted > self._asked_until:
            self._contact.hurry()
        if self._contact.may_ask(now):
            client_id = self.client_id
            for task_id in sorted(self._to_settle):
                task = self._tasks.get(task_id)
                nothing = ReportDelivery(
                    client_id=client_id, task_id=task_id, delivered=(), rounds=0
                )
                actions.calls.append(nothing if task is None else task.settlement(client_id))
            for task_id, refused in sorted(self._to_report.items()):
                actions.calls.append(
                    ReportUnreachable(
                        client_id=client_id, task_id=task_id, connection_refused=refused
                    )
                )
            actions.calls.append(
                self._heartbeat(
                    now,
                    horizon=wanted,
                    elements=self._rounds.number,
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
        super()._look_after_waiting(now, actions)
        if self._waiting.is_going_on:
            actions.wake_within(max(0.0, self._look_at - now))
            if self._left:
                actions.wake_within(_LAST_ROUNDS_SECONDS)

    def _problem(self, now: float) -> HeadraceError | None:
        number, seconds = self._rounds.number, self._waiting.seconds(now)
        since = min(seconds, now - self._left_since)
        if self._left and since >= _LAST_ROUNDS_SECONDS:
            return FailedPreconditionError(
                f"consumer {self._consumer} of {self._consumers} cannot go on with round {number}: "
                f"{self._left}. Rounds are read by all consumers together; start all of them again"
            )
        problem = super()._problem(now)
        if problem is not None:
            return problem
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

    @property
    def _what_is_next(self) -> str:
        return f"round {self._rounds.number}"

    def _needs_dispatcher(self, task: RoundTask) -> bool:
        return True  # which opens the next rounds

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
        return describe_missing(
            self._dispatcher,
            silence,
            self._open.values(),
            (),
            now,
            listed=list(self._listed.values()),
            is_idle=self._waiting.is_idle_for_long(now),
            journal_problem=self._journal_problem,
        )

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
