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
from headrace.service.dispatcher.connections import Connections
from headrace.service.dispatcher.decision import Decision
from headrace.service.dispatcher.dispatcher import Dispatcher
from headrace.service.dispatcher.limits import Limits
from headrace.service.dispatcher.slots import check_slots_may_change
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.dispatcher.updates import (
    DispatcherStarted,
    SlotsConfigured,
    UnitsDealt,
    Update,
)
from headrace.service.messages import ClientUpdate, DispatcherStatus
from headrace.serving.core import JournaledCore
from headrace.serving.journal import Format, Journal, MemoryJournal
from headrace.serving.sqlite_journal import SqliteJournal

__all__ = ["FORMAT", "DispatcherCore", "open_journal"]


class DispatcherCore(JournaledCore[Update, DispatcherState, Decision]):
    """Decides requests to a dispatcher, keeps what follows, then answers.

    Args:
        journal: Where facts are kept; closed by `close`.
        limits: How long what is waited for.
        worker_addresses: The slots of workers (`slots`).
        clock: Tells the time, in seconds that ascend steadily.
        token: Returns so many bytes that nobody can guess.
        heard: Called with facts when they are kept, while nothing else is decided.
        peers_refused: Says how many connections ended before they began.
        connections: Knows the connections of workers.
    """

    def __init__(
        self,
        journal: Journal[Update, DispatcherState],
        limits: Limits,
        *,
        worker_addresses: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        token: Callable[[int], bytes] = secrets.token_bytes,
        heard: Callable[[Sequence[Update]], object] = len,
        peers_refused: Callable[[], int] = int,
        connections: Connections | None = None,
    ) -> None:
        connections = connections or Connections()

        def kept(facts: Sequence[Update]) -> None:
            _count(facts)
            heard(facts)

        def begin(state: DispatcherState, now: float) -> tuple[Dispatcher, Sequence[Update]]:
            facts: list[Update] = []
            if not state.incarnation:
                facts.append(DispatcherStarted(incarnation=token(8).hex(), secret=token(32)))
                apply(state, facts[0])
            patterns = tuple(slot.pattern for slot in state.slots)
            if patterns != tuple(worker_addresses):
                check_slots_may_change(state, worker_addresses)
                facts.append(SlotsConfigured(patterns=tuple(worker_addresses)))
                apply(state, facts[-1])
            dispatcher = Dispatcher(state, limits, now)
            dispatcher.presence.activity.peers_refused = peers_refused
            dispatcher.presence.connections = connections
            return dispatcher, [*facts, *dispatcher.end_unoffered(now)]

        super().__init__(journal, begin, owner="dispatcher", clock=clock, kept=kept)

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        dispatcher = self.decider
        return 0 if dispatcher is None else len(dispatcher.state.workers)

    def _answer(self, decided: Decision | Exception) -> msgspec.Struct | Exception:
        answer = super()._answer(decided)
        if self._journal_problem and isinstance(answer, ClientUpdate):
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


def _count(facts: Sequence[Update]) -> None:
    for fact in facts:
        if isinstance(fact, UnitsDealt):
            count_split_granted()


# --- what the dispatcher's journal holds: its facts, its state, and plans -------------------------

FORMAT = Format(
    number=3,
    file_name="dispatcher.sqlite",
    owner="dispatcher",
    fresh_start="start with an empty work_dir and register everything again",
    decode_facts=msgspec.msgpack.Decoder(list[Update]).decode,
    decode_state=msgspec.msgpack.Decoder(DispatcherState).decode,
    first_state=DispatcherState,
    apply=apply,
)


def open_journal(config: DispatcherConfig) -> Journal[Update, DispatcherState]:
    """Open the journal that a configuration asks for.

    Raises:
        FailedPreconditionError: Another dispatcher uses the work directory.
        DataLossError: The file is damaged.
    """
    if config.fault_tolerant_mode and config.work_dir is not None:
        return SqliteJournal(Path(config.work_dir), FORMAT)
    return MemoryJournal(FORMAT)
