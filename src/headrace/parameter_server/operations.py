"""Operations of a parameter server, one record each, and their answers.

    class ReadShard(TypedRequest[Done], frozen=True): ...
    answer, arrays = store.execute(ReadShard(shard="w"), [])

Arrays are sent next to the records, in the order that each docstring gives, so a record is small
and arrays are never serialized into it. Rows have the numbers of the whole variable, so that errors
can name them; a shard subtracts its first row.

Operations with a `key` change something. One without a key is executed each time it arrives; the
caller decides whether it may be repeated.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headrace.parameter_server.specs import (
    Initializer,
    OptimizerRule,
    ShardSpec,
    StepParameters,
    TableSpec,
    WriteKey,
)
from headrace.serving.rpc import Done, Message, TypedRequest

__all__ = [
    "Answer",
    "Apply",
    "ApplyIds",
    "Assign",
    "AssignIds",
    "Counted",
    "Create",
    "CreateTable",
    "Created",
    "DescribeStore",
    "Evict",
    "Evicted",
    "Export",
    "Exported",
    "FenceWrites",
    "ForgetWriteKeys",
    "GatherIds",
    "GatherRows",
    "IncrementCounter",
    "KeyedOperation",
    "LookupIds",
    "Operation",
    "ReadShard",
    "Scatter",
    "ShardDescription",
    "StoreDescription",
    "TableDescription",
]


# --- answers -------------------------------------------------------------------------------------


class Created(Message, frozen=True):
    """Answer: the shard or table exists. `existed`: it already did, and keeps its values."""

    existed: bool


class Counted(Message, frozen=True):
    """Answer: the value of a counter before and after the operation."""

    before: int
    after: int


class Evicted(Message, frozen=True):
    """Answer: the number of evicted rows."""

    rows: int


class Exported(Message, frozen=True):
    """Answer: a part of a table's rows, sent next to this record.

    Attributes:
        next: Start of the next part; None after the last one.
        rows: Number of rows in the table shard, all parts together.
    """

    next: int | None
    rows: int


class ShardDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one variable shard on a server; `bytes` includes its slots."""

    spec: ShardSpec
    bytes: int
    slots: tuple[str, ...]


class TableDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one table shard on a server.

    Attributes:
        spec: Spec of the table shard.
        rows: Number of ids that have a row.
        waiting_ids: Number of ids looked up less often than admission requires.
        bytes: Size in bytes, with slots and index.
        slots: Names of the slots.
    """

    spec: TableSpec
    rows: int
    waiting_ids: int
    bytes: int
    slots: tuple[str, ...]


class StoreDescription(Message, frozen=True):
    """Answer: the contents of a store.

    Attributes:
        coordinator_term: Term of the latest coordinator that it knows; 0 if none.
        shards: Variable shards.
        tables: Table shards.
        counters: Values of the counters.
        keys: Number of writes remembered because their closures may still be retried.
        bytes: Total bytes of arrays.
    """

    coordinator_term: int
    shards: tuple[ShardDescription, ...]
    tables: tuple[TableDescription, ...]
    counters: dict[str, int]
    keys: int
    bytes: int


Answer: TypeAlias = Done | Created | Counted | Evicted | Exported | StoreDescription


# --- operations on shards ------------------------------------------------------------------------


class Create(TypedRequest[Created], frozen=True):
    """Create a shard if it does not exist.

    Arrays in: its value, if there is no `initializer`. A shard of that name with another shape,
    dtype or range of rows is an AlreadyExistsError.
    """

    shard: ShardSpec
    initializer: Initializer | None = None


class ReadShard(TypedRequest[Done], frozen=True):
    """Read a whole shard. Arrays out: the value, which may be the shard's own memory.

    Attributes:
        shard: Name of the shard.
        slot: Slot to read ("optimizer/name"); "" reads the value.
    """

    shard: str
    slot: str = ""


class Assign(TypedRequest[Done], frozen=True):
    """Change a whole shard. Arrays in: a value of the shard's shape.

    Attributes:
        shard: Name of the shard.
        mode: "assign", "add" or "sub".
        key: Write key.
        slot: Slot to set ("optimizer/name"), created if it does not exist; "" sets the value.
        initial_value: Initial value of the elements of a new slot.
    """

    shard: str
    mode: str = "assign"
    key: WriteKey | None = None
    slot: str = ""
    initial_value: float = 0.0


class GatherRows(TypedRequest[Done], frozen=True):
    """Read rows. Arrays in: rows (integers). Arrays out: their values, in that order."""

    shard: str


class Scatter(TypedRequest[Done], frozen=True):
    """Change some rows; `mode` is "add", "sub", "mul", "div", "min", "max" or "update".

    Arrays in: rows (int64, 1-D), and a value for each. A row that occurs twice is changed twice;
    with "update", it gets the last value.
    """

    shard: str
    mode: str = "add"
    key: WriteKey | None = None


class Apply(TypedRequest[Done], frozen=True):
    """Apply one step of an optimizer; the first one creates its slots.

    Arrays in: a gradient of the shard's shape; or rows (integers, distinct) and a value for each;
    or rows, values, and for each row the index of its value (integers).

    Attributes:
        shard: Name of the shard.
        optimizer: Name of the optimizer; each optimizer has its own slots.
        rule: Update rule.
        step: Parameters of the step.
        key: Write key.
    """

    shard: str
    optimizer: str
    rule: OptimizerRule
    step: StepParameters
    key: WriteKey | None = None


class IncrementCounter(TypedRequest[Counted], frozen=True):
    """Add `delta` to a counter, and return its value; a counter that does not exist starts from 0.

    Attributes:
        counter: Name of the counter.
        delta: Increment; 0 only reads the counter.
        key: Write key.
        last_seen: Value that the client has seen; a server with a smaller one has lost the counter.
    """

    counter: str
    delta: int = 1
    key: WriteKey | None = None
    last_seen: int = 0


# --- operations on tables ------------------------------------------------------------------------


class CreateTable(TypedRequest[Created], frozen=True):
    """Create a table shard if it does not exist; a different spec of that name is an error."""

    table: TableSpec


class LookupIds(TypedRequest[Done], frozen=True):
    """Count ids, admit those that have been counted often enough, and read their rows.

    Arrays in: ids (int64, distinct), and the number of requests for each (int64; optional, 1 by
    default). Arrays out: a row for each id, in that order; zeros for ids that are not admitted. A
    repetition with the same key counts nothing, and reads the current rows. The rows have dtype
    `dtype`; "" means that of the table.
    """

    table: str
    key: WriteKey | None = None
    dtype: str = ""


class GatherIds(TypedRequest[Done], frozen=True):
    """Read rows without changing anything.

    Arrays in: ids (int64). Arrays out: a row for each, of dtype `dtype` or that of the table. An id
    without a row gets zeros, or with `initialize` the initial value that its row would have.
    """

    table: str
    dtype: str = ""
    initialize: bool = False


class ApplyIds(TypedRequest[Done], frozen=True):
    """Apply one step of an optimizer to rows of a table.

    Arrays in: ids (int64, distinct), and gradients, as for `Apply`. Gradients of ids without a row
    are dropped.
    """

    table: str
    optimizer: str
    rule: OptimizerRule
    step: StepParameters
    key: WriteKey | None = None


class AssignIds(TypedRequest[Done], frozen=True):
    """Write rows. Arrays in: ids (int64, distinct), and a value for each. Admits the ids."""

    table: str
    key: WriteKey | None = None


class Evict(TypedRequest[Evicted], frozen=True):
    """Evict rows unused for `older_than` steps; None means the limit of the table's spec."""

    table: str
    older_than: int | None = None


class Export(TypedRequest[Exported], frozen=True):
    """Read a part of the rows. Arrays out: ids, values.

    Attributes:
        table: Name of the table.
        start: Start of the part: 0, then `Exported.next`.
        limit: Largest number of rows.
    """

    table: str
    start: int = 0
    limit: int = 65_536


# --- write keys, terms and descriptions -----------------------------------------------------------


class ForgetWriteKeys(TypedRequest[Done], frozen=True):
    """Forget the write keys of closures that will not be retried, and refuse their late writes.

    Attributes:
        coordinator_term: Term of the sending coordinator; those of an older one are ignored.
        closures: Numbers of the closures.
        below: All closures with smaller numbers are finished as well.
    """

    coordinator_term: int
    closures: tuple[int, ...] = ()
    below: int = 0


class FenceWrites(TypedRequest[Done], frozen=True):
    """Refuse writes of older terms from now on, and those of one worker.

    Attributes:
        coordinator_term: Term of the sending coordinator.
        worker: Number that the coordinator gave the worker; None fences no worker.
    """

    coordinator_term: int
    worker: int | None = None


class DescribeStore(TypedRequest[StoreDescription], frozen=True):
    """Describe the contents of a store, or of one `variable`."""

    variable: str | None = None


Operation: TypeAlias = (
    Create
    | ReadShard
    | Assign
    | GatherRows
    | Scatter
    | Apply
    | IncrementCounter
    | CreateTable
    | LookupIds
    | GatherIds
    | ApplyIds
    | AssignIds
    | Evict
    | Export
    | ForgetWriteKeys
    | FenceWrites
    | DescribeStore
)
"""All operations of a store."""

KeyedOperation: TypeAlias = (
    Assign | Scatter | Apply | IncrementCounter | LookupIds | ApplyIds | AssignIds
)
"""Operations that change something and may have a write key."""
