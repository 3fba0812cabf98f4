"""Who takes part in a strategy, and what each replica reads.

What differs between strategies is who takes part: devices, `first_replica`, `num_replicas_in_sync`,
`_input_context`, and what workers say to each other (`_agreement`, `_seed_for`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from headrace.arguments import check_callable, check_instance
from headrace.cluster.resolver import ClusterResolver
from headrace.data.dataset import Dataset
from headrace.distribute.agreement import StepAgreement
from headrace.distribute.batch_feeds import global_batch_size
from headrace.distribute.context import check_cross_replica
from headrace.distribute.dataset import (
    Distributed,
    DistributedDataset,
    DistributedDatasetsFromFunction,
)
from headrace.distribute.input_context import InputContext, InputOptions, ValueContext
from headrace.distribute.iterator import Delivery, GlobalArrays, OnDevices, OnHost
from headrace.distribute.values import regroup
from headrace.frameworks.framework import Device, Framework
from headrace.frameworks.numpy import FRAMEWORK as NUMPY

__all__ = ["Feeding"]


class Feeding:
    """Replicas, and what they read.

    Args:
        devices: Names of those of the replicas of this process.
        framework: Whose devices they are, and whose arrays the replicas' values are.
    """

    def __init__(self, devices: Sequence[str], framework: Framework = NUMPY) -> None:
        self._devices = tuple(devices)
        #: Whose arrays the replicas' values are.
        self.framework = framework
        #: What the framework itself calls the devices.
        self.framework_devices: tuple[Device, ...] = tuple(map(framework.device, devices))

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

    def _input_context(self) -> InputContext:
        return InputContext(1, 0, self.num_replicas_in_sync)

    def _agreement(self, batch_size: int | None = None) -> Callable[[], StepAgreement] | None:
        """Return what makes each iterator over a dataset its word with the others'; None: alone.

        Args:
            batch_size: Of the dataset, which is the same on all workers; None: nobody knows.
        """
        return None

    def _seed_for(self, dataset: Dataset) -> int | None:
        """Return the seed of what a dataset draws without one; None: it draws its own."""
        return None

    def _check_options(self, options: InputOptions) -> None:
        """Raise NotImplementedError for what this strategy cannot do."""

    def mesh_devices(self) -> tuple[Device, ...]:
        """Return the devices of the replicas of all workers, in the replicas' order."""
        return self.framework_devices

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
            raise TypeError(_no_dataset(dataset))
        if checked.is_per_replica:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in "
                "distribute_datasets_from_function"
            )
        context = self._input_context()
        size = global_batch_size(dataset.plan)
        share = None if size is None else -(-size // context.num_replicas_in_sync)
        delivery = self._delivery(checked, share)
        seed = self._seed_for(dataset)
        agreement = self._agreement(size)
        return DistributedDataset(dataset, context, checked, agreement, seed, delivery)

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
        self._check_options(checked)
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
            return DistributedDatasetsFromFunction(
                [dataset_fn(context)], context, self._agreement(), self._delivery(checked)
            )
        count = context.num_replicas_in_sync
        contexts = [InputContext(count, self.first_replica + i, count) for i in range(count)]
        datasets = [dataset_fn(each) for each in contexts]
        return DistributedDatasetsFromFunction(datasets, context, delivery=self._delivery(checked))

    def _rows_of_all(self, rows: list[int]) -> list[int]:
        """Return how many rows all replicas have in a step, given how many those here have."""
        return rows

    def _delivery(self, options: InputOptions, size: int | None = None) -> Delivery:
        """Return what becomes of the replicas' rows."""
        if options.global_arrays:
            return GlobalArrays(
                self.framework,
                self.mesh_devices(),
                options.remainder,
                self._rows_of_all,
                size,
            )
        if self.framework.shares_host or options.experimental_fetch_to_device is False:
            return OnHost()
        return OnDevices(self.framework, self.framework_devices)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return what a function returns for each replica, as one value for all.

        Args:
            value_fn: Called with a `ValueContext`, once for each replica of this process.
        """
        check_cross_replica(self, "distribute_values_from_function")
        check_callable("value_fn", value_fn)
        count = self.num_replicas_in_sync
        numbers = range(self.first_replica, self.first_replica + len(self._devices))
        settings, values = self.framework.settings(), []
        for number, device in zip(numbers, self.framework_devices, strict=True):
            with self.framework.on_replica(device, settings) or nullcontext():
                values.append(value_fn(ValueContext(number, count)))
        return regroup(values, always_wrap=self._wraps_single_values())

    def _wraps_single_values(self) -> bool:
        """Whether values from a function are `PerReplica`s also with one replica."""
        return True

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    check_instance("options", options, InputOptions)
    return options


def _no_dataset(value: Any) -> str:
    if isinstance(value, Distributed):
        return (
            f"Invalid dataset. {value!r} is distributed already: iterate over it, or pass the "
            "Dataset that it was made of"
        )
    if inspect.isfunction(value):
        return (
            "Invalid dataset. Expected a Dataset object but got a function: "
            "distribute_datasets_from_function takes one that returns a Dataset"
        )
    return (
        f"Invalid dataset. Expected a Dataset object but got {type(value).__name__}: "
        "Dataset.from_tensor_slices makes one of arrays, Dataset.from_generator of a generator, "
        "hr.torch.from_torch of torch's; values that are there use distribute_values_from_function"
    )
