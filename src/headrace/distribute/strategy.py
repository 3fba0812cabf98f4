"""The strategy: what runs on the replicas, and how their values become one.

What differs between strategies are the two methods by which replicas' values become one,
`reduce_columns` and `gather_replicas`, and who takes part (`feeding`). All else is said once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from headrace.arguments import check_callable, check_instance
from headrace.distribute.agreement import Calls
from headrace.distribute.collectives import Axis, ReduceOp, concatenated, reduced
from headrace.distribute.context import Scope, before_replicas, check_cross_replica, here
from headrace.distribute.crew import Crew, Round
from headrace.distribute.feeding import Feeding
from headrace.distribute.replica_context import Alone, ReplicaContext, across
from headrace.distribute.spmd import compiled
from headrace.distribute.values import (
    DistributedValues,
    local_results,
    map_structure,
    refuse_other_count,
    regroup,
    select,
)
from headrace.errors import FailedPreconditionError
from headrace.frameworks.framework import Framework, device_names, framework_named
from headrace.frameworks.numpy import FRAMEWORK as NUMPY

__all__ = [
    "Extended",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
]


class Strategy(Feeding):
    """Replicas that work in step: what runs on them, what they read, what becomes of their values.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> isinstance(strategy, hr.distribute.Strategy), strategy.num_replicas_in_sync
    (True, 2)
    >>> value = strategy.run(lambda x: x + 1, args=(hr.distribute.PerReplica([1, 2]),))
    >>> strategy.local_results(value)
    (2, 3)

    Args:
        devices: Names of those of the replicas of this process.
        framework: Whose devices they are, and whose arrays the replicas' values are.
    """

    #: What `hr.Variable` makes in the scope; None: one with a copy on each replica.
    variable_type: Callable[..., Any] | None = None

    def __init__(self, devices: Sequence[str], framework: Framework = NUMPY) -> None:
        super().__init__(devices, framework)
        self._crew = Crew(len(devices))

    @property
    def extended(self) -> Extended:
        """What tf.distribute has there."""
        return Extended(self)

    def _wraps_arrays(self) -> bool:
        """Whether arrays and numbers are `PerReplica`s also with one replica here."""
        return False

    def reduce_replicas(self, op: ReduceOp, values: Sequence[Any], axis: Axis = None) -> Any:
        """Return the sum or mean of what the local replicas have, over all replicas."""
        return self.reduce_columns(op, [values], axis)[0]

    def reduce_columns(
        self,
        op: ReduceOp,
        columns: Sequence[Sequence[Any]],
        axis: Axis = None,
        what: str | None = None,
    ) -> list[Any]:
        """Return what `reduce_replicas` returns for each of several values.

        Args:
            op: Sum or mean.
            columns: For each value what the local replicas have.
            axis: As of `reduce`.
            what: A name of the reduction, the same on all workers.
        """
        return [reduced(op, values, axis, self.framework) for values in columns]

    def gather_replicas(self, values: Sequence[Any], axis: int, what: str | None = None) -> Any:
        """Return what the local replicas have, and those of other workers, one after another."""
        return concatenated(values, axis, self.framework)

    def calls_of_all(self, what: str) -> Calls | None:
        """Return what workers say before they call a program together; None: there are no others.

        Args:
            what: The program is.
        """
        return None

    def value_of_first(self, value: Any, what: str) -> Any:
        """Return what the first worker has for `what`; all workers ask."""
        return value

    # --- running ------------------------------------------------------------------------------

    def scope(self) -> Scope:
        """Return a context manager in which this strategy is the current one.

        `hr.Variable`s made inside have a copy on each replica.
        """
        return Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` once on each replica, at the same time, and return what they return.

        >>> import headrace as hr
        >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> replica = hr.distribute.get_replica_context
        >>> strategy.run(lambda: replica().replica_id_in_sync_group).values
        (0, 1)

        Args:
            fn: Called with each replica's own values where arguments are `PerReplica`s, and with
                the same ones elsewhere.
            args: A tuple or list.
            kwargs: A dict.
            options: Accepted as in tf.distribute.

        Returns:
            The structure that the replicas returned, with a `PerReplica` for each leaf. With one
            replica, or where all returned the same object, what they returned.

        Raises:
            Exception: What the first replica that failed raised; the others end where they next
                meet.
        """
        check_cross_replica(self, "run")
        check_callable("fn", fn)
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args)}; for one value "
                "args=(value,)"
            )
        named: dict[str, Any] = {} if kwargs is None else kwargs
        check_instance("kwargs", named, dict)
        if self.num_replicas_in_sync > 1:
            self.framework.check_not_split((args, named))
        settings, count = self.framework.settings(), len(self._devices)

        def on_replica(replica: int, rendezvous: Any) -> Any:
            here.set(ReplicaContext(self, replica, rendezvous))
            positional = [select(replica, value, count) for value in args]
            by_name = {name: select(replica, value, count) for name, value in named.items()}
            device = self.framework.on_replica(self.framework_devices[replica], settings)
            if device is None:
                return fn(*positional, **by_name)
            with device:
                return fn(*positional, **by_name)

        return self.regroup(self._run_all(on_replica))

    def regroup(self, values: Sequence[Any]) -> Any:
        """Return one structure of what the replicas of this process returned."""
        return regroup(values, wraps_arrays=self._wraps_arrays())

    def compile(
        self, fn: Callable[..., Any], *, remainder: str = "error", donate: Sequence[int] = ()
    ) -> Callable[..., Any]:
        """Return `fn` as one program of JAX that runs on all replicas at once.

        Called with what `run` takes as `args`, it returns what `run` returns. Inside, `all_reduce`
        and `all_gather` of the replica context are collectives of the program over the axis
        "replica"; `hr.Variable`s and `merge_call` are not for programs: pass values as arguments,
        and assign what is returned.

        Args:
            fn: Traced once for all replicas, for each shape of its arguments.
            remainder: What becomes of a step of a distributed dataset in which replicas have
                different numbers of rows: "error"; "pad" with rows of zeros, and add a leaf `mask`
                to the argument, True for rows that are data; "drop" what some replica has not.
            donate: Numbers of arguments whose memory the results may have; they are gone then.

        Raises:
            ValueError: The framework of the strategy is not JAX.
        """
        return compiled(self, fn, remainder, donate)

    def _run_all(self, on_replica: Callable[[int, Any], Any]) -> Sequence[Any]:
        count = len(self._devices)
        if count == 1:
            before = here.get()
            try:
                return [on_replica(0, Alone(self))]
            finally:
                here.set(before)
        if (prepare := before_replicas.get()) is not None:
            prepare()
        return self._crew.run(Round(count, on_replica, functools.partial(across, self)))

    # --- values -------------------------------------------------------------------------------

    def reduce(self, reduce_op: Any, value: Any, axis: Axis = None) -> Any:
        """Return one value for those of all replicas, leaf by leaf.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or the name of one.
            value: What `run` returned.
            axis: None: the replicas' values have one shape, and are added element by element. Else
                an axis, or several, over which each is reduced, too; a mean is then over all rows
                of all replicas, however many each has.
        """
        check_cross_replica(self, "reduce", "all_reduce()")
        op = ReduceOp.of(reduce_op)
        if isinstance(axis, tuple | list):
            axis = tuple(axis)
        columns: list[Sequence[Any]] = []

        def is_reduced(leaf: Any) -> bool:
            values = self._column(op, leaf, axis)
            if values is not None:
                columns.append(values)
            return values is not None

        are_reduced = map_structure(is_reduced, value)
        made = iter(self.reduce_columns(op, columns, axis))
        return map_structure(
            lambda leaf, is_one: next(made) if is_one else leaf, value, are_reduced
        )

    def _column(self, op: ReduceOp, leaf: Any, axis: Axis) -> Sequence[Any] | None:
        """Return what the local replicas have for a leaf; None: it is its own mean."""
        values = self._values_of(leaf)
        if values is not None:
            return values
        if axis is not None:
            return [leaf] * len(self._devices)
        if op is ReduceOp.MEAN:
            return None
        raise ValueError(
            f"A non-DistributedValues value {leaf!r:.80} cannot be reduced with the given reduce "
            f"op {op}: it is one value, not one for each replica. Return it from strategy.run, or "
            "make it with distribute_values_from_function"
        )

    def _values_of(self, leaf: Any) -> tuple[Any, ...] | None:
        """Return the local replicas' values; None: this is not one for each."""
        if isinstance(leaf, DistributedValues):
            values: tuple[Any, ...] = leaf.values  # type: ignore[attr-defined]
            if len(values) != len(self._devices):
                refuse_other_count(len(values), len(self._devices))
            return values
        if self.num_replicas_in_sync == 1:
            return (leaf,)
        self.framework.check_not_split(leaf)
        return None

    def gather(self, value: Any, axis: int) -> Any:
        """Return the replicas' values one after another along an axis, leaf by leaf.

        Args:
            value: What `run` returned; lengths along `axis` may differ between replicas.
            axis: From 0 to rank - 1.
        """
        check_cross_replica(self, "gather", "all_gather()")

        def gathered(leaf: Any) -> Any:
            values = self._values_of(leaf)
            return self.gather_replicas(values or [leaf] * len(self._devices), axis)

        return map_structure(gathered, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of what each replica of this process has; a plain value is one."""
        return local_results(value)

    experimental_local_results = local_results

    # A strategy is one of a kind: its threads are here, and so is what was made in its scope.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise FailedPreconditionError(
            f"{self!r} belongs to the process that made it, and cannot be pickled: make a strategy "
            "there, in the function that is to run there"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._devices)}>"


# --- `strategy.extended`: the few names of tf.distribute there that have a meaning here -----------

_SCOPE = "strategy.scope()"
_ELSEWHERE = {
    "batch_reduce_to": "strategy.reduce(op, structure, axis=None), of any structure",
    "broadcast_to": "the value itself: strategy.run passes it to each replica",
    "call_for_each_replica": "strategy.run(fn, args)",
    "experimental_between_graph": "nothing: leave it out",
    "experimental_make_numpy_dataset": "Dataset.from_tensor_slices(arrays)",
    "read_var": "variable.read()",
    "reduce_to": "strategy.reduce(op, value, axis=None)",
    "should_checkpoint": "strategy.first_replica == 0",
    "should_save_summary": "strategy.first_replica == 0",
    "update": "variable.assign(...) in replica context",
    "value_container": "the variable itself",
    "variable_created_in_scope": f"making variables in {_SCOPE}",
}


class Extended:
    """What `strategy.extended` has.

    Args:
        strategy: Whose it is.
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
        """Return a context manager; variables made in it have copies where that one has."""
        if getattr(colocate_with_variable, "strategy", None) is not self._strategy:
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"Strategy.scope(), but got {colocate_with_variable!r:.80}"
            )
        return nullcontext()

    if not TYPE_CHECKING:  # or every name would pass for an attribute

        def __getattr__(self, name: str) -> Any:
            words = f"strategy.extended has no {name!r}"
            if name in _ELSEWHERE:
                words += f"; what does its work: {_ELSEWHERE[name]}"
            else:
                words += (
                    "; it has worker_devices, parameter_devices and colocate_vars_with. What "
                    "strategies do is on the strategy itself: run, reduce, gather, local_results"
                )
            raise AttributeError(words, name=name, obj=self)


