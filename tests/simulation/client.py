"""Client process: read session, connections and consumer."""

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
from headrace.service.client.task_list import TaskList
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

__all__ = ["GROUP_SECONDS", "ClientProcess", "Consumer", "Outcome", "Reading", "YieldedBatch"]

GROUP_SECONDS = 150.0
"""Seconds that consumers wait for each other."""
_OPEN_SECONDS = 60.0
_CALL_SECONDS = 2.0
_RETRY_SECONDS = 0.2
_ELEMENT_BYTES = 100


class Outcome(enum.Enum):
    """Outcome of a reading."""

    ENDED = "the iteration ended"
    FAILED = "an error"
    CLOSED = "closed by the consumer"
    DIED = "the process crashed"


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """Options of a client's reading."""

    epochs: int = 1
    """Number of epochs, read in succession."""
    max_outstanding: int = 16
    counts_elements: bool = False
    reorder_limit: int = 20
    """Capacity of the reorder buffer in ordered reading, in elements."""
    think: float = 0.0
    """Maximum seconds to consume a batch."""
    close_after: int | None = None
    """Batches after which it closes an epoch; None reads to the end."""
    trainer_id: str = ""
    """Trainer that it reads for, with a cross-trainer cache."""


@dataclass(frozen=True)
class YieldedBatch:
    """Elements of one reply that the consumer received."""

    task: TaskAddress
    number: int
    elements: Sequence[Element]

    @property
    def key(self) -> tuple[int, int]:
        """Task id and request number."""
        return self.task.task_id, self.number

    def atoms(self) -> list[Atom]:
        return [atom for element in self.elements for atom in element]


