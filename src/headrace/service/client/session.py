"""A client's session: what is there is delivered, whichever task it comes from.

Rule 1. A request to a worker is repeated under its own number until it is answered or the task is
        over, so nothing that a worker keeps is lost or doubled by a connection that breaks.
Rule 2. A task is over when its worker says that nothing is left, or calls it off; or when the
        dispatcher has declared it lost; or when its worker cannot be reached, and the dispatcher
        neither lists it nor says that its worker is still there with the rest of it.
        What arrives for a task that is over is dropped: it may have gone to somebody else.
Rule 3. A lost task is settled: the dispatcher learns which of its units arrived here, all of which
        the consumer will see.

What does not depend on how elements come is in `reading`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.element.packing import raw_size
from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    UnavailableError,
)
from headrace.service.client.actions import Actions, Ask, Delivery
from headrace.service.client.contact import describe_missing
from headrace.service.client.reading import Reading
from headrace.service.client.schedule import Budget, Turns
from headrace.service.client.settling import Settling
from headrace.service.client.task import Task
from headrace.service.messages import (
    ClientHeartbeatReply,
    GetElements,
    GetElementsReply,
    OpenIterationReply,
    ReportDelivery,
    SkippedElements,
    TaskAddress,
)
from headrace.service.modes.cross_trainer_cache.falling_behind import FallingBehind
from headrace.transport.channel import Buffer

__all__ = ["Session"]

_HELD_UP_SECONDS = 1.0
"""Seconds of a wait for one unit, in order, after which the dispatcher hears of it."""
_ENOUGH_ON_THE_WAY = 2
"""Answers of a task under way with which there is no haste to ask for another one."""


class Session(Reading[Task]):
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
        deals: Whether workers get splits from the dispatcher.
        wants_all: Whether answers without elements are delivered, too: they say of units.
    """

    _cure = (
        "Iterate over the dataset again; give the dispatcher a `work_dir` and "
        "`fault_tolerant_mode=True` so that it survives restarts"
    )

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
        deals: bool = False,
        wants_all: bool = False,
    ) -> None:
        super().__init__(client_id, dispatcher, now, wait_timeout=wait_timeout, codec=codec)
        self._is_far = is_far
        #: Those that are read through a wire that may be slow.
        self._far: set[int] = set()
        self._trainer_id = trainer_id
        self._behind = FallingBehind(trainer_id)
        self._wants_all = wants_all
        self._turns = Turns(Budget(max_outstanding, counts_elements=counts_elements))
        #: Elements that were received.
        self._elements = 0
        self._settling = Settling(client_id)
        #: Those whose end did not come.
        self._unended: dict[int, TaskAddress] = {}
        #: Finished ones that the dispatcher says are no longer on their workers.
        self._forsaken: set[int] = set()
        #: The last attempt at each shard; None: at whole copies.
        self._attempts: dict[int | None, int] = {}
        self._has_shares, self._deals = has_shares, deals
        #: In order: the unit that the consumer waits for, since when, and the last that was said.
        self._wanted: int | None = None
        self._wanted_since = now
        self._said = -1

    # --- the dispatcher -----------------------------------------------------------------------

    def opened(self, reply: OpenIterationReply, now: float) -> None:
        self._list(reply.tasks, now)
        self._finished, self._contact.lease = reply.finished, reply.lease
        if reply.failure_reason:
            self.fail(FailedPreconditionError(reply.failure_reason))

    def _settled(self, asked: ReportDelivery) -> None:
        self._settling.said(asked)
        if not asked.consumed:
            self._contact.hurry()

    def _reported(self, task_id: int) -> None:
        self._settling.reported(task_id)

    def updated(self, update: ClientHeartbeatReply, now: float) -> None:
        self._contact.answered(now, update.heartbeat_interval)
        self._journal_problem = update.journal_problem
        # Of another unit it says nothing.
        self.helpers = frozenset(update.urgent_tasks if self._said == self._wanted else ())
        owes, was_finished = False, self._finished
        if not update.unchanged:
            self._known = update.version
            self._list(update.tasks, now)
            self._forsaken |= self._kept.difference(update.redeliverable)
            self._kept = set(update.redeliverable)
            for task_id in update.reports_needed:
                owes = self._settling.lose(task_id, self._open.get(task_id)) or owes
                self._over(task_id)
            self._finished, self.lost = update.finished, update.lost
            self._silent, self.given_up = update.awaited_clients, update.abandoned_splits
            if update.failure_reason:
                self.fail(FailedPreconditionError(update.failure_reason))
        unsettled = self._settling.is_urgent or any(task.problem for task in self._open.values())
        stuck = not self._open and not self._finished
        self._contact.rest(now, waits=unsettled or stuck)
        if owes:  # others wait for what it has to say
            self._contact.hurry()
        for task in list(self._open.values()):
            task_id = task.address.task_id
            if task_id in self._listed.keys() | self._kept:
                continue
            if self._wants_all and was_finished:
                # All that came is known to have come: of a worker that is paused, say, only the end
                # is missing, which others have said long since.
                self._over(task_id)
            elif task.problem:
                if task_id in self._forsaken:
                    self._warn_of(task, f"whose task {task_id} was finished", now)
                elif self._has_shares and self._finished and task_id in self._unended:
                    share = f"which read share {task.address.shard_index} (task {task_id})"
                    unless = ", unless another worker read that share again"
                    self._warn_of(task, share, now, unless)
                self._over(task_id)

    def _warn_of(self, task: Task, which: str, now: float, unless: str = "") -> None:
        """Say of a task that is over, and whose worker is gone, what may be lost of it."""
        self._warnings.append(
            f"the worker at {task.address.worker_address}, {which}, cannot be reached since "
            f"{now - task.problem_since:.0f} s ({task.problem}), and is waited for no more: what "
            f"it sent last and did not arrive is lost{unless}"
        )

    def _list(self, tasks: tuple[TaskAddress, ...], now: float) -> None:
        self._listed = {task.task_id: task.worker_address for task in tasks}
        for address in tasks:
            if not self._settling.knows(address.task_id):
                task = Task(address)
                if self.pace.is_open and self._is_far(address.worker_address):
                    self._far.add(address.task_id)
                # In this order: an interruption may repeat it, and not leave out a part.
                self._turns.add(address.task_id)
                self._open[address.task_id] = task
                self._unended[address.task_id] = address
                self._settling.begin(address.task_id, task.arrived)
            if address.attempt > self._attempts.get(address.shard_index, 0):
                self._attempts[address.shard_index] = address.attempt
                lost = (
                    "every worker that read a copy of the dataset"
                    if address.shard_index is None
                    else f"the worker that read share {address.shard_index} of the dataset"
                )
                self._warn_of_attempt(address, lost)

    # --- workers ------------------------------------------------------------------------------

    def measured(self, task_id: int, buffers: Sequence[Buffer], now: float) -> None:
        if task_id in self._far and task_id in self._open:
            size = raw_size(buffers)
            outstanding = sum(task.window.unanswered for task in self._open.values())
            self.pace.arrived(size, self._waiting.seconds(now), outstanding, now)

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
        self._turns.touch(task_id)
        self._waiting.helped()
        if isinstance(answer, CancelledError):
            # As if the worker were lost: whether the iteration goes on, the dispatcher knows.
            if self._has_shares and task_id in self._kept:
                self._warnings.append(
                    f"the worker at {task.address.worker_address}, whose task {task_id} was "
                    "finished, has it no longer: what it sent last and did not arrive is lost"
                )
            self._over(task_id)
            self._contact.hurry()
            return []
        if isinstance(answer, AbortedError):
            # It was asked again; or the worker took this for an earlier request, when that came
            # over the connection before this one and was late.
            task.aborted(number, now)
            return []
        if isinstance(answer, UnavailableError):
            # Not now: the worker is not ready, or its answers wait to be read.
            task.put_off(number, now)
            return []
        if isinstance(answer, Exception):
            entry: tuple[GetElementsReply | None, Any] = (None, answer)
        else:
            entry = (answer, payload)
            task.ending = task.ending or answer.end_of_task
            if task.window.awaits(number):
                skipped = (
                    answer.mode_data.count if isinstance(answer.mode_data, SkippedElements) else 0
                )
                self._behind.skipped(skipped, task.address.worker_address)
            # With nothing in it the end is near, and waits until the dispatcher has heard of each
            # client; or all that was held was given, and more is dealt when that is used.
            task.draining = not (answer.num_elements or answer.error)
            if task.draining:
                self._contact.hurry()
        deliveries = []
        for due, (elements, value) in task.window.take(number, entry):
            self._turns.answered(task_id, due, 1 if elements is None else elements.num_elements)
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

    def _due(
        self, task: Task, number: int, elements: GetElementsReply | None, value: Any
    ) -> Delivery | None:
        if elements is not None and not task.receive(number, elements):
            self._give_back(task, number)
            if not self._wants_all or elements.num_elements or elements.error:
                return None
            value = None
        count = 0 if elements is None else elements.num_elements
        self._elements += count
        return Delivery(task.address, number, count, value, elements)

    def disconnected(self, task_id: int, error: UnavailableError, now: float) -> None:
        task = self._open.get(task_id)
        if task is None:
            return
        task.disconnected(error, now)
        self._turns.touch(task_id)
        self._settling.cannot_reach(task_id, refused=task.refused)
        self._contact.hurry()

    def allow(self, task_ids: set[int] | None, wanted: int | None, now: float) -> bool:
        if wanted != self._wanted:
            self._wanted, self._wanted_since, self.helpers = wanted, now, frozenset()
        return self._turns.allow(task_ids)

    # --- the consumer -------------------------------------------------------------------------

    def used_up(self, task_id: int, number: int) -> bool:
        # Where several answers are on the way, that has time until the next of them has come.
        task = self._open.get(task_id)
        if task is not None:
            self._give_back(task, number)
            return task.draining or task.window.unanswered < _ENOUGH_ON_THE_WAY
        self._settling.use_up(task_id, number)
        return True

    @property
    def skipped(self) -> int:
        return self._behind.total

    @property
    def unended(self) -> tuple[list[TaskAddress], list[TaskAddress]]:
        reading = [each for task_id, each in self._unended.items() if task_id in self._open]
        gone = [each for task_id, each in self._unended.items() if task_id not in self._open]
        return reading, gone

    @property
    def is_over(self) -> bool:
        return self.failure is not None or (
            self._finished and not self._open and not self._settling.is_unsettled
        )

    # --- acting -------------------------------------------------------------------------------

    def _ask(self, now: float, actions: Actions) -> None:
        turn = self._turns.take(self._open, now)
        actions.asks += [self._question(task, number) for task, number in turn.asks]
        actions.wake_within(turn.wake_in)
        actions.warnings += self._behind.due(now)

    def _question(self, task: Task, number: int) -> Ask:
        message = GetElements(
            task_id=task.address.task_id,
            ticket=task.address.task_token,
            client_id=self.client_id,
            request_number=number,
            acknowledged=task.window.acknowledged,
            max_elements=self._turns.most(task.address.task_id, number),
            trainer_id=self._trainer_id,
            codec=self.pace.codec if task.address.task_id in self._far else "",
        )
        return Ask(task.address, number, message)

    def _call(self, now: float, actions: Actions) -> None:
        wanted = self._wanted_for_long(now, actions)
        if wanted not in (self._said, -1):
            self._contact.hurry()
        if self._contact.may_ask(now):
            self._said = wanted
            actions.calls += self._settling.calls()
            actions.calls.append(
                self._heartbeat(
                    now,
                    elements=self._elements,
                    buffers=sum(len(task.in_use) for task in self._open.values()),
                    wanted=wanted,
                )
            )
            self._contact.asked(now)
        actions.wake_within(self._contact.next_in(now))

    def _forgive(self, pause: float, now: float) -> None:
        super()._forgive(pause, now)
        self._wanted_since = now  # it may have come meanwhile

    def _wanted_for_long(self, now: float, actions: Actions) -> int:
        """Return the unit that the consumer has waited for for a while; -1: none."""
        if self._wanted is None:
            return -1
        rest = self._wanted_since + _HELD_UP_SECONDS - now
        if rest > 0:
            actions.wake_within(rest)
            return -1
        return self._wanted

    def leave(self, begun: tuple[int, int, int] | None) -> list[ReportDelivery]:
        # What was used of each task: of one that is over all that came, unless it was lost, and
        # what came of it was said then.
        return self._settling.last_words(self._open, begun)

    @property
    def _what_is_next(self) -> str:
        return "the next element in order" if self._wants_all else super()._what_is_next

    def _needs_dispatcher(self, task: Task) -> bool:
        return self._deals or task.draining

    def _what_is_missing(self, now: float) -> str:
        silence = self._contact.silence(now)
        # In order, others may well give what comes later.
        holders = [task for each in self.helpers if (task := self._open.get(each)) is not None]
        return describe_missing(
            self._dispatcher,
            silence,
            holders or self._open.values(),
            self._silent,
            now,
            self.passed_over,
            listed=list(self._listed.values()),
            is_idle=self._waiting.is_idle_for_long(now),
            has_shares=self._has_shares,
            journal_problem=self._journal_problem,
        )

    # --- tasks --------------------------------------------------------------------------------

    def _ended(self, task: TaskAddress) -> None:
        """Take note that a task came to its end, and with it whoever read its shard before."""
        for task_id, other in list(self._unended.items()):
            if task_id == task.task_id or (
                task.shard_index is not None and other.shard_index == task.shard_index
            ):
                del self._unended[task_id]

    def _give_back(self, task: Task, number: int) -> None:
        task.use_up(number)
        self._turns.used_up(task.address.task_id, number)

    def _over(self, task_id: int) -> None:
        task = self._open.pop(task_id, None)
        if task is not None:
            self._settling.finish(task_id, task)
            self._turns.remove(task_id)
            self._drops.append(task_id)
