"""Client of the parameter servers: batched requests from any thread, with retries.

    client = ParameterServerClient(["host1:2222", "host2:2222"])
    count = OperationRequest(0, IncrementCounter("steps"))
    gather = OperationRequest(1, GatherRows("w"), [ids])
    (step, _), (_, [rows]) = client.execute_all([count, gather])

Each thread has its own channels, so threads neither hand data to each other nor wait while another
copies arrays into shared memory. All operations for one server travel in one request; the servers
work in parallel.

Rule 1. Requests to an unreachable server are retried until `timeout` seconds have passed; after 10
        s a warning names the server.
Rule 2. A request that may have been executed is retried only if that is safe: it changes nothing,
        has a write key, or is idempotent (`is_retryable`). A request that never reached the server
        is always retried.
Rule 3. A server executes the requests of one thread in the order in which they were made, even if
        the thread does not wait for each reply (`begin_all`) and if requests are retried.
Rule 4. A restarted server has lost its contents. The restart is reported once, before the next
        request to that server: to the log, to the recovery function and to the registered callbacks
        (`states`). Requests for a missing shard are then retried like requests to an unreachable
        server.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from numpy.typing import NDArray

from headrace.arguments import check_seconds, check_strings
from headrace.errors import (
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from headrace.parameter_server.messages import (
    BufferSpec,
    ExecuteOperations,
    GetServerStatus,
    NotLeader,
    OperationResults,
    PreviousRequestFailed,
    ServerReply,
    ServerStatus,
    StateLost,
    as_contiguous,
    buffer_of,
    buffer_spec,
    read_arrays,
)
from headrace.parameter_server.operations import (
    Answer,
    Assign,
    AssignIds,
    ForgetWriteKeys,
    IncrementCounter,
    KeyedOperation,
    LookupIds,
    Operation,
    Scatter,
)
from headrace.parameter_server.replica_state import REPLICA_TIMEOUT_SECONDS, AcknowledgedState
from headrace.parameter_server.server_states import ServerStates, ServerWait, StoreLeaders
from headrace.parameter_server.write_context import (
    current_closure_run,
    current_pending_steps,
    wait_for_steps,
)
from headrace.transport import zeromq
from headrace.transport.channel import Channel, Reply
from headrace.transport.security import Security

__all__ = [
    "NO_STATE_MESSAGE",
    "OperationReply",
    "OperationRequest",
    "ParameterServerClient",
    "PendingRequests",
    "is_retryable",
]


_MAX_REQUEST_BYTES = 16 << 30

_MISSING_KEY_MESSAGE = (
    "a function that a coordinator scheduled writes on a thread that it started; if the function "
    "is retried, the write would be repeated. Write on the function's own thread, or start the "
    "other thread with contextvars.copy_context().run; only one thread may write to a variable"
)

_FORKED_MESSAGE = (
    "this process was forked from the one that created the strategy, and cannot use its variables "
    "and tables: read and write in the parent process, and pass values to processes that it "
    "starts, preferably with `subprocess` or the spawn method of multiprocessing"
)

_FORKED_IN_FUNCTION_MESSAGE = (
    "this process was forked inside a function that a coordinator scheduled, and its requests to "
    "parameter servers could not be distinguished from those of the function. Read and write in "
    "the function itself, and pass values to processes that it starts"
)


class ParameterServerClient:
    """A client of all parameter servers of a cluster.

    Args:
        addresses: Addresses of the servers ("host:port"), by index.
        security: Keys of a client.
        timeout: Time in seconds before requests to an unreachable server fail.
        for_worker: Whether scheduled functions use this client; operations that are not safe to
            repeat then need a write key.
        replication: Number of servers that hold each store: 1 or 2.

    Raises:
        ValueError: If `addresses` is empty or an address is not "host:port".
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        security: Security | None = None,
        timeout: float = 120.0,
        for_worker: bool = False,
        replication: int = 1,
    ) -> None:
        check_strings("addresses", addresses)
        check_seconds("timeout", timeout)
        if not addresses:
            raise ValueError("`addresses` must contain at least one address, but is empty")
        self.addresses: tuple[str, ...] = tuple(addresses)
        self.timeout: float = float(timeout)
        self.replication = replication
        #: Leader of each store, which gets its requests.
        self.leaders: StoreLeaders = StoreLeaders(self.addresses, replication)
        self._for_worker = for_worker
        self._security = security
        #: Known states of the servers.
        self.states: ServerStates = ServerStates(len(addresses), self.describe_server)
        self._thread_connections = threading.local()
        #: Thread that owns each channel, by thread identifier.
        self._channel_threads: weakref.WeakKeyDictionary[Channel, int] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._closed = threading.Event()

    def __len__(self) -> int:
        return len(self.addresses)

    def execute(self, server: int, operation: Operation, *arrays: NDArray[Any]) -> OperationReply:
        """Execute one operation on one server; see `execute_all`."""
        return self.execute_all([OperationRequest(server, operation, arrays)])[0]

    def execute_all(self, requests: Sequence[OperationRequest]) -> list[OperationReply]:
        """Execute operations on several servers in parallel; return the replies in request order.

        Each server executes its operations in the order of `requests`. The caller owns the arrays
        of the replies.

        Raises:
            UnavailableError: If a server was unreachable for `timeout` seconds, or was lost while
                it executed an operation that is not safe to repeat.
            HeadraceError: If a server replied with an error; the other servers have executed their
                operations.
            FailedPreconditionError: If a scheduled function writes on a thread that it started, or
                this process was forked after the client was created.
        """
        return self.begin_all(requests).wait()

    def begin_all(self, requests: Sequence[OperationRequest]) -> PendingRequests:
        """Send requests as `execute_all` does, without waiting for the replies.

        The caller must wait for the result on the same thread. Later requests are executed after
        these: they use the same channels, which keep the order, or are sent once these are
        finished.

        Raises:
            UnavailableError, FailedPreconditionError: As for `execute_all`.
        """
        self._check_process()
        if self._for_worker:
            for _, operation, _ in requests:
                if not is_retryable(operation):
                    raise FailedPreconditionError(_MISSING_KEY_MESSAGE)
        by_server: dict[int, list[int]] = {}
        for position, request in enumerate(requests):
            by_server.setdefault(request.server, []).append(position)
        earlier = current_pending_steps()
        if not all(step.precedes_new_requests(self) for step in earlier):
            wait_for_steps(earlier)
        last = {call.server: call for step in earlier for call in step.calls if call.reply is None}
        calls = []
        for server, positions in by_server.items():
            calls.append(ServerCall(self, server, [requests[position] for position in positions]))
        for call in calls:
            call.send(last.get(call.server))
        return PendingRequests(calls, list(by_server.values()))

    def wait_until_reachable(self) -> None:
        """Wait until all servers reply; change nothing.

        Raises:
            UnavailableError: If a server did not reply in time.
        """
        self.execute_on_each(ForgetWriteKeys(0))

    def execute_on_each(self, operation: Operation) -> None:
        """Execute one operation on every server; ignore the answers.

        Raises:
            UnavailableError: If a server did not reply in time.
        """
        self.execute_all([OperationRequest(server, operation) for server in range(len(self))])

    def status(self, server: int, timeout: float = 5.0) -> ServerStatus:
        """Return the status of a server.

        Raises:
            UnavailableError: If the server is unreachable.
            DeadlineExceededError: If the server did not reply in time.
        """
        channel = self.connect(server)
        try:
            answer, _ = channel.call(GetServerStatus(), timeout=timeout)
        finally:
            channel.close()
        assert isinstance(answer, ServerStatus)
        return answer

    def close(self) -> None:
        """Close all connections; waiting callers get CancelledError. Idempotent."""
        self._closed.set()
        # Threads with a pending request close their own channels (`check_open`).
        self._thread_connections = threading.local()
        alive = {thread.ident for thread in threading.enumerate()}
        self._close_channels(
            {owner for owner in self._channel_threads.values() if owner not in alive}
        )
        self._close_channels({threading.get_ident()})

    def _close_channels(self, owners: set[int]) -> None:
        for channel, owner in list(self._channel_threads.items()):
            if owner in owners:
                channel.close()

    # --- used by `ServerCall` ---------------------------------------------------------------------

    def describe_server(self, server: int) -> str:
        """Return the description of a server for messages."""
        return f"parameter server {server} at {self.addresses[server]}"

    def connection_to(self, store: int, server: int) -> ServerConnection:
        """Return this thread's connection to a server for requests to a store."""
        self.check_open()
        connections: dict[tuple[int, int], ServerConnection] | None = getattr(
            self._thread_connections, "connections", None
        )
        if connections is None:
            connections = self._thread_connections.connections = {}
        found = connections.get((store, server))
        if found is None:
            found = connections[store, server] = ServerConnection(self.connect(server))
            self._channel_threads[found.channel] = threading.get_ident()
            self.check_open()  # `close` may have missed the new channel
        return found

    def connect(self, server: int) -> Channel:
        """Return a new channel to a server; the caller closes it."""
        self._check_process()
        return zeromq.connect(
            self.addresses[server],
            reply_type=ServerReply,
            security=self._security,
            # Unresponsive servers have the same timeout as unreachable ones, but at most half of it
            # with a replica, so that there is time to ask the other server.
            keepalive_timeout=min(REPLICA_TIMEOUT_SECONDS, self.timeout / 2)
            if self.leaders.is_replicated
            else self.timeout,
            request_bytes=_MAX_REQUEST_BYTES,
        )

    def acknowledged_states(self) -> tuple[AcknowledgedState, ...]:
        """Return the known acknowledged states of replicated stores, for other processes."""
        return self.states.acknowledged_states() if self.leaders.is_replicated else ()

    def check_open(self) -> None:
        """Raise CancelledError if this client was closed."""
        if self._closed.is_set():
            self._close_channels({threading.get_ident()})
            raise CancelledError("the connection to the parameter servers was closed")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise FailedPreconditionError(
                _FORKED_IN_FUNCTION_MESSAGE if self._for_worker else _FORKED_MESSAGE
            )

    def handle_not_leader(self, store: int, server: int, message: NotLeader) -> None:
        """Record that a server does not lead a store; start an empty store if all have lost it."""
        self.leaders.record_not_leader(store, server, is_empty=message.is_empty)
        if message.discarded_writes >= 0:
            writes = self.states.acknowledged_writes(store)
            missing = f"{writes} were acknowledged" if writes else "lacks acknowledged ones"
            # Store k has replicas on servers k and k + 1.
            other = (store + 1) % len(self) if server == store else store
            self.states.mark_stale(
                store,
                f"{self.describe_server(server)} had {message.discarded_writes} updates of store "
                f"{store}, but {missing}: it was paused or disconnected while "
                f"{self.describe_server(other)} led the store",
            )
        if (lead_request := self.leaders.take_lead_request(store)) is not None:
            self.connection_to(store, store).channel.send(lead_request)

    def start_wait(self, server: int, task: str, started_at: float | None = None) -> ServerWait:
        """Return the retry state of one request to a server."""
        return ServerWait(
            self.describe_server(server),
            task,
            self.timeout,
            self.sleep,
            started_at,
            lambda was_restarted: self.states.loss_reason(server, was_restarted=was_restarted),
        )

    def sleep(self, seconds: float) -> None:
        """Sleep; raise CancelledError if this client was closed."""
        self._closed.wait(seconds)
        self.check_open()


