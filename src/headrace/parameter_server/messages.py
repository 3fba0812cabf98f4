"""Messages between parameter servers and their clients.

    ExecuteOperations(operations, buffer_specs, state_id)
        ->  OperationResults(state_id, answers, buffer_specs), or StateLost(state_id)

One request has operations on any number of shards and tables. They are executed in order; the first
error ends the request and becomes the reply. Arrays are sent as buffers, those of the first
operation first; the message holds their dtypes and shapes.

Rule 1. A request names the state of the server that it is meant for. A restarted server executes
        nothing that was meant for the previous state: it replies with its new state id, so the
        client learns that the contents are lost before it writes anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import FailedPreconditionError
from headrace.parameter_server.checkpoint_format import Answers, ShardPiece
from headrace.parameter_server.operations import Answer, Operation
from headrace.parameter_server.replica_state import INITIAL_POSITION, Position
from headrace.parameter_server.shard_values import SavedServer, SavedShard, SavedTable
from headrace.parameter_server.specs import ShardSpec, TableSpec, name_of, parse_dtype
from headrace.serving.rpc import Done, Message, Ping, TypedRequest
from headrace.transport.channel import Buffer
from headrace.versions import Versions, own_versions

__all__ = [
    "BufferSpec",
    "ExecuteOperations",
    "FollowLeader",
    "GetServerStatus",
    "LeadEmptyStore",
    "NotLeader",
    "OperationResults",
    "PreviousRequestFailed",
    "ReplicateOperations",
    "RestorePhase",
    "RestoreShards",
    "SaveShards",
    "ServerReply",
    "ServerRequest",
    "ServerStatus",
    "ShardsRestored",
    "ShardsSaved",
    "StateLost",
    "TransferShard",
    "as_contiguous",
    "buffer_of",
    "buffer_spec",
    "read_arrays",
]


class BufferSpec(msgspec.Struct, frozen=True, array_like=True):
    """Dtype and shape of an array that is sent as a buffer."""

    dtype: str
    shape: tuple[int, ...]


class OperationResults(Message, frozen=True):
    """Reply with an answer for each operation, and the specs of its arrays.

    Attributes:
        state_id: Id of the server's state.
        answers: One answer for each operation.
        buffer_specs: Specs of the arrays, for each operation.
        writes: Number of writes executed by the server, including these.
        position: Position of a replicated store after these operations.
    """

    state_id: str
    answers: tuple[Answer, ...]
    buffer_specs: tuple[tuple[BufferSpec, ...], ...]
    writes: int = 0
    position: Position = INITIAL_POSITION


class StateLost(Message, frozen=True):
    """Reply: nothing was executed, because the server was restarted and has this new state."""

    state_id: str


class NotLeader(Message, frozen=True):
    """Reply: nothing was executed permanently, because this replica does not lead the store.

    Attributes:
        is_empty: Whether it has none or only a part of the store's contents.
        discarded_writes: Number of writes in the contents that it discarded because acknowledged
            writes were missing; -1 if it discarded none.
    """

    is_empty: bool
    discarded_writes: int = -1


class PreviousRequestFailed(Message, frozen=True):
    """Reply: nothing was executed, because the previous request of the channel was not."""


class ExecuteOperations(TypedRequest[OperationResults], frozen=True):
    """Request to execute operations.

    Attributes:
        operations: Operations, in order of execution.
        buffer_specs: Specs of the arrays of each operation.
        state_id: State that the request is meant for; "" accepts any.
        store: Number of the replicated store; -1 for the server's own, which has no replica.
        peer_unavailable: Whether the other replica was unreachable or empty.
        required_position: Acknowledged position that the client knows; a replica that has not
            reached it must not execute the request.
        requires_previous: Whether to refuse the request if the previous one of the channel was not
            executed.
    """

    operations: tuple[Operation, ...]
    buffer_specs: tuple[tuple[BufferSpec, ...], ...]
    state_id: str = ""
    store: int = -1
    peer_unavailable: bool = False
    required_position: Position = INITIAL_POSITION
    requires_previous: bool = False


class ShardsSaved(Message, frozen=True):
    """Reply with what a server wrote to files; see `shard_files`.

    Attributes:
        state_id: Id of the server's state.
        pieces: Pieces, in order.
        mark: The pieces contain everything written before this mark.
        counters: Values of the counters.
        coordinator_term: Term of the coordinator whose writes `answers` holds.
        answers: Answers by write key, for each shard.
        bytes: Size of the files.
        writes: Number of writes that the server had executed at the end.
        position: As in `OperationResults`.
    """

    state_id: str
    pieces: tuple[ShardPiece, ...]
    mark: int
    counters: dict[str, int]
    coordinator_term: int
    answers: Answers
    bytes: int
    writes: int
    position: Position = INITIAL_POSITION


class SaveShards(TypedRequest[ShardsSaved], frozen=True):
    """Request to write shards to files while operations continue.

    Attributes:
        url: Directory.
        file_prefix: Prefix of the file names.
        shards: Names of the variable shards.
        tables: Names of the table shards.
        since: Mark after which changes are written; None writes everything.
        forget_earlier_marks: Whether changes after earlier marks will never be requested.
        state_id: State that the request is meant for; "" accepts any.
        store: As in `ExecuteOperations`.
        peer_unavailable: As in `ExecuteOperations`.
        required_position: As in `ExecuteOperations`.
    """

    url: str
    file_prefix: str
    shards: tuple[str, ...]
    tables: tuple[str, ...]
    since: int | None = None
    forget_earlier_marks: bool = False
    state_id: str = ""
    store: int = -1
    peer_unavailable: bool = False
    required_position: Position = INITIAL_POSITION


class ShardsRestored(Message, frozen=True):
    """Reply: the shards were restored."""

    state_id: str
    position: Position = INITIAL_POSITION


RestorePhase: TypeAlias = Literal["prepare", "commit", "discard"]
"""Phases of a restore on several servers; see `RestoreShards`."""


class RestoreShards(TypedRequest[ShardsRestored], frozen=True):
    """Request to read shards from files, and to install all of them at once.

    On several servers, the first phase is "prepare": each reads and checks, and changes nothing.

    Attributes:
        url: Directory.
        shards: Variable shards, each with the name of its variable in the checkpoint.
        tables: Table shards, likewise.
        pieces: Contents of the files.
        optimizer_renames: New names of optimizers.
        counters: Values for the counters.
        coordinator_term: Term of the coordinator whose writes `answers` holds.
        answers: Answers by write key of writes that the shards contain.
        state_id: State that the request is meant for; "" accepts any.
        is_recovery: Whether the server lost its contents; its counts since then are then kept.
        phase: "prepare" reads and checks only. "commit" installs what was prepared, or reads it
            now. "discard" drops what was prepared.
        token: The same in all phases of one restore.
        store: As in `ExecuteOperations`.
        peer_unavailable: As in `ExecuteOperations`.
        required_position: As in `ExecuteOperations`.
    """

    url: str
    shards: tuple[tuple[ShardSpec, str], ...]
    tables: tuple[tuple[TableSpec, str], ...]
    pieces: tuple[ShardPiece, ...]
    optimizer_renames: dict[str, str]
    counters: dict[str, int]
    coordinator_term: int
    answers: Answers
    state_id: str = ""
    is_recovery: bool = False
    phase: RestorePhase = "commit"
    token: str = ""
    store: int = -1
    peer_unavailable: bool = False
    required_position: Position = INITIAL_POSITION


class ServerStatus(Message, frozen=True):
    """Statistics of a server since its start.

    Attributes:
        state_id: Id of the server's state.
        index: Index of the server in the cluster.
        uptime_seconds: Seconds since the start.
        requests: Number of executed requests.
        operations: Number of executed operations, by name.
        bytes_in: Bytes of received arrays.
        bytes_out: Bytes of sent arrays.
        busy_seconds: Seconds spent on operations.
        failed: Number of requests that ended with an error.
        waiting_requests: Number of queued requests.
        shards: Number of variable shards.
        tables: Number of table shards.
        rows: Number of rows of tables.
        bytes_stored: Bytes of values, slots and tables.
        replicas: Role in each replicated store on this server: "leader", "leader without follower",
            "follower", "catching up" or "empty".
        versions: Versions of the software in its process.
    """

    state_id: str
    index: int
    uptime_seconds: float
    requests: int
    operations: dict[str, int]
    bytes_in: int
    bytes_out: int
    busy_seconds: float
    failed: int
    waiting_requests: int
    shards: int = 0
    tables: int = 0
    rows: int = 0
    bytes_stored: int = 0
    replicas: dict[int, str] = msgspec.field(default_factory=dict)
    versions: Versions = msgspec.field(default_factory=own_versions)


class GetServerStatus(TypedRequest[ServerStatus], frozen=True):
    """Request for the status of a server; answered at once, whatever is queued."""


# --- between the replicas of a store --------------------------------------------------------------


class LeadEmptyStore(TypedRequest[Done], frozen=True):
    """Request to the first replica of a store: start it empty, if the other one agrees.

    Sent when both replicas are empty.

    Attributes:
        store: Number of the store.
        replica_addresses: Addresses of the two servers.
    """

    store: int
    replica_addresses: tuple[str, str]


class FollowLeader(TypedRequest[Done], frozen=True):
    """Request to discard a replica's contents and follow; `NotLeader` if the sender must not lead.

    Attributes:
        store: Number of the store.
        replica_addresses: Addresses of the two servers.
        replica_index: Index of the receiver among them.
        term: Term of the leader.
        state_id: Id of the contents.
        server: Current counters and write keys.
        is_restored: Whether the contents were restored from a checkpoint, so that clients may have
            seen higher counts.
        writes: Number of writes in the contents.
        position: Position of the contents.
    """

    store: int
    replica_addresses: tuple[str, str]
    replica_index: int
    term: int
    state_id: str
    server: SavedServer
    is_restored: bool = False
    writes: int = 0
    position: Position = INITIAL_POSITION


class TransferShard(TypedRequest[Done], frozen=True):
    """Request to install the current contents of one shard or table, with its write keys.

    Attributes:
        store: Number of the store.
        term: Term of the leader.
        state_id: Id of the contents.
        saved: Description of the shard or table.
        array_names: Names of its arrays.
        buffer_specs: Specs of its arrays.
        coordinator_term: Term of the coordinator whose writes `answers` holds.
        answers: Answers by write key of writes that the shard contains.
    """

    store: int
    term: int
    state_id: str
    saved: SavedShard | SavedTable
    array_names: tuple[str, ...]
    buffer_specs: tuple[BufferSpec, ...]
    coordinator_term: int
    answers: Answers


class ReplicateOperations(TypedRequest[Done], frozen=True):
    """Request to execute operations that the leader of a store has executed.

    Attributes:
        store: Number of the store.
        term: Term of the leader.
        state_id: Id of the contents.
        operations: Operations, in order of execution.
        buffer_specs: Specs of the arrays of each operation.
        is_complete: Whether the receiver now has all of the store, before these operations.
        writes: Number of writes in the contents, including these.
        position: Position of the contents, including these.
    """

    store: int
    term: int
    state_id: str
    operations: tuple[Operation, ...] = ()
    buffer_specs: tuple[tuple[BufferSpec, ...], ...] = ()
    is_complete: bool = False
    writes: int = 0
    position: Position = INITIAL_POSITION


ServerRequest: TypeAlias = (
    ExecuteOperations
    | SaveShards
    | RestoreShards
    | LeadEmptyStore
    | FollowLeader
    | TransferShard
    | ReplicateOperations
    | GetServerStatus
    | Ping
)
ServerReply: TypeAlias = (
    OperationResults
    | StateLost
    | NotLeader
    | PreviousRequestFailed
    | ShardsSaved
    | ShardsRestored
    | ServerStatus
    | Done
)


def buffer_spec(array: NDArray[Any]) -> BufferSpec:
    """Return the spec of an array.

    Raises:
        TypeError: If it holds neither numbers nor bools.
    """
    return BufferSpec(name_of(array.dtype), array.shape)


def as_contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array if its memory is C-contiguous, else a contiguous copy."""
    return array if array.flags.c_contiguous else array.copy()


