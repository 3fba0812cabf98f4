"""The simulation kernel: processes in virtual time, on one thread, from one seed.

A scenario puts real protocol code into subclasses of `Process`, connects them, injects faults, runs
and checks invariants:

    simulation = Simulation(seed)
    network = Network(simulation)
    server, client = Server(network, "server"), Client(network, "client")
    server.start()  # calls network.listen(server, "server:1", server.handle)
    client.start()  # sends through Link(network, client, "server:1", client.heard, client.lost)
    simulation.inject_faults({"pause": lambda: server.pause(3.0)}, mean_seconds=1.0, until=10.0)
    with simulation.report():
        simulation.run(60.0, stop=lambda: client.is_done)
        require(client.is_done, "each request is answered", of=[client])

Every event is in one queue, and all randomness is `simulation.random`, so a seed gives the same run
each time. `report` adds the seed and the trace to an error. A process that
crashes never runs its scheduled events; a paused one runs them when it resumes. A message may be
delayed, duplicated, held back by a partition, or lost with its connection. Requests on one
connection keep their order, as do replies; those on several connections do not.

The kernel is independent of the simulated system. Its users are the data service (this package),
the coordinator of parameter servers (`tests/coordinator/simulation.py`), and collectives
(`tests/distribute/collective_server/test_simulation.py`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tests.simulation.network import Connection, Network

__all__ = ["SILENCE_TIMEOUT", "InvariantError", "Process", "Simulation", "require", "require_none"]

P = TypeVar("P", bound="Process")

SILENCE_TIMEOUT = 12.0
"""Seconds of silence after which a connection is lost, as in `transport.zeromq`."""
_TRACE_LENGTH = 200_000
_MAX_EVENTS_PER_MS = 100_000
"""Maximum events in a millisecond; more are considered an endless loop."""
_TICK = 1e-9
"""Minimum seconds by which the clock advances during a sleep."""


class InvariantError(AssertionError):
    """Failure of an invariant.

    Args:
        message: The invariant and the observed state.
        processes: Names of the processes whose events explain it; empty for all.
    """

    def __init__(self, message: str, processes: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.processes = tuple(processes)


def require(holds: bool, invariant: str, *about: object, of: Iterable[Process] = ()) -> None:
    """Raise InvariantError if an invariant fails."""
    if not holds:
        message = f"{invariant}: {' '.join(map(str, about))}"
        raise InvariantError(message, [each.name for each in of])


def require_none(
    found: Iterable[object], invariant: str, *about: object, of: Iterable[Process] = ()
) -> None:
    """Raise InvariantError with the first five items if there are any."""
    items = list(found)
    about = f"{items[:5]} ({len(items)} in all)", *about
    require(not items, invariant, *about, of=of)


class _Event(NamedTuple):
    at: float
    number: int
    process: Process | None
    incarnation: int
    is_timer: bool
    action: Callable[[], None]


class Simulation:
    """Clock, event queue, randomness and trace of one run.

    Args:
        seed: Seed of all randomness.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.event_count = 0
        #: Number of injections of each fault.
        self.fault_counts: Counter[str] = Counter()
        self._events: list[_Event] = []
        self._last_number = 0
        self._trace: deque[tuple[float, str, str, tuple[object, ...]]] = deque(maxlen=_TRACE_LENGTH)

    def call_later(
        self,
        delay: float,
        action: Callable[[], None],
        process: Process | None = None,
        *,
        is_timer: bool = False,
    ) -> None:
        """Schedule an event; a crash of its process cancels it."""
        incarnation = 0 if process is None else process.incarnation
        self._last_number += 1
        event = _Event(self.now + delay, self._last_number, process, incarnation, is_timer, action)
        heapq.heappush(self._events, event)

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run events up to a time, or until `stop` returns true."""
        since, count = self.now, 0
        while self._events and self._events[0].at <= until and not stop():
            event = heapq.heappop(self._events)
            self.now = max(self.now, event.at)
            if self.now > since + 0.001:
                since, count = self.now, 0
            count += 1
            require(count <= _MAX_EVENTS_PER_MS, "time advances", f"{count} events in 1 ms")
            process = event.process
            if process is not None:
                if event.incarnation != process.incarnation or not process.is_up:
                    continue
                if process.is_paused:
                    process.deferred_events.append(event)
                    continue
            self.event_count += 1
            event.action()
        if not stop():
            self.now = max(self.now, until)

    # --- faults ---------------------------------------------------------------------------------

    def inject_faults(
        self, faults: Mapping[str, Callable[[], None]], *, mean_seconds: float, until: float
    ) -> None:
        """Inject one fault now, and others at random intervals, until a time."""
        names = list(faults)

        def inject() -> None:
            if self.now < until:
                name = self.random.choice(names)
                self.log("fault", name)
                self.fault_counts[name] += 1
                faults[name]()
                self.call_later(self.random.expovariate(1 / mean_seconds), inject)

        inject()

    def choose_running(self, processes: Sequence[P]) -> P | None:
        """Return one of the processes that are up and not paused, or None."""
        running = [each for each in processes if each.is_running]
        return self.random.choice(running) if running else None

    def duration(self, most: float) -> float:
        """Return a random duration of a fault, log-uniform up to `most` seconds."""
        return float(most ** self.random.random()) - 1.0 if most > 1.0 else most

    # --- the trace ------------------------------------------------------------------------------

    def log(self, who: str, what: str, *values: object) -> None:
        """Add a line to the trace."""
        self._trace.append((self.now, who, what, values))

    def trace(self, of: Collection[str] = (), last: int = 60) -> list[str]:
        """Return the last lines, of all processes or of the named ones."""
        chosen = [each for each in self._trace if not of or any(name in each[1] for name in of)]
        return [
            f"{at:10.4f}  {who:24} {what} {' '.join(map(str, values))}"
            for at, who, what, values in chosen[-last:]
        ]

    @contextmanager
    def report(self, *about: object, last: int = 40) -> Iterator[None]:
        """Add the seed, the time, `about` and the last lines of the trace to any error."""
        try:
            yield
        except Exception as error:
            error.add_note(f"seed {self.seed} at {self.now:.3f} s")
            for each in about:
                error.add_note(str(each))
            processes = error.processes if isinstance(error, InvariantError) else ()
            error.add_note("\n".join(self.trace(processes, last)))
            raise


class Process:
    """Process that starts, pauses, crashes and restarts; subclasses define its behaviour.

    Args:
        network: Network of the simulation.
        name: Name in the trace.
    """

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.simulation = network, network.simulation
        self.name = name
        #: Number of starts.
        self.incarnation = 0
        self.is_up = False
        self.paused_at: float | None = None
        #: End of the last pause since the start, and the longest pause.
        self.resumed_at = self.longest_pause = 0.0
        self.deferred_events: list[_Event] = []
        #: Connections by number: randomness must not depend on the order of a set.
        self.connections: dict[int, Connection] = {}
        self._alarm = math.inf

    @property
    def is_paused(self) -> bool:
        return self.paused_at is not None

    @property
    def is_running(self) -> bool:
        return self.is_up and not self.is_paused

    def start(self) -> None:
        """Start the process."""
        assert not self.is_up, self.name
        self.is_up = True
        self.incarnation += 1
        self.paused_at, self.resumed_at, self.longest_pause = None, self.simulation.now, 0.0
        self._alarm = math.inf
        self.log("starts")

    def start_in(self, seconds: float) -> None:
        """Start after a delay, unless it has started by then."""
        self.simulation.call_later(seconds, lambda: None if self.is_up else self.start())

    def crash(self, why: str = "crashes") -> None:
        """End the process at once; its connections are refused from now on."""
        if self.is_up:
            self.log(why)
            self.is_up, self.paused_at = False, None
            self.deferred_events.clear()
            self._lose_connections(refused=True, why=f"{self.name} has crashed")

    def pause(self, seconds: float) -> None:
        """Process no events for a while; connections are lost if the pause is too long."""
        if not self.is_running:
            return
        self.log("pauses for", f"{seconds:.3f} s")
        self.paused_at = self.simulation.now
        incarnation = self.incarnation

        def resume() -> None:
            if self.incarnation == incarnation and self.is_paused:
                self._resume()

        def give_up() -> None:
            if self.incarnation == incarnation and self.is_paused:
                self._lose_connections(refused=False, why=f"{self.name} is silent")

        self.simulation.call_later(seconds, resume)
        if seconds > SILENCE_TIMEOUT:
            self.simulation.call_later(SILENCE_TIMEOUT, give_up)

    def _resume(self) -> None:
        now = self.simulation.now
        self.longest_pause = max(self.longest_pause, now - (self.paused_at or 0.0))
        self.paused_at, self.resumed_at = None, now
        self.log("resumes")
        events, self.deferred_events = self.deferred_events, []
        if self.simulation.random.random() < 0.5:
            # Timers may fire before the messages that have arrived are read.
            events.sort(key=lambda event: not event.is_timer)
        for event in events:
            self.simulation.call_later(0.0, event.action, self, is_timer=event.is_timer)

    def _lose_connections(self, *, refused: bool, why: str) -> None:
        for each in list(self.connections.values()):
            each.lose(refused=refused, why=why)

    def log(self, what: str, *values: object) -> None:
        self.simulation.log(self.name, what, *values)

    def call_later(self, delay: float, action: Callable[[], None]) -> None:
        """Schedule an action, which a crash cancels."""
        self.simulation.call_later(delay, action, self, is_timer=True)

    def wake_in(self, seconds: float) -> None:
        """Call `woken` after `seconds`, or at an earlier time requested before."""
        delay = max(0.0, seconds) + _TICK
        due = self.simulation.now + delay
        if due < self._alarm and seconds < math.inf:
            self._alarm = due
            self.call_later(delay, lambda: self._ring(due))

    def _ring(self, due: float) -> None:
        if due == self._alarm:
            self._alarm = math.inf
            self.woken()

    def woken(self) -> None:
        """Handle a wake-up."""
