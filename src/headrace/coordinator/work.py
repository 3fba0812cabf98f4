"""What is sent to workers: calls, what they need, and what workers keep for themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.coordinator.closure import Closure, Payload, Result
from headrace.coordinator.messages import Feed, LoadFunction, Run
from headrace.transport.channel import Buffer

__all__ = ["Function", "Lease", "Resource", "Work", "feed_message", "load_message", "run_message"]


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
    if work.arguments is None and work.lease is None:
        return (
            Run(
                session=session,
                number=closure.number,
                digest=work.function.digest,
                keeps=work.keeps,
            ),
            [],
        )
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
