"""Base class of strategies, and the strategies of one process.

A strategy runs functions on replicas, and reduces or gathers their values. Subclasses differ in
`reduce_columns` and `gather_replicas`, which combine the values of all replicas, and in their
devices and workers (`replica_inputs`). Everything else is shared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from headrace.arguments import check_callable, check_instance
from headrace.distribute.agreement import ProgramCalls
from headrace.distribute.collectives import Axis, ReduceOp, concatenate_values, reduce_values
from headrace.distribute.execution_context import (
    Scope,
    before_replicas_hook,
    check_cross_replica,
    current_context,
)
from headrace.distribute.replica_context import (
    ReplicaContext,
    SingleReplicaRendezvous,
    call_cross_replica,
)
from headrace.distribute.replica_inputs import ReplicaInputs
from headrace.distribute.replica_threads import ReplicaStep, ReplicaThreadPool
from headrace.distribute.spmd import compile_step
from headrace.distribute.values import (
    DistributedValues,
    check_replica_count,
    local_results,
    map_structure,
    regroup,
    select,
)
from headrace.errors import FailedPreconditionError
from headrace.frameworks.framework import Framework, FrameworkName, device_names, find_framework
from headrace.frameworks.numpy import FRAMEWORK as NUMPY

__all__ = [
    "Extended",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
]


class Strategy(ReplicaInputs):
    """Base class of strategies: replicas that run the same steps, each on its own rows.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> isinstance(strategy, hr.distribute.Strategy), strategy.num_replicas_in_sync
    (True, 2)
    >>> value = strategy.run(lambda x: x + 1, args=(hr.distribute.PerReplica([1, 2]),))
    >>> strategy.local_results(value)
    (2, 3)

    Args:
        devices: Names of the devices of this process's replicas.
        framework: Framework of the devices and of the replicas' values.
    """

    #: Creates `hr.Variable`s in the scope; None creates one with a copy on each replica.
    variable_type: Callable[..., Any] | None = None

    def __init__(self, devices: Sequence[str], framework: Framework = NUMPY) -> None:
        super().__init__(devices, framework)
        self._replica_threads = ReplicaThreadPool(len(devices))

    @property
    def extended(self) -> Extended:
        """Namespace of rarely used members, as in tf.distribute."""
        return Extended(self)

    def _wraps_arrays(self) -> bool:
        """Return whether arrays become `PerReplica`s even with one local replica."""
        return False

    def reduce_replicas(self, op: ReduceOp, values: Sequence[Any], axis: Axis = None) -> Any:
        """Return the sum or mean over all replicas, given the local replicas' values."""
        return self.reduce_columns(op, [values], axis)[0]

    def reduce_columns(
        self,
        op: ReduceOp,
        columns: Sequence[Sequence[Any]],
        axis: Axis = None,
        description: str | None = None,
    ) -> list[Any]:
        """Reduce several values like `reduce_replicas`.

        Args:
            op: Sum or mean.
            columns: For each value the local replicas' values.
            axis: As in `reduce`.
            description: Name of the reduction, the same on all workers.
        """
        return [reduce_values(op, values, axis, self.framework) for values in columns]

    def gather_replicas(
        self, values: Sequence[Any], axis: int, description: str | None = None
    ) -> Any:
        """Return the concatenated values of all replicas, given the local replicas' values."""
        return concatenate_values(values, axis, self.framework)

    def open_program_calls(self, description: str) -> ProgramCalls | None:
        """Return the agreement on calls of a program over all workers; None with one worker.

        Args:
            description: Kind of program.
        """
        return None

    def broadcast_first(self, value: Any, description: str) -> Any:
        """Return the first worker's value; all workers must call it."""
        return value

    # --- running ------------------------------------------------------------------------------

    def scope(self) -> Scope:
        """Return a context manager in which this strategy is the current one.

        `hr.Variable`s created inside have a copy on each replica.
        """
        return Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` once on each replica, concurrently, and return the results.

        >>> import headrace as hr
        >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> replica = hr.distribute.get_replica_context
        >>> strategy.run(lambda: replica().replica_id_in_sync_group).values
        (0, 1)

        Args:
            fn: Called with each replica's own values for `PerReplica` arguments, and with the same
                values for others.
            args: Positional arguments, a tuple or list.
            kwargs: Keyword arguments.
            options: Accepted for compatibility with tf.distribute.

        Returns:
            The structure that the replicas returned, with a `PerReplica` for each leaf. With one
            replica, or if all returned the same object, the plain result.

        Raises:
            Exception: The error of the first replica that failed; the others are aborted at their
                next collective or `merge_call`.
        """
        check_cross_replica(self, "run")
        check_callable("fn", fn)
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args)}; for one value "
                "args=(value,)"
            )
        keywords: dict[str, Any] = {} if kwargs is None else kwargs
        check_instance("kwargs", keywords, dict)
        if self.num_replicas_in_sync > 1:
            self.framework.check_not_sharded((args, keywords))
        settings, count = self.framework.thread_settings(), len(self._devices)

        def on_replica(replica: int, rendezvous: Any) -> Any:
            current_context.set(ReplicaContext(self, replica, rendezvous))
            positional = [select(replica, value, count) for value in args]
            replica_kwargs = {
                name: select(replica, value, count) for name, value in keywords.items()
            }
            device = self.framework.replica_context(self.framework_devices[replica], settings)
            if device is None:
                return fn(*positional, **replica_kwargs)
            with device:
                return fn(*positional, **replica_kwargs)

        return self.regroup(self._run_all(on_replica))

    def regroup(self, values: Sequence[Any]) -> Any:
        """Return one structure with `PerReplica` leaves from the local replicas' results."""
        return regroup(values, wraps_arrays=self._wraps_arrays())

    def compile(
        self, fn: Callable[..., Any], *, remainder: str = "error", donate: Sequence[int] = ()
    ) -> Callable[..., Any]:
        """Compile `fn` to one JAX program that runs on all replicas at once.

        The result takes the `args` of `run`, and returns what `run` returns. Inside, `all_reduce`
        and `all_gather` of the replica context are collectives of the program over the axis
        "replica". `hr.Variable`s and `merge_call` are not supported in programs: pass values as
        arguments, and assign the results.

        Args:
            fn: Function; traced once for all replicas, for each shape of its arguments.
            remainder: Handling of steps of a distributed dataset in which replicas have different
                numbers of rows: "error"; "pad", which appends rows of zeros and adds a leaf `mask`
                to the argument, True for rows of data; or "drop", which drops rows that some
                replica lacks.
            donate: Indices of arguments whose memory the results may reuse; they become invalid.

        Raises:
            ValueError: If the framework of the strategy is not JAX.
        """
        return compile_step(self, fn, remainder, donate)

    def _run_all(self, on_replica: Callable[[int, Any], Any]) -> Sequence[Any]:
        count = len(self._devices)
        if count == 1:
            outer_context = current_context.get()
            try:
                return [on_replica(0, SingleReplicaRendezvous(self))]
            finally:
                current_context.set(outer_context)
        if (prepare := before_replicas_hook.get()) is not None:
            prepare()
        return self._replica_threads.run(
            ReplicaStep(count, on_replica, functools.partial(call_cross_replica, self))
        )

    # --- values -------------------------------------------------------------------------------

    def reduce(self, reduce_op: Any, value: Any, axis: Axis = None) -> Any:
        """Reduce the values of all replicas to one, leaf by leaf.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: A result of `run`.
            axis: None adds values of one shape elementwise. An axis, or several, also reduces each
                value over it; a mean is then over all rows of all replicas, however many each has.
        """
        check_cross_replica(self, "reduce", "all_reduce()")
        op = ReduceOp.parse(reduce_op)
        if isinstance(axis, tuple | list):
            axis = tuple(axis)
        # All leaves are reduced together: one exchange between workers.
        columns: list[Sequence[Any]] = []

        def collect_column(leaf: Any) -> bool:
            values = self._local_column(op, leaf, axis)
            if values is not None:
                columns.append(values)
            return values is not None

        are_reduced = map_structure(collect_column, value)
        reduced = iter(self.reduce_columns(op, columns, axis))
        return map_structure(
            lambda leaf, leaf_is_reduced: next(reduced) if leaf_is_reduced else leaf,
            value,
            are_reduced,
        )

    def _local_column(self, op: ReduceOp, leaf: Any, axis: Axis) -> Sequence[Any] | None:
        """Return the local replicas' values of a leaf; None if it is equal to its mean."""
        values = self._local_values(leaf)
        if values is not None:
            return values
        if axis is not None:
            return [leaf] * len(self._devices)
        if op is ReduceOp.MEAN:
            return None
        raise ValueError(
            f"A non-DistributedValues value {leaf!r:.80} cannot be reduced with the given reduce "
            f"op {op}: it is a single value, not one per replica. Return it from strategy.run, "
            "or create it with distribute_values_from_function"
        )

    def _local_values(self, leaf: Any) -> tuple[Any, ...] | None:
        """Return the local replicas' values; None if it has no value per replica."""
        if isinstance(leaf, DistributedValues):
            values: tuple[Any, ...] = leaf.values  # type: ignore[attr-defined]
            if len(values) != len(self._devices):
                check_replica_count(len(values), len(self._devices))
            return values
        if self.num_replicas_in_sync == 1:
            return (leaf,)
        self.framework.check_not_sharded(leaf)
        return None

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' values along an axis, leaf by leaf.

        Args:
            value: A result of `run`; lengths along `axis` may differ between replicas.
            axis: From 0 to rank - 1.
        """
        check_cross_replica(self, "gather", "all_gather()")

        def gather_leaf(leaf: Any) -> Any:
            values = self._local_values(leaf)
            return self.gather_replicas(values or [leaf] * len(self._devices), axis)

        return map_structure(gather_leaf, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of the values of this process's replicas; a plain value is one."""
        return local_results(value)

    experimental_local_results = local_results

    # Strategies are never copied: they own threads, and the variables of their scope.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise FailedPreconditionError(
            f"{self!r} belongs to the process that created it and cannot be pickled: create a "
            "strategy in the function that runs in the other process"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._devices)}>"


# --- `strategy.extended`, for compatibility with tf.distribute ------------------------------------

_SCOPE_METHOD = "strategy.scope()"
_EXTENDED_ALTERNATIVES = {
    "batch_reduce_to": "strategy.reduce(op, structure, axis=None), of any structure",
    "broadcast_to": "the value itself: strategy.run passes it to each replica",
    "call_for_each_replica": "strategy.run(fn, args)",
    "experimental_between_graph": "none, omit it",
    "experimental_make_numpy_dataset": "Dataset.from_tensor_slices(arrays)",
    "read_var": "variable.read()",
    "reduce_to": "strategy.reduce(op, value, axis=None)",
    "should_checkpoint": "strategy.first_replica == 0",
    "should_save_summary": "strategy.first_replica == 0",
    "update": "variable.assign(...) in replica context",
    "value_container": "the variable itself",
    "variable_created_in_scope": f"creating variables in {_SCOPE_METHOD}",
}


class Extended:
    """Namespace of `strategy.extended`.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Devices of the replicas of this process."""
        devices: tuple[str, ...] = self._strategy.worker_devices
        return devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Devices that hold variables: those of the replicas."""
        return self.worker_devices

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Return a context manager in which variables have copies on the same devices."""
        if getattr(colocate_with_variable, "strategy", None) is not self._strategy:
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"Strategy.scope(), but got {colocate_with_variable!r:.80}"
            )
        return nullcontext()

    if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            message = f"strategy.extended has no {name!r}"
            if name in _EXTENDED_ALTERNATIVES:
                message += f"; use instead: {_EXTENDED_ALTERNATIVES[name]}"
            else:
                message += (
                    "; it has worker_devices, parameter_devices and colocate_vars_with. Use the "
                    "methods of the strategy: run, reduce, gather, local_results"
                )
            raise AttributeError(message, name=name, obj=self)


# --- Strategies of one process: one device, or several with copies --------------------------------


class OneDeviceStrategy(Strategy):
    """One replica: elements and results are plain values.

    >>> import headrace as hr
    >>> strategy = hr.distribute.OneDeviceStrategy()
    >>> strategy.run(lambda x: x + 1, args=(2,))
    3

    Args:
        device: Device such as "cpu:0" or "gpu:1"; None: the framework's first one.
        framework: "numpy" (None), "jax" or "torch".
    """

    def __init__(self, device: str | None = None, framework: FrameworkName | None = None) -> None:
        found = find_framework(framework)
        names = [device] if device is not None else found.default_devices()[:1]
        super().__init__(device_names(names, found), found)

    def _wraps_single_values(self) -> bool:
        return False


class MirroredStrategy(Strategy):
    """Replicas in one process, one per device; each batch is divided among them.

    >>> import headrace as hr
    >>> strategy = hr.distribute.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    >>> strategy.num_replicas_in_sync
    4

    Args:
        devices: Devices such as "cpu:0", "cpu:1" or "gpu:0". NumPy and PyTorch have any number of
            logical CPUs; JAX has a fixed number from its start. None or an empty list: all
            accelerators that the framework finds, or "cpu:0" if it finds none.
        framework: "numpy" or None: values are NumPy arrays. "jax" and "torch": values are arrays of
            that framework, on each replica's device.
    """

    def __init__(
        self, devices: Sequence[str] | None = None, framework: FrameworkName | None = None
    ) -> None:
        found = find_framework(framework)
        super().__init__(device_names(devices, found), found)
