"""Messages between the coordinator and its workers.

`session` numbers a worker session of one coordinator; each `StartSession` has a new number. A
worker answers messages of any session but the latest with AbortedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from headrace.coordinator.closure import NEVER, Closure, ClosureResult, Payload, RoundPush
from headrace.parameter_server.replica_state import AcknowledgedState
from headrace.serving.rpc import Done, Message, TypedRequest
from headrace.transport.channel import Buffer
from headrace.versions import Versions, own_versions

__all__ = [
    "AcknowledgeResult",
    "AwaitSessionEnd",
    "CallSpec",
    "CancelClosure",
    "CancelReply",
    "CoordinatorActions",
    "ElementLease",
    "EndSession",
    "FeedElements",
    "FetchResult",
    "FetchedResult",
    "LoadFunction",
    "PackedFunction",
    "ReleaseResources",
    "RunClosure",
    "RunReply",
    "SessionStarted",
    "StartSession",
    "WorkerCall",
    "WorkerReply",
    "WorkerRequest",
    "WorkerResource",
    "build_feed_request",
    "build_load_request",
    "build_run_request",
]


class SessionStarted(Message, frozen=True):
    """Reply of a worker that joined the cluster.

    Attributes:
        process: Process of the worker as "host:pid", for messages.
        versions: Versions of that process.
    """

    process: str = ""
    versions: Versions = msgspec.field(default_factory=own_versions)


class StartSession(TypedRequest[SessionStarted], frozen=True):
    """Become worker `worker` of this cluster in a new session; an earlier session is dropped.

    Attributes:
        term: Term of the coordinator; a worker serves the newest term that it knows.
        servers: Addresses of the parameter servers.
        server_timeout: Seconds to wait for an unreachable parameter server.
        threads: Number of closures to run at a time.
        process: Process of the coordinator as "host:pid", for messages.
        replication: Number of replicas of each parameter store.
        collects_steps: Whether optimizer steps are returned with the closure's reply instead of
            being pushed to servers.
        versions: Versions of the coordinator's process.
        acknowledged: Acknowledged states of replicated stores that the coordinator knows.
    """

    cluster_id: str
    term: int
    session: int
    worker: int
    servers: tuple[str, ...] = ()
    server_timeout: float = 120.0
    threads: int = 1
    process: str = ""
    collects_steps: bool = False
    replication: int = 1
    versions: Versions = msgspec.field(default_factory=own_versions)
    acknowledged: tuple[AcknowledgedState, ...] = ()


class AwaitSessionEnd(TypedRequest[Done], frozen=True):
    """Request answered when the session ends; a lost connection shows that the worker is lost."""

    session: int


class LoadFunction(TypedRequest[Done], frozen=True):
    """Load a function (one buffer: pickled), which closures name by its digest."""

    session: int
    digest: bytes
    name: str


class RunReply(Message, frozen=True):
    """Outcome of a closure. Buffers: of its value, then of its optimizer steps.

    Attributes:
        value: Pickled value without the buffers.
        error: Error in place of a value, encoded by `transport.envelope`.
        nbytes: Bytes of a large value, to be fetched with `FetchResult`.
        seconds: Run time.
        has_written: Whether the closure wrote to a server.
        optimizer_steps: Optimizer steps taken but not pushed; pickled without the buffers.
        num_step_buffers: Number of buffers of `optimizer_steps`.
        iterator_states: States of the iterators that the closure used, by resource.
        num_wanted: Number of further elements (`FeedElements`) that the running closure waits for.
        reached_end: Whether the closure ended at the end of the shared dataset.
        num_unused: Number of supplied elements that the closure did not read.
        is_function_missing: Whether the closure did not run because its function is not loaded.
        is_dropped: Whether the closure was cancelled, so that its value is not needed.
        acknowledged: Acknowledged states of replicated stores that the worker knows.
    """

    value: bytes = b""
    error: bytes = b""
    nbytes: int = 0
    seconds: float = 0.0
    has_written: bool = False
    optimizer_steps: bytes = b""
    num_step_buffers: int = 0
    iterator_states: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    num_wanted: int = 0
    num_unused: int = 0
    reached_end: bool = False
    is_function_missing: bool = False
    is_dropped: bool = False
    acknowledged: tuple[AcknowledgedState, ...] = ()


class RunClosure(TypedRequest[RunReply], frozen=True):
    """Run a closure. Buffers: of its arguments, then of each input, then of each element.

    Attributes:
        number: Number of the closure.
        digest: Digest of the function.
        arguments: (args, kwargs), pickled without the buffers; empty without arguments.
        inputs: Values of other closures, which the arguments name by index; pickled likewise.
        elements: Elements of a shared dataset; pickled likewise.
        end_of_data: Whether the shared dataset ends after these elements.
        buffer_counts: Number of buffers of each of these; empty if none has any.
        resource: Number of the resource that the value becomes; 0 returns the value.
    """

    session: int
    number: int
    digest: bytes
    arguments: bytes = b""
    inputs: tuple[bytes, ...] = ()
    elements: tuple[bytes, ...] = ()
    end_of_data: bool = False
    buffer_counts: tuple[int, ...] = ()
    resource: int = 0


class FeedElements(TypedRequest[RunReply], frozen=True):
    """Resume a closure that waits for elements. Buffers: of each element.

    Attributes:
        elements: Elements, pickled without the buffers.
        end_of_data: Whether the dataset ends after these elements.
        buffer_counts: Number of buffers of each element; empty if none has any.
    """

    session: int
    number: int
    elements: tuple[bytes, ...] = ()
    end_of_data: bool = False
    buffer_counts: tuple[int, ...] = ()


class CancelReply(Message, frozen=True):
    """Whether the worker dropped the closure: it never ran, or its thread was abandoned."""

    is_dropped: bool


class CancelClosure(TypedRequest[CancelReply], frozen=True):
    """Cancel a closure.

    A closure that has not started is dropped in every mode.

    Attributes:
        mode: How to treat a running closure. "recall": let it run; "reject_writes": reject its
            further writes; "abandon": also replace its thread.
    """

    session: int
    number: int
    mode: Literal["recall", "reject_writes", "abandon"]


class FetchedResult(Message, frozen=True):
    """Value of a closure. Buffers: of the value."""

    value: bytes


class FetchResult(TypedRequest[FetchedResult], frozen=True):
    """Fetch the value of an ended closure, which the worker keeps until `AcknowledgeResult`."""

    session: int
    number: int


class AcknowledgeResult(TypedRequest[Done], frozen=True):
    """Acknowledge that the value of a closure has arrived, so that the worker drops it."""

    session: int
    number: int


class ReleaseResources(TypedRequest[Done], frozen=True):
    """Release resources that are no longer used."""

    session: int
    resources: tuple[int, ...]


class EndSession(TypedRequest[Done], frozen=True):
    """End the session and drop its contents."""

    session: int


WorkerRequest: TypeAlias = (
    StartSession
    | AwaitSessionEnd
    | LoadFunction
    | RunClosure
    | FeedElements
    | CancelClosure
    | FetchResult
    | AcknowledgeResult
    | ReleaseResources
    | EndSession
)

WorkerReply: TypeAlias = SessionStarted | RunReply | CancelReply | FetchedResult | Done


# --- contents of requests to workers: calls, functions, elements and resources --------------------


@dataclass(frozen=True, eq=False)
class PackedFunction:
    """Snapshot of a function, taken when it is scheduled for the first time.

    Attributes:
        digest: Digest of the payload.
        name: Name for messages.
        payload: Pickled function.
        handles: Handles of the worker resources that the function uses.
    """

    digest: bytes
    name: str
    payload: Payload
    handles: tuple[object, ...] = ()


class ElementLease:
    """Elements of a shared dataset that a closure was given; a retry gets the same ones.

    Attributes:
        elements: Packed elements.
        end_of_data: Whether the dataset ends after these elements.
        num_unused: Number of last elements that the closure did not read; set when it returns.
        reached_end: Whether the closure ended because the dataset did.
        num_wanted: Number of further elements that the closure waits for.
    """

    __slots__ = ("elements", "end_of_data", "num_unused", "num_wanted", "reached_end")

    def __init__(self, elements: list[Payload], *, end_of_data: bool) -> None:
        self.elements: list[Payload] = elements
        self.end_of_data: bool = end_of_data
        self.reached_end: bool = False
        self.num_unused = self.num_wanted = 0


@dataclass(frozen=True, slots=True)
class CallSpec:
    """Call of a function with its arguments.

    Attributes:
        function: The function.
        arguments: (args, kwargs), packed; None without arguments.
        resource: Number of the resource that the value becomes; 0 returns the value.
        lease: Elements of a shared dataset.
        handles: Handles of the worker resources that the arguments name.
    """

    function: PackedFunction
    arguments: Payload | None = None
    resource: int = 0
    lease: ElementLease | None = None
    handles: tuple[object, ...] = ()


@dataclass(eq=False)
class WorkerResource:
    """Value that each worker creates and keeps for itself.

    Attributes:
        number: Number of the resource, from 1.
        name: Name for messages.
        function: Function that creates it.
        build_arguments: Returns the function's arguments, given the last state (empty if none).
        results: Result of its creation by worker.
        states: State after the last ended closure that used it, by worker.
    """

    number: int
    name: str
    function: PackedFunction
    build_arguments: Callable[[bytes], Payload | None]
    results: dict[int, ClosureResult] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)

    def build_closure(self, worker: int) -> Closure:
        """Return the closure that creates it on a worker."""
        arguments = self.build_arguments(self.states.get(worker, b""))
        closure = Closure(self.name, CallSpec(self.function, arguments, resource=self.number))
        self.results[worker] = closure.result
        return closure


def build_load_request(session: int, function: PackedFunction) -> tuple[LoadFunction, list[Buffer]]:
    """Return the request that loads a function, and its buffers."""
    payload = function.payload
    message = LoadFunction(session=session, digest=function.digest, name=function.name)
    return message, [payload.data, *payload.buffers]


def build_run_request(session: int, closure: Closure) -> tuple[RunClosure, list[Buffer]]:
    """Return the request that runs a closure, and its buffers."""
    call_spec: CallSpec = closure.call_spec
    arguments = call_spec.arguments or Payload(b"")
    inputs = [each.payload for each in closure.inputs if each.payload is not None]
    elements = [] if call_spec.lease is None else call_spec.lease.elements
    counts, buffers = _split_buffers((arguments, *inputs, *elements))
    message = RunClosure(
        session=session,
        number=closure.number,
        digest=call_spec.function.digest,
        arguments=arguments.data,
        inputs=tuple([each.data for each in inputs]),
        elements=tuple([each.data for each in elements]),
        end_of_data=call_spec.lease is not None and call_spec.lease.end_of_data,
        buffer_counts=counts,
        resource=call_spec.resource,
    )
    return message, buffers


def build_feed_request(
    session: int, number: int, elements: Sequence[Payload], *, end_of_data: bool
) -> tuple[FeedElements, list[Buffer]]:
    """Return the request that supplies elements to a closure, and its buffers."""
    counts, buffers = _split_buffers(elements)
    message = FeedElements(
        session=session,
        number=number,
        elements=tuple([each.data for each in elements]),
        end_of_data=end_of_data,
        buffer_counts=counts,
    )
    return message, buffers


def _split_buffers(payloads: Iterable[Payload]) -> tuple[tuple[int, ...], list[Buffer]]:
    """Return the number of buffers of each payload, and all buffers; () if there are none."""
    counts: list[int] = []
    buffers: list[Buffer] = []
    for payload in payloads:
        counts.append(len(payload.buffers))
        buffers += payload.buffers
    return (tuple(counts) if buffers else ()), buffers


# --- actions of the coordinator's core ------------------------------------------------------------


class WorkerCall(NamedTuple):
    """Request to a worker; the runner returns the reply together with the request."""

    worker: int
    message: Any
    buffers: Sequence[Buffer] = ()


@dataclass
class CoordinatorActions:
    """Actions to run.

    Attributes:
        calls: Requests to workers, in this order.
        key_cleanups: Closures whose write keys servers may forget.
        fences: Worker sessions whose writes servers must reject.
        round_push: Round whose mean is pushed to servers; None if there is none.
        disconnects: Removed workers whose connection to close.
        warnings: Warnings to log.
        wake_in: Seconds until the next call of `take_actions`.
    """

    calls: list[WorkerCall] = field(default_factory=list)
    key_cleanups: list[int] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    round_push: RoundPush | None = None
    disconnects: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    wake_in: float = NEVER