# --- Strategies of one process: a single device, and several that hold copies ---------------------


class OneDeviceStrategy(Strategy):
    """One replica: elements and results are plain values.

    >>> import headrace as hr
    >>> strategy = hr.distribute.OneDeviceStrategy()
    >>> strategy.run(lambda x: x + 1, args=(2,))
    3

    Args:
        device: Such as "cpu:0" or "gpu:1"; None: the framework's first.
        framework: "numpy" (None), "jax" or "torch".
    """

    def __init__(self, device: str | None = None, framework: str | None = None) -> None:
        found = framework_named(framework)
        wanted = [device] if device is not None else found.defaults()[:1]
        super().__init__(device_names(wanted, found), found)

    def _wraps_single_values(self) -> bool:
        return False


class MirroredStrategy(Strategy):
    """Replicas in one process, one to a device; each batch is shared among them.

    >>> import headrace as hr
    >>> strategy = hr.distribute.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    >>> strategy.num_replicas_in_sync
    4

    Args:
        devices: Such as "cpu:0", "cpu:1" or "gpu:0". NumPy and PyTorch have any number of logical
            CPUs, JAX those that it was started with. None or none: all accelerators that the
            framework has here, else "cpu:0".
        framework: "numpy": values are NumPy arrays; None: that. "jax" and "torch": arrays of
            theirs, on each replica's device.
    """

    def __init__(self, devices: Sequence[str] | None = None, framework: str | None = None) -> None:
        found = framework_named(framework)
        super().__init__(device_names(devices, found), found)
