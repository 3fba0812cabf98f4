"""What a parameter server can be asked: one record an operation, and what answers it.

    class Read(Question[Done], frozen=True): ...
    answer, arrays = store.carry_out(Read(shard=spec), [])

Arrays travel beside the records, in the order that each docstring gives; so a record is small and
its arrays are never packed into it. Rows are numbered as the whole variable numbers them, so that
an error can name them; a shard takes off its first row.

Operations with a `key` change something. One without a key is carried out each time it comes: its
caller says whether it may be repeated.
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
from headrace.serving.call import Done, Message, Question

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
    """The shard or table is there. `existed`: it was before, and keeps its values."""

    existed: bool


class Counted(Message, frozen=True):
    """A counter was read or moved on."""

    before: int
    after: int


class Evicted(Message, frozen=True):
    """So many rows were dropped."""

    rows: int


class Exported(Message, frozen=True):
    """A part of a table's rows travels beside this.

    Attributes:
        next: Where the next part begins; None: this was the last.
        rows: Rows in the shard of the table, all parts together.
    """

    next: int | None
    rows: int


class ShardDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a server holds for one shard: `bytes` with its slots."""

    spec: ShardSpec
    bytes: int
    slots: tuple[str, ...]


class TableDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a server holds for one shard of a table: `bytes` with its slots and its index.

    Attributes:
        spec: Of the shard.
        rows: Ids that have a row.
        waiting_ids: Ids that were looked up, and not yet often enough.
        bytes: In all.
        slots: Their names.
    """

    spec: TableSpec
    rows: int
    waiting_ids: int
    bytes: int
    slots: tuple[str, ...]


class StoreDescription(Message, frozen=True):
    """What a server holds.

    Attributes:
        coordinator_term: Of the coordinator that it knows; 0: none.
        shards: Of variables.
        tables: Shards of tables.
        counters: What they are at.
        keys: Writes that are remembered because their closures have not settled.
        bytes: Of arrays, in all.
    """

    coordinator_term: int
    shards: tuple[ShardDescription, ...]
    tables: tuple[TableDescription, ...]
    counters: dict[str, int]
    keys: int
    bytes: int


Answer: TypeAlias = Done | Created | Counted | Evicted | Exported | StoreDescription


# --- operations on shards ------------------------------------------------------------------------


class Create(Question[Created], frozen=True):
    """Make a shard, unless it is there.

    Arrays in: its value, if there is no `initializer`. Another shape, dtype or place under the name
    is an AlreadyExistsError.
    """

    shard: ShardSpec
    initializer: Initializer | None = None


class ReadShard(Question[Done], frozen=True):
    """Arrays out: the whole value, which may be the shard's own memory (see `Store.execute`).

    Attributes:
        shard: Its name.
        slot: Read this slot ("optimizer/name") in place of the value; "": the value.
    """

    shard: str
    slot: str = ""


class Assign(Question[Done], frozen=True):
    """Change the whole value. `mode`: assign, add, sub. Arrays in: a value of the shard's shape.

    Attributes:
        shard: Its name.
        mode: What is done.
        key: Which write.
        slot: Set this slot ("optimizer/name") in place of the value, and make it if it is not
            there; "": the value.
        initial_value: What the elements of the slot begin with.
    """

    shard: str
    mode: str = "assign"
    key: WriteKey | None = None
    slot: str = ""
    initial_value: float = 0.0


class GatherRows(Question[Done], frozen=True):
    """Arrays in: rows (integers). Arrays out: their values, in that order."""

    shard: str


class Scatter(Question[Done], frozen=True):
    """Change some rows: `mode` is add, sub, mul, div, min, max or update.

    Arrays in: rows (int64, 1-D), and a value for each; a row that stands there twice is changed
    twice, and by `update` has the last value.
    """

    shard: str
    mode: str = "add"
    key: WriteKey | None = None


class Apply(Question[Done], frozen=True):
    """One step of an optimizer; the first makes its slots.

    Arrays in: a gradient of the shard's shape; or rows (integers, each once) and a value for each;
    or rows, values, and which of the values each row has (integers).

    Attributes:
        shard: Its name.
        optimizer: Name of the optimizer; another has other slots.
        rule: What it does.
        step: Which step.
        key: Which write.
    """

    shard: str
    optimizer: str
    rule: OptimizerRule
    step: StepParameters
    key: WriteKey | None = None


class IncrementCounter(Question[Counted], frozen=True):
    """Move a counter on by `delta`, which may be 0; one that is not there starts from 0.

    Attributes:
        counter: Its name.
        delta: How far.
        key: Which write.
        last_seen: Who asks has seen it there: a server where it is less has lost it.
    """

    counter: str
    delta: int = 1
    key: WriteKey | None = None
    last_seen: int = 0


# --- operations on tables ------------------------------------------------------------------------


class CreateTable(Question[Created], frozen=True):
    """Make a shard of a table, unless it is there; another spec under the name is an error."""

    table: TableSpec


class LookupIds(Question[Done], frozen=True):
    """Count ids, admit those that are due, and read their rows.

    Arrays in: ids (int64, each once), and how often each was asked for (int64; optional: once).
    Arrays out: a row for each, in that order; zeros where an id is not admitted. One that is
    repeated under its key counts nothing, and reads the rows as they are then. They are sent in
    `dtype`; "": in the table's own.
    """

    table: str
    key: WriteKey | None = None
    dtype: str = ""


class GatherIds(Question[Done], frozen=True):
    """Read rows and change nothing.

    Arrays in: ids (int64). Arrays out: a row for each; in `dtype`, or in that of the table. Where
    there is none: zeros, or the first value that the row would have (`initialize`).
    """

    table: str
    dtype: str = ""
    initialize: bool = False


class ApplyIds(Question[Done], frozen=True):
    """One step of an optimizer. Arrays in: ids (int64, each once), and gradients, as for `Apply`.

    Gradients of ids that have no row are dropped.
    """

    table: str
    optimizer: str
    rule: OptimizerRule
    step: StepParameters
    key: WriteKey | None = None


class AssignIds(Question[Done], frozen=True):
    """Write rows: arrays in ids (int64, each once), and a value for each. Ids are admitted."""

    table: str
    key: WriteKey | None = None


class Evict(Question[Evicted], frozen=True):
    """Drop rows that were not touched for `older_than` steps (None: as the table's spec says)."""

    table: str
    older_than: int | None = None


class Export(Question[Exported], frozen=True):
    """Read a part of the rows. Arrays out: ids, values.

    Attributes:
        table: Its name.
        start: Where to begin: 0, then `Exported.next`.
        limit: At most so many rows.
    """

    table: str
    start: int = 0
    limit: int = 65_536


# --- closures, and all of it ---------------------------------------------------------------------


class ForgetWriteKeys(Question[Done], frozen=True):
    """These closures will not be tried again: forget their keys, and refuse what still comes.

    Attributes:
        coordinator_term: Of the coordinator that says so; an older one's are passed over.
        closures: Their numbers.
        below: All closures from 0 to below this number have settled too.
    """

    coordinator_term: int
    closures: tuple[int, ...] = ()
    below: int = 0


class FenceWrites(Question[Done], frozen=True):
    """Refuse writes of older incarnations from now on, and those of one worker.

    Attributes:
        coordinator_term: Of the coordinator that says so.
        worker: The number that it had given the worker; None: no worker is meant.
    """

    coordinator_term: int
    worker: int | None = None


class DescribeStore(Question[StoreDescription], frozen=True):
    """What do you hold? `variable`: of this one alone, where that is what matters."""

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
"""All that a store carries out."""

KeyedOperation: TypeAlias = (
    Assign | Scatter | Apply | IncrementCounter | LookupIds | ApplyIds | AssignIds
)
"""Those that change something, and may have a key."""