def buffer_of(array: NDArray[Any]) -> memoryview:
    """Return a read-only view of the memory of a contiguous array."""
    if not array.size:
        return memoryview(b"")
    return array.reshape(-1).view(np.uint8).data.toreadonly()


def read_arrays(
    buffer_specs: Sequence[Sequence[BufferSpec]], buffers: Sequence[Buffer]
) -> list[list[NDArray[Any]]]:
    """Return the arrays of each operation, as views of the buffers.

    Raises:
        FailedPreconditionError: If the buffers do not match the specs.
    """
    count = sum(map(len, buffer_specs))
    if count != len(buffers):
        raise FailedPreconditionError(f"expected {count} buffers, but got {len(buffers)}")
    found = []
    index = 0
    for each in buffer_specs:
        arrays = []
        for spec in each:
            arrays.append(_array(spec, buffers[index]))
            index += 1
        found.append(arrays)
    return found


def _array(spec: BufferSpec, buffer: Buffer) -> NDArray[Any]:
    dtype = parse_dtype(spec.dtype)
    size = math.prod(spec.shape) * dtype.itemsize
    received = memoryview(buffer).nbytes
    if received != size or min(spec.shape, default=0) < 0:
        raise FailedPreconditionError(
            f"an array of shape {spec.shape} and dtype {spec.dtype} needs {size:,} bytes, but got "
            f"{received:,}"
        )
    if not size:
        return np.empty(spec.shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(spec.shape)
