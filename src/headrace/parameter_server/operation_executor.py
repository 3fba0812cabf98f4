"""Execution of operations on a parameter server, one at a time.

Rule 1. A read and a write never overlap: one request is executed at a time, and a reply that refers
        to a shard's own memory is copied while it is sent (`borrowed`), before the next one begins.
Rule 2. Requests are executed in arrival order.
Rule 3. A request that fails is answered with an error; the thread continues. Requests on the same
        channel that require it (`requires_previous`) are refused until another request arrives.
Rule 4. Operations run on a separate thread, so that the transport's thread is not blocked. A
        small request that arrives alone or with one other while nothing waits is executed on the
        transport's thread: that thread has nothing else to do, and a handover would take longer
        than the operation.
Rule 5. Other users of the store, such as checkpoints, run between two operations
        (`call_between_operations`); messages that arrive with the requests and are not operations
        run in order with them (`call_in_order`).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.errors import CancelledError, FailedPreconditionError, HeadraceError, describe_error
from headrace.parameter_server.messages import (
    BufferSpec,
    ExecuteOperations,
    GetServerStatus,
    NotLeader,
    OperationResults,
    PreviousRequestFailed,
    RestoreShards,
    SaveShards,
    ServerStatus,
    StateLost,
    buffer_of,
    buffer_spec,
    read_arrays,
)
from headrace.parameter_server.operations import (
    Answer,
    Apply,
    ApplyIds,
    Assign,
    AssignIds,
    DescribeStore,
    Export,
    FenceWrites,
    ForgetWriteKeys,
    GatherIds,
    GatherRows,
    IncrementCounter,
    LookupIds,
    Operation,
    ReadShard,
    Scatter,
)
from headrace.parameter_server.replica_state import INITIAL_POSITION, Position
from headrace.parameter_server.store import ShardStore
from headrace.serving.rpc import Done, Message
from headrace.transport.channel import Request

__all__ = ["ExecutedWrite", "OperationExecutor", "Replication", "ReplyAllocator", "collect_metrics"]


_log = logging.getLogger(__name__)

_STOP_SECONDS = 0.8
_READ_ONLY_OPERATIONS = frozenset({ReadShard, GatherRows, GatherIds, DescribeStore, Export})
_ALLOCATING_OPERATIONS = frozenset({GatherRows, GatherIds, LookupIds})
_MAX_INLINE_BYTES = 2 << 20
_MAX_FAILED_CHANNELS = 10_000
#: Largest number of requests received together that run inline; with more, the first reply would be
#: delayed.
_MAX_INLINE_REQUESTS = 2
#: Operations whose time is proportional to the size of their arrays.
_INLINE_OPERATIONS = _ALLOCATING_OPERATIONS | {
    ReadShard,
    IncrementCounter,
    Assign,
    Scatter,
    Apply,
    ApplyIds,
    ForgetWriteKeys,
    FenceWrites,
}
_WRITE_OPERATIONS = frozenset({Apply, ApplyIds, Assign, AssignIds, Scatter})


class _QueuedFunction:
    """A function that is called between two operations.

    Args:
        function: The function.
        is_in_order: Whether it arrived with the requests and keeps its order among them.
    """

    def __init__(self, function: Callable[[], Any], *, is_in_order: bool) -> None:
        self._function = function
        self.is_in_order = is_in_order
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Call the function and keep its result or error."""
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


class ReplyAllocator:
    """Allocates the arrays of replies, if possible in memory that is sent without a copy."""

    def __init__(self) -> None:
        self.request: Request | None = None
        """Request being answered; None if its reply is allocated in ordinary memory."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array."""
        size = math.prod(shape) * dtype.itemsize
        memory = self.request.allocate(size) if size and self.request is not None else None
        if memory is None:
            return np.empty(shape, dtype)
        return np.frombuffer(memory, dtype).reshape(shape)


ExecutedWrite = tuple[Operation, Sequence[NDArray[Any]]]


class Replication(Protocol):
    """A store that another server holds as well. Called while no operation runs."""

    @property
    def position(self) -> Position:
        """Operations executed so far."""

    @property
    def must_confirm_leadership(self) -> bool:
        """Whether the other server must first confirm that this one still leads."""

    def rejection_for(
        self, message: ExecuteOperations | SaveShards | RestoreShards
    ) -> Message | None:
        """Return the reply to a request that this server must not execute; None if it may."""

    def replicate(self, writes: Sequence[ExecutedWrite]) -> bool:
        """Have the other server execute the writes; return False if this one no longer leads."""


