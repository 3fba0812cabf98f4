"""Asking parameter servers: many at a time, from any thread, with patience.

    servers = Servers(["host1:2222", "host2:2222"])
    (step, _), (_, [rows]) = servers.ask_all([Ask(0, Count("steps")), Ask(1, Gather("w"), [ids])])

Each thread has channels of its own: nothing is handed from one thread to another, and what a thread
copies into shared memory keeps no other one waiting. What is asked of one server at a time is one
request; the servers work at the same time.

Rule 1. A server that cannot be reached is asked again until `timeout` seconds have passed; after 10
        s a warning says which it is.
Rule 2. What may have been carried out is repeated only if that does no harm: it changes nothing, or
        it has a key, or twice is as good as once (`is_retryable`). What never reached the server
        is always asked again.
Rule 3. What a thread asks of a server is carried out in that order, also where it does not wait
        for each answer (`begin_all`), and where something has to be asked again.
Rule 4. A server that was started again has lost what it held. That is reported once, before
        anything else is asked of it, to the log and to those who restore it or asked for it
        (`states`). Who then misses a shard waits for it as for the server.
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
    ArrayForm,
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
    form_of,
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
    "a function that a coordinator scheduled writes on a thread that it started, and would write "
    "it again if it ran again. Write on the function's own thread, or start the other one with "
    "contextvars.copy_context().run; to one variable only one thread may write"
)

_FORKED_MESSAGE = (
    "this process was forked from the one that made the strategy, to which variables and tables "
    "belong: read and write there, and pass values to processes that it starts, best with "
    "`subprocess` or the spawn method of multiprocessing"
)

_FORKED_IN_FUNCTION_MESSAGE = (
    "this process was forked inside a function that a coordinator scheduled, and asks parameter "
    "servers: what it writes would not be told apart from what the function writes. Read and write "
    "in the function itself, and pass values to processes that it starts"
)


class ParameterServerClient:
    """The parameter servers of a cluster, as those see them who ask.

    Args:
        addresses: Where they listen, by index.
        security: Keys of a client.
        timeout: Seconds for which a server that cannot be reached is asked again.
        for_worker: Whether scheduled functions ask: what may not be repeated must have a key then.
        replication: How many of the servers have what one of them has: 1 or 2.

    Raises:
        ValueError: There is none, or an address is not "host:port".
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
            raise ValueError("`addresses` must name a parameter server, but is empty")
        self.addresses = tuple(addresses)
        self.timeout = float(timeout)
        self.replication = replication
        #: Which server is asked for which store.
        self.leaders = StoreLeaders(self.addresses, replication)
        self._for_worker = for_worker
        self._security = security
        #: Which lives of the servers are known.
        self.states = ServerStates(len(addresses), self.describe_server)
        self._thread_connections = threading.local()
        #: Whose channel each is.
        self._channel_threads: weakref.WeakKeyDictionary[Channel, int] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._closed = threading.Event()

    def __len__(self) -> int:
        return len(self.addresses)

    def execute(self, server: int, operation: Operation, *arrays: NDArray[Any]) -> OperationReply:
        """Ask one thing of one server; see `execute_all`."""
        return self.execute_all([OperationRequest(server, operation, arrays)])[0]

    def execute_all(self, requests: Sequence[OperationRequest]) -> list[OperationReply]:
        """Ask things of several servers at a time; return the answers in the order of the asks.

        What one server is asked is carried out in the order in which it stands. The arrays of an
        answer belong to whoever asked.

        Raises:
            UnavailableError: A server could not be reached in time, or was lost while it carried
                out what may not be repeated.
            HeadraceError: What a server answered with; the other servers carried out theirs.
            FailedPreconditionError: A function writes on a thread that it started, or who asks is
                in a process that was forked.
        """
        return self.begin_all(requests).wait()

    def begin_all(self, requests: Sequence[OperationRequest]) -> PendingRequests:
        """Ask as `execute_all` does, and return before the answers are here.

        Whoever asks finishes it, on this thread. What is asked meanwhile is carried out after it:
        by the same channels, which keep the order, or once it is finished.

        Raises:
            UnavailableError, FailedPreconditionError: As of `execute_all`.
        """
        self._check_process()
        if self._for_worker:
            for _, operation, _ in requests:
                if not is_retryable(operation):
                    raise FailedPreconditionError(_MISSING_KEY_MESSAGE)
        by_server: dict[int, list[int]] = {}
        for position, ask in enumerate(requests):
            by_server.setdefault(ask.server, []).append(position)
        earlier = current_pending_steps()
        if not all(one.precedes_new_requests(self) for one in earlier):
            wait_for_steps(earlier)
        last = {call.server: call for one in earlier for call in one.calls if call.reply is None}
        calls = []
        for server, positions in by_server.items():
            calls.append(ServerCall(self, server, [requests[position] for position in positions]))
        for call in calls:
            call.send(last.get(call.server))
        return PendingRequests(calls, list(by_server.values()))

    def wait_until_reachable(self) -> None:
        """Wait until all servers answer, and ask nothing.

        Raises:
            UnavailableError: One did not answer in time.
        """
        self.execute_on_each(ForgetWriteKeys(0))

    def execute_on_each(self, operation: Operation) -> None:
        """Ask all servers the same, whose answers say nothing.

        Raises:
            UnavailableError: One did not answer in time.
        """
        self.execute_all([OperationRequest(server, operation) for server in range(len(self))])

    def status(self, server: int, timeout: float = 5.0) -> ServerStatus:
        """Ask a server what it has done.

        Raises:
            UnavailableError: It cannot be reached.
            DeadlineExceededError: It did not answer in time.
        """
        channel = self.connect(server)
        try:
            answer, _ = channel.call(GetServerStatus(), timeout=timeout)
        finally:
            channel.close()
        assert isinstance(answer, ServerStatus)
        return answer

    def close(self) -> None:
        """Ask nothing more; whoever waits gets CancelledError. May be called twice."""
        self._closed.set()
        # Threads that are at work close their own channels (`check_open`).
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

    # --- for calls ----------------------------------------------------------------------------

    def describe_server(self, server: int) -> str:
        """Return what a server is called in messages."""
        return f"parameter server {server} at {self.addresses[server]}"

    def connection_to(self, store: int, server: int) -> ServerConnection:
        """Return this thread's line to a server that it asks for a store."""
        self.check_open()
        mine: dict[tuple[int, int], ServerConnection] | None = getattr(
            self._thread_connections, "mine", None
        )
        if mine is None:
            mine = self._thread_connections.mine = {}
        found = mine.get((store, server))
        if found is None:
            found = mine[store, server] = ServerConnection(self.connect(server))
            self._channel_threads[found.channel] = threading.get_ident()
            self.check_open()  # `close` may not have seen it
        return found

    def connect(self, server: int) -> Channel:
        """Return a new channel to a server; whoever asks for it closes it."""
        self._check_process()
        return zeromq.connect(
            self.addresses[server],
            reply_type=ServerReply,
            security=self._security,
            # A server that stands still is waited for as long as one that is gone; where another
            # one has the same, for half of that at most, so that there is time to ask it.
            keepalive_timeout=min(REPLICA_TIMEOUT_SECONDS, self.timeout / 2)
            if self.leaders.is_replicated
            else self.timeout,
            request_bytes=_MAX_REQUEST_BYTES,
        )

    def acknowledged_states(self) -> tuple[AcknowledgedState, ...]:
        """Return what is known to be acknowledged of replicated stores, for other processes."""
        return self.states.acknowledged_states() if self.leaders.is_replicated else ()

    def check_open(self) -> None:
        """Raise CancelledError if nothing is to be asked any more."""
        if self._closed.is_set():
            self._close_channels({threading.get_ident()})
            raise CancelledError("the connection to the parameter servers was closed")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise FailedPreconditionError(
                _FORKED_IN_FUNCTION_MESSAGE if self._for_worker else _FORKED_MESSAGE
            )

    def handle_not_leader(self, store: int, server: int, message: NotLeader) -> None:
        """Take note that a server does not lead a store, and have it begin where nobody has it."""
        self.leaders.record_not_leader(store, server, is_empty=message.is_empty)
        if message.discarded_writes >= 0:
            writes = self.states.acknowledged_writes(store)
            were = (
                f"{writes} were acknowledged" if writes else "some that were acknowledged it lacks"
            )
            other = store + (store + 1) % len(self) - server
            self.states.mark_stale(
                store,
                f"{self.describe_server(server)} had {message.discarded_writes} updates of store "
                f"{store}, and "
                f"{were}: it stood still or was cut off while {self.describe_server(other)} led",
            )
        if (beginning := self.leaders.take_lead_request(store)) is not None:
            self.connection_to(store, store).channel.send(beginning)

    def start_wait(self, server: int, task: str, started_at: float | None = None) -> ServerWait:
        """Return how one waits for a server that was asked to do something."""
        return ServerWait(
            self.describe_server(server),
            task,
            self.timeout,
            self.sleep,
            started_at,
            lambda began_again: self.states.loss_reason(server, was_restarted=began_again),
        )

    def sleep(self, seconds: float) -> None:
        """Wait; raise CancelledError if nothing is to be asked any more."""
        self._closed.wait(seconds)
        self.check_open()


