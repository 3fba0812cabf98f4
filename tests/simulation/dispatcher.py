"""Dispatcher process: its core, and a journal that survives the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from headrace.errors import HeadraceError, UnavailableError
from headrace.service.dispatcher import events as dispatcher_events
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

_BATCHING_SECONDS = 0.0005
"""Maximum seconds to collect requests into one batch."""
_COMPACT_AFTER = 500
"""Number of events; small, so that many runs write a snapshot."""

_LOSS_EVENTS = (
    dispatcher_events.IterationFinished,
    dispatcher_events.DepartedClientReported,
    dispatcher_events.ClientLeft,
    dispatcher_events.DeliveryReported,
    RoundsReported,
    dispatcher_events.ElementsReceived,
    dispatcher_events.ElementsConsumed,
    dispatcher_events.WorkerLost,
    dispatcher_events.WorkerLeft,
)
"""Events that may change the losses of a finished iteration."""


class Disk(MemoryJournal[AnyEvent, DispatcherState]):
    """Journal that survives its process and may be full."""

    def __init__(self) -> None:
        super().__init__(FORMAT, compact_after=_COMPACT_AFTER)
        self.is_full = False
        #: Every event ever appended.
        self.history: list[AnyEvent] = []

    def append(self, events: Sequence[AnyEvent], blobs: Sequence[BlobPart] = ()) -> None:
        if self.is_full and (events or blobs):
            raise UnavailableError("no space left on the disk")
        super().append(events, blobs)
        self.history += events

    def close(self) -> None:
        """Keep all data."""


class _Core(DispatcherCore):
    """Core whose internal errors end the run."""

    def _internal_error(self, request: msgspec.Struct, error: Exception) -> HeadraceError:
        raise AssertionError(f"the dispatcher failed at {request}") from error


class DispatcherProcess(Process):
    """Handles requests in batches, and runs timers.

    Args:
        network: Network of the simulation.
        address: Address to listen at.
        limits: Timeouts of the dispatcher.
        is_durable: Whether its journal survives a crash.
    """

    def __init__(
        self, network: Network, address: str, limits: DispatcherLimits, *, is_durable: bool
    ) -> None:
        super().__init__(network, "dispatcher")
        self.address, self.limits, self.is_durable = address, limits, is_durable
        self.disk = Disk()
        #: Fixed list of workers.
        self.worker_addresses: tuple[str, ...] = ()
        self._pending_requests: list[Request] = []
        #: Registration time of each worker.
        self.registered_at: dict[str, float] = {}
        #: Reported losses of each finished iteration.
        self.reported_losses: dict[int, tuple[LostSplits, ...]] = {}

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher with its state, read from the journal again if necessary."""
        state_machine = self.core._open()
        assert isinstance(state_machine, Dispatcher)
        return state_machine

    @property
    def state(self) -> DispatcherState:
        return self.dispatcher.state

    def start(self) -> None:
        super().start()
        if not self.is_durable:
            self.disk = Disk()
            self.registered_at = {}
        self._pending_requests = []
        self.core = _Core(
            self.disk,
            self.limits,
            worker_addresses=self.worker_addresses,
            clock=lambda: self.simulation.now,
            random_bytes=lambda size: self.incarnation.to_bytes(size),
        )
        self.network.listen(self, self.address, self._request_received, accepts_repeats=True)
        self.call_later(self.limits.tick_interval, self._tick)

    def _request_received(self, request: Request) -> None:
        if not self._pending_requests:
            self.call_later(self.simulation.random.random() * _BATCHING_SECONDS, self._handle)
        self._pending_requests.append(request)

    def _handle(self) -> None:
        requests, self._pending_requests = self._pending_requests, []
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
        """Record the events that the block journals."""
        before = len(self.disk.history)
        yield
        events = self.disk.history[before:]
        for event in events:
            self.log("journals", event)
            if isinstance(event, dispatcher_events.WorkerRegistered):
                self.registered_at.setdefault(event.worker_id, self.simulation.now)
            elif isinstance(event, dispatcher_events.WorkerLost | dispatcher_events.WorkerLeft):
                self.registered_at.pop(event.worker_id, None)
        if any(isinstance(event, _LOSS_EVENTS) for event in events):
            for iteration_id, iteration in self.state.iterations.items():
                if iteration.finished:
                    policy = policy_of(self.state, iteration)
                    self.reported_losses[iteration_id] = policy.lost_splits(self.state, iteration)

    def check(self) -> None:
        """Compare the state with the journal."""
        dispatcher = self.dispatcher
        validate(dispatcher.state)
        assert self.disk.replay() == dispatcher.state, "the journal disagrees with the state"
        soft_state, state = dispatcher.soft_state, dispatcher.state
        assert soft_state.worker_heartbeats.keys() == state.workers.keys()
        assert soft_state.client_heartbeats.keys() == state.clients.keys()
        assert (
            soft_state.idle_since.keys()
            == soft_state.last_assignments.keys()
            == state.iterations.keys()
        )
        assert soft_state.last_task_losses.keys() <= state.iterations.keys()
        assert soft_state.refusing_workers <= soft_state.worker_heartbeats.keys()
