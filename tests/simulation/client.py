"""A client as a process: its session, its connections, and a consumer."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.element.chunk import Chunk
from headrace.errors import HeadraceError, UnavailableError
from headrace.service.client.read_session import ReadSession, ReceivedBatch
from headrace.service.config import STATIC_POLICIES
from headrace.service.messages import (
    PROGRESS_REQUEST,
    ClientHeartbeatReply,
    CloseIteration,
    DispatcherRequest,
    GetElementsReply,
    LostSplits,
    OpenIteration,
    OpenIterationReply,
    PutPlan,
    RegisterDataset,
    RegisterDatasetReply,
    TaskAddress,
)
from headrace.service.modes.coordinated_reads.coordinated_session import CoordinatedReadSession
from headrace.service.modes.ordered.reorder_buffer import NextElements, ReorderBuffer
from headrace.service.ranges import Ranges
from headrace.transport.envelope import decode_error
from tests.simulation.kernel import Process
from tests.simulation.network import Link, Network
from tests.simulation.production import Atom, Element

__all__ = ["GROUP_SECONDS", "ClientProcess", "Consumer", "Outcome", "Portion", "Reading"]

GROUP_SECONDS = 150.0
"""How long consumers wait for each other."""
_OPEN_SECONDS = 60.0
_CALL_SECONDS = 2.0
_ASK_AGAIN = 0.2
_ELEMENT_BYTES = 100


class Outcome(enum.Enum):
    """How a reading ended."""

    ENDED = "the iteration is over"
    FAILED = "an error"
    CLOSED = "closed by the consumer"
    DIED = "the process crashed"


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """How a client reads."""

    passes: int = 1
    """How many passes, one after another."""
    max_outstanding: int = 16
    counts_elements: bool = False
    ahead: int = 20
    """In order, how many elements may be here before their turn while all are asked."""
    think: float = 0.0
    """Seconds that it needs for a portion, at most."""
    close_after: int | None = None
    """Portions after which it closes a pass; None: it reads to the end."""
    trainer_id: str = ""
    """For whom it reads, where trainers share what workers make."""


@dataclass(frozen=True)
class Portion:
    """What one answer brought the consumer."""

    task: TaskAddress
    number: int
    elements: Sequence[Element]

    @property
    def key(self) -> tuple[int, int]:
        """Which answer of which task it is."""
        return self.task.task_id, self.number

    def atoms(self) -> list[Atom]:
        return [atom for element in self.elements for atom in element]


@dataclass
class Reading:
    """What one client had of one iteration."""

    client_id: str
    pass_number: tuple[int, ...]
    iteration_id: int = -1
    outcome: Outcome | None = None
    failure: HeadraceError | None = None
    #: What the consumer got, in order.
    yielded: list[Portion] = field(default_factory=list)
    #: (task, unit) of elements that raised.
    raised: list[tuple[int, int]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    lost: tuple[LostSplits, ...] = ()
    #: (task, number) of all answers that the consumer got something of.
    rounds: list[tuple[int, int]] = field(default_factory=list)
    #: In order: all that came, an element that raised by what it would have been.
    sequence: list[Atom] = field(default_factory=list)
    #: In order: ranges of units that are dealt no more.
    given_up: Ranges = ()
    warnings: list[str] = field(default_factory=list)
    #: Since when the consumer waits without having heard why; pauses of the client do not count.
    waiting_since: float | None = None
    warned: bool = False
    #: The dispatcher was lost after the end, perhaps before it heard what was used.
    was_unheard: bool = False

    def atoms(self) -> list[tuple[int, Atom]]:
        """Return (task, atom) of all that the consumer got, or that raised."""
        got = [(each.task.task_id, atom) for each in self.yielded for atom in each.atoms()]
        return got + [(task_id, (unit, 0)) for task_id, unit in self.raised]


class ClientProcess(Process):
    """Reads some passes of a job, one after another.

    Args:
        network: What connects it.
        name: Its name.
        dispatcher: The dispatcher's address.
        before: What to put and to register before anything is opened.
        opening: What to open; client, dataset and pass are filled in.
        consumer: How it reads.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        dispatcher: str,
        before: tuple[PutPlan, RegisterDataset],
        opening: OpenIteration,
        consumer: Consumer,
    ) -> None:
        super().__init__(network, name)
        self.consumer = consumer
        self.readings: list[Reading] = []
        self.is_done = self._is_closed = False
        #: When it said what, since the last look.
        self.unjudged: list[tuple[float, str]] = []
        self.most_outstanding = self.most_tasks = 0
        self._dispatcher_address = dispatcher
        self._before, self._opening = before, opening
        self._dataset_id = ""
        #: Elements that may come with each request, or came and are not used up; the most of all.
        self._owed: dict[tuple[int, int], int] = {}
        #: Requests that were answered; one that was repeated may be answered once more.
        self._answered: set[tuple[int, int]] = set()
        self.most_elements = 0
        #: When the dispatcher answered last, and for how long it did not, at most.
        self._heard_at = self.longest_silence = 0.0

    @property
    def reading(self) -> Reading:
        return self.readings[-1]

    def start(self) -> None:
        super().start()
        self._connect()
        put, register = self._before
        began = self.simulation.now

        def registered(answer: Any) -> None:
            if isinstance(answer, RegisterDatasetReply) and not answer.plan_needed:
                self._dataset_id = answer.dataset_id
                self._open_pass(0)
            else:
                # The dispatcher has the plan no more, or has not the whole of it.
                self._ask(put, lambda _: self._ask(register, registered, began), began)

        self._ask(put, lambda _: self._ask(register, registered, began), began)

    def crash(self, why: str = "dies") -> None:
        if self.is_up and self.readings and self.reading.outcome is None:
            self.reading.outcome = Outcome.DIED
        self.is_done = True
        super().crash(why)

    # --- opening ------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._asked: dict[int, DispatcherRequest | Callable[[Any], None]] = {}
        address = self._dispatcher_address
        take, lost = self._dispatcher_said, self._dispatcher_lost
        self._dispatcher = Link(self.network, self, address, take, lost)

    def _ask(self, message: DispatcherRequest, then: Callable[[Any], None], began: float) -> None:
        """Ask the dispatcher until it answers, as a stub with retries does."""
        is_answered = False

        def answered(answer: Any) -> None:
            nonlocal is_answered
            if is_answered:
                return
            if not isinstance(answer, UnavailableError):
                is_answered = True
                then(answer)

        def again() -> None:
            if is_answered or self.is_done:
                return
            if self.simulation.now - began > _OPEN_SECONDS:
                self._gave_up()
                return
            self.log("asks", message)
            self._asked[self._dispatcher.send(message)] = answered
            self.call_later(_CALL_SECONDS, again)

        again()

    def _gave_up(self) -> None:
        if not self.readings:
            self.readings.append(Reading("", ()))
        self._end(Outcome.FAILED, UnavailableError("the dispatcher did not answer for 60 s"))

    def _open_pass(self, number: int) -> None:
        reading = Reading(f"{self.name}/{number}", (number,))
        self.readings.append(reading)
        self._results: deque[ReceivedBatch] = deque()
        self._in_use: ReceivedBatch | None = None
        self._unread: list[Element] = []
        self._is_waiting = self._is_open = False
        self._links: dict[int, Link] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        self._taken = 0
        opening = msgspec.structs.replace(
            self._opening,
            client_id=reading.client_id,
            dataset_id=self._dataset_id,
            epoch=reading.pass_number,
        )
        self.session = self._session(reading.client_id)
        self._owed, self._answered = {}, set()
        self._units = ReorderBuffer(self.consumer.ahead * _ELEMENT_BYTES)
        self._unit = self._ordinal = 0

        def opened(answer: Any) -> None:
            if not isinstance(answer, OpenIterationReply):
                self._end(Outcome.FAILED, answer)
                return
            self.log("opened", answer)
            self._heard_at = self.simulation.now
            reading.iteration_id = answer.iteration_id
            self._is_open = True
            # A new connection, as that of a reader's own thread.
            self._dispatcher.close()
            self._connect()
            self.session.iteration_opened(answer, self.simulation.now)
            self._next()
            self._act()

        self._ask(opening, opened, self.simulation.now)

    def _session(self, client_id: str) -> ReadSession | CoordinatedReadSession:
        opening, consumer = self._opening, self.consumer
        common = client_id, self._dispatcher_address, consumer.max_outstanding, self.simulation.now
        if opening.options.num_consumers is None or opening.consumer_index is None:
            return ReadSession(
                *common,
                trainer_id=consumer.trainer_id,
                counts_elements=consumer.counts_elements,
                has_shards=opening.options.processing_mode in STATIC_POLICIES,
                delivers_empty=opening.options.ordered,
            )
        return CoordinatedReadSession(
            *common,
            consumer=opening.consumer_index,
            num_consumers=opening.options.num_consumers,
            wait_timeout=GROUP_SECONDS,
        )

    # --- connections --------------------------------------------------------------------------

    def woken(self) -> None:
        self._act()

    def _act(self) -> None:
        if self.is_done or not self._is_open or self.reading.outcome is not None:
            return
        now, session = self.simulation.now, self.session
        self._results += session.take_due(now)
        actions = session.act(now)
        for warning in actions.warnings:
            self.log("warns", warning)
            self.reading.warnings.append(warning)
            self.unjudged.append((now, warning))
            if warning.startswith("waited"):
                self.reading.waiting_since, self.reading.warned = now, True
        for task_id in actions.disconnects:
            self._drop(task_id)
        for task, number, message in actions.requests:
            link = self._links.get(task.task_id)
            if link is None:
                link = self._connect_worker(task)
            self._numbers[task.task_id][link.send(message)] = number
            self._owed[task.task_id, number] = message.max_elements
        for call in actions.calls:
            self.log("asks", call)
            self._asked[self._dispatcher.send(call)] = call
        self._measure()
        if self._is_waiting:
            self._next()
            if not self._is_waiting:
                self.wake_in(0.0)
        self.wake_in(actions.wake_in)

    def _connect_worker(self, task: TaskAddress) -> Link:
        task_id = task.task_id
        link = self._links[task_id] = Link(
            self.network,
            self,
            task.worker_address,
            lambda ticket, message, content: self._worker_said(task_id, ticket, message, content),
            lambda error: self._worker_lost(task_id, error),
        )
        self._numbers[task_id] = {}
        return link

    def _drop(self, task_id: int) -> None:
        link = self._links.pop(task_id, None)
        if link is not None:
            link.close()
            del self._numbers[task_id]

    def _worker_said(
        self, task_id: int, ticket: int, answer: msgspec.Struct | Exception, content: Any
    ) -> None:
        number = self._numbers[task_id].pop(ticket)
        assert isinstance(answer, GetElementsReply | Exception), answer
        payload = content
        if isinstance(answer, GetElementsReply):
            self.log(f"has of {task_id}", number, answer, content or "")
            if answer.error is not None:
                payload = decode_error(answer.error)
        else:
            self.log(f"is refused by {task_id}", number, repr(answer))
        due = self.session.worker_replied(task_id, number, answer, payload, self.simulation.now)
        for each in due:
            key = each.task.task_id, each.request_number
            if _has_content(each):
                self._owed[key] = max(1, each.num_elements)
            else:
                self._owed.pop(key, None)
        if isinstance(answer, GetElementsReply):
            self._answered.add((task_id, number))
            if not (answer.num_elements or answer.error):
                self._owed.pop((task_id, number), None)
        self._results += due
        self._act()

    def _worker_lost(self, task_id: int, error: UnavailableError) -> None:
        self._drop(task_id)
        self.session.disconnected(task_id, error, self.simulation.now)
        self._act()

    def _dispatcher_lost(self, error: UnavailableError) -> None:
        for reading in self.readings:
            reading.was_unheard = reading.was_unheard or reading.outcome is not None
        waiting = [each for each in self._asked.values() if callable(each)]
        has_session = len(waiting) < len(self._asked)
        self._asked.clear()
        if has_session and not self.is_done:
            self.session.dispatcher_unreachable(self.simulation.now)
            self._act()

    def _dispatcher_said(
        self, ticket: int, answer: msgspec.Struct | Exception, content: Any
    ) -> None:
        asked = self._asked.pop(ticket, None)
        if asked is None or self.is_done:
            return
        if callable(asked):
            asked(answer)
            return
        if isinstance(answer, ClientHeartbeatReply) and not answer.unchanged:
            self.log("hears", answer)
        self.session.dispatcher_replied(asked, answer, self.simulation.now)
        self.longest_silence = max(self.longest_silence, self.simulation.now - self._heard_at)
        self._heard_at = self.simulation.now
        self._act()

    # --- the consumer -------------------------------------------------------------------------

    def _next(self) -> None:
        """Go on reading, as `RemoteReader.read` does."""
        session, now = self.session, self.simulation.now
        if self._opening.options.ordered:
            self._next_in_order(now)
            return
        while True:
            if self._closes():
                return
            if self._in_use is not None:
                if not self._has_lease(now):
                    return
                if self._unread:
                    self._yield_some(self._in_use)
                    return
                self._use_up(self._in_use)
            if self._results:
                self._wait_no_more()
                self._taken += 1
                self._begin_to_use(self._results.popleft())
            elif session.is_finished:
                self._end(Outcome.FAILED if session.failure else Outcome.ENDED, session.failure)
                return
            else:
                self._wait(now)
                return

    def _closes(self) -> bool:
        """Close the pass if the consumer has enough; return whether it has."""
        has_enough = self.consumer.close_after is not None
        has_enough = has_enough and self._taken >= (self.consumer.close_after or 0)
        if has_enough:
            self._end(Outcome.CLOSED)
        return has_enough

    def _next_in_order(self, now: float) -> None:
        """Go on reading, as `ArrivingSplits.wait_for_next` does."""
        session, units, size = self.session, self._units, self._opening.options.num_splits or 0
        while True:
            if self._closes():
                return
            while self._results:
                self._take_in(self._results.popleft())
            units.forget_tasks(units.tasks - session.active_tasks)
            units.abandon(session.abandoned_splits)
            self.reading.given_up = session.abandoned_splits
            limit = self.simulation.random.choice((1, 64))
            found = (
                None
                if self._unit >= size
                else units.next_elements(self._unit, self._ordinal, limit)
            )
            wanted = self._unit if found is None and self._unit < size else None
            session.restrict_requests(
                units.tasks_to_request(wanted, session.active_tasks, session.urgent_tasks),
                wanted,
                now,
            )
            if found is not None:
                self._wait_no_more()
                if self._got(found):
                    return
            elif not session.is_finished:
                self._wait(now)
                return
            elif session.failure is not None or self._unit >= size:
                failed = session.failure is not None
                self._end(Outcome.FAILED if failed else Outcome.ENDED, session.failure)
                return
            else:
                units.abandon([(self._unit, self._unit + 1)])

    def _take_in(self, delivery: ReceivedBatch) -> None:
        self._owed.pop((delivery.task.task_id, delivery.request_number), None)
        self.session.batch_consumed(delivery.task.task_id, delivery.request_number)
        payload, answer = delivery.payload, delivery.reply
        if isinstance(payload, Exception) and (
            answer is None or answer.element_ids.failed_split < 0
        ):
            self.reading.errors.append(payload)
        content = None
        if isinstance(payload, Exception):
            content = payload
        elif delivery.num_elements:
            content = Chunk.of_rows(list(payload))
        if answer is not None:
            size = _ELEMENT_BYTES * delivery.num_elements
            self._units.add_reply(delivery.task.task_id, answer, content, size)

    def _got(self, found: NextElements) -> bool:
        """Take what came next; return whether the consumer is busy with it."""
        if found.error is not None:
            self.log("raises", found.error)
            self.reading.sequence.append((int(str(found.error).split()[1]), 0))
            self.reading.raised.append((0, int(str(found.error).split()[1])))
            return False
        if found.chunk is None:
            self._unit, self._ordinal = self._unit + 1, 0
            return False
        self._ordinal = found.ordinal + found.chunk.size
        self._taken += 1
        rows = found.chunk.rows()
        self.log("yields", rows)
        task = TaskAddress(task_id=0, worker_id="", worker_address="", task_token="")
        portion = Portion(task, self._taken, rows)
        self.reading.sequence += portion.atoms()
        self.reading.yielded.append(portion)
        self.call_later(self.consumer.think * self.simulation.random.random(), self._go_on_reading)
        return True

    def _has_lease(self, now: float) -> bool:
        """Whether what is here may be yielded; else wait until the dispatcher has said so."""
        if not self.session.may_consume(now):
            self._wait(now)
            return False
        if self._is_waiting and self.session.failure is not None:
            self._end(Outcome.FAILED, self.session.failure)
            return False
        self._wait_no_more()
        return True

    def _begin_to_use(self, delivery: ReceivedBatch) -> None:
        self.reading.rounds.append((delivery.task.task_id, delivery.request_number))
        if isinstance(delivery.payload, Exception):
            error = str(delivery.payload)
            if error.startswith("unit "):
                self.reading.raised.append((delivery.task.task_id, int(error.split()[1])))
            else:
                self.reading.errors.append(delivery.payload)
            self._use_up(delivery)
        else:
            self._in_use, self._unread = delivery, list(delivery.payload)

    def _yield_some(self, delivery: ReceivedBatch) -> None:
        size = self.simulation.random.choice((1, len(self._unread)))
        part, self._unread = self._unread[:size], self._unread[size:]
        self.log("yields", f"of {delivery.task.task_id}", part)
        self.reading.yielded.append(Portion(delivery.task, delivery.request_number, part))
        self.call_later(self.consumer.think * self.simulation.random.random(), self._go_on_reading)

    def _use_up(self, delivery: ReceivedBatch) -> None:
        self._owed.pop((delivery.task.task_id, delivery.request_number), None)
        self.session.batch_consumed(delivery.task.task_id, delivery.request_number)
        self._in_use = None

    def _go_on_reading(self) -> None:
        if not self.is_done and self.reading.outcome is None:
            self._next()
            self._act()

    def _wait(self, now: float) -> None:
        self.session.set_waiting(now)
        if not self._is_waiting:
            self._is_waiting, self.reading.waiting_since = True, now
            self.reading.warned = False

    def _wait_no_more(self) -> None:
        if self._is_waiting:
            self.session.set_waiting(None)
            self._is_waiting, self.reading.waiting_since = False, None

    def _measure(self) -> None:
        """Take note of how much is outstanding, of tasks that are not over."""
        unused = [*self._results, *([self._in_use] if self._in_use else [])]
        outstanding = {
            (each.task.task_id, each.request_number)
            for each in unused
            if each.task.task_id in self._numbers and _has_content(each)
        }
        outstanding |= {
            (task_id, number)
            for task_id, sent in self._numbers.items()
            for number in sent.values()
            if number != PROGRESS_REQUEST and (task_id, number) not in self._answered
        }
        self.most_outstanding = max(self.most_outstanding, len(outstanding))
        owed = sum(most for (task, _), most in self._owed.items() if task in self._numbers)
        self.most_elements = max(self.most_elements, owed)
        self.most_tasks = max(self.most_tasks, len(self._numbers))

    def close(self) -> None:
        """Stop reading, because the consumer wants no more."""
        if self.is_running and not self.is_done and self.readings:
            self._is_closed = True
            self._end(Outcome.CLOSED)

    def _end(self, outcome: Outcome, failure: HeadraceError | None = None) -> None:
        reading = self.reading
        reading.outcome, reading.failure, reading.waiting_since = outcome, failure, None
        self.log("ends:", outcome.value, "" if failure is None else repr(failure))
        number = len(self.readings)
        goes_on = outcome in (Outcome.ENDED, Outcome.CLOSED) and number < self.consumer.passes
        self.is_done = self._is_closed or not goes_on
        self._say_goodbye()
        if not self.is_done:
            self._open_pass(number)

    def _say_goodbye(self) -> None:
        """Say what was used, where others are to read the rest, and leave."""
        reading = self.reading
        if hasattr(self, "session"):
            reading.lost = self.session.losses
            for task_id in list(self._links):
                self._drop(task_id)
            if self._opening.job_name is not None:
                begun, used = None, self._in_use
                if used is not None:
                    begun = (
                        used.task.task_id,
                        used.request_number,
                        used.num_elements - len(self._unread),
                    )
                for word in self.session.final_reports(begun):
                    self.log("says", word)
                    self._dispatcher.send(word)
        self._asked.clear()
        self._dispatcher.send(CloseIteration(client_id=reading.client_id))


def _has_content(delivery: ReceivedBatch) -> bool:
    return delivery.num_elements > 0 or isinstance(delivery.payload, Exception)
