"""Embedding tables: rows for any integer ids, without a vocabulary, sharded over servers by a hash.

A row is created when its id is looked up (several times, with `admission`). Its initial values
depend only on the seed and the id. Unused rows are evicted, with their optimizer slots
(`evict_after`, `capacity`). `save` and `load` write and read all rows as one file for other
programs: safetensors or Parquet.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from headrace.argument_names import explain_unknown_arguments
from headrace.arguments import check_int, check_string
from headrace.distribute.bag_combiner import Combiner, as_ids, check_combiner, combine_bags
from headrace.distribute.current_strategy import get_strategy
from headrace.distribute.row_access import cast_exactly, is_floating
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.parameter_server.arrays import IndexedSlices, as_array, raise_if_tracing
from headrace.parameter_server.cluster_registry import Handle, ServerCluster
from headrace.parameter_server.gradients import check_ids, split_by_hash, unique_ids
from headrace.parameter_server.operations import (
    ApplyIds,
    AssignIds,
    CreateTable,
    Export,
    Exported,
    GatherIds,
    LookupIds,
)
from headrace.parameter_server.optimizer_steps import (
    Gradient,
    begin_gradients,
    push_gradients,
)
from headrace.parameter_server.read_cache import execute_with_prefetch
from headrace.parameter_server.server_requests import (
    OperationReply,
    OperationRequest,
    ParameterServerClient,
)
from headrace.parameter_server.specs import (
    Constant,
    Initializer,
    Normal,
    OptimizerRule,
    StepParameters,
    TableSpec,
    Uniform,
    Zeros,
    adding_dtype,
    as_dtype,
    name_of,
    parse_dtype,
    working_dtype,
)
from headrace.parameter_server.write_context import current_closure_run, next_key
from headrace.saved.arrow import pyarrow

__all__ = [
    "EmbeddingTable",
    "PlacedTable",
    "PulledRows",
    "TablePull",
    "TableRecord",
    "pull",
]


_NAMED: dict[str, Callable[[int], Initializer]] = {
    "uniform": lambda seed: Uniform(seed=seed),
    "normal": lambda seed: Normal(seed=seed),
    "zeros": lambda seed: Zeros(),
}


class PlacedTable(msgspec.Struct, frozen=True):
    """A table shard and the index of its server."""

    spec: TableSpec
    server: int


class TableRecord(msgspec.Struct, frozen=True):
    """Record of a table that its handle carries."""

    name: str
    dim: int
    dtype: str
    shards: tuple[PlacedTable, ...]
    #: Dtype of sent rows; "" means the dtype of the table.
    wire: str = ""


@explain_unknown_arguments
class EmbeddingTable(Handle[TableRecord]):
    """Rows for any int64 ids on parameter servers; created in the scope of their strategy.

        with strategy.scope():
            users = hr.EmbeddingTable(16, name="users")
        rows = users.lookup(ids)                                # ids.shape + (16,)
        users.apply_gradients(optimizer, gradients, ids)

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=2, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         table = hr.EmbeddingTable(4, name="words", initializer="zeros")
    ...     table.lookup([7, 10**12]).shape
    ...     strategy.close()
    (2, 4)

    Args:
        dim: Number of elements in a row.
        name: Name, unique in the strategy.
        initializer: Initial values of a row: "uniform" (-0.05 to 0.05), "normal", "zeros", a
            number, or one of `hr.initializers`.
        seed: Seed of the initial values, for the names "uniform" and "normal".
        dtype: Floating dtype of the rows.
        admission: Number of look-ups after which an id gets its row; until then it reads zeros, and
            its gradients are dropped. None admits it at once.
        evict_after: Number of steps after which an unused row is evicted; None disables this.
        capacity: Largest number of rows on all servers together; the least recently used are
            evicted. None means unlimited.
        wire_dtype: Dtype in which rows and gradients are sent, such as "bfloat16", which halves the
            network traffic; the servers keep `dtype`. None sends them as they are.

    Raises:
        FailedPreconditionError: If it is created outside the scope, or in a scheduled function.
    """

    kind = "EmbeddingTable"

    def __init__(
        self,
        dim: int,
        *,
        name: str,
        initializer: Any = "uniform",
        seed: int = 0,
        dtype: Any = "float32",
        admission: int | None = None,
        evict_after: int | None = None,
        capacity: int | None = None,
        wire_dtype: Any = None,
    ) -> None:
        check_int("dim", dim, minimum=1)
        check_string("name", name, empty=False)
        check_int("seed", seed, minimum=0)
        for argument, value in (
            ("admission", admission),
            ("evict_after", evict_after),
            ("capacity", capacity),
        ):
            if value is not None:
                check_int(argument, value, minimum=1)
        found = _floating("dtype", dtype)
        wire = found if wire_dtype is None else _floating("wire_dtype", wire_dtype)
        strategy = get_strategy()
        if current_closure_run() is not None or not hasattr(strategy, "place_table"):
            raise FailedPreconditionError(
                f"EmbeddingTable {name!r} must be created in the scope of a "
                "ParameterServerStrategy, and outside of functions that a coordinator schedules"
            )
        spec = TableSpec(
            name=name,
            table=name,
            dim=int(dim),
            dtype=name_of(found),
            initializer=_initializer(initializer, seed),
            admission=1 if admission is None else int(admission),
            evict_after=evict_after,
            capacity=capacity,
        )
        cluster, record = strategy.place_table(spec)
        cluster.servers.execute_all(
            [OperationRequest(shard.server, CreateTable(shard.spec)) for shard in record.shards]
        )
        if wire != found:
            record = msgspec.structs.replace(record, wire=name_of(wire))
        self._bind(cluster, record)

    def _bind(self, cluster: ServerCluster, record: TableRecord) -> None:
        self.dim = record.dim
        self.dtype = parse_dtype(record.dtype)
        self.wire_name = record.wire
        super()._bind(cluster, record)

    @property
    def shards(self) -> tuple[PlacedTable, ...]:
        """Shards of the table."""
        return self._record.shards

    # --- reading ------------------------------------------------------------------------------

    def lookup(self, ids: Any, combiner: Combiner | None = None) -> NDArray[Any]:
        """Return the rows of ids, and create rows of newly admitted ids; for training.

        Args:
            ids: Integers of any shape; a repeated id is sent once, with its count.
            combiner: How each bag of ids, along the last axis, becomes one row: "sum", "mean", or
                "sqrtn", the sum divided by the square root of the count. None does not combine.

        Returns:
            An array of shape `(*ids.shape, dim)`; with a combiner, without the last axis of `ids`.
        """
        return self._read(ids, combiner, counts=True)

    def gather(self, ids: Any, combiner: Combiner | None = None) -> NDArray[Any]:
        """Return the rows of ids, zeros for ids without a row; change nothing.

        Args:
            ids: Integers of any shape.
            combiner: As for `lookup`.
        """
        return self._read(ids, combiner, counts=False)

    def _read(self, ids: Any, combiner: str | None, *, counts: bool) -> NDArray[Any]:
        if combiner is not None:
            owner = f"EmbeddingTable {self.name!r}"
            raise_if_tracing(owner)
            ids = self.check_ids(ids)
            check_combiner(combiner, ids, owner, owner_kind="f")
        (found,) = pull([self], [ids], counts=counts)
        return found.expand() if combiner is None else found.pool(combiner)

    def pull_requests(
        self,
        unique_ids: NDArray[np.int64],
        counts: NDArray[np.int64] | None,
        *,
        initialize: bool = False,
    ) -> tuple[list[OperationRequest], list[NDArray[np.int64]]]:
        """Return the requests for rows, and for each the positions of its ids in `unique_ids`.

        Args:
            unique_ids: Distinct ids.
            counts: Number of look-ups of each id; None counts and creates nothing.
            initialize: Whether, without `counts`, ids without a row get initial values, not zeros.
        """
        requests, positions = [], []
        shards = self._record.shards
        for shard, part in zip(shards, split_by_hash(unique_ids, len(shards)), strict=True):
            if not len(part):
                continue
            name = shard.spec.name
            if counts is None:
                gather = GatherIds(name, self.wire_name, initialize)
                requests.append(OperationRequest(shard.server, gather, [unique_ids[part]]))
            else:
                operation = LookupIds(name, next_key(name), self.wire_name)
                requests.append(
                    OperationRequest(shard.server, operation, [unique_ids[part], counts[part]])
                )
            positions.append(part)
        return requests, positions

    def check_ids(self, ids: Any) -> NDArray[np.int64]:
        """Return ids as int64, of the same shape.

        Raises:
            TypeError: If they are not integers.
            ValueError: If they are lists of different lengths.
            InvalidArgumentError: If an id is too large.
        """
        owner = f"EmbeddingTable {self.name!r}"
        plain = as_ids(ids, owner) if isinstance(ids, list | tuple) else as_array(ids)
        return check_ids(plain, owner)

    def export(self, limit: int = 65_536) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield the ids that have a row, and their rows, in chunks.

        Args:
            limit: Largest number of rows in a chunk.
        """
        check_int("limit", limit, minimum=1)
        for shard in self._record.shards:
            start: int | None = 0
            while start is not None:
                answer, arrays = self._cluster.servers.execute(
                    shard.server, Export(shard.spec.name, start, limit)
                )
                assert isinstance(answer, Exported)
                start = answer.next
                if arrays and len(arrays[0]):
                    yield arrays[0], arrays[1]

    def save(self, path: Any) -> int:
        """Write all ids and rows to one file; return their number.

        The file becomes visible when it is complete.

        Args:
            path: Ends with ".safetensors" (tensors `ids` and `rows`; all rows must fit in the
                memory of this process) or ".parquet" (columns `id` and `row`, written in chunks;
                needs PyArrow).

        Raises:
            ValueError: If `path` has another suffix.
        """
        target = Path(path)
        write = _choose_by_suffix(target, _WRITERS)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            count = write(partial, self)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return count

    def load(self, path: Any) -> int:
        """Assign the rows of a file that `save` wrote; return their number.

        Other rows are kept. Optimizer slots of the rows are not in such a file, only in
        checkpoints, so they start from their initial values.

        Raises:
            InvalidArgumentError: If the rows have another length.
        """
        source = Path(path)
        count = 0
        for ids, rows in _choose_by_suffix(source, _READERS)(source):
            if rows.shape != (len(ids), self.dim) or not is_floating(rows.dtype):
                raise InvalidArgumentError(
                    f"{source} has rows of shape {rows.shape[1:]} and dtype {rows.dtype}, but "
                    f"EmbeddingTable {self.name!r} needs rows of {self.dim} floating-point numbers"
                )
            self.assign(ids, rows)
            count += len(ids)
        return count

    # --- writing ------------------------------------------------------------------------------

    def assign(self, ids: Any, values: Any) -> None:
        """Write rows, and admit their ids; the last row of a repeated id is used."""
        row_ids = self.check_ids(ids).reshape(-1)
        rows = np.broadcast_to(as_array(values), (len(row_ids), self.dim))
        rows = cast_exactly(rows, self.dtype, f"EmbeddingTable {self.name!r}")
        distinct, positions = np.unique(row_ids[::-1], return_index=True)
        rows = rows[::-1][positions]
        requests = []
        shards = self._record.shards
        for shard, part in zip(shards, split_by_hash(distinct, len(shards)), strict=True):
            if len(part):
                operation = AssignIds(shard.spec.name, next_key(shard.spec.name))
                requests.append(
                    OperationRequest(shard.server, operation, [distinct[part], rows[part]])
                )
        self._cluster.servers.execute_all(requests)

    # --- training -----------------------------------------------------------------------------

    needs_step_number = True

    def apply_gradients(self, optimizer: Any, gradients: Any, ids: Any = None) -> int:
        """Apply one step of an optimizer with the gradients of some rows.

        Args:
            optimizer: One of `hr.optimizers`.
            gradients: An `IndexedSlices`; or rows, with `ids`.
            ids: Ids of the rows, as passed to `lookup`.

        Returns:
            The number of steps that the optimizer has taken.
        """
        if ids is not None:
            gradients = IndexedSlices(gradients, self.check_ids(ids))
        return push_gradients(optimizer, [(gradients, self)])

    def convert_gradient(self, gradient: Any) -> Gradient:
        """Convert a gradient to the form of the table, with distinct ids.

        Raises:
            TypeError: If it is not an `IndexedSlices`.
            InvalidArgumentError: If its rows have another length.
        """
        if not isinstance(gradient, IndexedSlices):
            raise TypeError(
                f"a gradient of EmbeddingTable {self.name!r} must be an IndexedSlices(values, ids),"
                f" but got a {type(gradient).__name__}"
            )
        values, value_indices = gradient.shared_values()
        if values.shape[1:] != (self.dim,) or not is_floating(values.dtype):
            raise InvalidArgumentError(
                f"gradient rows of EmbeddingTable {self.name!r} must have {self.dim} "
                f"floating-point numbers, but have shape {values.shape[1:]} and dtype "
                f"{values.dtype}"
            )
        found = values.astype(working_dtype(self.dtype), copy=False)
        return Gradient.from_rows(gradient.indices, found, value_indices)

    def step_requests(
        self, optimizer: str, rule: OptimizerRule, step: StepParameters, gradient: Gradient
    ) -> list[OperationRequest]:
        """Return the requests of one step."""
        ids = gradient.rows
        assert ids is not None
        if self.wire_name:
            sent = gradient.values.astype(parse_dtype(self.wire_name), copy=False)
            gradient = gradient._replace(values=sent)
        requests = []
        shards = self._record.shards
        for shard, part in zip(shards, split_by_hash(ids, len(shards)), strict=True):
            if len(part):
                name = shard.spec.name
                operation = ApplyIds(name, optimizer, rule, step, next_key(name))
                requests.append(
                    OperationRequest(shard.server, operation, gradient.slice_arrays(part))
                )
        return requests

    #: Called by `Optimizer.apply_gradients` and `Optimizer.begin_gradients`.
    push_gradients = staticmethod(push_gradients)
    begin_gradients = staticmethod(begin_gradients)

    def __repr__(self) -> str:
        return (
            f"<EmbeddingTable {self.name!r} dim={self.dim} dtype={self.dtype} on "
            f"{len(self._record.shards)} servers>"
        )


