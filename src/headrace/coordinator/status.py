"""The state of a coordinator: for `headrace status`, and for log messages of long waits."""

from __future__ import annotations

import msgspec

from headrace.coordinator.coordination import Coordination
from headrace.serving.call import Message, Question
from headrace.versions import Versions, own_versions

__all__ = [
    "AskStatus",
    "CoordinatorStatus",
    "RunningFunction",
    "WorkerStatus",
    "status_of",
    "what_is_stuck",
]


_MOST_NAMED = 10


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
        finished: Functions that it has answered.
        losses: How often it was lost.
        is_leaving: Whether it gets nothing more.
        versions: Of its process, as far as it was ever there.
    """

    worker: int
    address: str
    is_there: bool
    seconds: float
    reason: str = ""
    in_flight: int = 0
    running: tuple[tuple[str, float], ...] = ()
    finished: int = 0
    losses: int = 0
    is_leaving: bool = False
    versions: Versions = Versions()


class RunningFunction(Message, frozen=True):
    """A function that runs.

    Attributes:
        name: Its name.
        worker: Number of the worker.
        seconds: For how long.
        usual: How long it takes in the median; None: too few have returned.
    """

    name: str
    worker: int
    seconds: float
    usual: float | None = None


class CoordinatorStatus(Message, frozen=True):
    """How a coordinator is.

    Attributes:
        waiting: Functions that no worker has.
        unsettled: Functions that are not over.
        finished: Functions that are over.
        gap: How many functions the oldest one that has not ended is behind the newest one sent.
        failure: The error that is to be raised; empty: there is none.
        workers: In the order of their numbers.
        seconds_up: How long the coordinator has been there.
        in_flight: Functions that workers have.
        finished_per_second: In the last ten seconds or so.
        returned: Calls that have returned or raised.
        failed: Those that raised.
        seconds: For which they ran, in all.
        retried: Calls that were taken back from workers that were lost, to be made again.
        workers_lost: How often a worker was lost.
        largest_gap: What `gap` has been at most.
        staleness: What it is held to; None: to nothing.
        longest: The function that has been running longest; None: none runs.
        servers: Addresses of the parameter servers.
        versions: Of the coordinator's process.
    """

    waiting: int
    unsettled: int
    finished: int
    gap: int
    failure: str = ""
    workers: tuple[WorkerStatus, ...] = ()
    seconds_up: float = 0.0
    in_flight: int = 0
    finished_per_second: float = 0.0
    returned: int = 0
    failed: int = 0
    seconds: float = 0.0
    retried: int = 0
    workers_lost: int = 0
    largest_gap: int = 0
    staleness: int | None = None
    longest: RunningFunction | None = None
    servers: tuple[str, ...] = ()
    versions: Versions = msgspec.field(default_factory=own_versions)


class AskStatus(Question[CoordinatorStatus], frozen=True):
    """How are you?"""


def status_of(core: Coordination, now: float, staleness: int | None = None) -> CoordinatorStatus:
    """Return how a coordinator is, whose closures are held to a staleness; None: to none."""
    queue, watch = core.queue, core.watch
    loads = {load.worker: load for load in queue.loads}
    workers: list[WorkerStatus] = []
    running: list[RunningFunction] = []
    for number, contact in sorted(core.contacts.items()):
        load = loads.get(number)
        first = [] if load is None else load.first()
        here = [
            (closure.name, now - closure.begun_at)
            for closure in first
            if closure.begun_at is not None
        ]
        running += [RunningFunction(name=name, worker=number, seconds=s) for name, s in here]
        workers.append(
            WorkerStatus(
                worker=number,
                address=contact.address,
                is_there=contact.is_there,
                seconds=now - contact.since,
                reason=contact.reason,
                in_flight=0 if load is None else len(load.running),
                running=tuple(here[:_MOST_NAMED]),
                finished=contact.finished,
                losses=contact.losses,
                is_leaving=contact.is_leaving,
                versions=contact.versions or Versions(),
            )
        )
    sent = [number for load in loads.values() for number in load.running]
    return CoordinatorStatus(
        waiting=queue.num_waiting,
        unsettled=len(queue.unsettled),
        finished=queue.finished,
        gap=max(0, watch.newest - queue.first),
        failure="" if queue.failure is None else str(queue.failure.error),
        workers=tuple(workers),
        seconds_up=watch.up(now),
        in_flight=sum(number > 0 for number in sent),
        finished_per_second=watch.rate(now),
        returned=watch.returned,
        failed=watch.failed,
        seconds=watch.seconds,
        retried=watch.retried,
        workers_lost=watch.workers_lost,
        largest_gap=watch.largest_gap,
        staleness=staleness,
        longest=_longest(core, running),
        servers=core.greeting.servers,
    )


def _longest(core: Coordination, running: list[RunningFunction]) -> RunningFunction | None:
    if not running:
        return None
    found = max(running, key=lambda each: each.seconds)
    return msgspec.structs.replace(found, usual=core.watch.usual(found.name))


_MOST_LOGGED = 5


def what_is_stuck(core: Coordination, now: float) -> str:
    """Return which functions run where for how long, who is not there, and how many wait."""
    words: list[str] = []
    running = [
        (now - closure.begun_at, closure.name, load.worker)
        for load in core.queue.loads
        for closure in load.first()
        if closure.begun_at is not None
    ]
    running.sort(key=lambda each: -each[0])
    for seconds, name, worker in running[:_MOST_LOGGED]:
        address = core.contacts[worker].address
        words.append(f"{name} has been running on worker {worker} ({address}) for {seconds:.0f} s")
    if len(running) > _MOST_LOGGED:
        words.append(f"{len(running) - _MOST_LOGGED} more run")
    words += [each.words(now) for each in core.contacts.values() if not each.is_there]
    if not core.contacts:
        words.append("there is no worker: add one")
    if core.queue.num_waiting:
        words.append(f"{core.queue.num_waiting} functions wait for a worker")
    return "; ".join(words) or "all has just ended"
