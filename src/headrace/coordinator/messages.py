"""What the coordinator and its workers say to each other.

`session` is the number of a worker's life, as one coordinator sees it: each greeting has a new one.
Messages of another session than the last are answered with AbortedError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from headrace.parameter_server.acknowledged import Acknowledged
from headrace.serving.call import Done, Message, Question
from headrace.versions import Versions, own_versions

__all__ = [
    "Attend",
    "CallOff",
    "CalledOff",
    "Feed",
    "Forget",
    "Greet",
    "Greeted",
    "LoadFunction",
    "News",
    "Ran",
    "Received",
    "Release",
    "Run",
    "TakeResult",
    "Taken",
    "WorkerReply",
    "WorkerRequest",
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
    acknowledged: tuple[Acknowledged, ...] = ()


class News(Message, frozen=True):
    """Something to say: the worker is about to stop."""

    leaves: bool = True


class Attend(Question[News], frozen=True):
    """Say when there is news. Whoever asks hears at once when the worker is gone."""

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
    acknowledged: tuple[Acknowledged, ...] = ()


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
WorkerReply: TypeAlias = Greeted | News | Ran | CalledOff | Taken | Done
