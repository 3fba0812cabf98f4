"""Making a variable on parameter servers: its shape, its shards, where they go, its first values.

A value is built here and sent in parts. Where that is too much for this process, a function that
takes `partition_shape` and `partition_offset` is called once a shard, and an initializer of the
servers' own (`Zeros`, `Uniform` ...) not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_int
from headrace.distribute.scattering import cast_exactly
from headrace.errors import AlreadyExistsError, InvalidArgumentError
from headrace.parameter_server.arrays import as_array
from headrace.parameter_server.gradients import IdBatch, split_by_rows
from headrace.parameter_server.operations import (
    Apply,
    Assign,
    Create,
    DescribeStore,
    GatherRows,
    ReadShard,
    Scatter,
    StoreDescription,
)
from headrace.parameter_server.optimizer_steps import Gradient
from headrace.parameter_server.partitioners import count_shards, split_rows
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
    ShardSpec,
    StepParameters,
    Uniform,
    Zeros,
    name_of,
    parse_dtype,
)
from headrace.parameter_server.write_context import next_key

__all__ = [
    "PlacedShard",
    "VariableRecord",
    "VariableShards",
    "add_to_variables",
    "create_shards",
    "place_shards",
    "resolve_initial_value",
]


_PART = re.compile(r"/part_\d+$")

_INITIALIZERS = (Zeros, Constant, Uniform, Normal)


class PlacedShard(msgspec.Struct, frozen=True):
    """A shard, and which server has it."""

    spec: ShardSpec
    server: int

    @property
    def rows(self) -> slice:
        """The rows of the variable that it holds."""
        return slice(self.spec.row, self.spec.row + (self.spec.shape[0] if self.spec.shape else 1))


class VariableRecord(msgspec.Struct, frozen=True):
    """A variable, as its handle carries it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aggregation: str
    shards: tuple[PlacedShard, ...]