class OperationExecutor:
    """Executor that accepts requests from the server's thread and answers them from its own.

    Args:
        store: Store that the operations act on.
        index: Index of the server, for statistics.
        allocator: Allocator of the store's reply arrays.
        replication: Replicates writes to another server; None if only this server has the store.
    """

    def __init__(
        self,
        store: ShardStore,
        index: int,
        allocator: ReplyAllocator | None = None,
        replication: Replication | None = None,
    ) -> None:
        self.on_file_request: Callable[[Request], object] | None = None
        """Handles requests to save and restore."""
        self.replication = replication
        self._allocator = allocator or ReplyAllocator()
        self.state_id: str = secrets.token_hex(8)
        self._store = store
        self._index = index
        self._queue: SimpleQueue[Request | _QueuedFunction | None] = SimpleQueue()
        self._closed = threading.Event()
        #: Held while the store is read or changed, by this object's thread or the transport's. It
        #: guards all attributes below except `_num_queued`; `status`, on the transport's thread,
        #: reads counters without it.
        self._store_lock = threading.Lock()
        #: Numbers of requests queued for the thread and completed by it. The transport's thread
        #: changes the first, this object's thread the second; if they are equal, nothing waits.
        self._num_queued = 0
        self._num_completed = 0
        self._operation_counts: Counter[str] = Counter()
        self._num_requests = 0
        #: Number of operations that changed a value.
        self.writes: int = 0
        self._num_failed = 0
        #: Channels whose last request was not executed, oldest first.
        self._failed_channels: dict[str, None] = {}
        self._bytes_in = 0
        self._bytes_out = 0
        self._busy_seconds = 0.0
        self._started_at = time.monotonic()
        #: Usage as last measured, and whether to measure it again.
        self._usage = _StoreUsage()
        self._is_usage_outdated = True
        self._thread = threading.Thread(
            target=self._run, name=f"headrace-parameter-server-{index}", daemon=True
        )

    def start(self) -> None:
        """Start executing the requests passed to `handle`."""
        self._thread.start()

    def close(self) -> None:
        """Stop executing; wait up to 0.8 s for the current operation."""
        self._closed.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def handle(self, requests: Sequence[Request]) -> None:
        """Accept requests; called by the transport's thread."""
        for request in requests:
            message = request.message
            if isinstance(message, ExecuteOperations | SaveShards | RestoreShards):
                if self.replication is None and message.state_id not in ("", self.state_id):
                    request.reply(StateLost(state_id=self.state_id))
                elif not isinstance(message, ExecuteOperations):
                    if self.replication is None:
                        self._forward_file_request(request)
                    else:
                        self.call_in_order(
                            partial(self._forward_replicated_file_request, request, message)
                        )
                elif len(requests) > _MAX_INLINE_REQUESTS or not self._try_execute_inline(
                    request, message
                ):
                    self._num_queued += 1
                    self._queue.put(request)
            elif isinstance(message, GetServerStatus):
                request.reply(self.status())
            else:
                request.reply(Done())

    @property
    def position(self) -> Position:
        """Operations executed so far on a replicated store."""
        return INITIAL_POSITION if self.replication is None else self.replication.position

    def _forward_file_request(self, request: Request) -> None:
        if self.on_file_request is None:
            request.fail(FailedPreconditionError("this server does not save or restore shards"))
        else:
            self.on_file_request(request)

    def _forward_replicated_file_request(
        self, request: Request, message: SaveShards | RestoreShards
    ) -> None:
        refusal = None if self.replication is None else self.replication.rejection_for(message)
        if refusal is None:
            self._forward_file_request(request)
        else:
            request.reply(refusal)

    def _try_execute_inline(self, request: Request, message: ExecuteOperations) -> bool:
        """Execute a request on the transport's thread if it is small and nothing waits."""
        if self._num_queued != self._num_completed:
            return False
        kinds = set(map(type, message.operations))
        if not kinds <= (
            _INLINE_OPERATIONS
            if self.replication is None
            else _INLINE_OPERATIONS & _READ_ONLY_OPERATIONS
        ):
            return False  # slow, or it would wait for the other server
        if self.replication is not None and self.replication.must_confirm_leadership:
            return False  # it would wait for the other server
        size = sum([memoryview(buffer).nbytes for buffer in request.buffers])
        if size > _MAX_INLINE_BYTES or not self._store_lock.acquire(blocking=False):
            return False
        try:
            self._process_request(request)
        finally:
            self._store_lock.release()
        return True

    def status(self) -> ServerStatus:
        """Return the statistics of this server.

        Never waits: while operations run, the usage figures are those after the first operation
        that followed the previous call.
        """
        if self._store_lock.acquire(blocking=False):
            try:
                self._usage = _measure_usage(self._store)
            finally:
                self._store_lock.release()
        else:
            self._is_usage_outdated = True
        usage = self._usage
        return ServerStatus(
            state_id=self.state_id,
            index=self._index,
            uptime_seconds=time.monotonic() - self._started_at,
            requests=self._num_requests,
            operations=dict(self._operation_counts),
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            busy_seconds=self._busy_seconds,
            failed=self._num_failed,
            waiting_requests=self._queue.qsize(),
            shards=usage.shards,
            tables=usage.tables,
            rows=usage.rows,
            bytes_stored=usage.nbytes,
        )

    def call_in_order(self, function: Callable[[], Any]) -> None:
        """Call a function between two operations, in arrival order among the requests.

        Called by the transport's thread. The function must handle its own errors.
        """
        self._num_queued += 1
        self._queue.put(_QueuedFunction(function, is_in_order=True))

    def call_between_operations(self, function: Callable[[], Any]) -> Any:
        """Call a function between two operations, and return its result.

        Raises:
            CancelledError: If the server was stopped.
        """
        queued = _QueuedFunction(function, is_in_order=False)
        self._queue.put(queued)
        while not queued.done.wait(_STOP_SECONDS):
            if self._closed.is_set():
                raise CancelledError("the parameter server was stopped")
        if queued.error is not None:
            raise queued.error
        return queued.result

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            with self._store_lock:
                if isinstance(request, _QueuedFunction):
                    request.run()
                    self._num_completed += request.is_in_order
                else:
                    self._process_request(request)
                    self._num_completed += 1
            # Not held while waiting for the next request: its buffers may be the client's memory.
            del request

    def _process_request(self, request: Request) -> None:
        started_at = time.monotonic()
        is_executed = False
        try:
            is_executed = self._execute_request(request)
        except Exception as error:
            self._fail_request(request, error)
        if not is_executed:
            self._failed_channels[request.peer] = None
            if len(self._failed_channels) > _MAX_FAILED_CHANNELS:  # most likely disconnected
                del self._failed_channels[next(iter(self._failed_channels))]
        elif self._failed_channels:
            self._failed_channels.pop(request.peer, None)
        self._allocator.request = None
        self._busy_seconds += time.monotonic() - started_at
        if self._is_usage_outdated:
            self._is_usage_outdated = False
            self._usage = _measure_usage(self._store)

    def _execute_request(self, request: Request) -> bool:
        message = request.message
        assert isinstance(message, ExecuteOperations)
        if message.requires_previous and request.peer in self._failed_channels:
            request.reply(PreviousRequestFailed())
            return False
        replication = self.replication
        if replication is not None and (refusal := replication.rejection_for(message)) is not None:
            request.reply(refusal)
            return False
        operations = message.operations
        if len(message.buffer_specs) != len(operations):
            raise FailedPreconditionError(
                f"a request has {len(operations)} operations, but arrays for "
                f"{len(message.buffer_specs)}"
            )
        kinds = [type(operation) for operation in operations]
        # A later operation of the same request may change what a read refers to.
        reads = ReadShard in kinds
        changes = reads and not _READ_ONLY_OPERATIONS.issuperset(kinds)
        # The connection's own memory has room for one large array and small ones next to it.
        can_allocate = _ALLOCATING_OPERATIONS.issuperset(
            kinds[:1]
        ) and _ALLOCATING_OPERATIONS.isdisjoint(kinds[1:])
        self._allocator.request = request if can_allocate else None
        answers: list[Answer] = []
        buffer_specs: list[tuple[BufferSpec, ...]] = []
        buffers: list[memoryview] = []
        inputs = read_arrays(message.buffer_specs, request.buffers)
        executed_writes: list[ExecutedWrite] = []
        is_leader = True
        try:
            for operation, kind, arrays in zip(operations, kinds, inputs, strict=True):
                answer, found = self._store.execute(operation, arrays)
                answers.append(answer)
                result_specs: list[BufferSpec] = []
                for array in found:
                    result_specs.append(buffer_spec(array))
                    if (kind is ReadShard and changes) or not array.flags.c_contiguous:
                        array = array.copy()
                    buffers.append(buffer_of(array))
                buffer_specs.append(tuple(result_specs))
                if replication is not None and kind not in _READ_ONLY_OPERATIONS:
                    executed_writes.append((operation, arrays))
                self._operation_counts[kind.__name__] += 1
                self.writes += kind in _WRITE_OPERATIONS
                self._bytes_in += sum([array.nbytes for array in arrays])
        finally:
            if replication is not None and executed_writes:
                is_leader = replication.replicate(executed_writes)
        if not is_leader:
            request.reply(NotLeader(is_empty=True))
            return False
        self._bytes_out += sum([buffer.nbytes for buffer in buffers])
        self._num_requests += 1
        request.reply(
            OperationResults(
                state_id=self.state_id,
                answers=tuple(answers),
                buffer_specs=tuple(buffer_specs),
                writes=self.writes,
                position=self.position,
            ),
            buffers,
            borrowed=reads and not changes,
        )
        return True

    def _fail_request(self, request: Request, error: Exception) -> None:
        self._num_failed += 1
        if not isinstance(error, HeadraceError | ValueError | TypeError):
            _log.error("operation failed: %s", describe_error(error), exc_info=error)
        request.fail(error)


