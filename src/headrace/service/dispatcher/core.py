"""The dispatcher with its journal and clock, on top of `serving.journaled_core`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.process_metrics import count_split_assigned
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
from headrace.serving.journal import Journal, JournalFormat, MemoryJournal
from headrace.serving.journaled_core import JournaledCore
from headrace.serving.sqlite_journal import SqliteJournal

__all__ = ["FORMAT", "DispatcherCore", "open_journal"]


class DispatcherCore(JournaledCore[AnyEvent, DispatcherState, DispatcherDecision]):
    """Decides requests to a dispatcher, makes the events durable, then replies.

    Args:
        journal: Journal for the events; closed by `close`.
        limits: Timeouts, intervals and sizes.
        worker_addresses: Slots of workers (`slots`).
        clock: Returns the time in seconds of a monotonic clock.
        random_bytes: Returns this number of unpredictable bytes.
        on_durable: Called with events once they are durable, while nothing else is decided.
        count_refused_connections: Returns the number of connections that were refused.
        connections: Connections of workers.
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

        def on_journaled(new_events: Sequence[AnyEvent]) -> None:
            _count_assignments(new_events)
            on_durable(new_events)

        def create_dispatcher(
            state: DispatcherState, now: float
        ) -> tuple[Dispatcher, Sequence[AnyEvent]]:
            new_events: list[AnyEvent] = []
            if not state.dispatcher_id:
                new_events.append(
                    DispatcherStarted(dispatcher_id=random_bytes(8).hex(), secret=random_bytes(32))
                )
                apply(state, new_events[0])
            patterns = tuple(slot.pattern for slot in state.slots)
            if patterns != tuple(worker_addresses):
                check_slots_may_change(state, worker_addresses)
                new_events.append(SlotsConfigured(patterns=tuple(worker_addresses)))
                apply(state, new_events[-1])
            dispatcher = Dispatcher(state, limits, now)
            dispatcher.soft_state.activity.count_refused_connections = count_refused_connections
            dispatcher.soft_state.connections = connections
            return dispatcher, [*new_events, *dispatcher.end_unsupported_iterations(now)]

        super().__init__(
            journal, create_dispatcher, owner="dispatcher", clock=clock, on_journaled=on_journaled
        )

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        dispatcher = self.state_machine
        return 0 if dispatcher is None else len(dispatcher.state.workers)

    def _make_reply(self, decision: DispatcherDecision | Exception) -> msgspec.Struct | Exception:
        reply = super()._make_reply(decision)
        if self._journal_problem and isinstance(reply, ClientHeartbeatReply):
            return msgspec.structs.replace(reply, journal_problem=self._journal_problem)
        return reply

    def describe(self) -> DispatcherStatus:
        """Return the status of the service.

        Raises:
            UnavailableError: If the journal cannot be used.
        """
        with self._lock:
            dispatcher = self._open()
            assert isinstance(dispatcher, Dispatcher)
            return dispatcher.describe(self._clock())


def _count_assignments(events: Sequence[AnyEvent]) -> None:
    for event in events:
        if isinstance(event, SplitsAssigned):
            count_split_assigned()


# --- the dispatcher's journal: its events, its state, and plans ----------------------------------

FORMAT = JournalFormat(
    number=3,
    file_name="dispatcher.sqlite",
    owner="dispatcher",
    fresh_start="start with an empty work_dir and register all datasets again",
    decode_events=msgspec.msgpack.Decoder(list[AnyEvent]).decode,
    decode_state=msgspec.msgpack.Decoder(DispatcherState).decode,
    initial_state=DispatcherState,
    apply=apply,
)


def open_journal(config: DispatcherConfig) -> Journal[AnyEvent, DispatcherState]:
    """Open the journal for a configuration.

    Raises:
        FailedPreconditionError: If another dispatcher uses the work directory.
        DataLossError: If the file is damaged.
    """
    if config.fault_tolerant_mode and config.work_dir is not None:
        return SqliteJournal(Path(config.work_dir), FORMAT)
    return MemoryJournal(FORMAT)
