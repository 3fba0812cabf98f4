"""Variables on parameter servers, in one or several shards.

`hr.Variable` creates them in the scope of a `ParameterServerStrategy`. The object is a handle: the
value is only on the servers, and each read requests it: all of it, some rows, slices, or as an
operand of array arithmetic. It also pickles as a handle, which denotes the same variable in each
process of the cluster.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from headrace.argument_names import explain_unknown_arguments
from headrace.arguments import check_flag, check_string
from headrace.distribute.bag_combiner import Combiner, check_combiner, combine_bags, row_indices
from headrace.distribute.collectives import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    parse_enum,
)
from headrace.distribute.current_strategy import get_strategy
from headrace.distribute.execution_context import ReplicaView, current_context
from headrace.distribute.row_access import (
    cast_exactly,
    dtype_kind,
    group_contributions,
    is_floating,
)
from headrace.distribute.variable import Variable
from headrace.errors import FailedPreconditionError
from headrace.parameter_server.arrays import (
    IndexedSlices,
    as_array,
    is_framework_array,
    raise_if_tracing,
)
from headrace.parameter_server.cluster_registry import Handle, ServerCluster
from headrace.parameter_server.gradients import IdBatch
from headrace.parameter_server.optimizer import Optimizer
from headrace.parameter_server.optimizer_steps import (
    Gradient,
    begin_gradients,
    push_gradients,
)
from headrace.parameter_server.read_cache import current_read_cache
from headrace.parameter_server.rules import slots_for_rule
from headrace.parameter_server.server_requests import OperationRequest
from headrace.parameter_server.specs import (
    OptimizerRule,
    StepParameters,
    adding_dtype,
    parse_dtype,
    working_dtype,
)
from headrace.parameter_server.variable_shards import (
    VariableRecord,
    VariableShards,
    resolve_initial_value,
)
from headrace.parameter_server.write_context import current_closure_run

__all__ = ["ServerVariable", "VariableShard"]


class VariableShard(msgspec.Struct, frozen=True):
    """Location of a shard of a variable.

    Attributes:
        name: Name of the shard.
        server: Index of its parameter server.
        row: First row of the variable in the shard.
        shape: Shape of the shard.
    """

    name: str
    server: int
    row: int
    shape: tuple[int, ...]


@explain_unknown_arguments
class ServerVariable(Handle[VariableRecord], NDArrayOperatorsMixin):
    """An array on parameter servers; created by `hr.Variable` in the scope of their strategy.

    Args:
        initial_value: An array or number, or a function that returns one. With `shape` and `dtype`,
            the function is called once for each shard, with `partition_shape` and
            `partition_offset` if it accepts them. Or an initializer that the servers evaluate
            (`hr.initializers`).
        name: Name, unique in the strategy; None means "Variable" and a number.
        dtype: Dtype of the variable; None means that of the initial value.
        trainable: Whether it should be trained; only informative.
        aggregation: How writes of several replicas of a worker are combined.
        synchronization: AUTO or ON_WRITE: there is one copy.
        shape: Shape of the variable; None means that of the initial value.
    """

    kind = "Variable"

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharded: VariableShards
    """Its shards and their servers."""

    def __init__(
        self,
        initial_value: Any,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
        aggregation: Any = VariableAggregation.NONE,
        synchronization: Any = VariableSynchronization.AUTO,
        *,
        shape: Any = None,
    ) -> None:
        if name is not None:
            check_string("name", name, empty=False)
        check_flag("trainable", trainable, or_none=False)
        if current_closure_run() is not None:
            raise FailedPreconditionError(
                f"Variable {name or ''!r} is created inside a function that a coordinator "
                "scheduled, and would be created again by each call: create it in "
                "strategy.scope(), outside of the function"
            )
        sync_mode = str(getattr(synchronization, "name", synchronization)).upper()
        if sync_mode not in ("AUTO", "ON_WRITE"):
            raise ValueError(
                "a variable on parameter servers has one copy: `synchronization` must be AUTO or "
                f"ON_WRITE, but got {synchronization!r}"
            )
        kind = parse_enum("aggregation", VariableAggregation, aggregation)
        made = get_strategy().make_variable(  # type: ignore[attr-defined]
            resolve_initial_value(initial_value, shape, dtype), name, bool(trainable), kind.name
        )
        self._bind(*made)

    def _bind(self, cluster: ServerCluster, record: VariableRecord) -> None:
        self.trainable = record.trainable
        self.shape = record.shape
        self.dtype = parse_dtype(record.dtype)
        self.sharded = VariableShards(cluster.servers, record)
        super()._bind(cluster, record)

    # --- properties -------------------------------------------------------------------------------

    @property
    def aggregation(self) -> VariableAggregation:
        """How writes of several replicas of a worker are combined."""
        return VariableAggregation[self._record.aggregation]

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE: there is one copy."""
        return VariableSynchronization.ON_WRITE

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def shards(self) -> tuple[VariableShard, ...]:
        """Shards, in row order."""
        return tuple(
            VariableShard(each.spec.name, each.server, each.spec.row, each.spec.shape)
            for each in self._record.shards
        )

    # --- reading ------------------------------------------------------------------------------

    def read(self) -> Any:
        """Return the value, as a NumPy array owned by the caller.

        Each shard is read at one moment; different shards may be read at different moments.

        Raises:
            FailedPreconditionError: If JAX traces the calling code.
            UnavailableError: If a server is unreachable.
        """
        raise_if_tracing(f"Variable {self.name!r}")
        cache = current_read_cache()
        if cache is None:
            return self.sharded.read()[()]
        return cache.read(self.sharded).copy()[()]

    numpy = value = read_value = read

    def gather(self, ids: Any, combiner: Combiner | None = None) -> NDArray[Any]:
        """Return the rows of these ids, in order, or one row for each bag of ids.

        Args:
            ids: Integers of any shape, from 0 to the number of rows - 1; a repeated id is sent
                once.
            combiner: How each bag of ids, along the last axis, becomes one row: "sum", "mean", or
                "sqrtn", the sum divided by the square root of the count. None does not combine.

        Raises:
            InvalidArgumentError: If an id is out of range; the message names it.
            ValueError: If the combiner is unknown, or does not support the dtype.
        """
        raise_if_tracing(f"Variable {self.name!r}")
        rows = self._check_rows(ids)
        if combiner is not None:
            owner = f"Variable {self.name!r}"
            check_combiner(combiner, rows, owner, owner_kind=dtype_kind(self.dtype))
        cache = current_read_cache()
        if cache is None or not cache.has(self.sharded):
            return self.sharded.read_rows(IdBatch(rows), combiner)
        value = cache.read(self.sharded)
        if combiner is None:
            return value.take(rows, axis=0)
        return combine_bags(value, rows, combiner, adding_dtype(self.dtype))

    sparse_read = gather

    def _check_rows(self, ids: Any) -> NDArray[np.int64]:
        plain = ids if isinstance(ids, list | tuple) else as_array(ids)
        return row_indices(self, plain)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.read())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, ServerVariable) for each in kwargs.get("out", ())):
            raise TypeError(
                "operators cannot write to a Variable; use assign, assign_add or assign_sub"
            )
        plain = [each.read() if isinstance(each, ServerVariable) else each for each in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        """Return a part, with NumPy's semantics; only the required rows are sent."""
        keys = key if isinstance(key, tuple) else (key,)
        for each in keys:
            _refuse_foreign(each)
        first, rest = (keys[0], keys[1:]) if keys else (Ellipsis, ())
        if self.shape and isinstance(first, slice):
            rows = range(self.shape[0])[first]
            if len(rows) < self.shape[0]:
                row_numbers = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
                return self.gather(row_numbers)[(slice(None), *rest)]
        elif self.shape and isinstance(first, int | np.integer) and not isinstance(first, bool):
            return self.gather([self._row(operator.index(first))])[(0, *rest)]
        return np.asarray(self.read())[key]

    def _row(self, index: int) -> int:
        count = self.shape[0]
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of bounds for axis 0 with size {count}")
        return index % count

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(
            "items of a Variable cannot be assigned; use scatter_update(ids, values), or assign"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a scalar variable")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec) if spec else str(self)

    # --- writing ------------------------------------------------------------------------------

    def assign(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> ServerVariable:
        """Assign `value`, and return the variable.

        The other arguments are accepted for compatibility with tf.Variable.

        Raises:
            ValueError: If it has another shape.
        """
        return self._write("assign", value)

    def assign_add(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> ServerVariable:
        """Add `value`, and return the variable; see `assign`."""
        return self._write("add", value)

    def assign_sub(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> ServerVariable:
        """Subtract `value`, and return the variable; see `assign`."""
        return self._write("sub", value)

    def _assign(self, mode: str, value: Any) -> None:
        self.sharded.assign(mode, self._fit(value, self.shape))

    def scatter_add(self, ids: Any, values: Any = None) -> ServerVariable:
        """Add a value to each given row; a repeated row is changed each time.

        Args:
            ids: Integers, 1-D; or an `IndexedSlices`, without `values`.
            values: One value for each id, or one for all.
        """
        return self._scatter("add", ids, values)

    def scatter_sub(self, ids: Any, values: Any = None) -> ServerVariable:
        """Subtract a value from each given row; see `scatter_add`."""
        return self._scatter("sub", ids, values)

    def scatter_update(self, ids: Any, values: Any = None) -> ServerVariable:
        """Assign a value to each given row, of a repeated row the last; see `scatter_add`."""
        return self._scatter("update", ids, values)

    batch_scatter_update = scatter_update

    def scatter_mul(self, ids: Any, values: Any = None) -> ServerVariable:
        """Multiply each given row by a value; see `scatter_add`."""
        return self._scatter("mul", ids, values)

    def scatter_div(self, ids: Any, values: Any = None) -> ServerVariable:
        """Divide each given row by a value; see `scatter_add`."""
        return self._scatter("div", ids, values)

    def scatter_min(self, ids: Any, values: Any = None) -> ServerVariable:
        """Assign the minimum of each given row and a value; see `scatter_add`."""
        return self._scatter("min", ids, values)

    def scatter_max(self, ids: Any, values: Any = None) -> ServerVariable:
        """Assign the maximum of each given row and a value; see `scatter_add`."""
        return self._scatter("max", ids, values)

    def _scatter(self, mode: str, ids: Any, values: Any) -> ServerVariable:
        if isinstance(ids, IndexedSlices):
            ids, values = ids.indices, ids.values
        rows = self._check_rows(ids)
        if rows.ndim != 1:
            raise ValueError(
                f"`ids` of a scatter into Variable {self.name!r} must be 1-D, but have shape "
                f"{rows.shape}"
            )
        shape = (len(rows), *self.shape[1:])
        found = as_array(values)
        if found.ndim < len(shape):
            found = np.broadcast_to(found, shape)
        found = self._fit(found, shape)
        self.sharded.scatter(mode, rows, found)
        return self

    # --- training -----------------------------------------------------------------------------

    needs_step_number = False

    def convert_gradient(self, gradient: Any) -> Gradient:
        """Convert a gradient to the form of the variable: its dtype, and distinct rows.

        Raises:
            TypeError: If the variable does not have a floating dtype.
            ValueError: If it has another shape.
        """
        if not is_floating(self.dtype):
            raise TypeError(
                f"Variable {self.name!r} has dtype {self.dtype}, but an optimizer needs a floating "
                "dtype; use assign, or a dtype such as float32"
            )
        dtype = working_dtype(self.dtype)
        if not isinstance(gradient, IndexedSlices):
            array = as_array(gradient)
            if array.shape != self.shape:
                raise ValueError(
                    f"the gradient of Variable {self.name!r} has shape {array.shape}, but the "
                    f"variable has shape {self.shape}"
                )
            return Gradient(None, self._check_floating(array).astype(dtype, copy=False))
        if gradient.dense_shape not in (None, self.shape):
            raise ValueError(
                f"the gradient of Variable {self.name!r} has dense_shape {gradient.dense_shape}, "
                f"but the variable has shape {self.shape}"
            )
        rows = self._check_rows(gradient.indices)
        values, value_indices = gradient.shared_values()
        if values.shape[1:] != self.shape[1:]:
            raise ValueError(
                f"gradient rows of Variable {self.name!r} have shape {values.shape[1:]}, but its "
                f"rows have shape {self.shape[1:]}"
            )
        return Gradient.from_rows(
            rows, self._check_floating(values).astype(dtype, copy=False), value_indices
        )

    def read_slot(self, optimizer: Optimizer, name: str) -> NDArray[Any]:
        """Return a slot of an optimizer for this variable, as a NumPy array.

        Args:
            optimizer: An optimizer that has trained the variable.
            name: Keras's name of the slot: "momentum", "velocity"; "average" is the moving average
                of an optimizer with `use_ema=True`.

        Raises:
            NotFoundError: If the optimizer has no such slot, or has not trained the variable.
        """
        return self.sharded.read_slot(f"{optimizer.name_in(self.cluster)}/{name}")

    def set_slot(self, optimizer: Optimizer, name: str, value: NDArray[Any]) -> None:
        """Set a slot of an optimizer for this variable, which it need not have trained.

        Args:
            optimizer: The optimizer.
            name: Name of the slot, see `read_slot`.
            value: Array of the variable's shape.
        """
        initial_values = {slot.name: slot.initial_value for slot in slots_for_rule(optimizer.rule)}
        key = f"{optimizer.name_in(self.cluster)}/{name}"
        self.sharded.assign("assign", value, key, initial_values.get(name, 0.0))

    def _check_floating(self, values: NDArray[Any]) -> NDArray[Any]:
        if is_floating(values.dtype):
            return values
        raise TypeError(
            f"a gradient of Variable {self.name!r} must have a floating dtype, but has "
            f"{values.dtype}"
        )

    def step_requests(
        self, optimizer: str, rule: OptimizerRule, step: StepParameters, gradient: Gradient
    ) -> list[OperationRequest]:
        """Return the requests of one step."""
        return self.sharded.step_requests(optimizer, rule, step, gradient)

    #: Called by `Optimizer.apply_gradients` and `Optimizer.begin_gradients`: variables hold the
    #: servers' addresses, optimizers do not.
    push_gradients = staticmethod(push_gradients)
    begin_gradients = staticmethod(begin_gradients)

    def _write(self, mode: str, value: Any) -> ServerVariable:
        """Combine the values of all replicas of this worker, and write the result once."""
        replica = current_context.get()
        if not isinstance(replica, ReplicaView) or replica.strategy.num_replicas_in_sync == 1:
            self._assign(mode, value)
            return self
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"You must specify an aggregation method to update Variable {self.name!r} in "
                'replica context, such as aggregation="SUM": each replica has a value for it'
            )
        strategy = replica.strategy

        def merge(contributions: list[tuple[Any, str, Any]]) -> list[None]:
            values = group_contributions(contributions)
            first_only = self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
            self._assign(
                mode,
                values[0]
                if first_only or self._is_integer_mean(values)
                else strategy.reduce_replicas(ReduceOp.parse(self.aggregation.name), values),
            )
            return [None] * len(values)

        method = mode if mode == "assign" else f"assign_{mode}"
        replica.merge(merge, (self, method, as_array(value)))  # type: ignore[attr-defined]
        return self

    def _is_integer_mean(self, values: list[Any]) -> bool:
        """Return whether replicas provide equal integers, whose mean is an integer as well."""
        if self.aggregation is not VariableAggregation.MEAN or self.dtype.kind in "fc":
            return False
        return all(np.array_equal(each, values[0]) for each in values[1:])

    def _fit(self, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a value as an array of this shape, and of the variable's dtype."""
        array = as_array(value.read() if isinstance(value, Variable) else value)
        if array.shape != shape:
            raise ValueError(
                f"Variable {self.name!r} needs a value of shape {shape}, but got shape "
                f"{array.shape}"
            )
        if array.dtype != self.dtype and not _is_safe_cast(array, self.dtype):
            raise TypeError(
                f"Variable {self.name!r} has dtype {self.dtype}, but got a value of dtype "
                f"{array.dtype}, which cannot be cast safely; convert it with astype"
            )
        return cast_exactly(array, self.dtype, f"Variable {self.name!r}")

    # --- copying and printing ---------------------------------------------------------------------

    def __copy__(self) -> ServerVariable:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ServerVariable:
        return self

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        servers = sorted({each.server for each in self._record.shards})
        location = f"server {servers[0]}" if len(servers) == 1 else f"servers {servers}"
        parts = "" if self.sharded.is_single else f", {len(self._record.shards)} shards"
        return (
            f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype} on {location}{parts}>"
        )


Variable.register(ServerVariable)


def _refuse_foreign(key: Any) -> None:
    parts = (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)
    if any(is_framework_array(each) for each in parts):
        raise TypeError(
            "arrays of a framework cannot be used as indices of a Variable; use integers, slices "
            "or NumPy arrays, or gather(ids) for rows"
        )


def _is_safe_cast(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if not array.shape and array.dtype.kind in "iu" and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return bool(bounds.min <= int(array) <= bounds.max)
    return bool(np.can_cast(array.dtype, dtype, "same_kind"))
