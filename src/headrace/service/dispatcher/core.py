"""The dispatcher with its journal and its clock: what `serving.core` leaves open."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.counts import count_split_granted
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.decision import DispatcherDecision
from headrace.service.dispatcher.dispatcher import Dispatcher
from headrace.service.dispatcher.events import (
    AnyEvent,
    DispatcherStarted,
    SlotsConfigured,
    SplitsAssigned,
)
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.slots import check_slots_may_change
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.worker_connections import WorkerConnections
from headrace.service.messages import ClientHeartbeatReply, DispatcherStatus
from headrace.serving.core import JournaledCore
from headrace.serving.journal import Format, Journal, MemoryJournal
from headrace.serving.sqlite_journal import SqliteJournal

__all__ = ["FORMAT", "DispatcherCore", "open_journal"]


class DispatcherCore(JournaledCore[AnyEvent, DispatcherState, DispatcherDecision]):
    """Decides requests to a dispatcher, keeps what follows, then answers.

    Args:
        journal: Where facts are kept; closed by `close`.
        limits: How long what is waited for.
        worker_addresses: The slots of workers (`slots`).
        clock: Tells the time, in seconds that ascend steadily.
        random_bytes: Returns so many bytes that nobody can guess.
        on_durable: Called with facts when they are kept, while nothing else is decided.
        count_refused_connections: Says how many connections ended before they began.
        connections: Knows the connections of workers.
    """

    def __init__(
        self,
        journal: Journal[AnyEvent, DispatcherState],
        limits: DispatcherLimits,
        *,
        worker_addresses: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        on_durable: Callable[[Sequence[AnyEvent]], object] = len,
        count_refused_connections: Callable[[], int] = int,
        connections: WorkerConnections | None = None,
    ) -> None:
        connections = connections or WorkerConnections()

        def kept(facts: Sequence[AnyEvent]) -> None:
            _count_assignments(facts)
            on_durable(facts)

        def begin(state: DispatcherState, now: float) -> tuple[Dispatcher, Sequence[AnyEvent]]:
            facts: list[AnyEvent] = []
            if not state.dispatcher_id:
                facts.append(
                    DispatcherStarted(dispatcher_id=random_bytes(8).hex(), secret=random_bytes(32))
                )
                apply(state, facts[0])
            patterns = tuple(slot.pattern for slot in state.slots)
            if patterns != tuple(worker_addresses):
                check_slots_may_change(state, worker_addresses)
                facts.append(SlotsConfigured(patterns=tuple(worker_addresses)))
                apply(state, facts[-1])
            dispatcher = Dispatcher(state, limits, now)
            dispatcher.soft_state.activity.count_refused_connections = count_refused_connections
            dispatcher.soft_state.connections = connections
            return dispatcher, [*facts, *dispatcher.end_unsupported_iterations(now)]

        super().__init__(journal, begin, owner="dispatcher", clock=clock, kept=kept)

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        dispatcher = self.decider
        return 0 if dispatcher is None else len(dispatcher.state.workers)

    def _answer(self, decided: DispatcherDecision | Exception) -> msgspec.Struct | Exception:
        answer = super()._answer(decided)
        if self._journal_problem and isinstance(answer, ClientHeartbeatReply):
            return msgspec.structs.replace(answer, journal_problem=self._journal_problem)
        return answer

    def describe(self) -> DispatcherStatus:
        """Return who is there, and what is going on.

        Raises:
            UnavailableError: The journal cannot be used.
        """
        with self._lock:
            decider = self._open()
            assert isinstance(decider, Dispatcher)
            return decider.describe(self._clock())


def _count_assignments(events: Sequence[AnyEvent]) -> None:
    for fact in events:
        if isinstance(fact, SplitsAssigned):
            count_split_granted()


# --- what the dispatcher's journal holds: its facts, its state, and plans -------------------------

FORMAT = Format(
    number=3,
    file_name="dispatcher.sqlite",
    owner="dispatcher",
    fresh_start="start with an empty work_dir and register everything again",
    decode_facts=msgspec.msgpack.Decoder(list[AnyEvent]).decode,
    decode_state=msgspec.msgpack.Decoder(DispatcherState).decode,
    first_state=DispatcherState,
    apply=apply,
)


def open_journal(config: DispatcherConfig) -> Journal[AnyEvent, DispatcherState]:
    """Open the journal that a configuration asks for.

    Raises:
        FailedPreconditionError: Another dispatcher uses the work directory.
        DataLossError: The file is damaged.
    """
    if config.fault_tolerant_mode and config.work_dir is not None:
        return SqliteJournal(Path(config.work_dir), FORMAT)
    return MemoryJournal(FORMAT)
