"""What the coordinator and its workers say to each other.

`session` is the number of a worker's life, as one coordinator sees it: each greeting has a new one.
Messages of another session than the last are answered with AbortedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from headrace.coordinator.closure import NEVER, Closure, Payload, Result, Round
from headrace.parameter_server.replica_state import AcknowledgedState
from headrace.serving.call import Done, Message, Question
from headrace.transport.channel import Buffer
from headrace.versions import Versions, own_versions

__all__ = [
    "Actions",
    "Attend",
    "Call",
    "CallOff",
    "CalledOff",
    "Feed",
    "Forget",
    "Function",
    "Greet",
    "Greeted",
    "Lease",
    "LoadFunction",
    "Ran",
    "Received",
    "Release",
    "Resource",
    "Run",
    "TakeResult",
    "Taken",
    "Work",
    "WorkerReply",
    "WorkerRequest",
    "feed_message",
    "load_message",
    "run_message",
]


class Greeted(Message, frozen=True):
    """The worker is yours.

    Attributes:
        process: Which process it is, for words: "host:pid".
        versions: Of that process.
    """

    process: str = ""
    versions: Versions = msgspec.field(default_factory=own_versions)


class Greet(Question[Greeted], frozen=True):
    """Be worker `worker` of this cluster, in a new life; what was before is dropped.

    Attributes:
        incarnation: Of the coordinator; a worker goes with the newest that it has heard of.
        servers: Addresses of the parameter servers.
        server_timeout: Seconds for which one that cannot be reached is waited for.
        threads: How many closures to run at a time.
        process: Of the coordinator, for words: "host:pid".
        replication: How many servers have what one of them has.
        gathers: Steps of optimizers are not pushed, but sent with a closure's answer.
        versions: Of the coordinator's process.
        acknowledged: What the coordinator knows to be acknowledged of replicated stores.
    """

    cluster_id: str
    incarnation: int
    session: int
    worker: int
    servers: tuple[str, ...] = ()
    server_timeout: float = 120.0
    threads: int = 1
    process: str = ""
    gathers: bool = False
    replication: int = 1
    versions: Versions = msgspec.field(default_factory=own_versions)
    acknowledged: tuple[AcknowledgedState, ...] = ()


class Attend(Question[Done], frozen=True):
    """Answer when this life is over. Whoever asks hears at once when the worker is gone."""

    session: int


class LoadFunction(Question[Done], frozen=True):
    """Keep this function (one buffer: pickled); closures name it by its digest."""

    session: int
    digest: bytes
    name: str


class Ran(Message, frozen=True):
    """A closure has ended. Buffers: of its value, then of the steps that it took.

    Attributes:
        value: Pickled, without the buffers.
        error: In place of a value, as `transport.envelope` writes errors.
        nbytes: The value is that large, and waits for `TakeResult`.
        seconds: How long it ran.
        wrote: Whether it wrote to a server.
        steps: Of optimizers, that it took and did not push; pickled, without the buffers.
        beside: How many buffers belong to them.
        states: Where the iterators stand that it used, by resource.
        wants: It is under way, and waits for so many more elements (`Feed`).
        met_end: It has ended where the shared dataset did.
        unused: How many of the elements that it was given it did not ask for.
        lacks_function: It did not run: the function is not here any more.
        is_dropped: It was called off, and nobody waits for its value.
        acknowledged: What the worker knows to be acknowledged of replicated stores.
    """

    value: bytes = b""
    error: bytes = b""
    nbytes: int = 0
    seconds: float = 0.0
    wrote: bool = False
    steps: bytes = b""
    beside: int = 0
    states: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    wants: int = 0
    unused: int = 0
    met_end: bool = False
    lacks_function: bool = False
    is_dropped: bool = False
    acknowledged: tuple[AcknowledgedState, ...] = ()


class Run(Question[Ran], frozen=True):
    """Run a closure. Buffers: of its arguments, then of each input, then of each element.

    Attributes:
        number: Of the closure.
        digest: Of the function.
        arguments: (args, kwargs), pickled without the buffers; empty: there are none.
        inputs: Values of other closures that its arguments name by their place, pickled likewise.
        elements: Of a shared dataset, pickled likewise.
        has_ended: The shared dataset has no more after these.
        buffers: How many buffers each of all these has; empty: none has any.
        keeps: The resource that its value becomes; 0: the value is sent back.
    """

    session: int
    number: int
    digest: bytes
    arguments: bytes = b""
    inputs: tuple[bytes, ...] = ()
    elements: tuple[bytes, ...] = ()
    has_ended: bool = False
    buffers: tuple[int, ...] = ()
    keeps: int = 0


class Feed(Question[Ran], frozen=True):
    """Go on with a closure that waits for elements. Buffers: of each.

    Attributes:
        elements: Pickled without the buffers.
        has_ended: There are no more after these.
        buffers: How many buffers each has; empty: none has any.
    """

    session: int
    number: int
    elements: tuple[bytes, ...] = ()
    has_ended: bool = False
    buffers: tuple[int, ...] = ()


class CalledOff(Message, frozen=True):
    """Whether the worker has let go of the closure: it never ran, or its thread was given up."""

    is_dropped: bool


class CallOff(Question[CalledOff], frozen=True):
    """Do not run this closure, if it has not begun.

    Attributes:
        how: "recall": one that has begun goes on; "refuse": it may write no more; "abandon": its
            thread is replaced, too.
    """

    session: int
    number: int
    how: Literal["recall", "refuse", "abandon"]


class Taken(Message, frozen=True):
    """A value. Buffers: of it."""

    value: bytes


class TakeResult(Question[Taken], frozen=True):
    """Send the value of a closure that ended; it is kept until `Received`."""

    session: int
    number: int


class Received(Question[Done], frozen=True):
    """The value of this closure has arrived: let go of it."""

    session: int
    number: int


class Release(Question[Done], frozen=True):
    """Nobody uses these resources any more."""

    session: int
    resources: tuple[int, ...]


class Forget(Question[Done], frozen=True):
    """This life is over: drop all that belongs to it."""

    session: int


WorkerRequest: TypeAlias = (
    Greet | Attend | LoadFunction | Run | Feed | CallOff | TakeResult | Received | Release | Forget
)

WorkerReply: TypeAlias = Greeted | Ran | CalledOff | Taken | Done


# --- what is sent to workers: calls, what they need, and what workers keep for themselves ---------


@dataclass(frozen=True, eq=False)
class Function:
    """A function as it was when it was scheduled first.

    Attributes:
        digest: Of its bytes.
        name: For words.
        payload: Pickled.
        kept: Handles of what workers keep that it uses.
    """

    digest: bytes
    name: str
    payload: Payload
    kept: tuple[object, ...] = ()


class Lease:
    """Elements of a shared dataset that a closure was given: another attempt gets the same.

    Attributes:
        elements: Packed.
        has_ended: Whether the dataset has no more.
        unused: How many of the last ones it did not ask for; known when it has returned.
        met_end: Whether it ended because there were no more.
        wants: For how many more it waits.
    """

    __slots__ = ("elements", "has_ended", "met_end", "unused", "wants")

    def __init__(self, elements: list[Payload], *, has_ended: bool) -> None:
        self.elements = elements
        self.has_ended = has_ended
        self.met_end = False
        self.unused = self.wants = 0


@dataclass(frozen=True, slots=True)
class Work:
    """A call.

    Attributes:
        function: What is called.
        arguments: (args, kwargs), packed; None: there are none.
        keeps: The resource that its value becomes; 0: the value comes back.
        lease: Elements of a shared dataset.
        kept: Handles of what workers keep that its arguments name.
    """

    function: Function
    arguments: Payload | None = None
    keeps: int = 0
    lease: Lease | None = None
    kept: tuple[object, ...] = ()


@dataclass(eq=False)
class Resource:
    """What each worker makes and keeps for itself.

    Attributes:
        number: From 1.
        name: For words.
        function: Makes it.
        arguments: Returns its arguments, given the state that it had before (empty: none).
        results: How far it is on each worker.
        states: Where it stood when the last closure that used it had ended, by worker.
    """

    number: int
    name: str
    function: Function
    arguments: Callable[[bytes], Payload | None]
    results: dict[int, Result] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)

    def closure_for(self, worker: int) -> Closure:
        """Return the closure that makes it on a worker."""
        arguments = self.arguments(self.states.get(worker, b""))
        closure = Closure(self.name, Work(self.function, arguments, keeps=self.number))
        self.results[worker] = closure.result
        return closure


def load_message(session: int, function: Function) -> tuple[LoadFunction, list[Buffer]]:
    """Return the request that brings a function, and its buffers."""
    payload = function.payload
    message = LoadFunction(session=session, digest=function.digest, name=function.name)
    return message, [payload.data, *payload.buffers]


def run_message(session: int, closure: Closure) -> tuple[Run, list[Buffer]]:
    """Return the request that has a closure run, and its buffers."""
    work: Work = closure.work
    arguments = work.arguments or Payload(b"")
    inputs = [each.payload for each in closure.inputs if each.payload is not None]
    elements = [] if work.lease is None else work.lease.elements
    counts, buffers = _beside((arguments, *inputs, *elements))
    message = Run(
        session=session,
        number=closure.number,
        digest=work.function.digest,
        arguments=arguments.data,
        inputs=tuple([each.data for each in inputs]),
        elements=tuple([each.data for each in elements]),
        has_ended=work.lease is not None and work.lease.has_ended,
        buffers=counts,
        keeps=work.keeps,
    )
    return message, buffers


def feed_message(
    session: int, number: int, elements: Sequence[Payload], *, has_ended: bool
) -> tuple[Feed, list[Buffer]]:
    """Return the request that brings elements to a closure, and its buffers."""
    counts, buffers = _beside(elements)
    message = Feed(
        session=session,
        number=number,
        elements=tuple([each.data for each in elements]),
        has_ended=has_ended,
        buffers=counts,
    )
    return message, buffers


def _beside(payloads: Iterable[Payload]) -> tuple[tuple[int, ...], list[Buffer]]:
    """Return how many buffers each has, and all of them; () where there are none."""
    counts: list[int] = []
    buffers: list[Buffer] = []
    for payload in payloads:
        counts.append(len(payload.buffers))
        buffers += payload.buffers
    return (tuple(counts) if buffers else ()), buffers


# --- what the coordinator's core has its shell do -------------------------------------------------


class Call(NamedTuple):
    """Ask a worker; the answer comes back with what was asked."""

    worker: int
    message: Any
    buffers: Sequence[Buffer] = ()


@dataclass
class Actions:
    """What is to be done.

    Attributes:
        calls: To workers, in this order.
        settles: Closures whose keys servers may forget.
        fences: Lives of workers whose writes servers are to refuse.
        round: The mean of what closures took as steps is to be pushed to servers.
        closes: Workers whose connection is to be closed: they have left.
        words: To be logged, as warnings.
        wake_in: Seconds after which to look again.
    """

    calls: list[Call] = field(default_factory=list)
    settles: list[int] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    round: Round | None = None
    closes: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    wake_in: float = NEVER
