"""Variables on parameter servers: shape, shards, placement, initial values, and requests.

A value is computed in this process and sent in parts. If it is too large for that, a function that
takes `partition_shape` and `partition_offset` is called once for each shard; initializers (`Zeros`,
`Uniform` ...) are evaluated on the servers.
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
from headrace.distribute.bag_combiner import Combiner
from headrace.distribute.row_access import cast_exactly
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
    """A shard and the index of its server."""

    spec: ShardSpec
    server: int

    @property
    def rows(self) -> slice:
        """Rows of the variable in the shard."""
        return slice(self.spec.row, self.spec.row + (self.spec.shape[0] if self.spec.shape else 1))


class VariableRecord(msgspec.Struct, frozen=True):
    """Record of a variable that its handle carries."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aggregation: str
    shards: tuple[PlacedShard, ...]


class InitialValue(msgspec.Struct, frozen=True):
    """Initial values of a variable, or their source.

    Attributes:
        shape: Shape of the variable.
        dtype: Dtype of the variable.
        value: The complete value.
        shard_function: Returns the value of a shard, given its shape and offset.
        initializer: Initializer that the servers evaluate.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value: Any = None
    shard_function: Callable[..., Any] | None = None
    initializer: Initializer | None = None


def resolve_initial_value(initial_value: Any, shape: Any, dtype: Any) -> InitialValue:
    """Determine shape and dtype of a variable from the user's arguments.

    Raises:
        TypeError: If the value is not an array of numbers.
        ValueError: If the shape is missing or does not match the value.
    """
    sizes = None if shape is None else _check_shape(shape)
    if isinstance(initial_value, _INITIALIZERS):
        if sizes is None:
            raise ValueError(f"`shape` is required with the initializer {initial_value}")
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
    """Partition a variable into shards, and choose their servers.

    Args:
        name: Name of the variable.
        initial: Shape and dtype of the variable.
        partitioner: Returns the number of shards; None means one.
        choose_server: Returns the server for a shard of a number of bytes.

    Raises:
        ValueError: If the partitioner returned an invalid value, or the name is that of a shard.
    """
    if _PART.search(name):
        raise ValueError(
            f"`name` {name!r} is reserved for a shard of the variable {_PART.sub('', name)!r}; use "
            "a name that does not end in /part_ and a number"
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
    """Create shards on the servers, in parallel; return whether any existed before.

    Raises:
        AlreadyExistsError: If a different variable of this name exists.
    """
    _check_existing(servers, shards)
    requests = []
    for shard in shards:
        arrays = (
            []
            if initial.initializer is not None
            else [_shard_value(shard, initial, len(shards) > 1)]
        )
        requests.append(
            OperationRequest(shard.server, Create(shard.spec, initial.initializer), arrays)
        )
    return any(answer.existed for answer, _ in servers.execute_all(requests))  # type: ignore[union-attr]


def _check_existing(servers: ParameterServerClient, shards: Sequence[PlacedShard]) -> None:
    """Reject the name of an existing variable that is partitioned or placed differently."""
    spec = shards[0].spec
    requests = [
        OperationRequest(server, DescribeStore(spec.variable)) for server in range(len(servers))
    ]
    found: dict[str, ShardSpec] = {}
    locations: set[tuple[str, int]] = set()
    for server, (answer, _) in enumerate(servers.execute_all(requests)):
        assert isinstance(answer, StoreDescription)
        for each in answer.shards:
            found[each.spec.name] = each.spec
            locations.add((each.spec.name, server))
    requested = {shard.spec.name: shard.spec for shard in shards}
    if any(requested.get(name) != shard_spec for name, shard_spec in found.items()):
        known = next(iter(found.values()))
        raise AlreadyExistsError(
            f"the parameter servers have a variable {spec.variable!r} of shape "
            f"{known.variable_shape} and dtype {known.dtype} in {_format_count(found)}, created by "
            "another program or by this one before a restart; it cannot be created with shape "
            f"{spec.variable_shape} and dtype {spec.dtype} in {_format_count(requested)}: use "
            "another name or the same partitioner, or restart the servers"
        )
    for shard in shards:
        if shard.spec.name in found and (shard.spec.name, shard.server) not in locations:
            existing_server = next(server for name, server in locations if name == shard.spec.name)
            raise AlreadyExistsError(
                f"the parameter servers have a variable {spec.variable!r} with {shard.spec.name!r} "
                f"on server {existing_server}, but this program places it on server "
                f"{shard.server}: create the same variables in the same order, or restart the "
                "servers"
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
            value = as_array(
                initial.shard_function(partition_shape=spec.shape, partition_offset=offset)
            )
        except (TypeError, ValueError):
            # It does not take these arguments. If it raises for another reason, it will raise
            # again.
            value = as_array(initial.shard_function())
    else:
        value = as_array(initial.shard_function())
    if value.shape != spec.shape and value.shape == initial.shape:
        value = value[shard.rows]
    if value.shape != spec.shape:
        raise InvalidArgumentError(
            f"the function that creates {spec.name!r} returned shape {value.shape}, but must "
            f"return {spec.shape} for the shard or {initial.shape} for the variable"
        )
    return value.astype(parse_dtype(spec.dtype), copy=False)


def _check_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int | np.integer):
        shape = (shape,)
    return tuple(check_int("shape", size, minimum=0) for size in shape)


# --- operations on all shards of one variable -----------------------------------------------------

# These methods expect arrays of the right shape and dtype; `variable` checks what users pass.

Rows = NDArray[np.int64]


class VariableShards:
    """The shards of a variable, and their servers.

    Args:
        servers: Client of the cluster's servers.
        record: Record of the variable.
    """

    def __init__(self, servers: ParameterServerClient, record: VariableRecord) -> None:
        self.servers = servers
        self._row_shape = record.shape[1:]
        self._dtype = parse_dtype(record.dtype)
        #: Dtype in which row indices are sent: for most variables, half the size of an int64 or
        #: less.
        self._row_dtype = np.min_scalar_type(max(record.shape[:1], default=0))
        self._shards: Sequence[PlacedShard] = record.shards
        self._ranges = [range(each.rows.start, each.rows.stop) for each in record.shards]

    @property
    def is_single(self) -> bool:
        """Whether the variable has only one shard."""
        return len(self._shards) == 1

    def read(self) -> NDArray[Any]:
        """Return the value."""
        return self.join_value(self.servers.execute_all(self.read_requests()))

    def read_slot(self, name: str) -> NDArray[Any]:
        """Return a slot, by "optimizer/name"."""
        requests = [
            OperationRequest(each.server, ReadShard(each.spec.name, name)) for each in self._shards
        ]
        return self.join_value(self.servers.execute_all(requests))

    def read_requests(self) -> list[OperationRequest]:
        """Return the requests that read the value."""
        return [OperationRequest(each.server, ReadShard(each.spec.name)) for each in self._shards]

    def join_value(self, answers: Sequence[OperationReply]) -> NDArray[Any]:
        """Return the value from the replies; several parts are copied once, a single one is not."""
        parts = [arrays[0] for _, arrays in answers]
        return parts[0] if self.is_single else np.concatenate(parts)

    def read_rows(self, batch: IdBatch, combiner: Combiner | None = None) -> NDArray[Any]:
        """Return the rows of a batch, or one row for each of its bags."""
        requests = self.row_requests(batch.unique)
        answers = execute_with_prefetch(self.servers, requests) if requests else []
        parts = [arrays[0] for _, arrays in answers]
        if combiner is None:
            return batch.expand(parts, self._row_shape, self._dtype)
        return batch.pool(parts, self._row_shape, self._dtype, combiner)

    def row_requests(self, rows: Rows) -> list[OperationRequest]:
        """Return the requests for distinct rows in ascending order."""
        sent = rows.astype(self._row_dtype)
        return [
            OperationRequest(shard.server, GatherRows(shard.spec.name), [sent[part]])
            for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True)
            if part.stop > part.start
        ]

    def join_rows(self, answers: Sequence[OperationReply]) -> NDArray[Any]:
        """Return the rows from the replies to `row_requests`."""
        parts = [arrays[0] for _, arrays in answers]
        if not parts:
            return np.empty((0, *self._row_shape), self._dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def assign(
        self, mode: str, value: NDArray[Any], slot: str = "", initial_value: float = 0.0
    ) -> None:
        """Change the whole value, or set a slot, whose elements begin with `initial_value`."""
        self.servers.execute_all(self.assign_requests(mode, value, slot, initial_value))

    def assign_requests(
        self, mode: str, value: NDArray[Any], slot: str = "", initial_value: float = 0.0
    ) -> list[OperationRequest]:
        """Return the requests that change the whole value or a slot."""
        return [
            OperationRequest(
                shard.server,
                Assign(shard.spec.name, mode, next_key(shard.spec.name), slot, initial_value),
                [value if self.is_single else value[shard.rows]],
            )
            for shard in self._shards
        ]

    def scatter(self, mode: str, rows: Rows, values: NDArray[Any]) -> None:
        """Change rows, in any order; a repeated row is changed each time."""
        parts = [slice(0, len(rows))]
        if not self.is_single:  # stable, so that the last of repeated rows stays the last
            order = np.argsort(rows, kind="stable")
            rows, values = rows[order], values[order]
            parts = split_by_rows(rows, self._ranges)
        requests = []
        for shard, part in zip(self._shards, parts, strict=True):
            if part.stop > part.start:
                operation = Scatter(shard.spec.name, mode, next_key(shard.spec.name))
                requests.append(
                    OperationRequest(shard.server, operation, [rows[part], values[part]])
                )
        self.servers.execute_all(requests)

    def step_requests(
        self, optimizer: str, rule: OptimizerRule, step: StepParameters, gradient: Gradient
    ) -> list[OperationRequest]:
        """Return the requests of one optimizer step."""
        rows, values, _ = gradient
        requests = []
        if rows is None:
            for shard in self._shards:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                requests.append(
                    OperationRequest(
                        shard.server, operation, [values if self.is_single else values[shard.rows]]
                    )
                )
            return requests
        for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True):
            if part.stop > part.start:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                sent = gradient.slice_arrays(part)
                sent[0] = sent[0].astype(self._row_dtype)
                requests.append(OperationRequest(shard.server, operation, sent))
        return requests


def add_to_variables(pairs: Sequence[tuple[Any, NDArray[Any]]]) -> None:
    """Add to several variables, with one request to each server.

    Args:
        pairs: Pairs of a variable on parameter servers of one cluster and the array to add, of its
            shape and dtype.
    """
    wholes: list[tuple[VariableShards, NDArray[Any]]] = [
        (each.sharded, value) for each, value in pairs
    ]
    requests = [
        request for whole, value in wholes for request in whole.assign_requests("add", value)
    ]
    if requests:
        wholes[0][0].servers.execute_all(requests)
