"""The strategy: which replicas there are, what runs on them, and how their values become one.

What differs between strategies are few things: `worker_devices`, `first_replica`,
`num_replicas_in_sync`, `_input_context`, and the two methods by which replicas' values become one,
`reduce_replicas` and `gather_replicas`. All else is said once, here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from headrace.arguments import check_callable, check_instance
from headrace.cluster.resolver import ClusterResolver
from headrace.data.dataset import Dataset
from headrace.distribute.collectives import (
    Axis,
    ReduceOp,
    concatenated,
    reduced,
    reduced_within,
)
from headrace.distribute.context import CrossReplica, check_cross_replica, here
from headrace.distribute.crew import Crew, Round
from headrace.distribute.dataset import (
    Agree,
    DistributedDataset,
    DistributedDatasetsFromFunction,
)
from headrace.distribute.extended import Extended
from headrace.distribute.input_context import InputContext, InputOptions, ValueContext
from headrace.distribute.replica_context import Alone, ReplicaContext, across
from headrace.distribute.scope import Scope
from headrace.distribute.values import (
    DistributedValues,
    local_results,
    map_structure,
    regroup,
    select,
)

__all__ = [
    "Strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class Strategy:
    """Replicas that work in step: what runs on them, what they read, what becomes of their values.

    Args:
        devices: Of the replicas of this process.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._crew = Crew(len(devices))

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""
        return len(self._devices)

    @property
    def first_replica(self) -> int:
        """The number of this process's first replica among those of all workers."""
        return 0

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Devices of the replicas of this process."""
        return self._devices

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What says who else takes part; None: nobody."""
        return None

    @property
    def extended(self) -> Extended:
        """What tf.distribute has there."""
        return Extended(self)

    def _input_context(self) -> InputContext:
        return InputContext(1, 0, self.num_replicas_in_sync)

    def _agree(self) -> Agree | None:
        """Return what workers ask each other at each step of a dataset; None: nobody is asked."""
        return None

    def reduce_replicas(self, op: ReduceOp, values: Sequence[Any], axis: Axis = None) -> Any:
        """Return the sum or mean of what the local replicas have, over all replicas."""
        return reduced(op, values) if axis is None else reduced_within(op, values, axis)

    def gather_replicas(self, values: Sequence[Any], axis: int) -> Any:
        """Return what the local replicas have, and those of other workers, one after another."""
        return concatenated(values, axis)

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

        def on_replica(replica: int, rendezvous: Any) -> Any:
            here.set(ReplicaContext(self, replica, rendezvous))
            return fn(
                *[select(replica, value) for value in args],
                **{name: select(replica, value) for name, value in named.items()},
            )

        return regroup(self._run_all(on_replica))

    def _run_all(self, on_replica: Callable[[int, Any], Any]) -> Sequence[Any]:
        count = len(self._devices)
        if count == 1:
            before = here.get()
            try:
                return [on_replica(0, Alone(self))]
            finally:
                here.set(before)
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
        return map_structure(lambda leaf: self._reduce_leaf(op, leaf, axis), value)

    def _reduce_leaf(self, op: ReduceOp, leaf: Any, axis: Axis) -> Any:
        values = self._values_of(leaf)
        if values is not None:
            return self.reduce_replicas(op, values, axis)
        if axis is not None:
            return self.reduce_replicas(op, [leaf] * len(self._devices), axis)
        if op is ReduceOp.MEAN:
            return leaf
        raise ValueError(
            f"A non-DistributedValues value {leaf!r:.80} cannot be reduced with the given reduce "
            f"op {op}: it is one value, not one for each replica. Return it from strategy.run, or "
            "make it with distribute_values_from_function"
        )

    def _values_of(self, leaf: Any) -> tuple[Any, ...] | None:
        """Return the local replicas' values; None: this is not one for each."""
        if isinstance(leaf, DistributedValues):
            values: tuple[Any, ...] = leaf.values  # type: ignore[attr-defined]
            return values
        return (leaf,) if self.num_replicas_in_sync == 1 else None

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

    # --- input --------------------------------------------------------------------------------

    def distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Share each batch of a dataset among the replicas.

        >>> import headrace as hr
        >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> steps = strategy.distribute_dataset(hr.Dataset.range(6).batch(4))
        >>> [[value.tolist() for value in step.values] for step in steps]
        [[[0, 1], [2, 3]], [[4], [5]]]

        Args:
            dataset: A dataset of global batches. With one replica, elements of any kind.
            options: How to share them.

        Raises:
            InvalidArgumentError: Its elements are no batches, or there are fewer files than
                workers.
        """
        check_cross_replica(self, "distribute_dataset")
        checked = _checked(options)
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"Invalid dataset. Expected a Dataset object but got {type(dataset).__name__}: "
                "Dataset.from_tensor_slices makes one of arrays, Dataset.from_generator of a "
                "generator; values that are there use distribute_values_from_function"
            )
        if checked.is_per_replica:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in "
                "distribute_datasets_from_function"
            )
        return DistributedDataset(dataset, self._input_context(), checked, self._agree())

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDatasetsFromFunction:
        """Have the replicas take elements of the dataset that a function makes for this worker.

        Nothing is batched or sharded again: the function does both, as its argument says.

        Args:
            dataset_fn: Called with an `InputContext`, once; with PER_REPLICA, once for each
                replica, which reads a dataset of its own.
            options: Hold for this call alone.
        """
        check_cross_replica(self, "distribute_datasets_from_function")
        check_callable("dataset_fn", dataset_fn)
        checked = _checked(options)
        context = self._input_context()
        if checked.experimental_place_dataset_on_device:
            if not checked.is_per_replica:
                raise ValueError(
                    "When `experimental_place_dataset_on_device` is set, you must also specify "
                    "`experimental_replication_mode=InputReplicationMode.PER_REPLICA`"
                )
            if checked.experimental_fetch_to_device is not False:
                raise ValueError(
                    "`experimental_place_dataset_on_device` can not be set to True when "
                    "`experimental_fetch_to_device` is True and the replication mode is PER_REPLICA"
                )
        if not checked.is_per_replica:
            return DistributedDatasetsFromFunction([dataset_fn(context)], context, self._agree())
        count = context.num_replicas_in_sync
        contexts = [InputContext(count, self.first_replica + i, count) for i in range(count)]
        return DistributedDatasetsFromFunction([dataset_fn(each) for each in contexts], context)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return what a function returns for each replica, as one value for all.

        Args:
            value_fn: Called with a `ValueContext`, once for each replica of this process.
        """
        check_cross_replica(self, "distribute_values_from_function")
        check_callable("value_fn", value_fn)
        count = self.num_replicas_in_sync
        numbers = range(self.first_replica, self.first_replica + len(self._devices))
        values = [value_fn(ValueContext(number, count)) for number in numbers]
        return regroup(values, always_wrap=self._wraps_single_values())

    def _wraps_single_values(self) -> bool:
        """Whether values from a function are `PerReplica`s also with one replica."""
        return True

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_local_results = local_results

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._devices)}>"