class InitialValue(msgspec.Struct, frozen=True):
    """First values: all of them, or what makes them.

    Attributes:
        shape: Of the variable.
        dtype: Of the variable.
        value: All of it.
        shard_function: Makes the value of a shard of this shape that begins at this offset.
        initializer: Of the servers' own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value: Any = None
    shard_function: Callable[..., Any] | None = None
    initializer: Initializer | None = None


def resolve_initial_value(initial_value: Any, shape: Any, dtype: Any) -> InitialValue:
    """Find out the shape and dtype of a variable from what a user gave.

    Raises:
        TypeError: It is no array of numbers.
        ValueError: The shape is missing, or another one.
    """
    sizes = None if shape is None else _check_shape(shape)
    if isinstance(initial_value, _INITIALIZERS):
        if sizes is None:
            raise ValueError(
                f"`shape` must say how large the variable is that {initial_value} fills"
            )
        found = np.dtype(np.float32 if dtype is None else dtype)
        return InitialValue(sizes, found, initializer=initial_value)
    if callable(initial_value):
        if sizes is not None and dtype is not None:
            return InitialValue(sizes, np.dtype(dtype), shard_function=initial_value)
        initial_value = initial_value()
    if isinstance(initial_value, str):
        raise TypeError(
            f"the initial value must be numbers or an initializer, but got {initial_value!r}; "
            "hr.initializers has Constant, Normal, Uniform and Zeros"
        )
    array = as_array(initial_value)
    if dtype is not None:
        array = cast_exactly(array, np.dtype(dtype), "the variable")
    if sizes is not None and array.shape != sizes:
        raise ValueError(f"`shape` is {sizes}, but the initial value has shape {array.shape}")
    name_of(array.dtype)
    return InitialValue(array.shape, array.dtype, value=array)


def place_shards(
    name: str,
    initial: InitialValue,
    partitioner: Callable[..., Any] | None,
    choose_server: Callable[[int], int],
) -> tuple[PlacedShard, ...]:
    """Cut a variable into shards, and place each.

    Args:
        name: Of the variable.
        initial: Its shape and dtype.
        partitioner: Says into how many; None: one.
        choose_server: Takes a shard's bytes, and returns its server.

    Raises:
        ValueError: The partitioner returned nonsense, or the name is that of a part.
    """
    if _PART.search(name):
        raise ValueError(
            f"`name` is {name!r}, which is what a part of the variable "
            f"{_PART.sub('', name)!r} is called; use one that does not end in /part_ and a number"
        )
    shape = initial.shape
    dtype = name_of(initial.dtype)
    shards = 1
    if partitioner is not None and shape:
        shards = count_shards(partitioner(shape, initial.dtype), shape)
    ranges = split_rows(shape[0], shards) if shards > 1 else [range(shape[0] if shape else 1)]
    row_bytes = math.prod(shape[1:]) * initial.dtype.itemsize
    return tuple(
        PlacedShard(
            ShardSpec(
                name=name if shards == 1 else f"{name}/part_{index}",
                variable=name,
                index=index,
                row=rows.start,
                shape=(len(rows), *shape[1:]) if shape else (),
                dtype=dtype,
                variable_shape=shape,
            ),
            choose_server(len(rows) * row_bytes),
        )
        for index, rows in enumerate(ranges)
    )


def create_shards(
    servers: ParameterServerClient, shards: Sequence[PlacedShard], initial: InitialValue
) -> bool:
    """Have the servers make shards, all at a time; return whether any was there before.

    Raises:
        AlreadyExistsError: There is a variable of this name that is another one.
    """
    _check_existing(servers, shards)
    asks = []
    for shard in shards:
        arrays = (
            []
            if initial.initializer is not None
            else [_shard_value(shard, initial, len(shards) > 1)]
        )
        asks.append(OperationRequest(shard.server, Create(shard.spec, initial.initializer), arrays))
    return any(answer.existed for answer, _ in servers.execute_all(asks))  # type: ignore[union-attr]


def _check_existing(servers: ParameterServerClient, shards: Sequence[PlacedShard]) -> None:
    """Refuse a name under which a variable is there that is cut or placed in another way."""
    spec = shards[0].spec
    asks = [
        OperationRequest(server, DescribeStore(spec.variable)) for server in range(len(servers))
    ]
    found: dict[str, ShardSpec] = {}
    where: set[tuple[str, int]] = set()
    for server, (answer, _) in enumerate(servers.execute_all(asks)):
        assert isinstance(answer, StoreDescription)
        for each in answer.shards:
            found[each.spec.name] = each.spec
            where.add((each.spec.name, server))
    wanted = {shard.spec.name: shard.spec for shard in shards}
    if any(wanted.get(name) != one for name, one in found.items()):
        known = next(iter(found.values()))
        raise AlreadyExistsError(
            f"the parameter servers have a variable {spec.variable!r} of shape "
            f"{known.variable_shape} and dtype {known.dtype} in {_format_count(found)}, of another "
            "program or of this one before it was started again; it cannot be made of shape "
            f"{spec.variable_shape} and dtype {spec.dtype} in {_format_count(wanted)}: use another "
            "name "
            "or the same partitioner, or start the servers again"
        )
    for shard in shards:
        if shard.spec.name in found and (shard.spec.name, shard.server) not in where:
            elsewhere = next(server for name, server in where if name == shard.spec.name)
            raise AlreadyExistsError(
                f"the parameter servers have the variable {spec.variable!r} already, with "
                f"{shard.spec.name!r} on server {elsewhere}, and this program would place that on "
                f"server {shard.server}: make the same variables in the same order, or start the "
                "servers again"
            )


def _format_count(shards: Mapping[str, ShardSpec]) -> str:
    return "1 shard" if len(shards) == 1 else f"{len(shards)} shards"


def _shard_value(shard: PlacedShard, initial: InitialValue, is_part: bool) -> NDArray[Any]:
    if initial.shard_function is None:
        whole: NDArray[Any] = initial.value
        return whole[shard.rows] if is_part else whole
    spec = shard.spec
    if is_part:
        offset = (spec.row, *[0] * (len(spec.shape) - 1))
        try:
            made = as_array(
                initial.shard_function(partition_shape=spec.shape, partition_offset=offset)
            )
        except (TypeError, ValueError):
            # It knows nothing of parts. It might raise these for another reason: then so it will.
            made = as_array(initial.shard_function())
    else:
        made = as_array(initial.shard_function())
    if made.shape != spec.shape and made.shape == initial.shape:
        made = made[shard.rows]
    if made.shape != spec.shape:
        raise InvalidArgumentError(
            f"the function that makes {spec.name!r} returned shape {made.shape}, and neither "
            f"{spec.shape} of the shard nor {initial.shape} of the variable"
        )
    return made.astype(parse_dtype(spec.dtype), copy=False)


def _check_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int | np.integer):
        shape = (shape,)
    return tuple(check_int("shape", size, minimum=0) for size in shape)


# --- the shards of one variable: what of an operation on all of it each of them is asked ----------

# Everything here takes arrays of the right shape and dtype; what users may pass, `variable` knows.

Rows = NDArray[np.int64]


class VariableShards:
    """The shards of a variable, and the servers that have them.

    Args:
        servers: Those of the cluster.
        record: Of the variable.
    """

    def __init__(self, servers: ParameterServerClient, record: VariableRecord) -> None:
        self.servers = servers
        self._row_shape = record.shape[1:]
        self._dtype = parse_dtype(record.dtype)
        #: In which rows are sent: half of an int64, for most variables.
        self._row_dtype = np.min_scalar_type(max(record.shape[:1], default=0))
        self._shards: Sequence[PlacedShard] = record.shards
        self._ranges = [range(each.rows.start, each.rows.stop) for each in record.shards]

    @property
    def is_single(self) -> bool:
        """Whether there is one shard alone."""
        return len(self._shards) == 1

    def read(self) -> NDArray[Any]:
        """Return the value."""
        return self.join_value(self.servers.execute_all(self.read_requests()))

    def read_slot(self, name: str) -> NDArray[Any]:
        """Return a slot, by "optimizer/name"."""
        asks = [
            OperationRequest(each.server, ReadShard(each.spec.name, name)) for each in self._shards
        ]
        return self.join_value(self.servers.execute_all(asks))

    def read_requests(self) -> list[OperationRequest]:
        """Return what asks for the value."""
        return [OperationRequest(each.server, ReadShard(each.spec.name)) for each in self._shards]

    def join_value(self, answers: Sequence[OperationReply]) -> NDArray[Any]:
        """Return the value; in one copy where it has several parts, and in none else."""
        parts = [arrays[0] for _, arrays in answers]
        return parts[0] if self.is_single else np.concatenate(parts)

    def read_rows(self, batch: IdBatch, combiner: str | None = None) -> NDArray[Any]:
        """Return the rows of a batch, or of each of its bags one."""
        asks = self.row_requests(batch.unique)
        answers = execute_with_prefetch(self.servers, asks) if asks else []
        parts = [arrays[0] for _, arrays in answers]
        if combiner is None:
            return batch.expand(parts, self._row_shape, self._dtype)
        return batch.pool(parts, self._row_shape, self._dtype, combiner)

    def row_requests(self, rows: Rows) -> list[OperationRequest]:
        """Return what asks for rows, which rise and of which each is there once."""
        sent = rows.astype(self._row_dtype)
        return [
            OperationRequest(shard.server, GatherRows(shard.spec.name), [sent[part]])
            for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True)
            if part.stop > part.start
        ]

    def join_rows(self, answers: Sequence[OperationReply]) -> NDArray[Any]:
        """Return the rows that `row_requests` asked for."""
        parts = [arrays[0] for _, arrays in answers]
        if not parts:
            return np.empty((0, *self._row_shape), self._dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def assign(
        self, mode: str, value: NDArray[Any], slot: str = "", initial_value: float = 0.0
    ) -> None:
        """Change the whole value; or set a slot, which begins with `initial_value`."""
        self.servers.execute_all(self.assign_requests(mode, value, slot, initial_value))

    def assign_requests(
        self, mode: str, value: NDArray[Any], slot: str = "", initial_value: float = 0.0
    ) -> list[OperationRequest]:
        """Return what asks for a change of the whole value, or of a slot."""
        return [
            OperationRequest(
                shard.server,
                Assign(shard.spec.name, mode, next_key(shard.spec.name), slot, initial_value),
                [value if self.is_single else value[shard.rows]],
            )
            for shard in self._shards
        ]

    def scatter(self, mode: str, rows: Rows, values: NDArray[Any]) -> None:
        """Change rows, in any order; one that is named twice is changed twice."""
        parts = [slice(0, len(rows))]
        if not self.is_single:  # stable: of a row that is named twice the last stays the last
            order = np.argsort(rows, kind="stable")
            rows, values = rows[order], values[order]
            parts = split_by_rows(rows, self._ranges)
        asks = []
        for shard, part in zip(self._shards, parts, strict=True):
            if part.stop > part.start:
                operation = Scatter(shard.spec.name, mode, next_key(shard.spec.name))
                asks.append(OperationRequest(shard.server, operation, [rows[part], values[part]]))
        self.servers.execute_all(asks)

    def step_requests(
        self, optimizer: str, rule: OptimizerRule, step: StepParameters, gradient: Gradient
    ) -> list[OperationRequest]:
        """Return what one step of an optimizer asks of which server."""
        rows, values, _ = gradient
        asks = []
        if rows is None:
            for shard in self._shards:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                asks.append(
                    OperationRequest(
                        shard.server, operation, [values if self.is_single else values[shard.rows]]
                    )
                )
            return asks
        for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True):
            if part.stop > part.start:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                sent = gradient.slice_arrays(part)
                sent[0] = sent[0].astype(self._row_dtype)
                asks.append(OperationRequest(shard.server, operation, sent))
        return asks


def add_to_variables(pairs: Sequence[tuple[Any, NDArray[Any]]]) -> None:
    """Add to several variables, for which each of their servers is asked once.

    Args:
        pairs: A variable on parameter servers of one cluster, and what is added, of its shape and
            dtype.
    """
    wholes: list[tuple[VariableShards, NDArray[Any]]] = [
        (each.sharded, value) for each, value in pairs
    ]
    asks = [ask for whole, value in wholes for ask in whole.assign_requests("add", value)]
    if asks:
        wholes[0][0].servers.execute_all(asks)