def _floating(argument: str, dtype: Any) -> np.dtype[Any]:
    found = as_dtype(dtype)
    if not is_floating(found):
        raise ValueError(f"`{argument}` of a table must be a floating dtype, but got {found}")
    return found


def _initializer(given: Any, seed: int) -> Initializer:
    if isinstance(given, Zeros | Constant | Uniform | Normal):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Constant(float(given))
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given](seed)
    raise ValueError(
        f"`initializer` must be one of {', '.join(map(repr, _NAMED))}, a number, or one of "
        f"hr.initializers, but got {given!r}"
    )


# --- pulled rows: distinct ids of many tables, in one request to each server ----------------------

Ids = NDArray[np.int64]


class PulledRows(NamedTuple):
    """Rows of one table.

    Attributes:
        ids: Distinct ids, sorted.
        inverse: Index among them of each requested id; has the shape of the request.
        rows: One row for each of `ids`.
    """

    ids: Ids
    inverse: Ids
    rows: NDArray[Any]

    def expand(self) -> NDArray[Any]:
        """Return a row for each requested id."""
        is_plain = self.inverse.ndim == 1 and len(self.inverse) == len(self.ids)
        if is_plain and np.array_equal(self.inverse, np.arange(len(self.ids))):
            return self.rows
        return self.rows.take(self.inverse, axis=0)

    def pool(self, combiner: str) -> NDArray[Any]:
        """Return a row for each bag of ids along their last axis (`distribute.bag_combiner`)."""
        return combine_bags(self.rows, self.inverse, combiner, adding_dtype(self.rows.dtype))


