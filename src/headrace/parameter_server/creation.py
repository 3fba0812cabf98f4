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
from headrace.parameter_server.connection import Answered, Ask, Servers
from headrace.parameter_server.gradients import Batch, split_by_rows
from headrace.parameter_server.operations import (
    Apply,
    Assign,
    Create,
    Describe,
    Described,
    Gather,
    Read,
    Scatter,
)
from headrace.parameter_server.origin import next_key
from headrace.parameter_server.partitioners import count_shards, ranges_of_rows
from headrace.parameter_server.pushing import Gradient
from headrace.parameter_server.read_cache import ask_together
from headrace.parameter_server.specs import (
    Constant,
    Initializer,
    Normal,
    OptimizerRule,
    ShardSpec,
    Step,
    Uniform,
    Zeros,
    dtype_named,
    name_of,
)

__all__ = ["PlacedShard", "Sharded", "VariableRecord", "add_together", "cut", "initial", "make"]


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


class Initial(msgspec.Struct, frozen=True):
    """First values: all of them, or what makes them.

    Attributes:
        shape: Of the variable.
        dtype: Of the variable.
        value: All of it.
        by_shard: Makes the value of a shard of this shape that begins at this offset.
        initializer: Of the servers' own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value: Any = None
    by_shard: Callable[..., Any] | None = None
    initializer: Initializer | None = None


def initial(initial_value: Any, shape: Any, dtype: Any) -> Initial:
    """Find out the shape and dtype of a variable from what a user gave.

    Raises:
        TypeError: It is no array of numbers.
        ValueError: The shape is missing, or another one.
    """
    sizes = None if shape is None else _sizes(shape)
    if isinstance(initial_value, _INITIALIZERS):
        if sizes is None:
            raise ValueError(
                f"`shape` must say how large the variable is that {initial_value} fills"
            )
        found = np.dtype(np.float32 if dtype is None else dtype)
        return Initial(sizes, found, initializer=initial_value)
    if callable(initial_value):
        if sizes is not None and dtype is not None:
            return Initial(sizes, np.dtype(dtype), by_shard=initial_value)
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
    return Initial(array.shape, array.dtype, value=array)


def cut(
    name: str,
    first: Initial,
    partitioner: Callable[..., Any] | None,
    place: Callable[[int], int],
) -> tuple[PlacedShard, ...]:
    """Cut a variable into shards, and place each.

    Args:
        name: Of the variable.
        first: Its shape and dtype.
        partitioner: Says into how many; None: one.
        place: Takes a shard's bytes, and returns its server.

    Raises:
        ValueError: The partitioner returned nonsense, or the name is that of a part.
    """
    if _PART.search(name):
        raise ValueError(
            f"`name` is {name!r}, which is what a part of the variable "
            f"{_PART.sub('', name)!r} is called; use one that does not end in /part_ and a number"
        )
    shape = first.shape
    dtype = name_of(first.dtype)
    shards = 1
    if partitioner is not None and shape:
        shards = count_shards(partitioner(shape, first.dtype), shape)
    ranges = ranges_of_rows(shape[0], shards) if shards > 1 else [range(shape[0] if shape else 1)]
    row_bytes = math.prod(shape[1:]) * first.dtype.itemsize
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
            place(len(rows) * row_bytes),
        )
        for index, rows in enumerate(ranges)
    )


def make(servers: Servers, shards: Sequence[PlacedShard], first: Initial) -> bool:
    """Have the servers make shards, all at a time; return whether any was there before.

    Raises:
        AlreadyExistsError: There is a variable of this name that is another one.
    """
    _check_alike(servers, shards)
    asks = []
    for shard in shards:
        arrays = [] if first.initializer is not None else [_value_of(shard, first, len(shards) > 1)]
        asks.append(Ask(shard.server, Create(shard.spec, first.initializer), arrays))
    return any(answer.existed for answer, _ in servers.ask_all(asks))  # type: ignore[union-attr]


def _check_alike(servers: Servers, shards: Sequence[PlacedShard]) -> None:
    """Refuse a name under which a variable is there that is cut or placed in another way."""
    spec = shards[0].spec
    asks = [Ask(server, Describe(spec.variable)) for server in range(len(servers))]
    found: dict[str, ShardSpec] = {}
    where: set[tuple[str, int]] = set()
    for server, (answer, _) in enumerate(servers.ask_all(asks)):
        assert isinstance(answer, Described)
        for each in answer.shards:
            found[each.spec.name] = each.spec
            where.add((each.spec.name, server))
    wanted = {shard.spec.name: shard.spec for shard in shards}
    if any(wanted.get(name) != one for name, one in found.items()):
        known = next(iter(found.values()))
        raise AlreadyExistsError(
            f"the parameter servers have a variable {spec.variable!r} of shape "
            f"{known.variable_shape} and dtype {known.dtype} in {_counted(found)}, of another "
            "program or of this one before it was started again; it cannot be made of shape "
            f"{spec.variable_shape} and dtype {spec.dtype} in {_counted(wanted)}: use another name "
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


def _counted(shards: Mapping[str, ShardSpec]) -> str:
    return "1 shard" if len(shards) == 1 else f"{len(shards)} shards"


def _value_of(shard: PlacedShard, first: Initial, is_part: bool) -> NDArray[Any]:
    if first.by_shard is None:
        whole: NDArray[Any] = first.value
        return whole[shard.rows] if is_part else whole
    spec = shard.spec
    if is_part:
        offset = (spec.row, *[0] * (len(spec.shape) - 1))
        try:
            made = as_array(first.by_shard(partition_shape=spec.shape, partition_offset=offset))
        except (TypeError, ValueError):
            # It knows nothing of parts. It might raise these for another reason: then so it will.
            made = as_array(first.by_shard())
    else:
        made = as_array(first.by_shard())
    if made.shape != spec.shape and made.shape == first.shape:
        made = made[shard.rows]
    if made.shape != spec.shape:
        raise InvalidArgumentError(
            f"the function that makes {spec.name!r} returned shape {made.shape}, and neither "
            f"{spec.shape} of the shard nor {first.shape} of the variable"
        )
    return made.astype(dtype_named(spec.dtype), copy=False)


def _sizes(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int | np.integer):
        shape = (shape,)
    return tuple(check_int("shape", size, minimum=0) for size in shape)


# --- the shards of one variable: what of an operation on all of it each of them is asked ----------

# Everything here takes arrays of the right shape and dtype; what users may pass, `variable` knows.

Rows = NDArray[np.int64]


class Sharded:
    """The shards of a variable, and the servers that have them.

    Args:
        servers: Those of the cluster.
        record: Of the variable.
    """

    def __init__(self, servers: Servers, record: VariableRecord) -> None:
        self.servers = servers
        self._row_shape = record.shape[1:]
        self._dtype = dtype_named(record.dtype)
        #: In which rows are sent: half of an int64, for most variables.
        self._row_dtype = np.min_scalar_type(max(record.shape[:1], default=0))
        self._shards: Sequence[PlacedShard] = record.shards
        self._ranges = [range(each.rows.start, each.rows.stop) for each in record.shards]

    @property
    def is_whole(self) -> bool:
        """Whether there is one shard alone."""
        return len(self._shards) == 1

    def read(self) -> NDArray[Any]:
        """Return the value."""
        return self.joined(self.servers.ask_all(self.reads()))

    def read_slot(self, name: str) -> NDArray[Any]:
        """Return a slot, by "optimizer/name"."""
        asks = [Ask(each.server, Read(each.spec.name, name)) for each in self._shards]
        return self.joined(self.servers.ask_all(asks))

    def reads(self) -> list[Ask]:
        """Return what asks for the value."""
        return [Ask(each.server, Read(each.spec.name)) for each in self._shards]

    def joined(self, answers: Sequence[Answered]) -> NDArray[Any]:
        """Return the value; in one copy where it has several parts, and in none else."""
        parts = [arrays[0] for _, arrays in answers]
        return parts[0] if self.is_whole else np.concatenate(parts)

    def rows(self, batch: Batch, combiner: str | None = None) -> NDArray[Any]:
        """Return the rows of a batch, or of each of its bags one."""
        asks = self.row_reads(batch.distinct)
        answers = ask_together(self.servers, asks) if asks else []
        parts = [arrays[0] for _, arrays in answers]
        if combiner is None:
            return batch.spread(parts, self._row_shape, self._dtype)
        return batch.pool(parts, self._row_shape, self._dtype, combiner)

    def row_reads(self, rows: Rows) -> list[Ask]:
        """Return what asks for rows, which rise and of which each is there once."""
        sent = rows.astype(self._row_dtype)
        return [
            Ask(shard.server, Gather(shard.spec.name), [sent[part]])
            for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True)
            if part.stop > part.start
        ]

    def joined_rows(self, answers: Sequence[Answered]) -> NDArray[Any]:
        """Return the rows that `row_reads` asked for."""
        parts = [arrays[0] for _, arrays in answers]
        if not parts:
            return np.empty((0, *self._row_shape), self._dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def assign(self, how: str, value: NDArray[Any], slot: str = "", first: float = 0.0) -> None:
        """Change the whole value; or set a slot, which begins with `first`."""
        self.servers.ask_all(self.assigns(how, value, slot, first))

    def assigns(
        self, how: str, value: NDArray[Any], slot: str = "", first: float = 0.0
    ) -> list[Ask]:
        """Return what asks for a change of the whole value, or of a slot."""
        return [
            Ask(
                shard.server,
                Assign(shard.spec.name, how, next_key(shard.spec.name), slot, first),
                [value if self.is_whole else value[shard.rows]],
            )
            for shard in self._shards
        ]

    def scatter(self, how: str, rows: Rows, values: NDArray[Any]) -> None:
        """Change rows, in any order; one that is named twice is changed twice."""
        parts = [slice(0, len(rows))]
        if not self.is_whole:  # stable: of a row that is named twice the last stays the last
            order = np.argsort(rows, kind="stable")
            rows, values = rows[order], values[order]
            parts = split_by_rows(rows, self._ranges)
        asks = []
        for shard, part in zip(self._shards, parts, strict=True):
            if part.stop > part.start:
                operation = Scatter(shard.spec.name, how, next_key(shard.spec.name))
                asks.append(Ask(shard.server, operation, [rows[part], values[part]]))
        self.servers.ask_all(asks)

    def pushes(
        self, optimizer: str, rule: OptimizerRule, step: Step, gradient: Gradient
    ) -> list[Ask]:
        """Return what one step of an optimizer asks of which server."""
        rows, values, _ = gradient
        asks = []
        if rows is None:
            for shard in self._shards:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                asks.append(
                    Ask(shard.server, operation, [values if self.is_whole else values[shard.rows]])
                )
            return asks
        for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True):
            if part.stop > part.start:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                sent = gradient.arrays(part)
                sent[0] = sent[0].astype(self._row_dtype)
                asks.append(Ask(shard.server, operation, sent))
        return asks


def add_together(pairs: Sequence[tuple[Any, NDArray[Any]]]) -> None:
    """Add to several variables, for which each of their servers is asked once.

    Args:
        pairs: A variable on parameter servers of one cluster, and what is added, of its shape and
            dtype.
    """
    wholes: list[tuple[Sharded, NDArray[Any]]] = [(each.sharded, value) for each, value in pairs]
    asks = [ask for whole, value in wholes for ask in whole.assigns("add", value)]
    if asks:
        wholes[0][0].servers.ask_all(asks)
