"""Steps compiled once for all replicas, and the context of code inside.

The framework compiles and runs the program; this module provides the `PerReplica`s, the execution
context, and the treatment of different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from headrace.arguments import check_callable, check_int
from headrace.distribute.agreement import ArgumentRowCounts
from headrace.distribute.collectives import ReduceOp
from headrace.distribute.execution_context import ReplicaView, check_cross_replica, current_context
from headrace.distribute.values import (
    DistributedValues,
    PerReplica,
    check_replica_count,
    map_structure,
)
from headrace.element.structure import flatten, unflatten
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks import batch_shards

__all__ = ["CompiledReplica", "ShardedPerReplica", "compile_step"]

_NO_VARIABLES = (
    "cannot be used in a step compiled by strategy.compile: pass variable.read() as an argument, "
    "return the new value, and assign it outside"
)


class ShardedPerReplica(PerReplica):
    """Result of a compiled step: the replicas' values are parts of one array.

    Attributes:
        array: The array over the strategy's mesh; the replicas' values one after another along its
            first axis.
    """

    __slots__ = ("_are_scalars", "_values", "_values_of", "array")

    def __init__(
        self, array: Any, are_scalars: bool, values_of: Callable[[Any, bool], tuple[Any, ...]]
    ) -> None:
        self.array: Any = array
        self._are_scalars = are_scalars
        self._values_of = values_of
        self._values: tuple[Any, ...] | None = None

    @property
    def values(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Values in replica order."""
        if self._values is None:
            self._values = self._values_of(self.array, self._are_scalars)
        return self._values

    @property
    def global_value(self) -> tuple[Any, bool]:
        """Array, and whether the replicas' values are scalars."""
        return self.array, self._are_scalars


class CompiledReplica(ReplicaView):
    """View of one replica in a compiled step; `get_replica_context()` returns it there.

    Args:
        strategy: Strategy whose replicas run the step.
        program: The framework's program (`frameworks/jax_replica_program.py`).
    """

    __slots__ = ("_program",)

    def __init__(self, strategy: Any, program: Any) -> None:
        self.strategy = strategy
        self._program = program

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Index of this replica; an array, known when the program runs."""
        return self._program.replica_index()

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of all workers."""
        count: int = self.strategy.num_replicas_in_sync
        return count

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return the sum or mean of the replicas' values, leaf by leaf."""
        is_mean = ReduceOp.parse(reduce_op) is ReduceOp.MEAN
        return map_structure(
            lambda leaf: self._program.all_reduce(is_mean, _reject_variable(leaf)), value
        )

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate the replicas' values, which must have one shape, leaf by leaf."""
        axis = check_int("axis", axis, minimum=0)
        return map_structure(
            lambda leaf: self._program.all_gather(_reject_variable(leaf), axis), value
        )

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise: all replicas are one program, so none waits for others."""
        raise FailedPreconditionError(
            "merge_call is not supported in a step compiled by strategy.compile, where no "
            "replica waits for others: use all_reduce or all_gather, or strategy.run"
        )

    def refuse_variable(self, name: str) -> NoReturn:
        """Raise, because variables are not supported in compiled steps."""
        raise FailedPreconditionError(f"Variable {name!r} {_NO_VARIABLES}")

    def __repr__(self) -> str:
        return f"<CompiledReplica of {self.strategy!r}>"


def compile_step(
    strategy: Any, fn: Callable[..., Any], remainder: str, donate: Sequence[int]
) -> Callable[..., Any]:
    """Return the result of `strategy.compile`."""
    program = strategy.framework.replica_programs()
    check_callable("fn", fn)
    batch_shards.check_remainder(remainder)
    if isinstance(donate, int):
        donate = (donate,)
    numbers = [check_int("donate", each, minimum=0) for each in donate]
    devices = strategy.framework_devices
    context = CompiledReplica(strategy, program)

    def on_replica(*args: Any) -> Any:
        token = current_context.set(context)
        try:
            return fn(*args)
        finally:
            current_context.reset(token)

    def result(array: Any, is_scalar: bool) -> Any:
        return ShardedPerReplica(
            array, is_scalar, lambda a, s: program.replica_values(a, devices, s)
        )

    def parts(leaf: Any) -> Any:
        if isinstance(leaf, ShardedPerReplica):
            return program.AllReplicasArray(*leaf.global_value)
        if isinstance(leaf, PerReplica):
            if len(leaf.values) != len(devices):
                check_replica_count(len(leaf.values), len(devices))
            return leaf.values
        _reject_variable(leaf)
        return None

    calls = strategy.open_program_calls("compiled step")
    poll = None if calls is None else calls.poll
    run = program.ReplicaProgram(strategy.mesh_devices(), on_replica, parts, result, numbers, poll)

    def step(*args: Any) -> Any:
        check_cross_replica(strategy, "compile")
        rows = [_row_counts(arg) for arg in args]
        if calls is None:
            return run(*_with_equal_rows(args, rows, rows, remainder))
        all_rows = calls.start_call(
            rows, run.describe_arguments(args, [each is not None for each in rows])
        )
        equalized = _with_equal_rows(args, rows, all_rows, remainder)
        with calls.report_missing():
            return run(*equalized)

    return step


def _reject_variable(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues) and not isinstance(leaf, PerReplica):
        raise FailedPreconditionError(f"{leaf!r} {_NO_VARIABLES}")
    return leaf


def _row_counts(arg: Any) -> list[int] | None:
    """Return the rows of each local replica in a step of a dataset; None for other arguments."""
    leaves, structure = flatten(arg)
    if not leaves or any(type(leaf) is not PerReplica for leaf in leaves):
        return None
    columns = [leaf.values for leaf in leaves]
    if not all(getattr(value, "ndim", 0) for column in columns for value in column):
        return None
    return batch_shards.shard_row_counts(structure, columns)


def _with_equal_rows(
    args: Sequence[Any], rows: ArgumentRowCounts, all_rows: ArgumentRowCounts, remainder: str
) -> list[Any]:
    """Return arguments with the same number of rows on all replicas of all workers."""
    return [
        arg if local is None or counts is None else _equalize_rows(arg, local, counts, remainder)
        for arg, local, counts in zip(args, rows, all_rows, strict=True)
    ]


def _equalize_rows(arg: Any, rows: Sequence[int], all_rows: Sequence[int], remainder: str) -> Any:
    leaves, structure = flatten(arg)
    columns = [leaf.values for leaf in leaves]
    if remainder == "drop":
        return unflatten(
            structure,
            [PerReplica(value[: min(all_rows)] for value in column) for column in columns],
        )
    try:
        row_count = batch_shards.rows_per_shard(remainder, all_rows)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}; or call it with strategy.run") from None
    if remainder == "error":
        return arg
    assert row_count is not None
    padded = [PerReplica(_pad_rows(column, row_count)) for column in columns]
    return batch_shards.add_mask(
        structure, padded, PerReplica(batch_shards.make_mask(rows, row_count))
    )


def _pad_rows(column: Sequence[Any], rows: int) -> list[Any]:
    if all(len(value) == rows for value in column):
        return list(column)
    return batch_shards.pad_column([value.__array__() for value in column], rows)