class TablePull:
    """Requests for rows of one table, to be sent together with others.

    Args:
        table: The table.
        ids: Distinct ids.
        counts: Number of look-ups of each id; None reads rows and changes nothing.
        initialize: Whether, without `counts`, ids without a row get initial values, not zeros.

    Attributes:
        requests: Requests to the servers of the table's cluster.
    """

    def __init__(
        self, table: EmbeddingTable, ids: Ids, counts: Ids | None, *, initialize: bool = False
    ) -> None:
        self.requests, self._parts = table.pull_requests(ids, counts, initialize=initialize)
        self._table = table
        self._count = len(ids)

    @property
    def servers(self) -> ParameterServerClient:
        """Client of the table's servers."""
        return self._table.cluster.servers

    def rows(self, answers: Sequence[OperationReply]) -> NDArray[Any]:
        """Return the rows in the order of the ids, from the replies to `requests`."""
        arrays = [arrays[0] for _, arrays in answers]
        if len(arrays) == 1:
            return arrays[0].astype(self._table.dtype, copy=False)
        rows = np.empty((self._count, self._table.dim), self._table.dtype)
        for part, array in zip(self._parts, arrays, strict=True):
            rows[part] = array
        return rows


def pull(tables: Sequence[EmbeddingTable], ids: Sequence[Any], *, counts: bool) -> list[PulledRows]:
    """Pull the rows of ids of several tables, with one request to each server.

    Args:
        tables: Tables of one cluster.
        ids: For each table, integers of any shape.
        counts: Whether to count the ids and create rows of newly admitted ids, for training.

    Raises:
        FailedPreconditionError: If JAX traces the calling code.
        ValueError: If the tables are in several clusters.
    """
    for table in tables:
        raise_if_tracing(f"EmbeddingTable {table.name!r}")
    if len({id(table.cluster) for table in tables}) > 1:
        raise ValueError("the tables of one look-up must be in one cluster, but are in several")
    found: list[tuple[Ids, Ids]] = []
    pulls: list[TablePull] = []
    for table, table_ids in zip(tables, ids, strict=True):
        distinct, inverse = unique_ids(table.check_ids(table_ids))
        occurrences = None
        if counts:
            occurrences = np.bincount(inverse.reshape(-1), minlength=len(distinct))
            occurrences = occurrences.astype(np.int64, copy=False)
        found.append((distinct, inverse))
        pulls.append(TablePull(table, distinct, occurrences))
    requests = [request for each in pulls for request in each.requests]
    answers = iter(execute_with_prefetch(tables[0].cluster.servers, requests) if requests else ())
    return [
        PulledRows(distinct, inverse, each.rows([next(answers) for _ in each.requests]))
        for each, (distinct, inverse) in zip(pulls, found, strict=True)
    ]


