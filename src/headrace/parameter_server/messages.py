"""What goes between a parameter server and those who ask it.

    ExecuteOperations(state_id, operations, arrays)
        ->  OperationResults(answers, arrays), or StateLost(state_id)

One request carries operations on any number of shards and tables. They are carried out in their
order; the first that fails ends it, and its error is the answer. Arrays travel as buffers, those of
the first operation first; what they look like stands in the message.

Rule 1. A request names the life of the server that it is meant for. A server that was started again
        carries out nothing that was meant for the one before: it says who it is, and whoever asks
        learns that what the server held is lost, before anything is written to it.
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
from headrace.serving.call import Done, Message, Ping, Question
from headrace.transport.channel import Buffer
from headrace.versions import Versions, own_versions

__all__ = [
    "ArrayForm",
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
    "form_of",
    "read_arrays",
]


class ArrayForm(msgspec.Struct, frozen=True, array_like=True):
    """What an array looks like that travels as a buffer."""

    dtype: str
    shape: tuple[int, ...]


class OperationResults(Message, frozen=True):
    """An answer for each operation, and the forms of the arrays that it has.

    Attributes:
        state_id: Of the server.
        answers: One an operation.
        array_forms: The forms, for each operation.
        writes: How many writes the server has carried out, these among them.
        position: Of a replicated store, with these operations.
    """

    state_id: str
    answers: tuple[Answer, ...]
    array_forms: tuple[tuple[ArrayForm, ...], ...]
    writes: int = 0
    position: Position = INITIAL_POSITION


class StateLost(Message, frozen=True):
    """Nothing was carried out: the server was started again, and this is its life."""

    state_id: str


class NotLeader(Message, frozen=True):
    """Nothing was carried out that lasts: this seat of a replicated store does not lead it.

    Attributes:
        is_empty: It has nothing of the store, or not all.
        discarded_writes: How many writes it had when it dropped what it had, because it lacked
            writes that were acknowledged; -1: it did not.
    """

    is_empty: bool
    discarded_writes: int = -1


class PreviousRequestFailed(Message, frozen=True):
    """Nothing was carried out: it follows what its sender asked before, which was not either."""


class ExecuteOperations(Question[OperationResults], frozen=True):
    """Carry out operations.

    Attributes:
        operations: What to do, in this order.
        array_forms: Forms of the arrays of each operation.
        state_id: Whom it is meant for; "": whoever listens there.
        store: Which replicated store; -1: the server's own, which has no replica.
        peer_unavailable: The other seat of the store is gone, or vacant.
        required_position: Up to where operations are known to be acknowledged; a replica that lacks
            one of them must not answer.
        requires_previous: It is not to be carried out where the last one of the same channel was
            not.
    """

    operations: tuple[Operation, ...]
    array_forms: tuple[tuple[ArrayForm, ...], ...]
    state_id: str = ""
    store: int = -1
    peer_unavailable: bool = False
    required_position: Position = INITIAL_POSITION
    requires_previous: bool = False


class ShardsSaved(Message, frozen=True):
    """What a server wrote; see `shard_writer.Written`.

    Attributes:
        state_id: Of the server.
        pieces: In their order.
        mark: What was written before it is in the pieces.
        counters: What they are at.
        coordinator_term: Of the coordinator whose writes `answers` are.
        answers: Keys of writes, by shard.
        bytes: Of the files.
        writes: Writes that the server had carried out when it was done.
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