# --------------------------------------------------------------------------------------------------
# Pending requests: one for each server, and its reply
#
#     pending = PendingRequests(calls, positions)     each call was sent
#     pending.wait() -> replies                       waits, and retries as the rules allow
#
# The calls of one thread share one connection to each server, which keeps their order, so several
# may be pending. The call that waits also receives the replies of the others.

NO_STATE_MESSAGE = "it does not lead the store of the request"
"""Reason for a retry after a `NotLeader` reply."""
_POLL_SECONDS = 1.0


class OperationRequest(NamedTuple):
    """One operation for one server."""

    server: int
    operation: Operation
    arrays: Sequence[NDArray[Any]] = ()


OperationReply = tuple[Answer, list[NDArray[Any]]]


class PendingRequests:
    """Requests to several servers whose replies may be outstanding.

    Args:
        calls: One call for each server, already sent.
        positions: For each call, the positions of its replies among all replies.
    """

    def __init__(self, calls: list[ServerCall], positions: list[list[int]]) -> None:
        self.calls = calls
        self._positions = positions

    def wait(self) -> list[OperationReply]:
        """Wait for the replies, and retry as the rules allow.

        Raises:
            HeadraceError: As for `ParameterServerClient.execute_all`.
        """
        answers: list[Any] = [None] * sum(map(len, self._positions))
        failed: Exception | None = None
        now = time.monotonic()
        for call in self.calls:
            call.started_at = now  # the time before this call does not count
        for call, positions in zip(self.calls, self._positions, strict=True):
            try:
                for position, answer in zip(positions, call.wait(), strict=True):
                    answers[position] = answer
            except Exception as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # breaks the cycle between the traceback and this frame
        return answers

    def precedes_new_requests(self, servers: ParameterServerClient) -> bool:
        """Return whether requests sent now on the same channels are executed after these."""
        return all(call.precedes_new_requests(servers) for call in self.calls)