# --- all rows in one file: safetensors or Parquet -------------------------------------------------

TableRowsChunk = tuple[NDArray[np.int64], NDArray[Any]]

T = TypeVar("T")

_ROWS_PER_CHUNK = 65_536


def _choose_by_suffix(path: Path, by_suffix: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    found = by_suffix.get(path.suffix)
    if found is None:
        raise ValueError(
            f"`path` of a table must end in one of {', '.join(by_suffix)}, but got "
            f"{os.fspath(path)!r}"
        )
    return found


def _write_safetensors(path: Path, table: EmbeddingTable) -> int:
    ids: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    rows: list[NDArray[Any]] = [np.zeros((0, table.dim), table.dtype)]
    for part, values in table.export():
        ids.append(part)
        rows.append(values)
    columns = {"ids": np.concatenate(ids), "rows": np.concatenate(rows)}
    save_file(columns, path, {"table": table.name})
    return len(columns["ids"])


def _read_safetensors(path: Path) -> Iterator[TableRowsChunk]:
    with safe_open(path, "numpy") as file:
        if not {"ids", "rows"} <= set(file.keys()):
            raise InvalidArgumentError(
                f"{path} has tensors {sorted(file.keys())}, but a saved table has `ids` and `rows`"
            )
        ids, rows = file.get_slice("ids"), file.get_slice("rows")
        count = ids.get_shape()[0]
        for start in range(0, count, _ROWS_PER_CHUNK):
            part = slice(start, min(start + _ROWS_PER_CHUNK, count))
            yield ids[part], rows[part]


def _write_parquet(path: Path, table: EmbeddingTable) -> int:
    arrow, parquet = _parquet()
    kind = table.dtype if table.dtype.isbuiltin == 1 else np.dtype(np.float32)
    row = arrow.list_(arrow.from_numpy_dtype(kind), table.dim)
    schema = arrow.schema([("id", arrow.int64()), ("row", row)])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for ids, rows in table.export():
            flat = arrow.array(rows.astype(kind, copy=False).reshape(-1))
            columns = [arrow.array(ids), arrow.FixedSizeListArray.from_arrays(flat, table.dim)]
            writer.write_table(arrow.table(columns, schema=schema))
            count += len(ids)
    return count


def _read_parquet(path: Path) -> Iterator[TableRowsChunk]:
    _, parquet = _parquet()
    with parquet.ParquetFile(path) as file:
        if not {"id", "row"} <= set(file.schema_arrow.names):
            raise InvalidArgumentError(
                f"{path} has columns {file.schema_arrow.names}, but a saved table has `id` and "
                "`row`"
            )
        for batch in file.iter_batches(_ROWS_PER_CHUNK, columns=["id", "row"]):
            ids = batch.column("id").to_numpy(zero_copy_only=False)
            flat = batch.column("row").flatten().to_numpy(zero_copy_only=False)
            yield ids, flat.reshape(len(ids), -1)


def _parquet() -> Sequence[Any]:
    return pyarrow(), importlib.import_module("pyarrow.parquet")


_WRITERS = {".safetensors": _write_safetensors, ".parquet": _write_parquet}
_READERS = {".safetensors": _read_safetensors, ".parquet": _read_parquet}