class SaveShards(Question[ShardsSaved], frozen=True):
    """Write shards to files; operations go on meanwhile.

    Attributes:
        url: Of the folder.
        file_prefix: What the names of the files begin with.
        shards: Of variables: their names.
        tables: Likewise.
        since: A mark: write what changed after it. None: write all.
        forget_earlier_marks: Nobody will ask for what changed after an earlier mark.
        state_id: Whom it is meant for; "": whoever listens there.
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
    """The shards are in place."""

    state_id: str
    position: Position = INITIAL_POSITION


RestorePhase: TypeAlias = Literal["prepare", "commit", "discard"]
"""Steps of a restore on several servers; see `RestoreShards`."""


class RestoreShards(Question[ShardsRestored], frozen=True):
    """Read shards from files, and put them in place all at a time.

    Several servers are first asked to prepare: they read and check, and change nothing.

    Attributes:
        url: Of the folder.
        shards: Each with the name of its variable in the checkpoint.
        tables: Likewise.
        pieces: What is in the files.
        optimizer_renames: New names of optimizers.
        counters: What they are to be at.
        coordinator_term: Of the coordinator whose writes `answers` are.
        answers: Keys of writes that are in the shards.
        state_id: Whom it is meant for; "": whoever listens there.
        is_recovery: The server lost what it had; what it has counted since then counts as well.
        phase: "prepare": only read and check. "commit": put in place what was prepared, or else
            read it now. "discard": forget what was prepared.
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
    """What a server has done so far.

    Attributes:
        state_id: Which life of the server this is.
        index: Its number in the cluster.
        uptime_seconds: How long it has been there.
        requests: Requests that were carried out, and operations in them.
        operations: Operations by name.
        bytes_in: Of arrays that came.
        bytes_out: Of arrays that went.
        busy_seconds: Spent on operations.
        failed: Requests that ended with an error.
        waiting_requests: Requests that came and were not begun.
        shards: Of variables, that it keeps.
        tables: Shards of tables that it keeps.
        rows: Of tables.
        bytes_stored: Of values, slots and tables.
        replicas: What it does for each replicated store that it has: "leads", "leads alone",
            "follows", "is filled", "is vacant".
        versions: Of its process.
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


class GetServerStatus(Question[ServerStatus], frozen=True):
    """What have you done? Answered at once, whatever waits to be carried out."""


# --- between the seats of a replicated store ----------------------------------------------------


class LeadEmptyStore(Question[Done], frozen=True):
    """Both seats of a store are vacant: begin it, if the other one agrees. Said to the first.

    Attributes:
        store: Its number.
        replica_addresses: Addresses of the two.
    """

    store: int
    replica_addresses: tuple[str, str]


class FollowLeader(Question[Done], frozen=True):
    """Give up what you have of a store, and follow; answered with `NotLeader` if that is not due.

    Attributes:
        store: Its number.
        replica_addresses: Addresses of the two.
        replica_index: Which of them is asked.
        term: Of the leading seat.
        state_id: Of the contents.
        server: Counters and keys as they are now.
        is_restored: Whether the contents came from a checkpoint: clients have seen later counts.
        writes: How many writes are in the contents.
        position: Of the contents.
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


class TransferShard(Question[Done], frozen=True):
    """Take one shard or table of a store, as it is now, with the keys of its writes.

    Attributes:
        store: Its number.
        term: Of the leading seat.
        state_id: Of the contents.
        saved: What it is.
        array_names: Of its arrays.
        array_forms: Their forms.
        coordinator_term: Of the coordinator whose writes `answers` are.
        answers: Keys of writes that are in it.
    """

    store: int
    term: int
    state_id: str
    saved: SavedShard | SavedTable
    array_names: tuple[str, ...]
    array_forms: tuple[ArrayForm, ...]
    coordinator_term: int
    answers: Answers


class ReplicateOperations(Question[Done], frozen=True):
    """Carry out what the leading seat of a store has carried out.

    Attributes:
        store: Its number.
        term: Of the leading seat.
        state_id: Of the contents.
        operations: In their order.
        array_forms: Forms of the arrays of each.
        is_complete: You have all of the store now, before these.
        writes: How many writes are in the contents, with these.
        position: Of the contents, with these.
    """

    store: int
    term: int
    state_id: str
    operations: tuple[Operation, ...] = ()
    array_forms: tuple[tuple[ArrayForm, ...], ...] = ()
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


def form_of(array: NDArray[Any]) -> ArrayForm:
    """Return what an array looks like.

    Raises:
        TypeError: It holds neither numbers nor bools.
    """
    return ArrayForm(name_of(array.dtype), array.shape)


def as_contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the same shape whose memory is in one piece: itself, if it is."""
    return array if array.flags.c_contiguous else array.copy()


def buffer_of(array: NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array, for reading."""
    if not array.size:
        return memoryview(b"")
    return array.reshape(-1).view(np.uint8).data.toreadonly()


def read_arrays(
    forms: Sequence[Sequence[ArrayForm]], buffers: Sequence[Buffer]
) -> list[list[NDArray[Any]]]:
    """Return the arrays of each operation, as views of what came.

    Raises:
        FailedPreconditionError: The buffers are not as they were announced.
    """
    count = sum(map(len, forms))
    if count != len(buffers):
        raise FailedPreconditionError(f"{len(buffers)} buffers came where {count} were announced")
    found = []
    at = 0
    for each in forms:
        arrays = []
        for form in each:
            arrays.append(_array(form, buffers[at]))
            at += 1
        found.append(arrays)
    return found


def _array(form: ArrayForm, buffer: Buffer) -> NDArray[Any]:
    dtype = parse_dtype(form.dtype)
    due = math.prod(form.shape) * dtype.itemsize
    found = memoryview(buffer).nbytes
    if found != due or min(form.shape, default=0) < 0:
        raise FailedPreconditionError(
            f"an array of shape {form.shape} and dtype {form.dtype} has {due:,} bytes, and "
            f"{found:,} came"
        )
    if not due:
        return np.empty(form.shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(form.shape)