# --------------------------------------------------------------------------------------------------
# What is asked of servers at a time: one request to each, and its answer, whenever it comes

#     under_way = PendingRequests(calls, positions)    each call was begun: it is sent
#     under_way.finish() -> answers             waits, and asks again as long as that makes sense
#
# Calls that one thread begins go by one line to each server, which keeps their order: so one may be
# begun while others are under way. Who waits for one hands on what comes for others.

NO_STATE_MESSAGE = "it has nothing of what it is asked for"
"""What a server says that does not lead the store that it is asked for."""
_POLL_SECONDS = 1.0


class OperationRequest(NamedTuple):
    """One operation for one server."""

    server: int
    operation: Operation
    arrays: Sequence[NDArray[Any]] = ()


OperationReply = tuple[Answer, list[NDArray[Any]]]


class PendingRequests:
    """What several servers are asked at a time, and have perhaps not answered yet.

    Args:
        calls: One for each server; they were begun.
        positions: Where each of its answers stands among all.
    """

    def __init__(self, calls: list[ServerCall], positions: list[list[int]]) -> None:
        self.calls = calls
        self._positions = positions

    def wait(self) -> list[OperationReply]:
        """Wait for the answers, and ask again as long as that makes sense.

        Raises:
            HeadraceError: As of `ParameterServerClient.execute_all`.
        """
        answers: list[Any] = [None] * sum(map(len, self._positions))
        failed: Exception | None = None
        now = time.monotonic()
        for call in self.calls:
            call.started_at = now  # before, nobody waited
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
                del failed  # its traceback holds this frame, which would hold it
        return answers

    def precedes_new_requests(self, servers: ParameterServerClient) -> bool:
        """Whether what is sent now by the same servers' channels comes after it."""
        return all(call.precedes_new_requests(servers) for call in self.calls)


