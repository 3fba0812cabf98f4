"""Where a coordinator listens: workers announce themselves, and whoever watches asks how it is.

Nothing of users' comes this way: no function, no value.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from headrace.coordinator.coordination import Coordination
from headrace.coordinator.shell import Shell
from headrace.serving.call import Done, Message, Ping, Question
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Request, Server
from headrace.transport.security import Security

__all__ = [
    "Announce",
    "Announced",
    "AskStatus",
    "CoordinatorStatus",
    "Reception",
    "ReceptionReply",
    "WorkerStatus",
    "status_of",
]

_MOST_NAMED = 10


class Announced(Message, frozen=True):
    """The worker is taken in, under this number; -1: it was removed."""

    worker: int


class Announce(Question[Announced], frozen=True):
    """A worker is there. Said again and again: the coordinator may be a new one.

    Attributes:
        address: Where it listens.
        life: Names its process: one that was removed stays so, another one at its address does not.
    """

    address: str
    life: str


class WorkerStatus(Message, frozen=True):
    """How one worker is.

    Attributes:
        worker: Its number.
        address: Where it listens.
        is_there: Whether it can be reached.
        seconds: Since when that is so.
        reason: Why it is not there.
        in_flight: How many functions it has.
        running: Functions that run, and for how many seconds.
    """

    worker: int
    address: str
    is_there: bool
    seconds: float
    reason: str = ""
    in_flight: int = 0
    running: tuple[tuple[str, float], ...] = ()


class CoordinatorStatus(Message, frozen=True):
    """How a coordinator is.

    Attributes:
        waiting: Functions that no worker has.
        unsettled: Functions that are not over.
        finished: Functions that are over.
        gap: How many functions the oldest one that is not over is behind the newest one sent.
        failure: The error that is to be raised; empty: there is none.
        workers: In the order of their numbers.
    """

    waiting: int
    unsettled: int
    finished: int
    gap: int
    failure: str = ""
    workers: tuple[WorkerStatus, ...] = ()


class AskStatus(Question[CoordinatorStatus], frozen=True):
    """How are you?"""


_ReceptionRequest: TypeAlias = Announce | AskStatus | Ping
ReceptionReply: TypeAlias = Announced | CoordinatorStatus | Done


def status_of(core: Coordination, now: float) -> CoordinatorStatus:
    """Return how a coordinator is."""
    queue = core.queue
    loads = {load.worker: load for load in queue.loads}
    workers: list[WorkerStatus] = []
    for number, contact in sorted(core.contacts.items()):
        load = loads.get(number)
        first = [] if load is None else load.first()
        workers.append(
            WorkerStatus(
                worker=number,
                address=contact.address,
                is_there=contact.is_there,
                seconds=now - contact.since,
                reason=contact.reason,
                in_flight=0 if load is None else len(load.running),
                running=tuple(
                    (closure.name, now - closure.begun_at)
                    for closure in first[:_MOST_NAMED]
                    if closure.begun_at is not None
                ),
            )
        )
    sent = [number for load in loads.values() for number in load.running]
    return CoordinatorStatus(
        waiting=queue.num_waiting,
        unsettled=len(queue.unsettled),
        finished=queue.finished,
        gap=max(0, max(sent, default=0) - queue.low),
        failure="" if queue.failure is None else str(queue.failure.error),
        workers=tuple(workers),
    )


class Reception:
    """Answers workers and watchers for one coordinator.

    Args:
        shell: Of the coordinator.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        #: Lives of workers that were removed.
        self._removed: set[str] = set()
        #: Who announced itself last, by address.
        self._lives: dict[str, str] = {}

    def listen(self, host: str, port: int, security: Security | None) -> Server:
        """Begin to answer."""
        return zeromq.serve(
            self._handle, request_type=_ReceptionRequest, host=host, port=port, security=security
        )

    def remove(self, address: str) -> None:
        """Take note that a worker was removed: what it announces later changes nothing."""
        life = self._lives.get(address)
        if life is not None:
            self._removed.add(life)

    def _handle(self, requests: Sequence[Request]) -> None:
        for request in requests:
            message = request.message
            if isinstance(message, Announce):
                request.reply(Announced(worker=self._take_in(message)))
            elif isinstance(message, AskStatus):
                with self._shell.lock:
                    status = status_of(self._shell.core, time.monotonic())
                request.reply(status)
            else:
                request.reply(Done())

    def _take_in(self, message: Announce) -> int:
        addresses.split(message.address)
        with self._shell.lock:
            if message.life in self._removed:
                return -1
            self._lives[message.address] = message.life
            worker = self._shell.core.add_worker(message.address, time.monotonic())
        self._shell.wake()
        return worker
