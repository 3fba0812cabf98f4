"""Variables: mutable values with a copy on each replica of the strategy that created them.

    ON_WRITE   a write on the replicas aggregates their values, as `aggregation` says, and updates
               every copy, so copies are equal. With NONE each copy is written separately
    ON_READ    each replica writes its copy; a read outside of replicas aggregates them

Copies are arrays of the strategy's framework and are never modified: a write replaces them, so a
read does not copy.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.argument_names import explain_unknown_arguments
from headrace.arguments import check_flag, check_string
from headrace.distribute.collectives import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    parse_enum,
)
from headrace.distribute.current_strategy import CreateOncePerStep, get_strategy
from headrace.distribute.execution_context import CrossReplicaContext, ReplicaView, current_context
from headrace.distribute.row_access import (
    RowAccess,
    RowSlices,
    check_combinable,
    check_range,
    combine_contributions,
    group_contributions,
    row_slices,
    scatter_rows,
)
from headrace.distribute.spmd import CompiledReplica
from headrace.distribute.values import ArrayOperators, DistributedValues, select
from headrace.errors import FailedPreconditionError

__all__ = ["Variable"]


@explain_unknown_arguments
class Variable(ArrayOperators, RowAccess, DistributedValues, metaclass=CreateOncePerStep):
    """Mutable array; in the scope of a strategy, with a copy on each replica.

    >>> import headrace as hr
    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     total = hr.Variable(1.0, aggregation="SUM")
    >>> _ = strategy.run(lambda: total.assign_add(2.0))
    >>> total.read()
    np.float64(5.0)

    Args:
        initial_value: An array or number, or a function that returns one.
        name: Name for messages.
        dtype: Dtype; None uses that of the initial value.
        trainable: Whether the variable is trainable; only informative. None means True, or False
            with ON_READ.
        aggregation: A `VariableAggregation`, or its name: how values of several replicas are
            combined.
        synchronization: A `VariableSynchronization`, or its name. AUTO means ON_WRITE.
        shape: Required shape of the initial value; None accepts any.
        per_worker_variable: For parameter server strategies: one independent copy per worker.
    """

    if TYPE_CHECKING:  # attributes of variables created in the scope of a ParameterServerStrategy
        gather: Callable[..., Any]
        sparse_read: Callable[..., Any]
        scatter_add: Callable[..., Any]
        scatter_sub: Callable[..., Any]
        scatter_update: Callable[..., Any]
        batch_scatter_update: Callable[..., Any]
        scatter_mul: Callable[..., Any]
        scatter_div: Callable[..., Any]
        scatter_min: Callable[..., Any]
        scatter_max: Callable[..., Any]
        shards: Sequence[Any]
        read_all: Callable[[], list[Any]]

    def __init__(
        self,
        initial_value: Any,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool | None = None,
        aggregation: Any = VariableAggregation.NONE,
        synchronization: Any = VariableSynchronization.AUTO,
        *,
        shape: Any = None,
        per_worker_variable: bool = False,
    ) -> None:
        if name is not None:
            check_string("name", name)
        if per_worker_variable:
            raise ValueError(
                "`per_worker_variable` requires the scope of a ParameterServerStrategy; in other "
                "strategies, ON_READ gives each replica a separate copy"
            )
        check_flag("trainable", trainable)
        self.strategy = get_strategy()
        self.name: str = name or "Variable"
        self.aggregation: VariableAggregation = parse_enum(
            "aggregation", VariableAggregation, aggregation
        )
        mode = parse_enum("synchronization", VariableSynchronization, synchronization)
        if mode is VariableSynchronization.NONE:
            raise ValueError(
                "`synchronization` NONE is not supported; use ON_WRITE for equal copies, or "
                "ON_READ for a separate copy on each replica"
            )
        self._is_on_read = mode is VariableSynchronization.ON_READ
        if self._is_on_read and trainable:
            raise ValueError(
                "`trainable` True is not supported with `synchronization` ON_READ, whose copies "
                "differ; omit it, or use ON_WRITE"
            )
        self.trainable: bool = not self._is_on_read if trainable is None else bool(trainable)
        self.framework = framework = self.strategy.framework
        initial = initial_value() if callable(initial_value) else initial_value
        cast_dtype = None if dtype is None else framework.as_dtype(dtype)
        if cast_dtype is not None:
            check_range(initial, cast_dtype, framework, f"Variable {self.name!r}")
        value = framework.as_array(initial, cast_dtype)
        kind = framework.dtype_kind(value.dtype)
        if kind in "OSU":
            raise ValueError(
                "`initial_value` must be a number or an array of numbers, or a function that "
                f"returns one, but it has dtype {value.dtype}"
            )
        expected_shape = (shape,) if isinstance(shape, int) else shape
        if shape is not None and tuple(expected_shape) != tuple(value.shape):
            raise ValueError(
                f"`shape` is {shape}, but the initial value has shape {tuple(value.shape)}"
            )
        if self.aggregation is VariableAggregation.MEAN and kind not in "fc":
            raise ValueError(
                "creating a distributed Variable with aggregation=MEAN and a non-floating dtype "
                f"is not supported, but the dtype is {value.dtype}; use a dtype such as "
                "np.float32, or another aggregation"
            )
        value = self.strategy.broadcast_first(value, f"the initial value of Variable {self.name!r}")
        self._copies: list[Any] = self._place_copies(self._select_copies(value, kind))
        #: Whether copies that should be equal may differ, and no warning was logged.
        self._may_differ = False

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        kinds = VariableSynchronization
        return kinds.ON_READ if self._is_on_read else kinds.ON_WRITE

    @property
    def values(self) -> tuple[Any, ...]:
        """Copies in replica order."""
        return tuple(map(self.framework.to_user_value, self._copies))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(self._copies[0].shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the framework."""
        return self._copies[0].dtype

    # --- reading ------------------------------------------------------------------------------

    def read(self) -> Any:
        """Return the value: on a replica its copy, otherwise the aggregated value.

        The array is read-only; PyTorch does not enforce that.

        Raises:
            ValueError: If it is ON_READ without an aggregation, so it has no single value.
            FailedPreconditionError: If it is read in a compiled step.
        """
        replica = self._replica()
        if replica is not None:
            return self.framework.to_user_value(self._copies[replica])
        if self._is_on_read and self.strategy.num_replicas_in_sync > 1:
            return self._aggregate(self._copies)
        if self._may_differ:
            self._warn_where_copies_differ()
        return self.framework.to_user_value(self._copies[0])

    value = read_value = read

    # --- writing ------------------------------------------------------------------------------

    def assign(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        """Set the value and return it.

        All replicas must call it if `aggregation` combines their values.

        Args:
            value: The new value, of the variable's shape.
            use_locking: Ignored; exists for compatibility with tf.Variable, like the next two.
            name: Ignored.
            read_value: Ignored.
        """
        return self._write("assign", value, lambda old, new: new)

    def assign_add(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        """Add `value` and return the new value; see `assign`."""
        return self._write("assign_add", value, operator.add)

    def assign_sub(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        """Subtract `value` and return the new value; see `assign`."""
        return self._write("assign_sub", value, operator.sub)

    def _write(self, method: str, value: Any, change: Callable[..., Any]) -> Any:
        replica = self._replica()
        if replica is None:
            return self._write_all(method, value, change)
        value = self._convert_value(value)
        if self._is_on_read or self.aggregation is VariableAggregation.NONE:
            self._may_differ = not self._is_on_read
            device = self.strategy.framework_devices[replica]
            new = change(self._copies[replica], self.framework.move_to_device(value, device))
            self._copies[replica] = self.framework.copy_to_device(new, device)
            return self.framework.to_user_value(self._copies[replica])

        def merge_values(contributions: list[tuple[Any, str, Any]]) -> list[None]:
            values = group_contributions(contributions)
            aggregated = self._convert_value(self._aggregate(values))
            aggregated = self.framework.move_to_device(
                aggregated, self.strategy.framework_devices[0]
            )
            self._copies = self._place_copies(
                [change(self._copies[0], aggregated)] * len(self._copies)
            )
            return [None] * len(values)

        context = current_context.get()
        assert isinstance(context, ReplicaView)
        context.merge(merge_values, (self, method, value))  # type: ignore[attr-defined]
        return self.framework.to_user_value(self._copies[replica])

    def _check_scope(self) -> None:
        context = current_context.get()
        if isinstance(context, CrossReplicaContext) and context.strategy is not self.strategy:
            raise ValueError(
                f"Variable {self.name!r} belongs to {self.strategy!r}, but is written in the "
                f"scope of {context.strategy!r}; write it in the scope of its strategy"
            )
        if isinstance(context, ReplicaView) and context.strategy.num_replicas_in_sync > 1:
            # Replicas would read and write one value concurrently, and writes would be lost.
            raise ValueError(
                f"Variable {self.name!r} was created outside of the scope of {context.strategy!r}, "
                "so its replicas would write one value concurrently; create it in `with "
                "strategy.scope():`, where each replica has a copy"
            )

    def _write_all(self, method: str, value: Any, change: Callable[..., Any]) -> Any:
        self._check_scope()
        count, num_replicas = len(self._copies), self.strategy.num_replicas_in_sync
        is_sum = self._is_on_read and self.aggregation is VariableAggregation.SUM
        if is_sum and method != "assign" and num_replicas > 1:
            raise ValueError(
                f"SyncOnReadVariable does not support `{method}` in cross-replica context when "
                "aggregation is set to VariableAggregation.SUM; call it on the replicas, or assign"
            )
        values = [self._convert_value(select(i, value)) for i in range(count)]
        if is_sum:
            values = self._select_copies(values[0], self.framework.dtype_kind(self.dtype))
        devices = self.strategy.framework_devices
        moved = map(self.framework.move_to_device, values, devices)
        self._copies = self._place_copies(
            [change(old, new) for old, new in zip(self._copies, moved, strict=True)]
        )
        return self.read()

    def _scatter(self, operation: str, ids: Any, values: Any) -> Any:
        if self._is_on_read:
            raise NotImplementedError(
                f"scatter_{operation} of Variable {self.name!r} is not supported with "
                "synchronization ON_READ: assign the whole value, or use ON_WRITE"
            )
        slices = row_slices(ids, values, self)
        replica, devices = self._replica(), self.strategy.framework_devices
        if replica is None:
            self._check_scope()
            self._copies = self._place_copies(
                [self._with_rows(operation, old, slices) for old in self._copies]
            )
            return self.read()
        if self.aggregation is VariableAggregation.NONE:
            self._may_differ = True
            new = self._with_rows(operation, self._copies[replica], slices)
            self._copies[replica] = self.framework.copy_to_device(new, devices[replica])
            return self.framework.to_user_value(self._copies[replica])
        check_combinable(operation, self.aggregation.name, self.name)

        def merge_values(contributions: list[tuple[Any, str, RowSlices]]) -> list[None]:
            found = combine_contributions(
                group_contributions(contributions), self.aggregation.name, self.strategy
            )
            self._copies = self._place_copies(
                [self._with_rows(operation, self._copies[0], found)] * len(devices)
            )
            return [None] * len(contributions)

        current_context.get().merge(merge_values, (self, f"scatter_{operation}", slices))  # type: ignore[union-attr]
        return self.framework.to_user_value(self._copies[replica])

    def _with_rows(self, operation: str, old: Any, slices: RowSlices) -> Any:
        """Return a copy with changed rows, computed by NumPy."""
        return self.framework.as_array(
            scatter_rows(operation, self.framework.to_numpy(old), *slices), self.dtype
        )

    # --- the copies ---------------------------------------------------------------------------

    def _replica(self) -> int | None:
        """Return the calling replica; None outside of this strategy's replicas."""
        context = current_context.get()
        if isinstance(context, CompiledReplica):
            context.refuse_variable(self.name)
        if isinstance(context, ReplicaView) and context.strategy is self.strategy:
            return context.replica_id_in_sync_group - self.strategy.first_replica  # type: ignore[no-any-return]
        return None

    def _aggregate(self, values: Sequence[Any]) -> Any:
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.strategy.broadcast_first(values[0], f"a value of Variable {self.name!r}")
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                "Could not convert from VariableAggregation.NONE to a ReduceOp: Variable "
                f"{self.name!r} has a separate value on each replica; read `values`, or set an "
                "aggregation"
            )
        return self.strategy.reduce_replicas(ReduceOp.parse(self.aggregation.name), values)

    def _select_copies(self, value: Any, kind: str) -> list[Any]:
        """Return the copies whose aggregation is `value`."""
        num_local, num_replicas = (
            len(self.strategy.framework_devices),
            self.strategy.num_replicas_in_sync,
        )
        is_sum = self._is_on_read and self.aggregation is VariableAggregation.SUM
        if not is_sum or num_replicas == 1:
            return [value] * num_local
        if kind in "iu":
            quotient = value // num_replicas
            with_remainder = value - quotient * (num_replicas - 1)
            first = with_remainder if self.strategy.first_replica == 0 else quotient
            return [first, *[quotient] * (num_local - 1)]
        return [self.framework.as_array(value / num_replicas, value.dtype)] * num_local

    def _place_copies(self, values: Sequence[Any]) -> list[Any]:
        """Return values on the replicas' devices; equal NumPy values share one immutable array."""
        framework, devices = self.framework, self.strategy.framework_devices
        if framework.uses_host_memory and all(value is values[0] for value in values):
            return [framework.copy_to_device(values[0], devices[0])] * len(devices)
        return [framework.copy_to_device(*each) for each in zip(values, devices, strict=True)]

    def _convert_value(self, value: Any) -> Any:
        """Return a value as an array of the variable's shape and dtype."""
        plain = value.read() if isinstance(value, Variable) else value
        # Before the framework converts it: JAX truncates 64 bits to 32.
        check_range(plain, self.dtype, self.framework, f"Variable {self.name!r}")
        array = self.framework.as_array(plain)
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"Variable {self.name!r} has shape {self.shape}, but got a value of shape "
                f"{tuple(array.shape)}"
            )
        if not self.framework.can_cast(array.dtype, self.dtype):
            raise TypeError(
                f"a value of dtype {array.dtype} cannot be cast to dtype {self.dtype} of "
                f"Variable {self.name!r} without loss; convert it with astype"
            )
        return self.framework.as_array(array, self.dtype)

    def _warn_where_copies_differ(self) -> None:
        first, *others = map(self.framework.to_numpy, self._copies)
        if all(np.array_equal(copy, first) for copy in others):
            return
        self._may_differ = False
        warnings.warn(
            f"the replicas' copies of Variable {self.name!r} differ, since each replica wrote "
            "its own (aggregation NONE). Returning the copy of the first replica; set an "
            "aggregation, or synchronization ON_READ",
            stacklevel=4,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        return self.__copy__()

    def __copy__(self) -> Variable:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._copies = list(self._copies)
        return copied

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise FailedPreconditionError(
            f"Variable {self.name!r} belongs to this process and cannot be pickled, since a copy "
            "would be another variable. Pass its value, variable.read(), or create it in the "
            "scope of a ParameterServerStrategy, where all processes share it"
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype}>"
