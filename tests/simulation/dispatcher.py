"""The dispatcher as a process: its core, and a journal on a disk that survives the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from headrace.errors import HeadraceError, UnavailableError
from headrace.service.dispatcher import events as updates
from headrace.service.dispatcher.core import FORMAT, DispatcherCore
from headrace.service.dispatcher.dispatcher import Dispatcher
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.invariants import validate
from headrace.service.dispatcher.limits import DispatcherLimits
from headrace.service.dispatcher.policy_selection import policy_of
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.messages import LostSplits
from headrace.service.modes.coordinated_reads.events import RoundsReported
from headrace.serving.blobs import BlobPart
from headrace.serving.journal import MemoryJournal
from tests.simulation.kernel import Process
from tests.simulation.network import Network, Request

__all__ = ["Disk", "DispatcherProcess"]

_AT_ONCE = 0.0005
"""Seconds in which requests gather that are decided together."""
_COMPACT_AFTER = 500
"""Events: few, so that many runs go through a snapshot."""

_ENDING = (
    updates.IterationFinished,
    updates.DepartedClientReported,
    updates.ClientLeft,
    updates.DeliveryReported,
    RoundsReported,
    updates.ElementsReceived,
    updates.ElementsConsumed,
    updates.WorkerLost,
    updates.WorkerLeft,
)
"""Events that may change what a finished iteration has lost."""


class Disk(MemoryJournal[AnyEvent, DispatcherState]):
    """A journal that outlives whoever writes it, and may be full."""

    def __init__(self) -> None:
        super().__init__(FORMAT, compact_after=_COMPACT_AFTER)
        self.is_full = False
        #: Every event that was ever kept.
        self.history: list[AnyEvent] = []

    def append(self, events: Sequence[AnyEvent], blobs: Sequence[BlobPart] = ()) -> None:
        if self.is_full and (events or blobs):
            raise UnavailableError("no space left on the disk")
        super().append(events, blobs)
        self.history += events

    def close(self) -> None:
        """Leave everything where it is."""


class _Core(DispatcherCore):
    """A core whose own errors end the run."""

    def _internal_error(self, request: msgspec.Struct, error: Exception) -> HeadraceError:
        raise AssertionError(f"the dispatcher failed at {request}") from error


class DispatcherProcess(Process):
    """Decides requests in batches, and ticks.

    Args:
        network: Where it listens.
        address: At which address.
        limits: How long what is waited for.
        is_durable: Whether its journal survives it.
    """

    def __init__(
        self, network: Network, address: str, limits: DispatcherLimits, *, is_durable: bool
    ) -> None:
        super().__init__(network, "dispatcher")
        self.address, self.limits, self.is_durable = address, limits, is_durable
        self.disk = Disk()
        #: The slots of workers.
        self.worker_addresses: tuple[str, ...] = ()
        self._in_hand: list[Request] = []
        #: Since when it knows each worker.
        self.registered_at: dict[str, float] = {}
        #: What of each iteration that is finished it would say, or has said, to be lost.
        self.said_lost: dict[int, tuple[LostSplits, ...]] = {}

    @property
    def dispatcher(self) -> Dispatcher:
        """The state and what decides; read from the disk again where that must be."""
        decider = self.core._open()
        assert isinstance(decider, Dispatcher)
        return decider

    @property
    def state(self) -> DispatcherState:
        return self.dispatcher.state

    def start(self) -> None:
        super().start()
        if not self.is_durable:
            self.disk = Disk()
            self.registered_at = {}
        self._in_hand = []
        self.core = _Core(
            self.disk,
            self.limits,
            worker_addresses=self.worker_addresses,
            clock=lambda: self.simulation.now,
            random_bytes=lambda size: self.incarnation.to_bytes(size),
        )
        self.network.listen(self, self.address, self._take, accepts_repeats=True)
        self.call_later(self.limits.tick_interval, self._tick)

    def _take(self, request: Request) -> None:
        if not self._in_hand:
            self.call_later(self.simulation.random.random() * _AT_ONCE, self._handle)
        self._in_hand.append(request)

    def _handle(self) -> None:
        requests, self._in_hand = self._in_hand, []
        with self.logged_events():
            try:
                self.core.handle(requests)
            except UnavailableError as error:
                for request in requests:
                    request.fail(error)

    def _tick(self) -> None:
        self.call_later(self.limits.tick_interval, self._tick)
        with self.logged_events():
            try:
                self.core.tick()
            except UnavailableError:
                self.log("cannot write")

    @contextmanager
    def logged_events(self) -> Iterator[None]:
        """Have the trace, and what is remembered here, follow the events of a change."""
        before = len(self.disk.history)
        yield
        events = self.disk.history[before:]
        for event in events:
            self.log("journals", event)
            if isinstance(event, updates.WorkerRegistered):
                self.registered_at.setdefault(event.worker_id, self.simulation.now)
            elif isinstance(event, updates.WorkerLost | updates.WorkerLeft):
                self.registered_at.pop(event.worker_id, None)
        if any(isinstance(event, _ENDING) for event in events):
            for iteration_id, iteration in self.state.iterations.items():
                if iteration.finished:
                    policy = policy_of(self.state, iteration)
                    self.said_lost[iteration_id] = policy.lost_splits(self.state, iteration)

    def check(self) -> None:
        """Compare what is known with what was kept."""
        dispatcher = self.dispatcher
        validate(dispatcher.state)
        assert self.disk.replay() == dispatcher.state, "the journal says something else"
        presence, state = dispatcher.soft_state, dispatcher.state
        assert presence.worker_heartbeats.keys() == state.workers.keys()
        assert presence.client_heartbeats.keys() == state.clients.keys()
        assert (
            presence.idle_since.keys()
            == presence.last_assignments.keys()
            == state.iterations.keys()
        )
        assert presence.last_task_losses.keys() <= state.iterations.keys()
        assert presence.refusing_workers <= presence.worker_heartbeats.keys()