class ServerConnection:
    """A thread's channel to a server, and who waits for answers on it.

    Args:
        channel: The channel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pending_calls: dict[int, ServerCall] = {}

    def receive(self) -> bool:
        """Hand the next answer to whoever waits for it; False: none has come for a while.

        Where the server is gone, or does not let this process in, all who wait hear it.
        """
        try:
            reply = self.channel.receive(_POLL_SECONDS)
        except (UnavailableError, UnauthenticatedError) as error:
            waiting, self.pending_calls = self.pending_calls, {}
            for call in waiting.values():
                call.reply = error.with_traceback(None)  # which holds this frame, and so the calls
            return True
        if reply is None:
            return False
        asked = self.pending_calls.pop(reply.request_id, None)
        if asked is not None:  # else it is for somebody who gave up, as by Ctrl-C
            asked.reply = reply
        return True


class ServerCall:
    """What one server is asked at a time."""

    def __init__(
        self, servers: ParameterServerClient, server: int, requests: Sequence[OperationRequest]
    ) -> None:
        self._servers = servers
        self.server = server
        operations: list[Operation] = []
        forms: list[tuple[ArrayForm, ...]] = []
        self._buffers: list[memoryview] = []
        for _, operation, arrays in requests:
            operations.append(operation)
            of_each: list[ArrayForm] = []
            for array in arrays:
                of_each.append(form_of(array))
                self._buffers.append(buffer_of(as_contiguous(array)))
            forms.append(tuple(of_each))
        self._operations = tuple(operations)
        self._forms = tuple(forms)
        #: The answer, or why there is none; None: not yet.
        self.reply: Reply | UnavailableError | UnauthenticatedError | None = None
        #: When whoever waits for it began to.
        self.started_at = time.monotonic()
        self._wait: ServerWait | None = None

    def send(self, previous: ServerCall | None = None) -> None:
        """Send it.

        Args:
            previous: What is on its way to the same server, and must be carried out before; a
                server that has another life by now, or did not carry that out, refuses this as
                well.
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
            self._operations, self._forms, self._state_id, requires_previous=previous is not None
        )
        self.reply = None
        ticket = self._connection.channel.send(
            servers.leaders.address_message(
                message,
                self.server,
                servers.states.acknowledged_position(self.server, self._state_id),
            ),
            self._buffers,
        )
        self._connection.pending_calls[ticket] = self

    def precedes_new_requests(self, servers: ParameterServerClient) -> bool:
        """Whether what is sent now to the same server comes after it."""
        if isinstance(self.reply, Reply):
            return isinstance(self.reply.message, OperationResults)
        return (
            self.reply is None
            and servers is self._servers
            and servers.states.state_id(self.server) == self._state_id != ""
            and servers.leaders.find_server(self.server) == self._target_server
        )

    def wait(self) -> list[OperationReply]:
        """Wait for the answer, and ask again as long as that makes sense."""
        servers = self._servers
        while True:
            try:
                reply = self._wait_for_reply()
                message = reply.message
                if isinstance(message, Exception):
                    try:
                        raise message
                    finally:
                        del message, reply  # its traceback holds this frame, which would hold it
                if isinstance(message, OperationResults):
                    servers.leaders.record_reply(self.server, self._target_server)
                    # An answer that was not read for a while may be of a life that is over by now.
                    if self._state_id in ("", servers.states.state_id(self.server)):
                        servers.states.record_state(
                            self.server, message.state_id, message.writes, message.position
                        )
                    given = read_arrays(message.array_forms, reply.buffers)
                    return list(zip(message.answers, given, strict=True))
                if isinstance(message, StateLost):
                    servers.states.record_state(self.server, message.state_id)
                elif isinstance(message, NotLeader):
                    servers.handle_not_leader(self.server, self._target_server, message)
                elif not isinstance(message, PreviousRequestFailed):
                    raise FailedPreconditionError(
                        f"{servers.describe_server(self.server)} answered with "
                        f"{type(message).__name__}; is it of another version of Headrace?"
                    )
            except UnavailableError as error:
                servers.leaders.record_unavailable(self.server, self._target_server)
                if not (self._is_retryable() or error.unsent):
                    raise self._unknown_outcome(error) from error
                self._get_wait().wait_before_retry(error)
            except NotFoundError as error:
                # What a closure names was made before it was scheduled, so it was lost, also where
                # this process meets the server for the first time.
                is_lost = (
                    servers.states.has_restarted(self.server) or current_closure_run() is not None
                )
                # What fails changes nothing, so nothing was done where it was all.
                if not ((self._is_retryable() or len(self._operations) == 1) and is_lost):
                    raise
                self._get_wait().wait_before_retry(error)
            else:
                if isinstance(message, NotLeader):
                    self._get_wait().wait_before_retry(UnavailableError(NO_STATE_MESSAGE))
            wait_for_steps(
                current_pending_steps()
            )  # what was asked before it is done before it, also now
            self.send()

    def _wait_for_reply(self) -> Reply:
        """Return the answer; the server is alive, or the channel says that it is not."""
        while self.reply is None:
            if not self._connection.receive():
                self._servers.check_open()
                self._get_wait().warn_if_due("has not answered")
        came, self.reply = self.reply, None
        if isinstance(came, Exception):
            try:
                raise came
            finally:
                del came  # as above
        return came

    def _is_retryable(self) -> bool:
        return all(map(is_retryable, self._operations))

    def _get_wait(self) -> ServerWait:
        """Return how this call waits, from when it began; most never do."""
        if self._wait is None:
            task = f"carry out {self._operation_names()}"
            self._wait = self._servers.start_wait(self.server, task, self.started_at)
        return self._wait

    def _operation_names(self) -> str:
        kinds = dict.fromkeys(type(operation).__name__ for operation in self._operations)
        return ", ".join(kinds)

    def _unknown_outcome(self, error: UnavailableError) -> UnavailableError:
        return UnavailableError(
            f"{self._servers.describe_server(self.server)} was lost while it carried out "
            f"{self._operation_names()}: "
            "it may be done or not, so it is not asked again. Read what is there, and decide; in "
            f"functions that a coordinator schedules, writes are repeated safely. {error}"
        )


# --- what may be asked of a server again, where nobody knows whether it was carried out -----------

_KEYED_OPERATIONS = frozenset(get_args(KeyedOperation))


def is_retryable(operation: Operation) -> bool:
    """Whether an operation may be asked again that was perhaps carried out."""
    if type(operation) not in _KEYED_OPERATIONS or operation.key is not None:  # type: ignore[union-attr]
        return True
    match operation:
        case Assign(mode=how):
            return how == "assign"
        case Scatter(mode=how):
            return how in ("update", "min", "max")
        case IncrementCounter(delta=by):
            return by == 0
        # An id that is counted once too often is admitted a little earlier.
        case AssignIds() | LookupIds():
            return True
    return False
