"""What goes wrong: troubles come at random for a while, then all is mended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.simulation.cast import Cast
from tests.simulation.network import Peer, Weather
from tests.simulation.worker import WorkerProcess

__all__ = ["TROUBLES", "Storm"]

P = TypeVar("P", bound=Peer)

_MARGIN = 1.5
"""Seconds less than a timeout that a pause lasts which must do no harm: a heartbeat, and delays."""
_BREATH = 3.0
"""Seconds between two pauses of one process which must do no harm."""
_RESTART_SECONDS = 0.5
"""After which whoever looks after a worker process starts another in its place."""


class Storm:
    """Brings trouble upon a cast until it is over.

    Args:
        cast: Upon whom.
    """

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.is_over = False
        self._paused_until: dict[str, float] = {}

    def begin(self) -> None:
        scenario, world = self.cast.scenario, self.cast.world
        if scenario.promises.troubles and scenario.storm_seconds:
            self._next()
        world.at(scenario.storm_seconds + 1.0, self._mend)
        self._look_after_workers()

    def _next(self) -> None:
        world, scenario = self.cast.world, self.cast.scenario
        if self.is_over:
            return
        trouble = world.chance.choice(scenario.promises.troubles)
        TROUBLES[trouble](self)
        world.at(world.chance.expovariate(1 / scenario.calm_seconds), self._next)

    def _mend(self) -> None:
        """Let nothing be wrong any more; who is paused goes on when the pause is over."""
        cast = self.cast
        self.is_over = True
        cast.world.note("storm", "is over")
        cast.network.clear_up()
        cast.dispatcher.disk.is_full = False
        if not cast.dispatcher.is_up:
            cast.dispatcher.begin()
        if not cast.staying:
            cast.add_worker()

    def _look_after_workers(self) -> None:
        """Start processes that ended by themselves again, and see that there is one in the end."""
        cast = self.cast
        for worker in cast.workers:
            if not worker.is_up and worker.was_killed_by_a_unit:
                worker.begin()
        if self.is_over and not cast.staying:
            cast.add_worker()
        cast.world.at(_RESTART_SECONDS, self._look_after_workers)

    # --- whom ---------------------------------------------------------------------------------

    def anyone(self, peers: Sequence[P]) -> P | None:
        """Return one of those that are up and awake."""
        there = [each for each in peers if each.is_running]
        return self.cast.world.chance.choice(there) if there else None

    def pause(self, peer: Peer | None, seconds: float) -> None:
        """Pause somebody who had time to be heard since the last pause."""
        if peer is None or self.cast.world.now < self._paused_until.get(peer.name, 0.0):
            return
        self._paused_until[peer.name] = self.cast.world.now + seconds + _BREATH
        peer.pause(seconds)

    def seconds(self, most: float) -> float:
        """Return a duration: short ones as likely as long ones."""
        return float(most ** self.cast.world.chance.random()) - 1.0 if most > 1.0 else most


def _weather(storm: Storm) -> None:
    world, network = storm.cast.world, storm.cast.network
    chance = world.chance
    network.weather = Weather(
        latency=chance.choice((0.0002, 0.005, 0.05)),
        late=chance.choice((0.0, 0.02, 0.2)),
        lateness=chance.choice((0.01, 0.1, 0.3)),
        twice=chance.choice((0.0, 0.05, 0.5)),
    )


def _reset(storm: Storm) -> None:
    cast = storm.cast
    peer = storm.anyone([cast.dispatcher, *cast.workers, *cast.clients])
    if peer is not None:
        cast.network.reset(peer)


def _part(storm: Storm, seconds: float) -> None:
    cast = storm.cast
    worker = storm.anyone(cast.workers)
    other = storm.anyone([cast.dispatcher, *cast.clients])
    if worker is not None and other is not None:
        if cast.world.chance.random() < 0.2:
            client = storm.anyone(cast.clients)
            worker, other = (worker, other) if client is None else (client, cast.dispatcher)  # type: ignore[assignment]
        cast.network.part(worker, other, seconds)


def _part_briefly(storm: Storm) -> None:
    _part(storm, storm.seconds(1.0 + 0.4))


def _part_for_long(storm: Storm) -> None:
    _part(storm, storm.seconds(40.0))


def _pause_worker(storm: Storm) -> None:
    limit = storm.cast.scenario.limits.worker_timeout - _MARGIN
    storm.pause(storm.anyone(storm.cast.workers), storm.seconds(1.0 + limit))


def _pause_worker_for_long(storm: Storm) -> None:
    storm.pause(storm.anyone(storm.cast.workers), storm.seconds(60.0))


def _pause_client(storm: Storm) -> None:
    limits = storm.cast.scenario.limits
    limit = min(limits.client_timeout, limits.settle_patience) - 2 * _MARGIN
    storm.pause(storm.anyone(storm.cast.clients), storm.seconds(1.0 + limit))


def _pause_client_for_long(storm: Storm) -> None:
    storm.pause(storm.anyone(storm.cast.clients), storm.seconds(120.0))


def _pause_dispatcher(storm: Storm) -> None:
    storm.pause(storm.cast.dispatcher, storm.seconds(100.0))


def _restart_dispatcher(storm: Storm) -> None:
    dispatcher, world = storm.cast.dispatcher, storm.cast.world
    if dispatcher.is_up:
        dispatcher.die()

        def begin() -> None:
            if not dispatcher.is_up:
                dispatcher.begin()

        world.at(storm.seconds(20.0), begin)


def _fill_disk(storm: Storm) -> None:
    disk, world = storm.cast.dispatcher.disk, storm.cast.world
    if not disk.history:
        return  # nobody could start
    disk.is_full = True
    world.note("disk", "is full")

    def make_room() -> None:
        disk.is_full = False

    world.at(storm.seconds(5.0), make_room)


def _kill_worker(storm: Storm) -> None:
    cast = storm.cast
    worker = storm.anyone(cast.workers)
    if worker is None:
        return
    worker.die("is killed")
    if cast.world.chance.random() < 0.5:
        cast.world.at(storm.seconds(20.0), lambda: _begin_again(worker))


def _begin_again(worker: WorkerProcess) -> None:
    if not worker.is_up:
        worker.begin()


def _add_worker(storm: Storm) -> None:
    if len(storm.cast.staying) < 2 * storm.cast.scenario.workers:
        storm.cast.add_worker()


def _drain_worker(storm: Storm) -> None:
    worker = storm.anyone(storm.cast.staying)
    if worker is not None:
        worker.drain(10_000.0)


def _stop_worker(storm: Storm) -> None:
    worker = storm.anyone(storm.cast.workers)
    if worker is not None:
        worker.stop()


def _close_client(storm: Storm) -> None:
    client = storm.anyone(storm.cast.clients)
    if client is not None:
        client.close()


def _kill_client(storm: Storm) -> None:
    client = storm.anyone(storm.cast.clients)
    if client is not None:
        client.die()


TROUBLES: dict[str, Callable[[Storm], None]] = {
    "weather": _weather,
    "reset": _reset,
    "part briefly": _part_briefly,
    "part for long": _part_for_long,
    "pause a worker": _pause_worker,
    "pause a worker for long": _pause_worker_for_long,
    "pause a client": _pause_client,
    "pause a client for long": _pause_client_for_long,
    "pause the dispatcher": _pause_dispatcher,
    "restart the dispatcher": _restart_dispatcher,
    "fill the disk": _fill_disk,
    "kill a worker": _kill_worker,
    "add a worker": _add_worker,
    "drain a worker": _drain_worker,
    "stop a worker": _stop_worker,
    "close a client": _close_client,
    "kill a client": _kill_client,
}