@dataclass
class Reading:
    """Results of one client in one iteration."""

    client_id: str
    epoch: tuple[int, ...]
    iteration_id: int = -1
    outcome: Outcome | None = None
    failure: HeadraceError | None = None
    #: Batches that the consumer received, in order.
    yielded: list[YieldedBatch] = field(default_factory=list)
    #: (task, split) of elements that raised.
    raised: list[tuple[int, int]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    lost: tuple[LostSplits, ...] = ()
    #: (task, request number) of all consumed replies.
    rounds: list[tuple[int, int]] = field(default_factory=list)
    #: All elements of ordered reading; one that raised is listed at its position.
    sequence: list[Atom] = field(default_factory=list)
    #: Ranges of abandoned splits of ordered reading.
    abandoned: Ranges = ()
    warnings: list[str] = field(default_factory=list)
    #: When the wait for the next warning began, without pauses of the client.
    waiting_since: float | None = None
    warned: bool = False
    #: The dispatcher was lost after the end, possibly before it received the last report.
    may_have_unreported: bool = False

    def atoms(self) -> list[tuple[int, Atom]]:
        """Return (task, atom) of all elements that the consumer received or that raised."""
        got = [(each.task.task_id, atom) for each in self.yielded for atom in each.atoms()]
        return got + [(task_id, (split, 0)) for task_id, split in self.raised]


class ClientProcess(Process):
    """Reads some epochs of a job in succession.

    Args:
        network: Network of the simulation.
        name: Name in the trace.
        dispatcher: Address of the dispatcher.
        registration_requests: Requests that register the dataset.
        opening: Request that opens an iteration; client, dataset and epoch are filled in.
        consumer: Options of the reading.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        dispatcher: str,
        registration_requests: tuple[PutPlan, RegisterDataset],
        opening: OpenIteration,
        consumer: Consumer,
    ) -> None:
        super().__init__(network, name)
        self.consumer = consumer
        self.readings: list[Reading] = []
        self.is_done = self._is_closed = False
        #: (time, text) of the warnings since the last check.
        self.unchecked_warnings: list[tuple[float, str]] = []
        self.most_outstanding = self.most_tasks = 0
        self._dispatcher_address = dispatcher
        self._registration_requests, self._opening = registration_requests, opening
        self._dataset_id = ""
        #: Elements requested or not yet consumed, by request; and their maximum total.
        self._outstanding_elements: dict[tuple[int, int], int] = {}
        #: Answered requests; a repeated one may be answered again.
        self._answered: set[tuple[int, int]] = set()
        self.most_elements = 0
        #: Time of the dispatcher's last reply, and its longest silence.
        self._last_reply_at = self.longest_silence = 0.0

    @property
    def reading(self) -> Reading:
        return self.readings[-1]

    def start(self) -> None:
        super().start()
        self._connect()
        put, register = self._registration_requests
        started_at = self.simulation.now

        def registered(answer: Any) -> None:
            if isinstance(answer, RegisterDatasetReply) and not answer.plan_needed:
                self._dataset_id = answer.dataset_id
                self._open_epoch(0)
            else:
                # The dispatcher no longer has the plan, or has only a part of it.
                self._ask(put, lambda _: self._ask(register, registered, started_at), started_at)

        self._ask(put, lambda _: self._ask(register, registered, started_at), started_at)

    def crash(self, why: str = "dies") -> None:
        if self.is_up and self.readings and self.reading.outcome is None:
            self.reading.outcome = Outcome.DIED
        self.is_done = True
        super().crash(why)

    # --- opening ------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._asked: dict[int, DispatcherRequest | Callable[[Any], None]] = {}
        address = self._dispatcher_address
        take, lost = self._dispatcher_replied, self._dispatcher_lost
        self._dispatcher = Link(self.network, self, address, take, lost)

    def _ask(
        self, message: DispatcherRequest, then: Callable[[Any], None], started_at: float
    ) -> None:
        """Repeat a request until the dispatcher answers, as a stub with retries does."""
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
            if self.simulation.now - started_at > _OPEN_SECONDS:
                self._fail_opening()
                return
            self.log("asks", message)
            self._asked[self._dispatcher.send(message)] = answered
            self.call_later(_CALL_SECONDS, again)

        again()

    def _fail_opening(self) -> None:
        if not self.readings:
            self.readings.append(Reading("", ()))
        self._end(Outcome.FAILED, UnavailableError("the dispatcher did not answer for 60 s"))

    def _open_epoch(self, number: int) -> None:
        reading = Reading(f"{self.name}/{number}", (number,))
        self.readings.append(reading)
        self._results: deque[ReceivedBatch] = deque()
        self._current: ReceivedBatch | None = None
        self._unread: list[Element] = []
        self._is_waiting = self._is_open = False
        self._links: dict[int, Link] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        self._num_taken = 0
        opening = msgspec.structs.replace(
            self._opening,
            client_id=reading.client_id,
            dataset_id=self._dataset_id,
            epoch=reading.epoch,
        )
        self.session = self._session(reading.client_id)
        self._task_list = TaskList()
        self._outstanding_elements, self._answered = {}, set()
        self._reorder_buffer = ReorderBuffer(self.consumer.reorder_limit * _ELEMENT_BYTES)
        self._split_index = self._ordinal = 0

        def opened(answer: Any) -> None:
            if not isinstance(answer, OpenIterationReply):
                self._end(Outcome.FAILED, answer)
                return
            self.log("opened", answer)
            self._last_reply_at = self.simulation.now
            reading.iteration_id = answer.iteration_id
            self._is_open = True
            # A new connection, as in a reader's thread.
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
            self.unchecked_warnings.append((now, warning))
            if warning.startswith("waited"):
                self.reading.waiting_since, self.reading.warned = now, True
        for task_id in actions.disconnects:
            self._drop(task_id)
        for task, number, message in actions.requests:
            link = self._links.get(task.task_id)
            if link is None:
                link = self._connect_worker(task)
            self._numbers[task.task_id][link.send(message)] = number
            self._outstanding_elements[task.task_id, number] = message.max_elements
        for call in actions.calls:
            self.log("asks", call)
            self._asked[self._dispatcher.send(call)] = call
        self._record_outstanding()
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
            lambda ticket, message, content: self._worker_replied(
                task_id, ticket, message, content
            ),
            lambda error: self._worker_lost(task_id, error),
        )
        self._numbers[task_id] = {}
        return link

    def _drop(self, task_id: int) -> None:
        link = self._links.pop(task_id, None)
        if link is not None:
            link.close()
            del self._numbers[task_id]

    def _worker_replied(
        self, task_id: int, ticket: int, answer: msgspec.Struct | Exception, content: Any
    ) -> None:
        number = self._numbers[task_id].pop(ticket)
        assert isinstance(answer, GetElementsReply | Exception), answer
        payload = content
        if isinstance(answer, GetElementsReply):
            self.log(f"receives from {task_id}", number, answer, content or "")
            if answer.error is not None:
                payload = decode_error(answer.error)
        else:
            self.log(f"is rejected by {task_id}", number, repr(answer))
        due = self.session.worker_replied(task_id, number, answer, payload, self.simulation.now)
        for each in due:
            key = each.task.task_id, each.request_number
            if _has_content(each):
                self._outstanding_elements[key] = max(1, each.num_elements)
            else:
                self._outstanding_elements.pop(key, None)
        if isinstance(answer, GetElementsReply):
            self._answered.add((task_id, number))
            if not (answer.num_elements or answer.error):
                self._outstanding_elements.pop((task_id, number), None)
        self._results += due
        self._act()

    def _worker_lost(self, task_id: int, error: UnavailableError) -> None:
        self._drop(task_id)
        self.session.disconnected(task_id, error, self.simulation.now)
        self._act()

    def _dispatcher_lost(self, error: UnavailableError) -> None:
        for reading in self.readings:
            reading.may_have_unreported = reading.may_have_unreported or reading.outcome is not None
        waiting = [each for each in self._asked.values() if callable(each)]
        has_session = len(waiting) < len(self._asked)
        self._asked.clear()
        if has_session and not self.is_done:
            self.session.dispatcher_unreachable(self.simulation.now)
            self._act()

    def _dispatcher_replied(
        self, ticket: int, answer: msgspec.Struct | Exception, content: Any
    ) -> None:
        asked = self._asked.pop(ticket, None)
        if asked is None or self.is_done:
            return
        if callable(asked):
            asked(answer)
            return
        if isinstance(answer, ClientHeartbeatReply):
            answer = self._task_list.complete(answer)
            if not answer.unchanged:
                self.log("hears", answer)
        self.session.dispatcher_replied(asked, answer, self.simulation.now)
        self.longest_silence = max(self.longest_silence, self.simulation.now - self._last_reply_at)
        self._last_reply_at = self.simulation.now
        self._act()

    # --- the consumer -------------------------------------------------------------------------

    def _next(self) -> None:
        """Continue reading, like `RemoteReader.read`."""
        session, now = self.session, self.simulation.now
        if self._opening.options.ordered:
            self._next_ordered(now)
            return
        while True:
            if self._close_if_enough():
                return
            if self._current is not None:
                if not self._has_lease(now):
                    return
                if self._unread:
                    self._yield_some(self._current)
                    return
                self._finish_consuming(self._current)
            if self._results:
                self._stop_waiting()
                self._num_taken += 1
                self._start_consuming(self._results.popleft())
            elif session.is_finished:
                self._end(Outcome.FAILED if session.failure else Outcome.ENDED, session.failure)
                return
            else:
                self._wait(now)
                return

    def _close_if_enough(self) -> bool:
        """Close the epoch if the consumer has enough batches; return whether it has."""
        has_enough = self.consumer.close_after is not None
        has_enough = has_enough and self._num_taken >= (self.consumer.close_after or 0)
        if has_enough:
            self._end(Outcome.CLOSED)
        return has_enough

    def _next_ordered(self, now: float) -> None:
        """Continue reading in order, like `ArrivingSplits.wait_for_next`."""
        session, reorder_buffer, size = (
            self.session,
            self._reorder_buffer,
            self._opening.options.num_splits or 0,
        )
        while True:
            if self._close_if_enough():
                return
            while self._results:
                self._add_to_reorder_buffer(self._results.popleft())
            reorder_buffer.forget_tasks(reorder_buffer.tasks - session.active_tasks)
            reorder_buffer.abandon(session.abandoned_splits)
            self.reading.abandoned = session.abandoned_splits
            limit = self.simulation.random.choice((1, 64))
            found = (
                None
                if self._split_index >= size
                else reorder_buffer.next_elements(self._split_index, self._ordinal, limit)
            )
            needed_split = self._split_index if found is None and self._split_index < size else None
            session.restrict_requests(
                reorder_buffer.tasks_to_request(
                    needed_split, session.active_tasks, session.urgent_tasks
                ),
                needed_split,
                now,
            )
            if found is not None:
                self._stop_waiting()
                if self._yield_ordered(found):
                    return
            elif not session.is_finished:
                self._wait(now)
                return
            elif session.failure is not None or self._split_index >= size:
                failed = session.failure is not None
                self._end(Outcome.FAILED if failed else Outcome.ENDED, session.failure)
                return
            else:
                reorder_buffer.abandon([(self._split_index, self._split_index + 1)])

    def _add_to_reorder_buffer(self, delivery: ReceivedBatch) -> None:
        self._outstanding_elements.pop((delivery.task.task_id, delivery.request_number), None)
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
            self._reorder_buffer.add_reply(delivery.task.task_id, answer, content, size)

    def _yield_ordered(self, found: NextElements) -> bool:
        """Yield the next elements; return whether the consumer is busy with them."""
        if found.error is not None:
            self.log("raises", found.error)
            self.reading.sequence.append((int(str(found.error).split()[1]), 0))
            self.reading.raised.append((0, int(str(found.error).split()[1])))
            return False
        if found.chunk is None:
            self._split_index, self._ordinal = self._split_index + 1, 0
            return False
        self._ordinal = found.ordinal + found.chunk.size
        self._num_taken += 1
        rows = found.chunk.rows()
        self.log("yields", rows)
        task = TaskAddress(task_id=0, worker_id="", worker_address="", task_token="")
        batch = YieldedBatch(task, self._num_taken, rows)
        self.reading.sequence += batch.atoms()
        self.reading.yielded.append(batch)
        self.call_later(
            self.consumer.think * self.simulation.random.random(), self._continue_reading
        )
        return True

    def _has_lease(self, now: float) -> bool:
        """Return whether elements may be yielded; otherwise wait for the dispatcher."""
        if not self.session.may_consume(now):
            self._wait(now)
            return False
        if self._is_waiting and self.session.failure is not None:
            self._end(Outcome.FAILED, self.session.failure)
            return False
        self._stop_waiting()
        return True

    def _start_consuming(self, delivery: ReceivedBatch) -> None:
        self.reading.rounds.append((delivery.task.task_id, delivery.request_number))
        if isinstance(delivery.payload, Exception):
            error = str(delivery.payload)
            if error.startswith("split "):
                self.reading.raised.append((delivery.task.task_id, int(error.split()[1])))
            else:
                self.reading.errors.append(delivery.payload)
            self._finish_consuming(delivery)
        else:
            self._current, self._unread = delivery, list(delivery.payload)

    def _yield_some(self, delivery: ReceivedBatch) -> None:
        size = self.simulation.random.choice((1, len(self._unread)))
        part, self._unread = self._unread[:size], self._unread[size:]
        self.log("yields", f"of {delivery.task.task_id}", part)
        self.reading.yielded.append(YieldedBatch(delivery.task, delivery.request_number, part))
        self.call_later(
            self.consumer.think * self.simulation.random.random(), self._continue_reading
        )

    def _finish_consuming(self, delivery: ReceivedBatch) -> None:
        self._outstanding_elements.pop((delivery.task.task_id, delivery.request_number), None)
        self.session.batch_consumed(delivery.task.task_id, delivery.request_number)
        self._current = None

    def _continue_reading(self) -> None:
        if not self.is_done and self.reading.outcome is None:
            self._next()
            self._act()

    def _wait(self, now: float) -> None:
        self.session.set_waiting(now)
        if not self._is_waiting:
            self._is_waiting, self.reading.waiting_since = True, now
            self.reading.warned = False

    def _stop_waiting(self) -> None:
        if self._is_waiting:
            self.session.set_waiting(None)
            self._is_waiting, self.reading.waiting_since = False, None

    def _record_outstanding(self) -> None:
        """Record the number of outstanding requests and elements of unfinished tasks."""
        unconsumed = [*self._results, *([self._current] if self._current else [])]
        outstanding = {
            (each.task.task_id, each.request_number)
            for each in unconsumed
            if each.task.task_id in self._numbers and _has_content(each)
        }
        outstanding |= {
            (task_id, number)
            for task_id, sent in self._numbers.items()
            for number in sent.values()
            if number != PROGRESS_REQUEST and (task_id, number) not in self._answered
        }
        self.most_outstanding = max(self.most_outstanding, len(outstanding))
        num_outstanding = sum(
            most for (task, _), most in self._outstanding_elements.items() if task in self._numbers
        )
        self.most_elements = max(self.most_elements, num_outstanding)
        self.most_tasks = max(self.most_tasks, len(self._numbers))

    def close(self) -> None:
        """Stop reading at the consumer's request."""
        if self.is_running and not self.is_done and self.readings:
            self._is_closed = True
            self._end(Outcome.CLOSED)

    def _end(self, outcome: Outcome, failure: HeadraceError | None = None) -> None:
        reading = self.reading
        reading.outcome, reading.failure, reading.waiting_since = outcome, failure, None
        self.log("ends:", outcome.value, "" if failure is None else repr(failure))
        number = len(self.readings)
        continues = outcome in (Outcome.ENDED, Outcome.CLOSED) and number < self.consumer.epochs
        self.is_done = self._is_closed or not continues
        self._close_iteration()
        if not self.is_done:
            self._open_epoch(number)

    def _close_iteration(self) -> None:
        """Report consumed elements if other clients read the rest, and close the iteration."""
        reading = self.reading
        if hasattr(self, "session"):
            reading.lost = self.session.losses
            for task_id in list(self._links):
                self._drop(task_id)
            if self._opening.job_name is not None:
                partly_consumed, current = None, self._current
                if current is not None:
                    partly_consumed = (
                        current.task.task_id,
                        current.request_number,
                        current.num_elements - len(self._unread),
                    )
                for report in self.session.final_reports(partly_consumed):
                    self.log("says", report)
                    self._dispatcher.send(report)
        self._asked.clear()
        self._dispatcher.send(CloseIteration(client_id=reading.client_id))


def _has_content(delivery: ReceivedBatch) -> bool:
    return delivery.num_elements > 0 or isinstance(delivery.payload, Exception)