class ServerConnection:
    """A thread's channel to a server, with the calls that wait for replies on it.

    Args:
        channel: The channel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pending_calls: dict[int, ServerCall] = {}

    def receive(self) -> bool:
        """Pass the next reply to the call that waits for it; return False if none arrived in 1 s.

        If the server is lost or rejects this process, all waiting calls get the error.
        """
        try:
            reply = self.channel.receive(_POLL_SECONDS)
        except (UnavailableError, UnauthenticatedError) as error:
            waiting, self.pending_calls = self.pending_calls, {}
            for call in waiting.values():
                call.reply = error.with_traceback(None)  # drops a reference to this frame
            return True
        if reply is None:
            return False
        asked = self.pending_calls.pop(reply.request_id, None)
        if asked is not None:  # else the caller gave up, for example after Ctrl-C
            asked.reply = reply
        return True


class ServerCall:
    """One request to one server, with several operations."""

    def __init__(
        self, servers: ParameterServerClient, server: int, requests: Sequence[OperationRequest]
    ) -> None:
        self._servers = servers
        self.server = server
        operations: list[Operation] = []
        buffer_specs: list[tuple[BufferSpec, ...]] = []
        self._buffers: list[memoryview] = []
        for _, operation, arrays in requests:
            operations.append(operation)
            operation_specs: list[BufferSpec] = []
            for array in arrays:
                operation_specs.append(buffer_spec(array))
                self._buffers.append(buffer_of(as_contiguous(array)))
            buffer_specs.append(tuple(operation_specs))
        self._operations = tuple(operations)
        self._buffer_specs = tuple(buffer_specs)
        #: Reply, or the error that replaced it; None while the call is pending.
        self.reply: Reply | UnavailableError | UnauthenticatedError | None = None
        #: Time when the caller began to wait, by the monotonic clock.
        self.started_at: float = time.monotonic()
        self._wait: ServerWait | None = None

    def send(self, previous: ServerCall | None = None) -> None:
        """Send the request.

        Args:
            previous: Pending call to the same server that must be executed first. The server
                rejects this call if it has a new state or did not execute `previous`.
        """
        servers = self._servers
        servers.states.wait_for_recovery(self.server, servers.check_open)
        if previous is None:
            self._state_id = servers.states.state_id(self.server)
            self._target_server = servers.leaders.find_server(self.server)
        else:
            self._state_id, self._target_server = previous._state_id, previous._target_server
        self._connection = servers.connection_to(self.server, self._target_server)
        message = ExecuteOperations(
            self._operations,
            self._buffer_specs,
            self._state_id,
            requires_previous=previous is not None,
        )
        self.reply = None
        request_id = self._connection.channel.send(
            servers.leaders.address_message(
                message,
                self.server,
                servers.states.acknowledged_position(self.server, self._state_id),
            ),
            self._buffers,
        )
        self._connection.pending_calls[request_id] = self

    def precedes_new_requests(self, servers: ParameterServerClient) -> bool:
        """Return whether a request sent now to the same server is executed after this one."""
        if isinstance(self.reply, Reply):
            return isinstance(self.reply.message, OperationResults)
        return (
            self.reply is None
            and servers is self._servers
            and servers.states.state_id(self.server) == self._state_id != ""
            and servers.leaders.find_server(self.server) == self._target_server
        )

    def wait(self) -> list[OperationReply]:
        """Wait for the reply, and retry as the rules allow."""
        servers = self._servers
        while True:
            try:
                reply = self._wait_for_reply()
                message = reply.message
                if isinstance(message, Exception):
                    try:
                        raise message
                    finally:
                        del message, reply  # breaks the cycle between the traceback and this frame
                if isinstance(message, OperationResults):
                    servers.leaders.record_reply(self.server, self._target_server)
                    # A reply that was read late may belong to an older state of the server.
                    if self._state_id in ("", servers.states.state_id(self.server)):
                        servers.states.record_state(
                            self.server, message.state_id, message.writes, message.position
                        )
                    arrays = read_arrays(message.buffer_specs, reply.buffers)
                    return list(zip(message.answers, arrays, strict=True))
                if isinstance(message, StateLost):
                    servers.states.record_state(self.server, message.state_id)
                elif isinstance(message, NotLeader):
                    servers.handle_not_leader(self.server, self._target_server, message)
                elif not isinstance(message, PreviousRequestFailed):
                    raise FailedPreconditionError(
                        f"{servers.describe_server(self.server)} replied with "
                        f"{type(message).__name__}; does it run another version of Headrace?"
                    )
            except UnavailableError as error:
                servers.leaders.record_unavailable(self.server, self._target_server)
                if not (self._is_retryable() or error.unsent):
                    raise self._unknown_outcome(error) from error
                self._get_wait().wait_before_retry(error)
            except NotFoundError as error:
                # A closure only names shards that existed when it was scheduled, so a missing one
                # was lost, even if this process contacts the server for the first time.
                is_lost = (
                    servers.states.has_restarted(self.server) or current_closure_run() is not None
                )
                # A failing operation changes nothing; if it was the only one, nothing was executed.
                if not ((self._is_retryable() or len(self._operations) == 1) and is_lost):
                    raise
                self._get_wait().wait_before_retry(error)
            else:
                if isinstance(message, NotLeader):
                    self._get_wait().wait_before_retry(UnavailableError(NO_STATE_MESSAGE))
            # Earlier requests of this thread are executed first on a retry, too.
            wait_for_steps(current_pending_steps())
            self.send()

    def _wait_for_reply(self) -> Reply:
        """Return the reply; raise the channel's error if the server is lost."""
        while self.reply is None:
            if not self._connection.receive():
                self._servers.check_open()
                self._get_wait().warn_if_due("no reply")
        reply, self.reply = self.reply, None
        if isinstance(reply, Exception):
            try:
                raise reply
            finally:
                del reply  # breaks the cycle, as above
        return reply

    def _is_retryable(self) -> bool:
        return all(map(is_retryable, self._operations))

    def _get_wait(self) -> ServerWait:
        """Return the retry state of this call, created on first use as most calls need none."""
        if self._wait is None:
            self._wait = self._servers.start_wait(
                self.server, self._operation_names(), self.started_at
            )
        return self._wait

    def _operation_names(self) -> str:
        kinds = dict.fromkeys(type(operation).__name__ for operation in self._operations)
        return ", ".join(kinds)

    def _unknown_outcome(self, error: UnavailableError) -> UnavailableError:
        return UnavailableError(
            f"{self._servers.describe_server(self.server)} was lost during "
            f"{self._operation_names()}, which may have been executed or not, so the request is "
            "not retried. Read the current values before you repeat it; in functions that a "
            f"coordinator schedules, writes are retried safely. {error}"
        )


# --- operations that are safe to repeat when it is unknown whether they were executed -------------

_KEYED_OPERATIONS = frozenset(get_args(KeyedOperation))


def is_retryable(operation: Operation) -> bool:
    """Return whether an operation may be repeated that may already have been executed."""
    if type(operation) not in _KEYED_OPERATIONS or operation.key is not None:  # type: ignore[union-attr]
        return True
    match operation:
        case Assign(mode=mode):
            return mode == "assign"
        case Scatter(mode=mode):
            return mode in ("update", "min", "max")
        case IncrementCounter(delta=delta):
            return delta == 0
        # An id that is counted twice is admitted slightly earlier.
        case AssignIds() | LookupIds():
            return True
    return False