class _DefaultStrategy(Strategy):
    """Stands in where no strategy was entered: one replica, and nothing is distributed."""

    def __init__(self) -> None:
        super().__init__(["cpu:0"])
        #: What `get_replica_context` returns where nothing was entered.
        self.context = ReplicaContext(self, 0, Alone(self))

    def _wraps_single_values(self) -> bool:
        return False


def get_strategy() -> Strategy:
    """Return the strategy of the scope or replica that the code is in; outside any, a default."""
    place = here.get()
    strategy: Strategy = _DEFAULT if place is None else place.strategy
    return strategy


def has_strategy() -> bool:
    """Say whether the code is in the scope of a strategy, or on one of its replicas."""
    return get_strategy() is not _DEFAULT


def in_cross_replica_context() -> bool:
    """Say whether the code runs once for all replicas: in a scope, or in `merge_call`."""
    return isinstance(here.get(), CrossReplica)


def get_replica_context() -> ReplicaContext | None:
    """Return the replica that the code runs on; None: it runs once for all.

    Outside any strategy it is the one replica of the default strategy.
    """
    place = here.get()
    if place is None:
        return _DEFAULT.context
    if isinstance(place, CrossReplica):
        return None
    assert isinstance(place, ReplicaContext)
    return place


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    check_instance("options", options, InputOptions)
    return options


_DEFAULT = _DefaultStrategy()