# --- contents of a parameter server, and its Prometheus metrics -----------------------------------


class _StoreUsage(NamedTuple):
    """Contents of a store.

    Attributes:
        shards: Number of variable shards.
        tables: Number of table shards.
        rows: Number of rows of tables.
        nbytes: Total bytes of arrays.
    """

    shards: int = 0
    tables: int = 0
    rows: int = 0
    nbytes: int = 0


def _measure_usage(store: ShardStore) -> _StoreUsage:
    """Return the usage of a store; must be called between two operations."""
    tables = store.tables.values()
    return _StoreUsage(
        shards=len(store.shards),
        tables=len(tables),
        rows=sum(len(table.rows) for table in tables),
        nbytes=sum(shard.nbytes for shard in store.shards.values())
        + sum(table.nbytes for table in tables),
    )


def collect_metrics(status: ServerStatus) -> Iterator[Metric]:
    """Return the metrics of a parameter server."""
    name = "headrace_parameter_server_"
    operations = CounterMetricFamily(
        f"{name}operations", "Executed operations.", labels=["operation"]
    )
    for operation, count in status.operations.items():
        operations.add_metric([operation], count)
    yield operations
    for counter, description, value in (
        ("requests", "Executed requests.", status.requests),
        ("failures", "Failed requests.", status.failed),
        ("received_bytes", "Bytes of received arrays.", status.bytes_in),
        ("sent_bytes", "Bytes of sent arrays.", status.bytes_out),
        ("busy_seconds", "Seconds spent on operations.", status.busy_seconds),
    ):
        yield CounterMetricFamily(f"{name}{counter}", description, value=value)
    roles = GaugeMetricFamily(
        f"{name}replicas",
        "Replicated stores on this server, and its role in each.",
        labels=["store", "role"],
    )
    for store, role in status.replicas.items():
        roles.add_metric([str(store), role], 1)
    yield roles
    for gauge, description, value in (
        ("waiting", "Queued requests.", status.waiting_requests),
        ("shards", "Variable shards.", status.shards),
        ("tables", "Table shards.", status.tables),
        ("rows", "Table rows.", status.rows),
        ("stored_bytes", "Bytes of values, slots and tables.", status.bytes_stored),
        ("uptime_seconds", "Seconds since the server started.", status.uptime_seconds),
    ):
        yield GaugeMetricFamily(f"{name}{gauge}", description, value=value)
